"""A run goes on with other processes, workers and micro-batches, sharded or not (F11-F15)."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_pretrained
from tools import FSDP2, make_shards, on_ranks, rows, tiny_config

from multimodal.config import Optim
from multimodal.train import loop
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.loop import train
from multimodal.train.optim import build_optimizer, named_parameters
from multimodal.train.run_weights import RunWeights
from multimodal.train.snapshot import load_optimizer, take_snapshot
from multimodal.weights.load import load, load_weights

STEPS, CUT = 12, 7
FULL = f"checkpoints/step-{STEPS:08d}"


def config_of(run, shards, *overrides):
    settings = (f"train.duration={STEPS} steps", "train.ema=0.5", "data.workers=1")
    return tiny_config(run, shards, *settings, *overrides)


def work(config, sharded, cut=None):
    """Train, to the end or until a failure in step `cut`; what a mistake of the user says."""
    if sharded:
        os.environ.update(FSDP2)
    real = loop.train_step

    def step(*args, step, **kwargs):
        if step + 1 == cut:
            raise ConnectionError("cut")
        return real(*args, step=step, **kwargs)

    loop.train_step = step
    try:
        train(config)
    except (ConnectionError, ValueError) as error:
        return str(error)
    finally:
        loop.train_step = real


def on(world, config, *, sharded=False, cut=None):
    if world == 1:
        return [work(config, sharded, cut)]
    return on_ranks(world, work, config, sharded, cut)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


@pytest.fixture(scope="module")
def twin(tmp_path_factory, shards):
    """The same run, never interrupted, in one process."""
    run = tmp_path_factory.mktemp("twin")
    train(config_of(run, shards))
    return run


def cut_run(folder, shards, world, sharded):
    assert on(world, config_of(folder, shards), sharded=sharded, cut=CUT) == ["cut"] * world
    return folder


def assert_goes_on(run, twin, shards, world, sharded, *overrides):
    assert on(world, config_of(run, shards, *overrides), sharded=sharded) == [None] * world
    ours, theirs = rows(run), rows(twin)
    assert [row["batch_hash"] for row in ours] == [row["batch_hash"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row["lr"] == other["lr"] and row["step"] == other["step"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    for name in ("model", "ema"):
        found, expected = (load_file(r / FULL / name / "model.safetensors") for r in (run, twin))
        for key, tensor in expected.items():
            # Adam turns a gradient's rounding into part of a step where the gradient is near 0.
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


def test_saved_sharded_by_two_it_goes_on_in_one(tmp_path, shards, twin):
    run = cut_run(tmp_path, shards, 2, sharded=True)
    assert_goes_on(run, twin, shards, 1, False, "data.workers=0", "train.micro_batch_size=3")


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_saved_by_two_it_goes_on_on_any_number(tmp_path, shards, twin, sharded):
    saved = cut_run(tmp_path / "saved", shards, 2, sharded)
    changes = {
        (1, False): ("data.workers=2",),
        (1, True): (),
        (2, not sharded): ("train.micro_batch_size=3",),
        (4, False): ("data.workers=0",),
        (4, True): ("train.micro_batch_size=1",),
    }
    for (world, then), overrides in changes.items():
        run = shutil.copytree(saved, tmp_path / f"{world}-{then}")
        assert_goes_on(run, twin, shards, world, then, *overrides)


@pytest.mark.slow
def test_saved_by_one_it_goes_on_sharded_by_two(tmp_path, shards, twin):
    run = cut_run(tmp_path, shards, 1, sharded=False)
    assert_goes_on(run, twin, shards, 2, True)


def test_processes_that_cannot_share_the_batch_are_refused_with_those_that_can(tmp_path, shards):
    for told in on(3, config_of(tmp_path / "run", shards)):
        assert "3 processes" in told and "can be 1, 2, 4, 8" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.batch_size=16", "train.batch_size: 8 -> 16"),
        ("model.image.width=32", "model.image.width: 16 -> 32"),
        ("data.train.path=DATA/", "data.train.path: "),
    ],
)
def test_another_run_is_refused_before_anything_is_written(tmp_path, shards, twin, override, line):
    run = shutil.copytree(twin, tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    override = override.replace("DATA", str(shards))
    with pytest.raises(ValueError, match=line):
        train(config_of(run, shards, override))
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    assert {p: t for p, t in after.items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def test_what_may_change_is_said(tmp_path, shards, twin, caplog):
    caplog.set_level("INFO")
    run = shutil.copytree(twin, tmp_path / "run")
    train(config_of(run, shards, "optim.lr=0.5", "data.workers=0"))
    for line in ("optim.lr: 0.001 -> 0.5", "data.workers: 1 -> 0"):
        assert f"changed since the run was started: {line}" in caplog.text


# --- F15: names of a checkpoint ------------------------------------------------------------------


def test_a_compiled_model_saves_the_names_of_a_plain_one(tmp_path):
    pretrained = tiny_pretrained()
    plain = set(pretrained.model.state_dict())
    weights = RunWeights(pretrained, decay=0.9, found=None)
    pretrained.model.compile(backend="eager")
    pretrained.model(tokens=torch.ones(2, 5, dtype=torch.int64), lengths=torch.tensor([3, 5]))
    weights.update()
    optimizer = build_optimizer(pretrained.model, Optim())
    snapshot = take_snapshot({"step": 1}, pretrained, optimizer, weights.ema)
    assert set(snapshot.weights) == set(snapshot.ema) == plain
    saved = Checkpoints(tmp_path, keep=1).save(snapshot)
    for folder in (saved.model, saved.ema):
        again = load(folder).model
        assert set(again.state_dict()) == plain
        again.compile(backend="eager")
        load_weights(again, folder / "model.safetensors")
    load_optimizer(saved.path, build_optimizer(load(saved.model).model, Optim()))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_of_a_wrapper_match_nothing_and_are_an_error(tmp_path, prefix):
    pretrained = tiny_pretrained()
    file = tmp_path / "model.safetensors"
    save_file({f"{prefix}{n}": x for n, x in pretrained.model.state_dict().items()}, file)
    with pytest.raises(ValueError, match=rf"missing .*unexpected {prefix}"):
        load_weights(pretrained.model, file)


def test_a_checkpoint_holds_the_state_of_every_parameter(twin):
    """Of all ranks' parts, when sharded: test_sharded_runs."""
    names = set(named_parameters(build_optimizer(load(twin / FULL / "model").model, Optim())))
    found = set(load_file(twin / FULL / "optimizer.safetensors"))
    assert found == {f"{slot}.{n}" for slot in ("exp_avg", "exp_avg_sq", "step") for n in names}

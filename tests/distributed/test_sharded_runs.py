"""Sharded over the ranks (FSDP2) a run is the run it would be in DDP, in steps and on the disk."""

import os

import pytest
import torch
from checkpoint_parts import STATE
from safetensors.torch import load_file
from tiny import tiny_pretrained, tiny_section
from tools import (
    FSDP2,
    finish,
    make_shards,
    on_ranks,
    retrieval,
    rows,
    start,
    tiny_tree,
    write_config,
)

from multimodal import config
from multimodal.config import Config, Optim
from multimodal.config_io import check
from multimodal.distributed import barrier
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.loop import train
from multimodal.train.machine import make_accelerator
from multimodal.train.optim import build_optimizer
from multimodal.train.run_weights import RunWeights
from multimodal.train.sharding import check_sharded
from multimodal.train.snapshot import load_optimizer, take_snapshot

SECTION = tiny_section(logit_bias=-3.0)


# --- checkpoints ---------------------------------------------------------------------------------


def saved_with_plain_weights(folder):
    """A checkpoint of a model, its average and AdamW's state, all of them random."""
    pretrained = tiny_pretrained(SECTION)
    weights = RunWeights(pretrained, decay=0.9, found=None)
    for parameter in weights.ema.parameters():
        torch.nn.init.normal_(parameter)
    weights.ema.n_averaged.fill_(5)
    optimizer = build_optimizer(pretrained.model, Optim())
    for parameter in pretrained.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    snapshot = take_snapshot(
        {**STATE, "step": 5, "config": {"train": {"ema": 0.9}}},
        pretrained,
        optimizer,
        weights.ema,
    )
    return Checkpoints(folder, keep=1).save(snapshot)


def there_and_back(folder, sharded):
    """Resume from the checkpoint; a new snapshot, how much of the model this rank holds."""
    if sharded:
        os.environ.update(FSDP2)
    accelerator = make_accelerator()
    found = Checkpoints(folder, keep=1).find_resume()
    pretrained = tiny_pretrained(SECTION, seed=7)
    pretrained.model.load_state_dict(load_file(found.model / "model.safetensors"))
    weights = RunWeights(pretrained, decay=0.9, found=found)
    weights.distribute(accelerator)
    optimizer = build_optimizer(pretrained.model, Optim())
    load_optimizer(found.path, optimizer)
    snapshot = take_snapshot({"step": 5}, pretrained, optimizer, weights.ema)
    usable = {suffix: model.fingerprint() for suffix, model in weights.usable()}
    tensors = (snapshot.weights, snapshot.optimizer, snapshot.ema)
    return tensors, snapshot.state, usable, [len(local(p)) for p in moments(optimizer)]


def moments(optimizer):
    return [s["exp_avg"] for s in optimizer.state.values() if s["exp_avg"].ndim > 1]


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


@pytest.mark.parametrize("world", [2, 3])
def test_a_checkpoint_goes_into_shards_and_comes_out_bit_for_bit(tmp_path, world):
    saved = saved_with_plain_weights(tmp_path)
    files = [saved.model / "model.safetensors", saved.path / "optimizer.safetensors"]
    expected = [load_file(file) for file in (*files, saved.ema / "model.safetensors")]
    plain = {
        "": fingerprint(saved.model / "model.safetensors"),
        "@ema": fingerprint(saved.ema / "model.safetensors"),
    }
    results = on_ranks(world, there_and_back, tmp_path, True)
    for _, state, usable, _ in results:
        assert state["ema_updates"] == 5 and usable == plain
    for found, whole in zip(results[0][0], expected, strict=True):
        assert found.keys() == whole.keys() and len(found) > 10
        assert all(found[name].equal(whole[name]) for name in whole)
    assert all(not any(tensors) for tensors, *_ in results[1:]), "only rank 0 writes"
    for rows_of_ranks in zip(*(sizes for *_, sizes in results), strict=True):
        whole = sum(rows_of_ranks)
        assert max(rows_of_ranks) <= -(-whole // world), "each rank holds its share"


def fingerprint(file):
    pretrained = tiny_pretrained(SECTION)
    pretrained.model.load_state_dict(load_file(file))
    return pretrained.fingerprint()


# --- runs ----------------------------------------------------------------------------------------


def refusals():
    os.environ.update(FSDP2)
    told = []
    for settings in ({"compile": True}, {"micro_batch_size": "auto"}, {}):
        try:
            told.append(check_sharded(check(settings, config.Train)))
        except ValueError as error:
            told.append(str(error))
    barrier()  # else one rank may leave before the other has come
    return told


def test_what_cannot_be_had_sharded_is_refused():
    for compiled, auto, fine in on_ranks(2, refusals):
        assert "train.compile=true" in compiled and "give a number" in auto and fine is None


def sharded_run(config):
    os.environ.update(FSDP2)
    train(config)


def both_runs(folder, *overrides):
    """A run in DDP and sharded, with evaluations whose parts are not equally long."""
    shards = make_shards(folder / "data", 37)
    for name, function in (("ddp", train), ("fsdp", sharded_run)):
        tree = tiny_tree(folder / name, shards, "train.ema=0.5", *overrides)
        tree["evaluate"] = {"shapes": retrieval(shards, "5 steps")}
        on_ranks(2, function, check(tree, Config))
    return folder / "ddp", folder / "fsdp"


def assert_same_run(ddp, fsdp):
    for ours, theirs in zip(rows(fsdp), rows(ddp), strict=True):
        assert list(ours) == list(theirs)
        for column in ("step", "eval", "lr", "batch_hash", "images"):
            assert ours.get(column) == theirs.get(column)
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-5)
    for name in ("model", "checkpoints/step-00000012/ema", "checkpoints/step-00000012/model"):
        a, b = (load_file(run / name / "model.safetensors") for run in (ddp, fsdp))
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_sharded_run_is_the_run_of_ddp(tmp_path):
    assert_same_run(*both_runs(tmp_path))


@pytest.mark.slow
def test_a_library_tower_can_be_sharded(tmp_path):
    """timm's blocks stand in an `nn.Sequential`."""
    tower = "{kind: timm, name: test_vit2, image_size: 32}"
    assert_same_run(*both_runs(tmp_path, f"model.image={tower}", "train.micro_batch_size=3"))


@pytest.mark.slow
def test_accelerate_launch_shards(tmp_path):
    """On a machine without a GPU too, where Accelerate by itself would leave the flag aside."""
    tree = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 37), "train.ema=0.5")
    path = write_config(tmp_path / "run.yaml", tree)
    flags = ("--use_fsdp", "--fsdp_version=2", "--num_processes=2", "--main_process_port=0")
    launch = ("-m", "accelerate.commands.launch", *flags, "scripts/train.py", str(path))
    output = finish(start(*launch))
    assert "sharded over 2 processes in 4 blocks (FSDP2)" in output
    assert load_file(tmp_path / "run/model/model.safetensors")

"""Runs that begin as another: from the command line to a finished run, alone and in parallel."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from tools import RANDOM, make_shards, on_ranks, rows, tiny_tree

from multimodal.cli_options import describe_model
from multimodal.config_init import load_run
from multimodal.config_io import dump_yaml, merge, parse_override
from multimodal.errors import StopRequested
from multimodal.train import loop
from multimodal.train.check import check_run
from multimodal.train.loop import train
from multimodal.train.step import train_step

GROUPS = r"""optim.groups=[
    {match: 'text\..*blocks\.0', freeze: true},
    {match: 'token_embedding', lr: 0.1, weight_decay: 0.5},
]"""
GENTLE = (GROUPS, "optim.layer_decay=0.5", "train.ema=0.5", "train.micro_batch_size=3", *RANDOM)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


@pytest.fixture(scope="module")
def first(tmp_path_factory, shards):
    """A finished run to start from."""
    run = tmp_path_factory.mktemp("first") / "run"
    train(load(run, shards))
    return run


def load(run, shards, *overrides, init=None):
    """The configuration of a tiny run, or of one that begins as another and says nothing more."""
    tree = tiny_tree(run, shards)
    if init is not None:
        tree["model"] = {"init": str(init)}
    for override in overrides:
        tree = merge(tree, parse_override(override))
    path = run.parent / f"{run.name}.yaml"
    path.write_text(json.dumps(tree))
    return load_run([str(path)], describe_model)


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_run_goes_on_where_the_other_ended(tmp_path, first, shards, caplog):
    caplog.set_level("INFO")
    train(load(tmp_path / "run", shards, "train.duration=4 steps", init=first))
    before, after = rows(first), rows(tmp_path / "run")
    assert after[0]["loss"] < before[0]["loss"] - 0.1
    assert after[0]["logit_scale"] == pytest.approx(before[-1]["logit_scale"], rel=1e-2)
    assert f"numbers from {first}" in caplog.text
    settings = json.loads((tmp_path / "run/model/config.json").read_text())["model"]
    assert "init" not in settings, "a model describes itself"


def test_a_locked_tower_of_another_run_keeps_its_weights(tmp_path, first, shards):
    """LiT: the text tower and its projection stay, and a new image tower learns to meet them."""
    words = ("model.init_parts=[text]", "train.freeze=[text]", "model.image.width=32")
    words += ("data.templates=['quite other words of {}']",)  # a new tokenizer would be another
    train(load(tmp_path / "run", shards, *words, init=first))
    tokenizers = [(r / "model/tokenizer.json").read_bytes() for r in (first, tmp_path / "run")]
    assert tokenizers[0] == tokenizers[1]
    theirs, ours = weights(first / "model"), weights(tmp_path / "run/model")
    text = [name for name in ours if name.startswith("text")]
    assert len(text) > 20 and all(ours[name].equal(theirs[name]) for name in text)
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    states = load_file(newest / "optimizer.safetensors")
    assert states and not any("text" in name for name in states)
    assert rows(tmp_path / "run")[-1]["loss"] < rows(tmp_path / "run")[0]["loss"]


def test_the_treatment_of_parameters_is_told_before_the_first_step(tmp_path, first, shards, caplog):
    caplog.set_level("INFO")
    train(load(tmp_path / "run", shards, GROUPS, "train.duration=1 steps", init=first))
    told = [record.message for record in caplog.records]
    head = next(i for i, line in enumerate(told) if line.startswith("group  "))
    assert head < next(i for i, line in enumerate(told) if line.startswith("step 1 "))
    [second] = [line for line in told if line.startswith("optim.groups.1: token_embedding ")]
    assert second.split()[2:6] == ["x", "0.1", "0.5", "1"]
    table = json.loads((tmp_path / "run/parameters.json").read_text())
    names = [name for row in table for name in row["names"]]
    frozen = [row for row in table if row["frozen"]]
    assert sorted(names) == sorted(weights(tmp_path / "run/model"))
    assert [row["tensors"] for row in frozen] == [16]


def stopping_after(step, monkeypatch):
    """Make runs stop after a step, as on a signal."""

    def stopped(*args, **kwargs):
        if kwargs["step"] == step:
            raise StopRequested("a test")
        return train_step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", stopped)


def test_a_resumed_run_is_bit_identical_and_the_other_model_may_be_gone(
    tmp_path, first, shards, monkeypatch
):
    init = tmp_path / "init"
    shutil.copytree(first, init)
    twin, run = tmp_path / "twin", tmp_path / "run"
    train(load(twin, shards, *GENTLE, init=init))
    with monkeypatch.context() as patch, pytest.raises(StopRequested):
        stopping_after(6, patch)
        train(load(run, shards, *GENTLE, init=init))
    shutil.rmtree(init)
    train(load(run, shards, *GENTLE, init=init))
    for name in ("model", "checkpoints/step-00000012/model"):
        a, b = weights(run / name), weights(twin / name)
        assert a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)
    assert [r["loss"] for r in rows(run)] == [r["loss"] for r in rows(twin)]
    with pytest.raises(ValueError, match=r"optim\.groups"):
        train(load(run, shards, *GENTLE, "optim.groups=[]", init=init))
    train(load(run, shards, *GENTLE, "optim.lr=1e-2", "optim.layer_decay=0.9", init=init))


def test_the_resolved_config_of_the_run_starts_it_again(tmp_path, first, shards):
    config = load(tmp_path / "run", shards, "train.duration=2 steps", *GENTLE, init=first)
    train(config)
    path = tmp_path / "run/config.yaml"
    assert path.read_text() == dump_yaml(config)
    again = load_run([str(path), f"run={tmp_path / 'again'}"], describe_model)
    train(again)
    a, b = weights(tmp_path / "run/model"), weights(tmp_path / "again/model")
    assert all(a[name].equal(b[name]) for name in a)


def test_mistakes_are_found_before_anything_is_made(tmp_path, first, shards):
    config = load(tmp_path / "run", shards, "model.image.depth=3", init=first)
    with pytest.raises(ValueError, match=r"model\.image\.depth=2, not 3"):
        train(config)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="no model at"):
        load(tmp_path / "run", shards, init=tmp_path / "nowhere")


def test_a_mistake_in_the_groups_leaves_a_run_that_can_be_started(tmp_path, shards):
    wrong = "optim.groups=[{match: nothing}]"
    with pytest.raises(ValueError, match="matches no parameter"):
        train(load(tmp_path / "run", shards, wrong))
    train(load(tmp_path / "run", shards, "train.duration=1 steps"))


def test_a_check_knows_what_learns(tmp_path, first, shards):
    words = ("train.freeze=[text]", "train.ema=0.9", "optim.layer_decay=0.5")
    report = check_run(load(tmp_path / "run", shards, *words, init=first))
    assert not report.problems, report.problems
    own = weights(first / "model")
    parameters = sum(x.numel() for x in own.values())
    learning = sum(x.numel() for name, x in own.items() if not name.startswith("text"))
    assert (report.facts["parameters"], report.facts["learning"]) == (parameters, learning)
    assert report.facts["checkpoint_bytes"] == 4 * (2 * parameters + 2 * learning)
    memory = report.facts["memory"]
    assert memory["optimizer"]["run_mb"] == pytest.approx(8 * learning / 1e6, abs=0.01)
    assert memory["checkpoint"]["run_mb"] * 1e6 == pytest.approx(
        report.facts["checkpoint_bytes"], rel=0.02
    )
    assert any("train.freeze: text" in line for line in report.facts["groups"])
    wrong = check_run(load(tmp_path / "run", shards, "model.embed_dim=5", init=first))
    assert any("model.embed_dim=12, not 5" in problem for problem in wrong.problems)


@pytest.mark.slow
def test_two_processes_fine_tune_like_one(tmp_path, first, shards):
    words = (GROUPS, "optim.layer_decay=0.5", "model.init_parts=[image, temperature]")
    words += ("train.micro_batch_size=2", "train.ema=0.5")
    train(load(tmp_path / "one", shards, *words, init=first))
    on_ranks(2, train, load(tmp_path / "two", shards, *words, init=first))
    for ours, theirs in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["batch_hash"] == theirs["batch_hash"]

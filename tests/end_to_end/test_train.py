"""Whole runs of a second or two, in this process and in two."""

import hashlib
import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file
from tools import RANDOM, make_shards, on_ranks, retrieval, rows, tiny_config, tiny_tree

import multimodal
from multimodal.config import Config, Retrieval
from multimodal.config_io import check
from multimodal.errors import RunStopped
from multimodal.evaluate.run import evaluate
from multimodal.losses import ContrastiveLoss
from multimodal.losses.metrics import LossMetrics
from multimodal.train import evaluating, loop
from multimodal.train.loop import train

COLUMNS = [
    *("step", "epoch", "samples", "loss", "lr", "grad_norm", "logit_scale", "batch_hash"),
    *LossMetrics._fields,
    *("image_grad_norm", "text_grad_norm", "temperature_grad_norm"),
    *("alignment", "image_uniformity", "text_uniformity", "modality_gap"),
    *("image_effective_rank", "text_effective_rank", "peak_memory_mb"),
    *("samples_per_second", "data_wait", "skipped", "nonfinite", "mfu"),
]
EXACT = ("step", "loss", "lr", "grad_norm", "logit_scale", "batch_hash", "skipped")
EXACT += LossMetrics._fields


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


@pytest.fixture(scope="module")
def other_shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("other"), 20, seed=9)


def with_evaluations(run, shards, other, *overrides):
    tree = tiny_tree(run, shards, *overrides)
    tree["evaluate"] = {"often": retrieval(other, "5 steps"), "last": retrieval(other)}
    return check(tree, Config)


def exact(run):
    return [[row[name] for name in EXACT] for row in rows(run) if "eval" not in row]


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def snapshot(run):
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in run.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shards, other_shards):
    run = tmp_path_factory.mktemp("runs") / "finished"
    config = with_evaluations(run, shards, other_shards)
    train(config)
    return run, config


def test_a_finished_run_holds_all_it_promises(finished, shards):
    run, config = finished
    training = [row for row in rows(run) if "eval" not in row]
    assert [list(row) for row in training] == [COLUMNS] * 12
    assert [row["step"] for row in training] == list(range(1, 13))
    assert [row["samples"] for row in training] == list(range(8, 97, 8))
    assert training[-1]["epoch"] == 96 / 37
    evaluations = [(row["step"], row["eval"]) for row in rows(run) if "eval" in row]
    assert evaluations == [(5, "often"), (10, "often"), (12, "often"), (12, "last")]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000012",
    ]
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    state = json.loads((run / "checkpoints/step-00000012/state.json").read_text())
    assert state["step"], state["samples"] == (12, 96)
    assert state["data"]["samples"] == 37 and state["config"] == config.model_dump()
    assert_equal_weights(run / "model", run / "checkpoints/step-00000012/model")


def test_results_are_those_of_the_saved_model(finished):
    run, config = finished
    results = json.loads((run / "results.json").read_text())
    assert list(results) == ["often", "last"] and results["often"] == results["last"]
    again = evaluate(multimodal.load(str(run)), config.evaluate["last"])
    assert results["last"] == pytest.approx(again)


def test_a_run_learns(shards, tmp_path):
    train(tiny_config(tmp_path / "run", shards, "train.duration=60 steps", "optim.lr=5e-3"))
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


def test_running_a_finished_run_again_changes_nothing(finished, caplog):
    run, config = finished
    before = snapshot(run)
    caplog.set_level("INFO")
    train(config)
    assert "finished" in caplog.text
    assert snapshot(run) == before


class PowerCut(Exception):
    pass


def stop_at(monkeypatch, name, when=lambda *a, **k: True):
    """Let a function of the engine fail, as if the machine had stopped there."""
    module = loop if hasattr(loop, name) else evaluating
    real = getattr(module, name)

    def stopped(*args, **kwargs):
        if when(*args, **kwargs):
            raise PowerCut
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, stopped)


RANDOM_HERE = [setting for setting in RANDOM if "workers" not in setting]
RANDOM_HERE += ["train.micro_batch_size=3", "train.checkpoint_activations=selective"]


@pytest.fixture(scope="module")
def twin(tmp_path_factory, shards, other_shards):
    run = tmp_path_factory.mktemp("runs") / "twin"
    train(with_evaluations(run, shards, other_shards, *RANDOM_HERE))
    return run


@pytest.mark.parametrize("stop", [2, 4, 6, 11])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    twin, shards, other_shards, tmp_path, monkeypatch, stop
):
    """Stopped before the first checkpoint, right after one, and between two."""
    config = with_evaluations(tmp_path, shards, other_shards, *RANDOM_HERE)
    with monkeypatch.context() as patch:
        stop_at(patch, "train_step", lambda *a, **k: k["step"] == stop)
        with pytest.raises(PowerCut):
            train(config)
    train(config)
    assert exact(tmp_path) == exact(twin)
    assert (tmp_path / "results.json").read_text() == (twin / "results.json").read_text()
    assert_equal_weights(tmp_path / "model", twin / "model")


@pytest.mark.parametrize("name", ["write_results", "write_report", "publish_model"])
def test_a_stop_while_the_end_is_written_is_repaired(
    finished, shards, other_shards, tmp_path, monkeypatch, name
):
    run = tmp_path / "run"
    config = with_evaluations(run, shards, other_shards)
    with monkeypatch.context() as patch:
        stop_at(patch, name)
        with pytest.raises(PowerCut):
            train(config)
    train(config)
    assert exact(run) == exact(finished[0])
    assert (run / "results.json").read_text() == (finished[0] / "results.json").read_text()
    assert_equal_weights(run / "model", finished[0] / "model")


def test_a_longer_duration_goes_on_and_replaces_the_model(shards, tmp_path, caplog):
    caplog.set_level("INFO")
    train(tiny_config(tmp_path, shards, "train.duration=4 steps"))
    first = weights(tmp_path / "model")
    train(tiny_config(tmp_path, shards, "train.duration=6 steps"))
    assert "train.duration: '4 steps' -> '6 steps'" in caplog.text
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    second = weights(tmp_path / "model")
    assert any(not first[name].equal(second[name]) for name in first)
    assert "duration: 6 steps" in (tmp_path / "config.yaml").read_text()


def test_an_evaluation_added_later_is_run_on_the_finished_model(shards, other_shards, tmp_path):
    train(tiny_config(tmp_path, shards, "train.duration=2 steps"))
    assert json.loads((tmp_path / "results.json").read_text()) == {}
    train(with_evaluations(tmp_path, shards, other_shards, "train.duration=2 steps"))
    assert list(json.loads((tmp_path / "results.json").read_text())) == ["often", "last"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.path=/nowhere", "/nowhere"),
        ("train.duration=0 steps", "at least 1 step"),
        ("train.micro_batch_size=auto", "give a number"),
        ("evaluate.shapes.data.path=/missing", "evaluate.shapes: .*/missing"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(shards, tmp_path, override, message):
    tree = tiny_tree(tmp_path / "run", shards)
    tree["evaluate"] = {"shapes": retrieval(shards)}
    section, _, value = override.partition("=")
    node = tree
    for name in section.split(".")[:-1]:
        node = node[name]
    node[section.split(".")[-1]] = value
    with pytest.raises(ValueError, match=message):
        train(check(tree, Config))
    assert not (tmp_path / "run").exists()


def test_other_data_under_the_same_path_is_refused(tmp_path):
    shards = make_shards(tmp_path / "data", 30)
    train(tiny_config(tmp_path / "run", shards, "train.duration=4 steps"))
    make_shards(tmp_path / "data", 31)
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=r"held 30 samples.*holds 31"):
        train(tiny_config(tmp_path / "run", shards, "train.duration=9 steps"))
    assert snapshot(tmp_path / "run") == before


def break_steps(monkeypatch, steps):
    """Let the loss of some steps (from 1) be infinite."""
    real = loop.train_step

    def train_step(model, loss, *args, step, **kwargs):
        shown = Infinite() if step + 1 in steps else loss
        return real(model, shown, *args, step=step, **kwargs)

    monkeypatch.setattr(loop, "train_step", train_step)


class Infinite(ContrastiveLoss):
    def forward(self, *features, **ids):
        return super().forward(*features, **ids) + math.inf


def test_steps_that_are_not_finite_are_left_out_counted_and_listed(shards, tmp_path, monkeypatch):
    break_steps(monkeypatch, (2, 3, 5))
    train(tiny_config(tmp_path, shards, "train.duration=6 steps", "train.max_nonfinite=3"))
    assert [row["nonfinite"] for row in rows(tmp_path)] == [0, 1, 2, 2, 3, 3]
    assert [row["loss"] is None for row in rows(tmp_path)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    listed = rows(tmp_path, "nonfinite.jsonl")
    assert [row["step"] for row in listed] == [2, 3, 5]
    assert listed[0] | {"grad_norm": 0} == {
        **{"step": 2, "loss": None, "grad_norm": 0, "positions": [8, 15], "suspects": []},
    }
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "model").values())


def checkpoints_of(run):
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step*"))


@pytest.mark.parametrize(
    ("broken", "every", "kept"),
    [((5, 6, 7), 1, [3, 4]), ((5, 6), 5, [7, 9]), ((9,), 1, [8, 9])],
    ids=["until the run stops", "where one is due", "at the end"],
)
def test_no_checkpoint_is_made_of_broken_steps(
    shards, tmp_path, monkeypatch, caplog, broken, every, kept
):
    """They would take the place of the last good ones."""
    break_steps(monkeypatch, broken)
    settings = ("train.duration=9 steps", "train.max_nonfinite=3")
    config = tiny_config(tmp_path, shards, f"checkpoint.every={every} steps", *settings)
    if len(broken) == 3:
        with pytest.raises(RunStopped, match=r"Last checkpoint: .*step-00000004\. .*remove it"):
            train(config)
    else:
        with caplog.at_level("WARNING"):
            train(config)
    assert checkpoints_of(tmp_path) == kept
    told = "the last 1 step(s) were not finite and left out" in caplog.text
    assert told == (broken == (9,))


def test_a_stop_amid_broken_steps_does_not_start_their_count_anew(shards, tmp_path, monkeypatch):
    config = tiny_config(tmp_path, shards, "train.max_nonfinite=3")
    break_steps(monkeypatch, (3, 4, 5))
    with monkeypatch.context() as patch:
        stop_at(patch, "train_step", lambda *a, **k: k["step"] == 4)
        with pytest.raises(PowerCut):
            train(config)
    with pytest.raises(RunStopped, match=r"step 5: loss inf .* 3 steps .*checkpoint: none yet"):
        train(config)
    assert [row["step"] for row in rows(tmp_path, "nonfinite.jsonl")] == [3, 4, 5]


def test_unreadable_samples_are_counted_listed_and_replaced(tmp_path):
    shards = make_shards(tmp_path / "data", 40, broken=(3, 17))
    run = tmp_path / "run"
    train(tiny_config(run, shards, "train.duration=2 epochs", "data.max_skipped=0.05"))
    assert rows(run)[-1]["skipped"] == 4
    skipped = rows(run, "skipped.jsonl")
    assert sorted(row["index"] for row in skipped) == [3, 3, 17, 17]
    assert {row["place"].split("/")[-1] for row in skipped} == {"00000.tar", "00001.tar"}
    train_rows = rows(run)
    assert [row["samples"] for row in train_rows] == list(range(8, 81, 8))


def test_too_many_unreadable_samples_stop_the_run_with_the_numbers(tmp_path):
    shards = make_shards(tmp_path / "data", 40, broken=(3, 17, 22))
    with pytest.raises(RunStopped, match=r"3 samples .* data.max_skipped=0.05 of 40.*skipped"):
        train(tiny_config(tmp_path / "run", shards, "data.max_skipped=0.05"))


def train_in_16_bit(config):
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    train(config)


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_a_plain_one(shards, tmp_path):
    """With dropout and two passes, so that the random numbers are the same too."""
    small = (
        "log.every=1 steps",
        "model.image.depth=1",
        "model.text.depth=1",
        "model.text.fixed_length=true",
    )
    few = ("train.duration=3 steps", "train.micro_batch_size=4")
    dropout = [override for override in RANDOM if override.startswith("model")]
    for name in ("false", "true"):
        settings = (*small, *few, *dropout, f"train.compile={name}")
        train(tiny_config(tmp_path / name, shards, *settings))
    for ours, theirs in zip(rows(tmp_path / "true"), rows(tmp_path / "false"), strict=True):
        for column in ("loss", "grad_norm", "logit_scale"):
            assert ours[column] == pytest.approx(theirs[column], rel=1e-5)


def test_frozen_parts_keep_their_weights(shards, tmp_path):
    freeze = ("model.logit_scale=10", "train.freeze=[temperature]", "train.duration=4 steps")
    train(tiny_config(tmp_path / "run", shards, "checkpoint.every=1 steps", *freeze))
    first, last = (weights(tmp_path / f"run/checkpoints/step-0000000{n}/model") for n in (3, 4))
    changed = {name.partition(".")[0] for name in first if not first[name].equal(last[name])}
    assert changed == {"image", "image_projection", "text", "text_projection"}
    assert [row["logit_scale"] for row in rows(tmp_path / "run")] == pytest.approx([10.0] * 4)


def test_the_offset_of_the_sigmoid_loss_follows_the_batch(shards, tmp_path):
    loss = ("loss.kind=sigmoid", "model.logit_bias=auto")
    train(tiny_config(tmp_path / "run", shards, "train.duration=4 steps", *loss))
    assert rows(tmp_path / "run")[0]["logit_bias"] == pytest.approx(-math.log(7))
    train(tiny_config(tmp_path / "run", shards, "train.duration=5 steps", *loss))
    offset = multimodal.load(tmp_path / "run").logit_bias()
    assert -2.1 < offset < -1.8 and offset != rows(tmp_path / "run")[0]["logit_bias"]


def test_16_bit_training_keeps_loss_and_weights_in_32_bit(shards, tmp_path, caplog):
    half, full = (
        tiny_config(tmp_path / name, shards, "train.duration=3 steps") for name in ("half", "full")
    )
    on_ranks(1, train_in_16_bit, half)
    train(full)
    dtypes = {tensor.dtype for tensor in weights(tmp_path / "half/model").values()}
    assert dtypes == {torch.float32}
    for ours, theirs in zip(rows(tmp_path / "half"), rows(tmp_path / "full"), strict=True):
        assert ours["batch_hash"] == theirs["batch_hash"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
        assert ours["loss"] != theirs["loss"]


def test_a_label_that_is_no_class_is_found_before_the_first_step(shards, tmp_path):
    data = f"{{kind: shards, path: {shards}}}"
    evaluation = f"evaluate.a={{kind: zero_shot, classes: [x, y], data: {data}}}"
    with pytest.raises(ValueError, match=r"evaluate.a: sample .* neither one of the 2 class names"):
        train(tiny_config(tmp_path / "run", shards, evaluation))
    assert not (tmp_path / "run").exists()


def test_a_broken_evaluation_does_not_cost_the_checkpoint(shards, tmp_path, monkeypatch):
    config = tiny_config(tmp_path / "run", shards)
    config = config.model_copy(update={"evaluate": {"a": check(retrieval(shards), Retrieval)}})
    with monkeypatch.context() as patch:
        stop_at(patch, "evaluate")
        with pytest.raises(PowerCut):
            train(config)
    assert (tmp_path / "run/checkpoints/step-00000012").is_dir()
    train(config)
    assert (tmp_path / "run/results.json").is_file()

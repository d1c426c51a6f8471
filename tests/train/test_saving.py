"""When checkpoints are saved: in a thread like in the foreground, and those of the best steps."""

import json
import logging
import threading
from hashlib import sha256

import pytest
import torch
from checkpoint_parts import STATE, make_parts, names
from tools import make_shards, on_ranks, retrieval, rows, tiny_config, tiny_tree
from typer.testing import CliRunner

from multimodal.cli import app
from multimodal.config import Best, Config
from multimodal.config_io import check
from multimodal.errors import RunStopped
from multimodal.evaluate.run import evaluate
from multimodal.train import evaluating
from multimodal.train.best import best_steps, metric_values
from multimodal.train.checkpoint import Checkpoints, SaveFailed
from multimodal.train.loop import train
from multimodal.train.saving import Buffers, Saver
from multimodal.weights.load import load

METRIC = "val/image_retrieval_recall@1"


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


def settings(run, *overrides):
    """Of a run that need not have data."""
    return tiny_config(run, run / "data", *overrides)


def manifests(run):
    return {
        path.parent.name: json.loads(path.read_text())["files"]
        for path in (run / "checkpoints").glob("*/manifest.json")
    }


# --- in a thread ---------------------------------------------------------------------------------


def test_a_thread_writes_the_same_bytes(shards, tmp_path):
    """The configuration in state.json tells the two apart, so it is compared without it."""
    runs = {name: tmp_path / name for name in ("true", "false")}
    for name, run in runs.items():
        train(tiny_config(run, shards, f"checkpoint.background={name}"))
    ours, theirs = (manifests(run) for run in runs.values())
    assert ours.keys() == theirs.keys() == {"step-00000008", "step-00000012"}
    for step, files in ours.items():
        assert files.keys() == theirs[step].keys()
        for file in files.keys() - {"state.json"}:
            assert files[file] == theirs[step][file]
            content = (runs["true"] / "checkpoints" / step / file).read_bytes()
            assert sha256(content).hexdigest() == files[file]["sha256"]
        states = [
            json.loads((run / "checkpoints" / step / "state.json").read_text())
            for run in runs.values()
        ]
        for state in states:
            del state["config"]
        assert states[0] == states[1]


def test_the_run_may_go_on_while_a_checkpoint_is_written(tmp_path, parts, monkeypatch):
    """Weights that change meanwhile are not in it, and the next save waits for it."""
    begun, go_on = threading.Event(), threading.Event()
    real, saved = Checkpoints.save, []

    def slow(self, snapshot, **kwargs):
        begun.set()
        assert go_on.wait(30)
        saved.append(snapshot.state["step"])
        return real(self, snapshot, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", slow)
    model, optimizer = parts["pretrained"].model, parts["optimizer"]
    weight = model.image_projection.weight
    before = weight.detach().clone()
    with Saver(settings(tmp_path), Checkpoints(tmp_path, keep=3), None) as saver:
        saver.save({"step": 4, **STATE}, **parts)
        assert begun.wait(30) and saved == []
        with torch.no_grad():
            weight.add_(1)
            for state in optimizer.state.values():
                state["exp_avg"].mul_(2)
        threading.Timer(0.2, go_on.set).start()
        saver.save({"step": 8, **STATE}, **parts)
        assert saved[:1] == [4]
        assert saver.newest().step == 8
    first, second = (
        load(tmp_path / f"checkpoints/step-0000000{step}").model.image_projection.weight
        for step in (4, 8)
    )
    assert first.equal(before) and second.equal(before + 1)
    with torch.no_grad():
        weight.copy_(before)


def test_buffers_are_used_again_and_never_twice_in_a_snapshot():
    buffers = Buffers()
    a, b = buffers.copy(torch.full((3,), 1.0)), buffers.copy(torch.full((3,), 2.0))
    assert (a.tolist(), b.tolist()) == ([1.0] * 3, [2.0] * 3)
    buffers.restart()
    again = buffers.copy(torch.full((3,), 5.0))
    assert again.data_ptr() == a.data_ptr() and again.tolist() == [5.0] * 3
    other = buffers.copy(torch.arange(5))
    assert other.dtype == torch.int64 and other.tolist() == [0, 1, 2, 3, 4]
    assert buffers.copy(torch.tensor(7.0)).item() == 7


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize(("error", "expected"), [(SaveFailed, RunStopped), (KeyError, KeyError)])
def test_what_fails_in_the_thread_is_told_at_once_and_raised_later(
    tmp_path, parts, monkeypatch, caplog, background, error, expected
):
    def fail(self, snapshot, **kwargs):
        raise error("what is wrong")

    monkeypatch.setattr(Checkpoints, "save", fail)
    config = settings(tmp_path, f"checkpoint.background={background}")

    def run():
        with Saver(config, Checkpoints(tmp_path, keep=1), None) as saver:
            saver.save({"step": 4, **STATE}, **parts)
            assert background == "true"
            saver._thread.submit(lambda: None).result()
            assert "what is wrong" in caplog.text
            saver.finish(4)

    with pytest.raises(expected, match="what is wrong"):
        run()
    assert "what is wrong" in caplog.text


def stopped_after_a_save(config):
    """A run that ends with an error right after it has begun to save."""
    real = evaluating.evaluate

    def evaluate(*args, **kwargs):
        raise RunStopped("no evaluation")

    evaluating.evaluate = evaluate
    try:
        train(config)
    except RunStopped as error:
        return str(error)
    finally:
        evaluating.evaluate = real


def test_an_error_elsewhere_lets_the_checkpoint_be_completed_on_two_ranks(shards, tmp_path):
    tree = tiny_tree(tmp_path, shards)
    tree["evaluate"] = {"val": retrieval(shards, "4 steps")}
    told = on_ranks(2, stopped_after_a_save, check(tree, Config))
    assert told == ["no evaluation"] * 2
    assert names(tmp_path) == ["step-00000004"]
    assert Checkpoints(tmp_path, keep=1).find_resume().step == 4


# --- the best ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_are_those_of_a_sort(mode):
    """Of equal values the earlier is better; what is no number is none."""
    best = Best(metric="val/x@1", keep=3, mode=mode)
    draw = torch.Generator().manual_seed(2)
    for _ in range(30):
        drawn = torch.randint(0, 5, (9,), generator=draw).tolist()
        table = [{"step": step, "eval": "val", "x@1": x} for step, x in enumerate(drawn, 1)]
        others = [{"step": 3, "loss": 9.0}, {"step": 2, "eval": "other", "x@1": 99.0}]
        broken = [{"step": 70, "eval": "val", "x@1": None}, {"step": 71, "eval": "val"}]
        values = metric_values(best, [*table, *others, *broken])
        assert values == dict(enumerate(drawn, 1))
        kept = best_steps(best, values, range(1, 60))
        rest = set(values) - set(kept)
        assert len(kept) == 3
        for step in rest:
            for good in kept:
                better = drawn[good - 1] - drawn[step - 1]
                better = better if mode == "max" else -better
                assert better > 0 or (better == 0 and good < step)


def scripted(monkeypatch, values):
    """Let the evaluations of a run give these values, in their order; reading, not time, counts."""
    real, calls = evaluate, []

    def give(*args, **kwargs):
        calls.append(0)
        figures = real(*args, **kwargs)
        return figures | {"image_retrieval_recall@1": values[len(calls) - 1]}

    monkeypatch.setattr(evaluating, "evaluate", give)


def with_best(run, shards, *overrides, keep=2):
    tree = tiny_tree(run, shards, "checkpoint.keep=1", "checkpoint.every=5 steps", *overrides)
    tree["evaluate"] = {"val": retrieval(shards, "2 steps")}
    tree["checkpoint"]["best"] = {"metric": METRIC, "keep": keep}
    return check(tree, Config)


def steps_of(run):
    return [int(name.removeprefix("step-")) for name in names(run)]


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_best_steps_have_checkpoints_and_keep_them(shards, tmp_path, monkeypatch, background):
    """Evaluated after 2, 4, ... 12; the regular checkpoints are of 5, 10 and 12."""
    scripted(monkeypatch, [0.5, 0.9, 0.1, 0.9, 0.2, 0.3])
    train(with_best(tmp_path, shards, f"checkpoint.background={background}"))
    assert steps_of(tmp_path) == [4, 8, 12]
    assert [row["image_retrieval_recall@1"] for row in rows(tmp_path) if "eval" in row] == [
        *(0.5, 0.9, 0.1, 0.9, 0.2, 0.3)
    ]


def test_the_last_step_may_be_the_best_and_then_frees_another(shards, tmp_path, monkeypatch):
    scripted(monkeypatch, [0.5, 0.1, 0.1, 0.4, 0.2, 0.8])
    train(with_best(tmp_path, shards))
    assert steps_of(tmp_path) == [2, 12]


def test_the_best_outlive_a_resume_that_asks_for_more(shards, tmp_path, monkeypatch, caplog):
    scripted(monkeypatch, [0.5, 0.9, 0.1])
    train(with_best(tmp_path, shards, "train.duration=6 steps", keep=1))
    assert steps_of(tmp_path) == [4, 6]
    caplog.set_level(logging.INFO)
    # Step 6, whose regular checkpoint is there, is the second of those that have one.
    scripted(monkeypatch, [0.05, 0.8, 0.3])
    train(with_best(tmp_path, shards, "checkpoint.every=100 steps", keep=2))
    assert "checkpoint.best.keep: 1 -> 2" in caplog.text
    assert steps_of(tmp_path) == [4, 10, 12]


@pytest.mark.parametrize(
    ("metric", "every", "message"),
    [
        ("val/image_retrieval_recall@2", "2 steps", "did you mean val/image_retrieval_recall@"),
        ("loss", "2 steps", "there are val/image_retrieval_recall@1, val/image"),
        (METRIC, None, "set evaluate.val.every"),
    ],
)
def test_a_metric_that_will_not_be_there_is_refused_before_the_start(
    shards, tmp_path, metric, every, message
):
    tree = tiny_tree(tmp_path / "run", shards)
    tree["evaluate"] = {"val": retrieval(shards, every)}
    tree["checkpoint"]["best"] = {"metric": metric}
    with pytest.raises(ValueError, match=message):
        train(check(tree, Config))
    assert not (tmp_path / "run").exists()


# --- the list ------------------------------------------------------------------------------------


def listed(*arguments, code=0):
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_the_list_tells_state_metrics_and_which_one_is_next(shards, tmp_path, monkeypatch):
    scripted(monkeypatch, [0.5, 0.9, 0.1, 0.9, 0.2, 0.3])
    train(with_best(tmp_path, shards))
    (tmp_path / "checkpoints/.step-00000014").mkdir()
    found = listed(tmp_path)
    assert [(e["step"], e["state"], e["resume"], e["best"]) for e in found] == [
        (4, "sound", False, 1),
        (8, "sound", False, 2),
        (12, "sound", True, None),
        (14, "incomplete", False, None),
    ]
    assert found[0]["epoch"] == 4 * 8 / 37
    assert found[0]["loss"] == rows(tmp_path)[4]["loss"] and rows(tmp_path)[4]["step"] == 4
    assert found[0]["evaluations"]["val"]["image_retrieval_recall@1"] == 0.9
    folder = tmp_path / "checkpoints/step-00000012"
    assert found[2]["bytes"] == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    optimizer = folder / "optimizer.safetensors"
    content = bytearray(optimizer.read_bytes())
    content[-1] ^= 1
    optimizer.write_bytes(content)
    last = listed(tmp_path)[2]
    assert (last["state"], last["resume"]) == ("damaged", False)
    assert last["problem"].startswith("optimizer.safetensors has changed")
    assert listed(tmp_path)[1]["resume"]
    assert [e["state"] for e in listed(tmp_path, "--no-verify")] == [
        *("complete", "complete", "complete", "incomplete")
    ]
    shown = CliRunner().invoke(app, ["checkpoints", str(tmp_path)])
    assert shown.exit_code == 0 and "optimizer.safetensors has changed" in shown.stdout


def test_the_list_of_a_run_that_cannot_resume_has_an_exit_code(shards, tmp_path):
    train(tiny_config(tmp_path, shards, "train.duration=2 steps"))
    (tmp_path / "checkpoints/step-00000002/manifest.json").unlink()
    (entry,) = listed(tmp_path, code=1)
    assert (entry["state"], entry["problem"]) == ("damaged", "manifest.json is missing")

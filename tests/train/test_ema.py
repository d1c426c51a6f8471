"""The average of the weights: what it is, that it disturbs nothing, and where it ends up."""

import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools import make_shards, retrieval, rows, tiny_config, tiny_tree

from multimodal import load
from multimodal.config import Config
from multimodal.config_io import check
from multimodal.losses import ContrastiveLoss
from multimodal.train import evaluating, loop
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.ema import decay_after, make_ema
from multimodal.train.loop import train

DECAY = 0.4
"""So low that its warm-up is over within a run."""
LAST = "checkpoints/step-00000012"


class NanLoss(ContrastiveLoss):
    def forward(self, *features, **ids):
        return super().forward(*features, **ids) * math.nan


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


def config_of(run, shards, *overrides):
    settings = ("checkpoint.keep=9", f"train.ema={DECAY}", "train.max_nonfinite=5", *overrides)
    tree = tiny_tree(run, shards, *settings)
    tree["evaluate"] = {"shapes": retrieval(shards, "5 steps")}
    return check(tree, Config)


def state(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("micro_batch_size", ["null", "3"])
@pytest.mark.parametrize("broken", [(), (1, 6, 12)])
def test_it_follows_its_formula_over_finished_steps(
    tmp_path, shards, monkeypatch, micro_batch_size, broken
):
    real, seen = loop.train_step, []

    def watched(model, loss, *args, step, **kwargs):
        shown = NanLoss() if step + 1 in broken else loss
        result = real(model, shown, *args, step=step, **kwargs)
        if result.finite:
            seen.append({n: x.detach().double().clone() for n, x in model.state_dict().items()})
        return result

    monkeypatch.setattr(loop, "train_step", watched)
    train(config_of(tmp_path, shards, f"train.micro_batch_size={micro_batch_size}"))
    assert len(seen) == 12 - len(broken)
    expected = seen[0]
    for n, weights in enumerate(seen[1:], start=1):
        d = min(DECAY, (1 + n) / (10 + n))
        expected = {name: d * expected[name] + (1 - d) * x for name, x in weights.items()}
    found = state(tmp_path / LAST / "ema")
    assert found.keys() == expected.keys() and "temperature.logit_scale" in found
    for name, x in expected.items():
        assert found[name].dtype == torch.float32
        # A rounding of fp32 for each of a dozen updates.
        torch.testing.assert_close(found[name].double(), x, rtol=2e-6, atol=1e-7)
    assert json.loads((tmp_path / LAST / "state.json").read_text())["ema_updates"] == len(seen)


@pytest.fixture(scope="module")
def run(tmp_path_factory, shards):
    """A finished run with an average; `evaluated` lists the fingerprints of what it evaluated."""
    folder = tmp_path_factory.mktemp("run")
    real = evaluating.evaluate

    def noted(pretrained, *args, **kwargs):
        with (folder / "evaluated").open("a") as file:
            file.write(pretrained.fingerprint() + "\n")
        return real(pretrained, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluating, "evaluate", noted)
        train(config_of(folder, shards))
    return folder


def test_it_is_evaluated_beside_the_weights_and_published(run):
    names = [(row["step"], row["eval"]) for row in rows(run) if "eval" in row]
    assert names == [(s, f"shapes{suffix}") for s in (5, 10, 12) for suffix in ("", "@ema")]
    results = json.loads((run / "results.json").read_text())
    assert list(results) == ["shapes", "shapes@ema"]
    assert same(state(run / "model"), state(run / LAST / "ema"))
    assert not same(state(run / "model"), state(run / LAST / "model"))
    last = [load(run / LAST / name).fingerprint() for name in ("model", "ema")]
    assert (run / "evaluated").read_text().split()[-2:] == last


def test_each_path_names_its_weights(run):
    def weights(path):
        return load(path).model.state_dict()

    averaged = state(run / LAST / "ema")
    for path in (run, run / LAST, run / LAST / "ema"):
        assert same(weights(path), averaged)
    assert same(weights(run / LAST / "model"), state(run / LAST / "model"))


def test_while_a_run_goes_on_its_newest_sound_average_is_used(run, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.symlink_to(run / "checkpoints")
    assert same(load(tmp_path).model.state_dict(), state(run / LAST / "ema"))


def test_it_changes_nothing_about_the_training(run, shards, tmp_path):
    train(config_of(tmp_path, shards, "train.ema=null"))
    assert same(state(tmp_path / LAST / "model"), state(run / LAST / "model"))
    assert same(state(tmp_path / "model"), state(tmp_path / LAST / "model"))
    assert not (tmp_path / LAST / "ema").exists()
    ours = [row for row in rows(run) if not row.get("eval", "").endswith("@ema")]
    for row, twin in zip(ours, rows(tmp_path), strict=True):
        for column in ("step", "eval", "loss", "text_retrieval_recall@5"):
            assert row.get(column) == twin.get(column)


def test_an_evaluation_of_it_that_fails_leaves_weights_and_average_as_they_were(
    run, shards, tmp_path, monkeypatch
):
    calls = []

    def failing(pretrained, *args, **kwargs):
        calls.append(pretrained)
        if len(calls) == 4:
            with torch.inference_mode():
                pretrained.model.eval()
                raise RuntimeError("out of memory")
        return real(pretrained, *args, **kwargs)

    real = evaluating.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(evaluating, "evaluate", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(config_of(tmp_path, shards))
    assert calls[3].model is not calls[2].model
    train(config_of(tmp_path, shards))
    for name in ("model", f"{LAST}/model", f"{LAST}/ema"):
        assert same(state(tmp_path / name), state(run / name))
    assert rows(tmp_path)[-1]["eval"] == "shapes@ema"


def test_a_finished_run_is_found_finished(run, shards, caplog):
    caplog.set_level(logging.INFO)
    train(config_of(run, shards))
    assert "nothing to do" in caplog.text


@pytest.mark.parametrize("lost", ["ema_updates", "folder", "tensor", "extra tensor"])
def test_a_checkpoint_without_a_part_of_it_is_refused(run, shards, lost, tmp_path):
    found = Checkpoints(run, keep=9).find_resume()
    pretrained = load(run / LAST / "model")
    assert make_ema(DECAY, pretrained, found).n_averaged == 12
    (tmp_path / "ema").mkdir()
    tensors = state(found.ema)
    if lost == "ema_updates":
        del found.state["ema_updates"]
    elif lost == "tensor":
        del tensors["temperature.logit_scale"]
    elif lost == "extra tensor":
        tensors["module.temperature.logit_scale"] = torch.ones(())
    if lost != "folder":
        save_file(tensors, tmp_path / "ema/model.safetensors")
    found = type(found)(tmp_path, found.state)
    messages = {"folder": "no ema/ weights", "ema_updates": "no ema_updates"}
    with pytest.raises(ValueError, match=messages.get(lost, "logit_scale")):
        make_ema(DECAY, pretrained, found)


def interrupted(monkeypatch, config):
    """Train and fail in step 7."""
    real = loop.train_step

    def step(*args, step, **kwargs):
        if step == 6:
            raise RuntimeError("cut")
        return real(*args, step=step, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        with pytest.raises(RuntimeError, match="cut"):
            train(config)


@pytest.mark.slow
def test_a_resumed_run_may_begin_one_and_may_drop_it(tmp_path, shards, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    off, on = ("train.ema=null",), ()
    for name, before, after in (("begins", off, on), ("drops", on, off)):
        interrupted(monkeypatch, config_of(tmp_path / name, shards, *before))
        train(config_of(tmp_path / name, shards, *after))
    assert "changed since the run was started: train.ema: None -> 0.4" in caplog.text
    assert "changed since the run was started: train.ema: 0.4 -> None" in caplog.text
    begun = json.loads((tmp_path / "begins" / LAST / "state.json").read_text())
    assert begun["ema_updates"] == 8
    dropped = tmp_path / "drops"
    assert (dropped / "checkpoints/step-00000004/ema").exists()
    assert not (dropped / LAST / "ema").exists()
    assert same(state(dropped / "model"), state(dropped / LAST / "model"))


def test_its_decay_warms_up():
    decays = [decay_after(n, 0.999) for n in range(20_000)]
    assert decays == sorted(decays) and decays[0] == 0.1 and decays[-1] == 0.999
    assert decays.index(0.999) == pytest.approx(9 / (1 - 0.999), rel=0.01)


@pytest.mark.parametrize("value", ["1.0", "-0.1", "true"])
def test_a_decay_that_is_none_is_refused(tmp_path, shards, value):
    with pytest.raises(ValueError, match=r"train\.ema"):
        tiny_config(tmp_path, shards, f"train.ema={value}")

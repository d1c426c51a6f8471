"""Steps with a broken or a high loss: what is saved amid them, and what a resume remembers."""

import math
import shutil

import pytest
from checkpoint_parts import names
from tools import make_shards, rows, tiny_config

from multimodal.losses import ContrastiveLoss
from multimodal.train import loop
from multimodal.train.loop import train


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


@pytest.fixture
def times(monkeypatch):
    """Factors of the loss by step, to fill; 1 for the others."""
    real, factors = loop.train_step, {}

    class Times(ContrastiveLoss):
        def forward(self, *features, **how):
            return super().forward(*features, **how) * self.factor

    def train_step(model, loss, *args, step, **kwargs):
        if step + 1 in factors:
            loss = Times()
            loss.factor = factors[step + 1]
        return real(model, loss, *args, step=step, **kwargs)

    monkeypatch.setattr(loop, "train_step", train_step)
    return factors


def test_a_save_that_is_due_in_a_broken_step_is_made_after_it(shards, tmp_path, times):
    times |= {4: math.nan, 5: math.nan, 9: math.nan}
    train(tiny_config(tmp_path, shards, "checkpoint.keep=9"))
    assert names(tmp_path) == ["step-00000006", "step-00000008", "step-00000012"]


def test_a_resumed_run_notes_the_spikes_of_the_uninterrupted_one(shards, tmp_path, times):
    """The band of a spike takes 20 losses, most of which are of before the resume."""
    times |= {23: 4.0, 26: 5.0, 28: 4.0}
    settings = ("train.duration=30 steps", "checkpoint.every=12 steps", "checkpoint.keep=9")
    twin, run = tmp_path / "twin", tmp_path / "run"
    train(tiny_config(twin, shards, *settings))
    assert [row["step"] for row in rows(twin, "spikes.jsonl")] == [23, 26, 28]
    shutil.copytree(twin, run)
    shutil.rmtree(run / "checkpoints/step-00000030")
    train(tiny_config(run, shards, *settings))
    assert (run / "spikes.jsonl").read_bytes() == (twin / "spikes.jsonl").read_bytes()

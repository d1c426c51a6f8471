"""F42 and F43 in whole runs: a NaN pixel on one of two ranks, and a batch whose loss leaps."""

import math
import shutil

import pytest
from tools import make_shards, on_ranks, rows, tiny_config

from multimodal.distributed import rank
from multimodal.errors import RunStopped
from multimodal.losses import ContrastiveLoss
from multimodal.train import loop
from multimodal.train.loop import train


def train_with(config, change, *args):
    """Train with each step's loss and batch changed by `change(step, loss, batch, *args)`; the
    keys of this rank's steps, the last model and optimiser, and why the run stopped."""
    real, keys, kept, stopped = loop.train_step, {}, {}, None

    def train_step(model, loss, optimizer, batch, *, step, **kwargs):
        keys[step + 1] = batch.keys
        kept.update(model=model, optimizer=optimizer)
        loss, batch = change(step + 1, loss, batch, *args)
        return real(model, loss, optimizer, batch, step=step, **kwargs)

    loop.train_step = train_step
    try:
        train(config)
    except RunStopped as error:
        stopped = str(error)
    finally:
        loop.train_step = real
    states = [x for state in kept["optimizer"].state.values() for x in state.values()]
    finite = all(x.isfinite().all() for x in [*kept["model"].parameters(), *states])
    return keys, bool(finite), stopped


def nan_pixel(step, loss, batch, broken):
    if rank() == 1 and step in broken:
        images = batch.images.float()
        images[1, 0, 2, 3] = math.nan
        batch = type(batch)(**{**vars(batch), "images": images})
    return loss, batch


@pytest.mark.parametrize("broken", [(3,), (3, 4, 5)])
def test_a_nan_pixel_on_one_rank_leaves_the_step_out_or_stops_both(tmp_path, broken):
    shards = make_shards(tmp_path / "data", 37)
    settings = ("train.duration=7 steps", "train.max_nonfinite=3", "checkpoint.every=2 steps")
    config = tiny_config(tmp_path / "run", shards, *settings)
    results = on_ranks(2, train_with, config, nan_pixel, broken)
    listed = rows(tmp_path / "run", "nonfinite.jsonl")
    keys = results[1][0]
    assert [row["step"] for row in listed] == list(broken)
    assert [row["suspects"] for row in listed] == [[keys[step][1]] for step in broken]
    for _, finite, stopped in results:
        assert finite
        assert (stopped is None) == (len(broken) < 3)
        if stopped:
            assert "step 5:" in stopped and "step-00000002" in stopped and keys[5][1] in stopped


class Leaping(ContrastiveLoss):
    def forward(self, *args, **ids):
        return 2.5 * super().forward(*args, **ids)


def leap(step, loss, batch, at):
    return (Leaping() if step in at else loss), batch


NOISELESS = ("train.batch_size=16", "log.every=7 steps", "optim.lr=1e-9", "checkpoint.keep=3")


def test_a_leap_of_the_loss_is_logged_with_its_samples_and_the_run_goes_on(tmp_path):
    shards = make_shards(tmp_path / "data", 37)
    config = tiny_config(tmp_path / "run", shards, "train.duration=32 steps", *NOISELESS)
    (first, *_), (second, *_) = on_ranks(2, train_with, config, leap, (30,))
    (row,) = rows(tmp_path / "run", "spikes.jsonl")
    assert row["step"] == 30 and row["keys"] == first[30] + second[30]
    assert row["positions"] == [29 * 16, 30 * 16 - 1]
    assert row["loss"] > row["limit"] > row["median"]
    assert (tmp_path / "run" / "model").is_dir()


def test_a_resumed_run_knows_the_band_and_lists_each_spike_once(tmp_path):
    shards = make_shards(tmp_path / "data", 37)
    for duration in (28, 34):
        length = (f"train.duration={duration} steps", "checkpoint.every=26 steps")
        config = tiny_config(tmp_path / "run", shards, *length, *NOISELESS)
        if duration == 34:  # as if the run had been killed before its last checkpoint
            shutil.rmtree(tmp_path / "run/checkpoints/step-00000028")
        train_with(config, leap, (24, 27, 32))
    assert [row["step"] for row in rows(tmp_path / "run", "spikes.jsonl")] == [24, 27, 32]
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert steps == sorted(set(steps))

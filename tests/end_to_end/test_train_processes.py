"""Runs of two processes: the same training, and the same end of a mistake."""

import math
import re

import pytest
from tools import make_shards, on_ranks, retrieval, rows, tiny_config, tiny_tree

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.distributed import rank
from multimodal.errors import RunStopped
from multimodal.losses import ContrastiveLoss
from multimodal.losses.metrics import LossMetrics
from multimodal.train import checkpoint, loop
from multimodal.train.loop import train


@pytest.mark.parametrize("duplicates", ["negative", "ignore"])
def test_two_processes_train_like_one(tmp_path, duplicates):
    shards = make_shards(tmp_path / "data", 37, broken=(7,))
    other = make_shards(tmp_path / "other", 20, seed=9)
    for name in ("one", "two"):
        loss = ("loss.kind=contrastive", f"loss.duplicates={duplicates}")
        tree = tiny_tree(tmp_path / name, shards, "data.max_skipped=0.1", *loss)
        tree["evaluate"] = {"shapes": retrieval(other, "5 steps")}
        config = check(tree, Config)
        if name == "one":
            train(config)
        else:
            on_ranks(2, train, config)
    for ours, theirs in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert list(ours) == list(theirs)
        for column in ("step", "lr", "batch_hash", "skipped"):
            assert ours.get(column) == theirs.get(column)
        for column in ("loss", *LossMetrics._fields):
            assert ours.get(column, 0) == pytest.approx(theirs.get(column, 0), rel=1e-5, abs=1e-6)
    for column in LossMetrics._fields:
        assert len({row.get(column) for row in rows(tmp_path / "two")}) > 2
    skipped = [rows(tmp_path / name, "skipped.jsonl") for name in ("one", "two")]
    assert skipped[0] == skipped[1]


def train_with_breaks(config, kind, steps):
    """Break some steps (from 1) on rank 1; the weights at the end and what stopped the run."""
    real, models = loop.train_step, []

    def train_step(model, loss, *args, step, **kwargs):
        models[:] = [model]
        shown = Broken(kind) if rank() == 1 and step + 1 in steps else loss
        return real(model, shown, *args, step=step, **kwargs)

    loop.train_step = train_step
    try:
        stopped = train(config)
    except RunStopped as error:
        stopped = str(error)
    return stopped, {name: p.detach().clone() for name, p in models[0].named_parameters()}


class Broken(ContrastiveLoss):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, image, text, scale, bias, **ids):
        value = super().forward(image, text, scale, bias, **ids)
        return (
            value * math.nan
            if self.kind == "nan loss"
            else value + (image - image).abs().sqrt()[0, 0]
        )


@pytest.mark.parametrize("kind", ["nan loss", "infinite gradient"])
def test_a_break_on_one_rank_is_left_out_by_both_and_again_and_again_stops_both(tmp_path, kind):
    shards = make_shards(tmp_path / "data", 37)
    settings = ("train.duration=7 steps", "train.max_nonfinite=2", "train.micro_batch_size=3")
    config = tiny_config(tmp_path / "run", shards, *settings)
    (none, ours), (_, theirs) = on_ranks(2, train_with_breaks, config, kind, (3, 5))
    assert none is None
    assert all(p.equal(theirs[name]) and p.isfinite().all() for name, p in ours.items())
    assert [row["nonfinite"] for row in rows(tmp_path / "run")] == [0, 0, 1, 1, 2, 2, 2]
    config = tiny_config(tmp_path / "again", shards, *settings)
    for stopped, weights in on_ranks(2, train_with_breaks, config, kind, (5, 6)):
        assert re.search(r"step 6: loss .* 2 steps in a row .*step-00000004\. ", stopped), stopped
        assert all(p.isfinite().all() for p in weights.values())


def mistake_of(config):
    try:
        train(config)
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def mistake_of_a_full_disk(config):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    checkpoint.save_file = full
    return mistake_of(config)


@pytest.mark.parametrize(
    ("function", "override", "message"),
    [
        (mistake_of, "train.batch_size=7", "number of processes can be 1, 7"),
        (mistake_of, "data.train.path=/nowhere", "ValueError: .*/nowhere"),
        (mistake_of, "data.max_skipped=0", "RunStopped: step .* 1 samples were unreadable"),
        (mistake_of_a_full_disk, "data.max_skipped=0.5", "No space left"),
        (mistake_of, "model.image={kind: timm, name: test_byobnet}", "batch normalisations"),
    ],
)
def test_a_mistake_on_any_rank_ends_all(tmp_path, function, override, message):
    shards = make_shards(tmp_path / "data", 40, broken=(3,))
    for told in on_ranks(2, function, tiny_config(tmp_path / "run", shards, override)):
        assert told and re.search(message, told), told

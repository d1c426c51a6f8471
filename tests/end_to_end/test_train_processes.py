"""Runs of two processes: the same training, and the same end of a mistake."""

import re

import pytest
from tools import make_shards, on_ranks, retrieval, rows, tiny_config, tiny_tree

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.train import checkpoint
from multimodal.train.loop import train


def test_two_processes_train_like_one(tmp_path):
    shards = make_shards(tmp_path / "data", 37, broken=(7,))
    other = make_shards(tmp_path / "other", 20, seed=9)
    for name in ("one", "two"):
        tree = tiny_tree(tmp_path / name, shards, "data.max_skipped=0.1")
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
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-5)
    skipped = [rows(tmp_path / name, "skipped.jsonl") for name in ("one", "two")]
    assert skipped[0] == skipped[1]


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

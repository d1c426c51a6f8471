"""Every sample once an epoch, in one order, whatever the shards, ranks, workers and restarts."""

import json
import random
from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from made_data import keys_in_order, pairs, write_tar

from multimodal import config
from multimodal.data.build import open_source
from multimodal.data.order import Order

BATCH, SAMPLES, EPOCHS = 12, 41, 3
STEPS = -(-SAMPLES * EPOCHS // BATCH)
SIZES = {1: [41], 3: [29, 1, 11], 12: [1, 9, 2, 1, 1, 12, 1, 5, 2, 4, 2, 1]}
KINDS = ("shards", "table", "folder", "mixture")


def make(root, kind: str, sizes: list[int]) -> Any:
    """A source of one kind with these numbers of samples in its shards, files or folders."""
    root.mkdir()
    ends = list(accumulate(sizes))
    names = [[f"{i:03d}" for i in range(end - n, end)] for n, end in zip(sizes, ends, strict=True)]
    if kind == "mixture":
        kinds = KINDS[: min(3, len(sizes))]
        each = [sizes[i :: len(kinds)] for i in range(len(kinds))]
        parts = {k: make(root / k, k, own) for k, own in zip(kinds, each, strict=True)}
        return config.MixtureSource(kind="mixture", sources=parts)
    if kind == "shards":
        for i, own in enumerate(names):
            write_tar(root / f"{i}.tar", pairs(own))
        return config.ShardsSource(kind="shards", path=str(root))
    rows = []
    for i, own in enumerate(names):
        (root / f"{i}").mkdir()
        for name in own:
            (root / f"{i}" / f"{name}.jpg").write_bytes(b"picture")
            rows.append(json.dumps({"image": f"{i}/{name}.jpg", "caption": name}) + "\n")
    if kind == "folder":
        return config.FolderSource(kind="folder", path=str(root))
    (root / "t.jsonl").write_text("".join(rows))
    return config.TableSource(kind="table", path=str(root / "t.jsonl"))


def keys(section, *, ranks: int = 1, workers: int = 0, start: int = 0) -> list[str]:
    """Sample names in global order, put together from all ranks."""
    source = open_source(section)
    data = config.Data(train=section, workers=workers, shuffle_window=20)
    steps = range(start, STEPS)
    return keys_in_order(source, data, steps=steps, batch_size=BATCH, ranks=ranks)


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    grid = [(kind, shards) for kind in KINDS for shards in SIZES]
    return {(k, n): make(root / f"{k}-{n}", k, SIZES[n]) for k, n in grid}


@pytest.mark.parametrize(
    "shards", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once_an_epoch_for_any_ranks_and_workers(sections, kind, shards):
    section = sections[kind, shards]
    source = open_source(section)
    every = Counter(source.read(i).key for i in range(len(source)))
    assert (len(every), set(every.values())) == (SAMPLES, {1})
    expected = keys(section)
    epochs = [expected[i * SAMPLES : (i + 1) * SAMPLES] for i in range(EPOCHS)]
    for epoch in epochs:
        assert Counter(epoch) == every
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for ranks in (1, 2, 4):
        for workers in (0, 2):
            assert keys(section, ranks=ranks, workers=workers) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_with_other_ranks_and_workers_goes_on_with_the_same_names(sections, kind):
    section = sections[kind, 3]
    expected = keys(section)
    draw = random.Random(kind)
    for start in draw.sample(range(1, STEPS), 5):
        ranks, workers = draw.choice([1, 2, 4]), draw.choice([0, 2])
        assert keys(section, ranks=ranks, workers=workers, start=start) == expected[BATCH * start :]


def test_where_a_shard_comes_in_the_order_has_nothing_to_do_with_its_number():
    """Spearman's correlation of a shard's number with the mean position of its samples.

    Of unrelated ranks of n shards its deviation is 1 / sqrt(n - 1): here 0.05, and for the mean of
    12 seeds and epochs 0.015.
    """
    shards, size = 400, 7
    found = []
    for seed in range(4):
        order = Order([size] * shards, seed=seed, window=50)
        for epoch in range(3):
            first = epoch * shards * size
            of = [order.locate(p).index // size for p in range(first, first + shards * size)]
            positions = np.bincount(of, weights=np.arange(len(of))) / size
            found.append(np.corrcoef(np.arange(shards), positions.argsort().argsort())[0, 1])
    assert np.abs(found).max() < 4 * 0.05
    assert abs(np.mean(found)) < 4 * 0.015

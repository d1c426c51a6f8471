"""A mixture goes wherever a source goes: training, resuming, evaluation, packing, embedding."""

from collections import Counter

import pandas as pd
import pytest
from tiny import tiny_pretrained
from tools import make_shards, rows, tiny_tree

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.data.build import open_source
from multimodal.data.mixture import training_order
from multimodal.data.pack import pack
from multimodal.embed.export import export
from multimodal.train import loop
from multimodal.train.loop import train


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    sources = {
        "few": {"kind": "shards", "path": str(make_shards(root / "few", 20, seed=9))},
        "many": {"kind": "shards", "path": str(make_shards(root / "many", 37, broken=(4, 30)))},
    }
    return {"kind": "mixture", "sources": sources, "weights": {"few": 1.0, "many": 2.0}}


def config(run, section) -> Config:
    tree = tiny_tree(run, run, "data.max_skipped=0.2")
    tree["data"]["train"] = section
    tree["evaluate"] = {"both": {"kind": "retrieval", "data": section}}
    return check(tree, Config)


def test_a_run_counts_samples_and_skips_by_source_and_goes_on_after_a_stop(
    section, tmp_path, monkeypatch
):
    whole = config(tmp_path / "whole", section)
    train(whole)
    source = open_source(whole.data.train)
    order = training_order(source, seed=whole.seed, window=whole.data.shuffle_window)
    for row in (row for row in rows(tmp_path / "whole") if "eval" not in row):
        counts = Counter(order.locate(p).part for p in range(row["samples"]))
        assert (row["samples/few"], row["samples/many"]) == (counts[0], counts[1])
    skips = rows(tmp_path / "whole", "skipped.jsonl")
    assert {skip["key"].split("/")[0] for skip in skips} == {"many"}
    assert {skip["place"] for skip in skips} <= {f"many/0000{i}.tar" for i in range(3)}
    assert rows(tmp_path / "whole")[-1]["eval"] == "both"

    class PowerCut(Exception):
        pass

    done = loop.train_step

    def cut(*arguments, step, **options):
        if step == 9:
            raise PowerCut
        return done(*arguments, step=step, **options)

    again = config(tmp_path / "cut", section)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", cut)
        with pytest.raises(PowerCut):
            train(again)
    train(again)
    same = ("step", "loss", "batch_hash", "samples/few", "samples/many", "skipped")
    figures = [
        [[row[name] for name in same] for row in rows(tmp_path / run) if "eval" not in row]
        for run in ("whole", "cut")
    ]
    assert figures[0] == figures[1]


def test_a_mixture_is_packed_and_embedded_whole(section, tmp_path):
    source = open_source(config(tmp_path, section).data.train)
    state = pack(source, tmp_path / "packed", samples_per_shard=30)
    assert (state.samples, state.skipped) == (55, {"not an image": 2})
    export(tiny_pretrained(), source, tmp_path / "embedded", rows_per_part=20, batch_size=10)
    tables = [pd.read_parquet(path) for path in sorted((tmp_path / "embedded/metadata").iterdir())]
    assert [len(table) for table in tables] == [20, 19, 16]
    keys = [key for table in tables for key in table["key"]]
    assert keys[:20] == [f"few/{i:06d}" for i in range(20)]
    assert keys[20:] == [f"many/{i:06d}" for i in range(37) if i not in (4, 30)]

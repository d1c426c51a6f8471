"""Training on shards that are read in sequence: it resumes by shard, and lost shards end it."""

import json
from collections import Counter
from itertools import chain

import pytest
from tools import finish, make_shards, retrieval, rows, start, tiny_tree, write_config

from multimodal import cli
from multimodal.config import Config
from multimodal.config_io import check
from multimodal.data.loader import train_loader
from multimodal.errors import RunStopped
from multimodal.train import loop
from multimodal.train import start as start_module
from multimodal.train.check import check_run
from multimodal.train.loop import train

SAMPLES = 48


@pytest.fixture
def shards(tmp_path):
    """Eight shards of six."""
    return make_shards(tmp_path / "shards", SAMPLES, per_shard=6)


def config(run, shards, *overrides: str) -> Config:
    tree = tiny_tree(run, run, "data.workers=2", *overrides)
    section = {"kind": "stream", "path": str(shards), "samples": SAMPLES, "shuffle_buffer": 6}
    tree["data"]["train"] = section
    tree["evaluate"] = {"val": retrieval(shards)}
    return check(tree, Config)


class Stopped(Exception):
    pass


def stopped_after(step: int, monkeypatch, run: Config) -> None:
    done = loop.train_step

    def cut(*arguments, **options):
        if options["step"] == step:
            raise Stopped
        return done(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", cut)
        with pytest.raises(Stopped):
            train(run)


def keys_of(run: Config, monkeypatch) -> list[list[str]]:
    """Names that each step of a run is given."""
    seen: list[list[str]] = []

    def noted(*arguments, **options):
        for batch in train_loader(*arguments, **options):
            seen.append(batch.keys)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(start_module, "train_loader", noted)
        train(run)
    return seen


@pytest.mark.slow
def test_a_run_repeats_itself_and_a_resumed_one_goes_on_by_shard(tmp_path, shards, monkeypatch):
    runs = {name: config(tmp_path / name, shards) for name in ("a", "b", "cut")}
    whole = keys_of(runs["a"], monkeypatch)
    epochs = [Counter(chain(*whole[i : i + 6])) for i in (0, 6)]
    assert [set(epoch.values()) for epoch in epochs] == [{1}, {1}]
    train(runs["b"])
    train_rows = {
        name: [r for r in rows(tmp_path / name) if "eval" not in r] for name in ("a", "b")
    }
    same = ("step", "epoch", "loss", "batch_hash", "skipped")
    a, b = ([[row[name] for name in same] for row in train_rows[run]] for run in "ab")
    assert a == b
    assert rows(tmp_path / "a")[-1]["eval"] == "val"

    stopped_after(9, monkeypatch, runs["cut"])  # the last checkpoint is of step 8
    rest = keys_of(runs["cut"], monkeypatch)
    assert len(rest) == 4
    assert [row["step"] for row in rows(tmp_path / "cut") if "eval" not in row] == list(
        range(1, 13)
    )
    seen = Counter(chain(*whole[6:8], *rest))
    repeated = seen.total() - len(seen)
    assert repeated <= 2 * (6 + 6), "a shard and a buffer for each of two workers"


def test_a_lost_shard_above_the_budget_stops_the_run_and_names_it(tmp_path, shards):
    first = shards / "00003.tar"
    first.write_bytes(first.read_bytes()[:2000])
    with pytest.raises(RunStopped, match=r"1 of 8 shards are missing, cut or damaged.*00003\.tar"):
        train(config(tmp_path / "run", shards, "data.max_skipped=0.1"))
    reasons = {row["reason"] for row in rows(tmp_path / "run", "skipped.jsonl")}
    assert reasons == {"truncated shard", "cut sample"}


def test_the_check_tries_a_run_on_a_stream(tmp_path, shards, monkeypatch, capsys):
    monkeypatch.setattr("multimodal.train.check._SECONDS", 0.1)
    report = check_run(config(tmp_path / "run", shards))
    assert report.problems == []
    assert report.facts["epochs"] == 2.0
    assert report.facts["data_per_second"] > 0
    tree = config(tmp_path / "run", shards).model_dump()
    path = write_config(tmp_path / "c.yaml", tree)
    monkeypatch.setattr("sys.argv", ["multimodal", "check", str(path), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert (found["data"]["samples"], found["data"]["looked_at"]) == (SAMPLES, SAMPLES)


@pytest.mark.slow
def test_two_processes_train_on_a_stream_and_too_few_shards_are_refused(tmp_path, shards):
    def launch(name: str, *overrides: str):
        tree = config(tmp_path / name, shards, *overrides).model_dump()
        path = write_config(tmp_path / f"{name}.yaml", tree)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        return start(*torchrun, "scripts/train.py", str(path))

    lost = shards / "00003.tar"
    lost.write_bytes(lost.read_bytes()[:2000])
    finish(launch("run", "data.max_skipped=0.2"))
    assert (tmp_path / "run/model").is_dir()
    assert {row["place"] for row in rows(tmp_path / "run", "skipped.jsonl")} == {"00003.tar"}
    for shard in sorted(shards.glob("*.tar"))[1:]:
        shard.unlink()
    output = finish(launch("few"), code=1)
    assert "1 shard(s) cannot be shared by 2 processes" in output
    assert not list((tmp_path / "few").glob("*.yaml"))

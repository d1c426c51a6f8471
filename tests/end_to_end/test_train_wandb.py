"""The copy of the metrics that W&B gets, and that nothing depends on it."""

import json
import os
import struct
import sys
import time

import pytest
from tools import make_shards, on_ranks, retrieval, rows, tiny_tree

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.train.loop import train


def config(tmp_path, mode):
    shards = make_shards(tmp_path / "data", 20)
    tree = tiny_tree(tmp_path / "run", shards, "train.duration=3 steps")
    tree["evaluate"] = {"shapes": retrieval(shards)}
    tree["log"]["wandb"] = {"mode": mode, "project": "tiny"}
    return check(tree, Config)


def train_without_wandb(config):
    train(config)
    assert "wandb" not in sys.modules
    assert "timm" not in sys.modules, "it imports wandb"


def test_disabled_does_not_import_it_and_writes_no_folder(tmp_path):
    on_ranks(1, train_without_wandb, config(tmp_path, "disabled"))
    assert len(rows(tmp_path / "run")) == 4
    assert not (tmp_path / "run/wandb").exists()


def records(path):
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    content, position, parts = path.read_bytes(), 7, []
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(run):
    """Rows in the run folder's offline log, without W&B's own columns."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for content in records(path):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            found.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return found


def assert_same_metrics(run):
    expected = {}
    for row in rows(run):
        prefix = f"{row['eval']}/" if "eval" in row else ""
        columns = {k: v for k, v in row.items() if k not in ("step", "eval") and v is not None}
        expected.setdefault(row["step"], {}).update({prefix + k: v for k, v in columns.items()})
    assert history(run) == list(expected.values())


def test_offline_keeps_the_same_metrics_in_the_run_folder(tmp_path):
    on_ranks(2, train, config(tmp_path, "offline"))
    assert_same_metrics(tmp_path / "run")


def run_without_server(config):
    """A server that refuses at once; a key that has the right form."""
    os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    started = time.monotonic()
    train(config)
    return time.monotonic() - started


@pytest.mark.slow
def test_online_without_a_server_goes_on_offline_after_ten_seconds(tmp_path):
    (seconds,) = on_ranks(1, run_without_server, config(tmp_path, "online"))
    assert seconds < 60
    assert len([row for row in rows(tmp_path / "run") if "loss" in row]) == 3
    assert_same_metrics(tmp_path / "run")

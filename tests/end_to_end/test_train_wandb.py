"""The copy of the metrics that W&B gets, and that nothing depends on it."""

import sys

from tools import make_shards, on_ranks, retrieval, rows, tiny_tree
from wandb_files import history

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


def assert_same_metrics(run):
    """Row by row, each with its step as the axis."""
    expected = []
    for row in rows(run):
        prefix = f"{row['eval']}/" if "eval" in row else ""
        columns = {k: v for k, v in row.items() if k not in ("step", "eval") and v is not None}
        expected.append({"step": row["step"], **{prefix + k: v for k, v in columns.items()}})
    assert history(run) == expected


def test_offline_keeps_the_same_metrics_in_the_run_folder(tmp_path):
    on_ranks(2, train, config(tmp_path, "offline"))
    assert_same_metrics(tmp_path / "run")

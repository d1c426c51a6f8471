"""One process writes a run folder, and a resumed run is the run that was started."""

import multiprocessing
import os
import socket

import pytest
import yaml
from tools import make_shards, tiny_config

from multimodal.config import Config
from multimodal.config_io import load_config
from multimodal.train import run_folder
from multimodal.train.run_folder import changed_settings, locked, publish_model, write_config


def refusal(run):
    try:
        with locked(run):
            return None
    except ValueError as error:
        return str(error)


def test_a_second_process_is_refused_with_the_holder_named(tmp_path):
    run = tmp_path / "run"
    with locked(run) as lock:
        lock.sign()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            message = pool.apply(refusal, (run,))
    assert f"process {os.getpid()}" in message and "choose another folder" in message
    assert refusal(run) is None


def test_the_lock_does_not_outlive_its_process_in_a_forked_child(tmp_path):
    """A loader process of a killed run lives on for seconds, and must not keep the folder."""
    ours, theirs = socket.socketpair()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            ours.close()
            theirs.send(b"started")
            theirs.recv(1)
            os._exit(0)
        ours.recv(7)
    message = refusal(tmp_path)
    ours.send(b"x")
    os.waitpid(child, 0)
    assert message is None


def test_looking_at_a_locked_folder_changes_nothing(tmp_path):
    with locked(tmp_path) as lock:
        lock.sign()
    before = (tmp_path / ".lock").stat().st_mtime_ns
    with locked(tmp_path):
        pass
    assert (tmp_path / ".lock").stat().st_mtime_ns == before


def test_a_folder_with_results_of_something_else_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "no config.yaml" in refusal(tmp_path)
    assert not (tmp_path / ".lock").exists()


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "data", 3)


def test_the_written_config_is_the_whole_config(tmp_path, shards):
    config = tiny_config(tmp_path, shards, "optim.eps=1e-9")
    write_config(tmp_path, config)
    assert load_config([str(tmp_path / "config.yaml")], Config) == config
    assert changed_settings(tmp_path, config) == []


def test_a_run_from_before_a_setting_existed_can_go_on(tmp_path, shards):
    config = tiny_config(tmp_path, shards)
    write_config(tmp_path, config)
    path = tmp_path / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    del tree["train"]["freeze"], tree["loss"]["duplicates"]
    path.write_text(yaml.safe_dump(tree))
    assert changed_settings(tmp_path, config) == []
    tree["train"]["gone"] = 3
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=r"train.gone: 3 -> None"):
        changed_settings(tmp_path, config)


def test_harmless_changes_are_listed(tmp_path, shards):
    write_config(tmp_path, tiny_config(tmp_path, shards))
    changed = tiny_config(
        tmp_path / "moved",
        shards,
        "optim.lr=0.5",
        "train.duration=50 steps",
        "data.workers=3",
        "checkpoint.keep=7",
    )
    assert changed_settings(tmp_path, changed) == [
        "data.workers: 0 -> 3",
        "train.duration: '12 steps' -> '50 steps'",
        "optim.lr: 0.001 -> 0.5",
        "checkpoint.keep: 2 -> 7",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.image.depth=3", "model.image.depth: 2 -> 3"),
        ("model.image.patch_dropout=0.5", "model.image.patch_dropout: 0.0 -> 0.5"),
        ("data.train.path=elsewhere", "data.train.path: .* -> 'elsewhere'"),
        ("data.augment.flip=0.5", "data.augment.flip: 0.0 -> 0.5"),
        ("data.templates=['a {}']", r"data.templates: \['{}'\] -> \['a {}'\]"),
        ("train.batch_size=16", "train.batch_size: 8 -> 16"),
        ("seed=4", "seed: 3 -> 4"),
    ],
)
def test_another_model_order_or_data_is_refused_with_the_difference(
    tmp_path, shards, override, line
):
    write_config(tmp_path, tiny_config(tmp_path, shards))
    with pytest.raises(ValueError, match=line) as error:
        changed_settings(tmp_path, tiny_config(tmp_path, shards, override, "optim.lr=0.5"))
    assert "optim.lr" not in str(error.value).split("\nUndo")[0]


def test_the_published_model_is_whole_or_absent(tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoints/step-00000001"
    (checkpoint / "model/text").mkdir(parents=True)
    (checkpoint / "model/a").write_text("new")
    (checkpoint / "model/text/b").write_text("new")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a").write_text("old")

    def stop(*args):
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "move_folder", stop)
        with pytest.raises(OSError, match="power cut"):
            publish_model(tmp_path, checkpoint, "a card")
    assert (tmp_path / "model/a").read_text() == "old"
    publish_model(tmp_path, checkpoint, "a card")
    assert (tmp_path / "model/text/b").read_text() == "new"
    assert (tmp_path / "model/README.md").read_text() == "a card"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "model"]


def test_a_folder_with_other_files_is_not_taken_for_a_run(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"")
    assert "holiday.jpg but no config.yaml" in refusal(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]

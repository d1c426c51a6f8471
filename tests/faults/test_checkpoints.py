"""Checkpoints that are damaged, killed or cut short, alone and in whole runs.

F01 F02 F03 F07 F08 F09 F10 F14 F16 F17 are here. F06 (a second signal) is with the signals, the
locks of F17 alone in train/test_run_folder.py, and F18 (a finished run) in end_to_end/test_train.py
(test_running_a_finished_run_again_changes_nothing).
"""

import contextlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from checkpoint_parts import FILES, STATE, make_parts, names, newest, save_three, snapshot
from safetensors.torch import load_file, save_file
from tools import (
    RANDOM,
    finish,
    make_shards,
    on_ranks,
    rows,
    start,
    tiny_config,
    tiny_tree,
    write_config,
)

import multimodal.train.checkpoint as module
from multimodal.config import Optim
from multimodal.errors import RunStopped
from multimodal.files import file_hash
from multimodal.train import loop
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.loop import train
from multimodal.train.optim import build_optimizer
from multimodal.train.run_folder import locked
from multimodal.train.snapshot import load_optimizer
from multimodal.weights.load import load, load_weights

EXACT = ("step", "epoch", "loss", "lr", "grad_norm", "logit_scale", "batch_hash", "skipped")


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture
def saved(tmp_path, parts):
    return save_three(tmp_path, parts)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"), 37)


@pytest.fixture(scope="module")
def twin(tmp_path_factory, shards):
    """A run of 12 steps that nothing disturbed, with its checkpoints in the foreground."""
    run = tmp_path_factory.mktemp("runs") / "twin"
    train(tiny_config(run, shards, "checkpoint.background=false"))
    return run


@pytest.fixture
def copy(twin, tmp_path):
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(twin, tmp_path / "copy"))


def files(run):
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def exact(run):
    return [[row[name] for name in EXACT] for row in rows(run)]


def assert_same_end(run, twin):
    assert exact(run) == exact(twin)
    a, b = load_file(run / "model/model.safetensors"), load_file(twin / "model/model.safetensors")
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


# --- F01, F02: kill -9 ---------------------------------------------------------------------------


def wait_for_step(process, run, step):
    path = run / "metrics.jsonl"
    while not path.exists() or f'{{"step": {step},' not in path.read_text():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.slow
def test_kills_at_five_random_steps_of_two_epochs_leave_no_trace(tmp_path):
    """With augmentation, dropout, workers and unreadable samples; 38 steps are an epoch."""
    shards = make_shards(tmp_path / "data", 307, broken=(5, 61))
    settings = (*RANDOM, "train.duration=60 steps", "checkpoint.every=5 steps")
    settings += ("data.max_skipped=0.1",)
    run, twin = tmp_path / "run", tmp_path / "twin"

    def launch(folder):
        tree = tiny_tree(folder, shards, *settings)
        return start("scripts/train.py", str(write_config(tmp_path / f"{folder.name}.yaml", tree)))

    finish(launch(twin))
    for step in sorted(random.Random(4).sample(range(6, 58), 5)):
        process = launch(run)
        wait_for_step(process, run, step)
        # The main process only: its loader processes outlive it for a while, as they really do.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert "resuming after step" in finish(launch(run))
    assert_same_end(run, twin)
    assert rows(run, "skipped.jsonl") == rows(twin, "skipped.jsonl")


# --- F03: kill -9 while a checkpoint is written --------------------------------------------------


def die_while_saving(config, name, when):
    """Train, and be killed before or after a part of the checkpoint of step 8 is written."""
    real = getattr(module, name)

    def deadly(*args, **kwargs):
        of_step_8 = any("step-00000008" in str(x) for x in args if isinstance(x, Path))
        if not of_step_8:
            return real(*args, **kwargs)
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, deadly)
    torch.set_num_threads(1)
    train(config)


@pytest.mark.parametrize(
    ("name", "when", "step", "background"),
    [
        ("save_model", "after", 4, "true"),
        ("save_file", "after", 4, "true"),
        ("_write_json", "after", 4, "true"),
        ("move_folder", "before", 4, "true"),
        ("move_folder", "after", 8, "true"),
        ("save_file", "after", 4, "false"),
    ],
)
def test_a_kill_between_two_files_leaves_the_checkpoint_before(
    shards, twin, tmp_path, caplog, name, when, step, background
):
    config = tiny_config(tmp_path, shards, f"checkpoint.background={background}")
    # A fork of this process, which may have had threads, would not be like a fresh start.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "multimodal.train.loop"])
    process = context.Process(target=die_while_saving, args=(config, name, when))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (".step-00000008" in names(tmp_path)) == (step == 4)
    caplog.set_level(logging.INFO)
    train(config)
    assert f"resuming after step {step} " in caplog.text
    assert ("removing the incomplete checkpoint" in caplog.text) == (step == 4)
    assert names(tmp_path) == ["step-00000008", "step-00000012"]
    assert_same_end(tmp_path, twin)


# --- F07: a flipped bit --------------------------------------------------------------------------


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named_and_the_one_before_is_used(saved, name, caplog):
    file = newest(saved) / name
    original = file.read_bytes()
    for bit in random.Random(name).sample(range(len(original) * 8), 3):
        caplog.clear()
        flip(file, bit)
        assert Checkpoints(saved, keep=3).find_resume().step == 8
        assert "step-00000012" in caplog.text and f"{name} has changed" in caplog.text
        file.write_bytes(original)


def test_a_flipped_bit_of_the_manifest_is_found_wherever_it_is(saved, caplog):
    file = newest(saved) / "manifest.json"
    original = file.read_bytes()
    bits = range(len(original) * 8)
    for bit in random.Random(1).sample(bits, 150):
        flip(file, bit)
        assert Checkpoints(saved, keep=3).find_resume().step == 8, bit
        file.write_bytes(original)
    assert Checkpoints(saved, keep=3).find_resume().step == 12


def test_a_run_goes_on_from_the_one_before_a_damaged_one(shards, tmp_path, caplog):
    train(tiny_config(tmp_path, shards, "train.duration=8 steps", "optim.warmup=3 steps"))
    flip(tmp_path / "checkpoints/step-00000008/optimizer.safetensors", 99_999)
    # The learning rate depends on the length of the run: go on with that of the first steps.
    long = tiny_config(tmp_path, shards, "train.duration=8 steps")
    with caplog.at_level(logging.INFO):
        train(long)
    assert "optimizer.safetensors has changed" in caplog.text
    assert "resuming after step 4 " in caplog.text
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    assert Checkpoints(tmp_path, keep=2).find_resume().step == 8


# --- F08: truncated, empty, missing --------------------------------------------------------------


def truncate(folder):
    file = folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_state(folder, name):
    """Take a field from state.json, and make the manifest fit."""
    state = json.loads((folder / "state.json").read_text())
    del state[name]
    (folder / "state.json").write_text(json.dumps(state))
    refit(folder, "state.json")


def refit(folder, name):
    """Let the manifest say what a file now holds."""
    manifest = json.loads((folder / "manifest.json").read_text())
    size, digest = (folder / name).stat().st_size, file_hash(folder / name)
    manifest["files"][name] = {"size": size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    "bytes instead of": truncate,
    "state.json has 0 bytes": lambda folder: (folder / "state.json").write_bytes(b""),
    "model/model.safetensors is missing": lambda f: (f / "model/model.safetensors").unlink(),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is unreadable": lambda folder: (folder / "manifest.json").write_text("[1, {"),
    "does not list state.json": lambda f: (f / "manifest.json").write_text('{"files": {}}'),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_an_incomplete_one_is_named_and_the_one_before_is_used(saved, message, caplog):
    DAMAGES[message](newest(saved))
    assert Checkpoints(saved, keep=3).find_resume().step == 8
    assert message in caplog.text


def test_none_sound_is_an_error_and_never_a_fresh_start(shards, copy):
    for path in (copy / "checkpoints").iterdir():
        truncate(path)
    before = files(copy)
    with pytest.raises(ValueError, match=r"no checkpoint .* is sound:(\n  step-0.*){2}"):
        train(tiny_config(copy, shards, "train.duration=16 steps"))
    assert files(copy) == before


# --- F09: a disk that is full --------------------------------------------------------------------

_LIMIT = 60_000
"""Bytes that a file may have then: more than any but those of weights and of AdamW's state."""


BOTH_WAYS = pytest.mark.parametrize(
    "background", ["true", pytest.param("false", marks=pytest.mark.slow)]
)


def train_on_a_full_disk(config, until):
    """Train where files cannot grow from step 7 up to step `until`; the error, if any."""
    real = loop.train_step
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def train_step(*args, step, **kwargs):
        while step == 6 and not Path(config.run, "checkpoints/step-00000004").exists():
            time.sleep(0.01)
        limit = _LIMIT if 6 <= step < until else before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        return real(*args, step=step, **kwargs)

    loop.train_step = train_step
    try:
        train(config)
    except RunStopped as error:
        return str(error)
    return None


@BOTH_WAYS
def test_a_full_disk_stops_all_ranks_and_the_run_goes_on_later(
    shards, twin, tmp_path, caplog, background
):
    config = tiny_config(tmp_path, shards, f"checkpoint.background={background}")
    for message in on_ranks(2, train_on_a_full_disk, config, 99):
        assert "step-00000008 could not be written: " in message and "too large" in message
        assert "It takes 0.0" in message and "GB are free" in message
        assert "the newest complete one is step-00000004" in message
        assert message.endswith("run the same command again")
    assert names(tmp_path) == ["step-00000004"]
    with caplog.at_level(logging.INFO):
        train(config)
    assert "resuming after step 4 " in caplog.text
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 13))
    assert [row["batch_hash"] for row in rows(tmp_path)] == [r["batch_hash"] for r in rows(twin)]


def test_what_can_be_saved_by_then_is_saved_though_the_run_ends(shards, tmp_path):
    config = tiny_config(tmp_path, shards)
    (message,) = on_ranks(1, train_on_a_full_disk, config, 10)
    assert "step-00000008 could not be written: " in message
    assert names(tmp_path) == ["step-00000004", "step-00000012"]


@BOTH_WAYS
def test_a_run_can_go_on_without_the_checkpoint_that_did_not_fit(
    shards, twin, tmp_path, background
):
    settings = ("checkpoint.on_error=continue", f"checkpoint.background={background}")
    (message,) = on_ranks(1, train_on_a_full_disk, tiny_config(tmp_path, shards, *settings), 10)
    assert message is None
    assert names(tmp_path) == ["step-00000004", "step-00000012"]
    assert_same_end(tmp_path, twin)


def test_no_run_ends_well_without_its_last_checkpoint(shards, tmp_path):
    config = tiny_config(tmp_path, shards, "checkpoint.on_error=continue")
    (message,) = on_ranks(1, train_on_a_full_disk, config, 99)
    assert "step-00000012 could not be written" in message
    assert names(tmp_path) == ["step-00000004"]
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "model").exists()


@pytest.mark.parametrize("where", ["save_model", "save_file", "_write_json", "move_folder"])
def test_a_save_that_fails_midway_changes_nothing(saved, parts, where, monkeypatch):
    def stop(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = names(saved)
    monkeypatch.setattr(module, where, stop)
    with pytest.raises(module.SaveFailed, match=r"step-00000016 could .* No space left"):
        Checkpoints(saved, keep=1).save(snapshot(parts, 16))
    assert names(saved) == before


# --- F10: what is never purged -------------------------------------------------------------------


def test_interrupted_saves_never_evict_a_good_one(saved, parts, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "move_folder", stop)
        for step in (13, 14, 15, 16):
            with contextlib.suppress(KeyboardInterrupt):
                Checkpoints(saved, keep=3).save(snapshot(parts, step))
    again = Checkpoints(saved, keep=3)
    assert again.find_resume().step == 12
    again.save(snapshot(parts, 17))
    complete = [name for name in names(saved) if not name.startswith(".")]
    assert complete == ["step-00000008", "step-00000012", "step-00000017"]
    again.remove_incomplete()
    assert names(saved) == complete


def test_a_damaged_one_does_not_count_as_kept(saved, parts):
    """After a flipped bit in 12 the run goes on from 8, which must outlive the save of 10."""
    truncate(newest(saved))
    checkpoints = Checkpoints(saved, keep=2)
    assert checkpoints.find_resume().step == 8
    checkpoints.save(snapshot(parts, 10))
    assert names(saved) == [f"step-{step:08d}" for step in (8, 10, 12)]
    checkpoints.save(snapshot(parts, 12))
    assert names(saved) == ["step-00000010", "step-00000012"]
    assert Checkpoints(saved, keep=2).find_resume().step == 12


def test_the_last_sound_one_is_never_retired(saved, parts):
    for step in (8, 12):
        truncate(saved / f"checkpoints/step-{step:08d}")
    checkpoints = Checkpoints(saved, keep=2)
    checkpoints.save(snapshot(parts, 16))
    assert "step-00000004" in names(saved)


# --- F14: everything is needed -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step", "versions", *STATE])
def test_a_state_that_lacks_anything_is_not_used(saved, name, caplog):
    without_state(newest(saved), name)
    assert Checkpoints(saved, keep=3).find_resume().step == 8
    assert f"state.json lacks {name}" in caplog.text


def test_a_tensor_that_is_missing_is_named(saved, parts):
    model, optimizer = newest(saved) / "model/model.safetensors", newest(saved)
    for file, names_of, restore in (
        (model, r"missing {}", lambda: load_weights(parts["pretrained"].model, model)),
        (
            optimizer / "optimizer.safetensors",
            r"missing \['{}'\]",
            lambda: load_optimizer(optimizer, build_optimizer(load(saved).model, Optim())),
        ),
    ):
        whole = load_file(file)
        for name in random.Random(2).sample(sorted(whole), 12):
            save_file({key: x for key, x in whole.items() if key != name}, file)
            refit(newest(saved), file.relative_to(newest(saved)).as_posix())
            with pytest.raises(ValueError, match=names_of.format(name.replace(".", r"\."))):
                restore()
        save_file(whole, file)
        refit(newest(saved), file.relative_to(newest(saved)).as_posix())
        restore()


# --- F16: a planted pickle -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FILES, "manifest.json", "model/weights.pkl"])
def test_a_planted_pickle_is_never_run(shards, copy, tmp_path, name):
    """Even with a manifest made to fit: no file of a checkpoint is read by what runs code."""
    canary = tmp_path / "canary"
    shutil.rmtree(copy / "checkpoints/step-00000008")
    (newest(copy) / name).write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    if name != "manifest.json":
        refit(newest(copy), name)
    again = tiny_config(copy, shards, "train.duration=13 steps")
    if name == "model/weights.pkl":
        train(again)
    else:
        with pytest.raises(ValueError, match=name.rpartition("/")[2].partition(".")[0]):
            train(again)
    assert not canary.exists()


# --- F17: one run, one folder --------------------------------------------------------------------


def test_a_second_run_on_the_folder_is_refused_and_overwrites_nothing(shards, copy):
    before = files(copy)
    with locked(copy), pytest.raises(ValueError, match="is being written by"):
        train(tiny_config(copy, shards, "train.duration=16 steps"))
    assert files(copy) == before


def test_a_folder_of_something_else_is_refused_and_left_alone(shards, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"thesis.tex but no config.yaml"):
        train(tiny_config(tmp_path / "run", shards))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]

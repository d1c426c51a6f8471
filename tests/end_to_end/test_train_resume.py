"""A killed run, started again by the same command, is the uninterrupted run to the last bit."""

import os
import signal

import pytest
from safetensors.torch import load_file
from tools import RANDOM, finish, make_shards, rows, start, tiny_tree, wait_for_step, write_config

STEPS = 30
EXACT = ("step", "loss", "lr", "grad_norm", "logit_scale", "batch_hash", "skipped")


def exact(run):
    return [[row[name] for name in EXACT] for row in rows(run)]


def assert_same_end(run, twin):
    assert exact(run) == exact(twin)
    a, b = load_file(run / "model/model.safetensors"), load_file(twin / "model/model.safetensors")
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


@pytest.mark.slow
def test_two_kills_in_one_epoch_leave_no_trace(tmp_path):
    shards = make_shards(tmp_path / "data", 307, broken=(5, 61))
    configs = {
        name: write_config(
            tmp_path / f"{name}.yaml",
            tiny_tree(
                tmp_path / name,
                shards,
                *RANDOM,
                f"train.duration={STEPS} steps",
                "checkpoint.every=7 steps",
                "data.max_skipped=0.1",
            ),
        )
        for name in ("run", "twin")
    }
    finish(start("scripts/train.py", str(configs["twin"])))
    for step in (10, 24):
        process = start("scripts/train.py", str(configs["run"]))
        wait_for_step(process, tmp_path / "run", step)
        # The main process only: its loader processes outlive it for a while, as they really do.
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    output = finish(start("scripts/train.py", str(configs["run"])))
    assert "resuming after step 21" in output
    assert_same_end(tmp_path / "run", tmp_path / "twin")
    assert rows(tmp_path / "run", "skipped.jsonl") == rows(tmp_path / "twin", "skipped.jsonl")


@pytest.mark.slow
def test_a_killed_rank_ends_the_launch_and_the_next_one_goes_on(tmp_path):
    """Four ranks: with more than two, the order of a sum over them can show in the last bit."""
    shards = make_shards(tmp_path / "data", 101)
    run, twin = tmp_path / "run", tmp_path / "twin"
    settings = (*RANDOM, "train.duration=8 steps", "checkpoint.every=3 steps", "data.workers=1")
    settings += ("train.micro_batch_size=1",)

    def launch(folder):
        tree = tiny_tree(folder, shards, *settings)
        config = write_config(tmp_path / f"{folder.name}.yaml", tree)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
        return start(*torchrun, "scripts/train.py", str(config))

    finish(launch(twin))
    process = launch(run)
    wait_for_step(process, run, 4)
    rank_0 = int((run / ".lock").read_text().split()[1])
    os.kill(rank_0, signal.SIGKILL)
    finish(process, code=1)
    assert "resuming after step 3" in finish(launch(run))
    assert_same_end(run, twin)

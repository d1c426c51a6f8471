"""A launch of which a rank was killed, started again, is the uninterrupted one to the last bit.

Kills of one process are in tests/faults/test_checkpoints.py.
"""

import os
import signal

import pytest
from safetensors.torch import load_file
from tools import RANDOM, finish, make_shards, rows, start, tiny_tree, wait_for_step, write_config

EXACT = ("step", "loss", "lr", "grad_norm", "logit_scale", "batch_hash", "skipped")


def exact(run):
    return [[row[name] for name in EXACT] for row in rows(run)]


def assert_same_end(run, twin):
    assert exact(run) == exact(twin)
    a, b = load_file(run / "model/model.safetensors"), load_file(twin / "model/model.safetensors")
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


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

"""Requests to stop, through the launchers where users send them there (F04, F05, F06).

Measured with torch 2.14 and accelerate 1.15: one-process `accelerate launch` passes no signal on;
torchrun passes SIGTERM, SIGINT and SIGHUP on, and SIGUSR1 if PET_SIGNALS_TO_HANDLE names it, else
it dies of it. In each case the trainers must not be left behind.
"""

import os
import signal
import time

import pytest
from tools import (
    finish,
    make_shards,
    on_ranks,
    processes_with,
    retrieval,
    rows,
    start,
    tiny_config,
    tiny_tree,
    wait_for_step,
    write_config,
)

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.distributed import rank
from multimodal.errors import STOPPED, StopRequested
from multimodal.train import checkpoint, evaluating, loop
from multimodal.train.loop import train

SECONDS = 30
LONG = ("train.duration=100000 steps", "checkpoint.every=100000 steps", "data.workers=2")
ACCELERATE = ("-m", "accelerate.commands.launch")
LAUNCHERS = {
    "accelerate, one process": (*ACCELERATE, "--num_processes=1"),
    "accelerate, two": (*ACCELERATE, "--multi_gpu", "--num_processes=2", "--main_process_port=0"),
    "torchrun, two": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
}
ALL_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def saved_step(run) -> int:
    """The one checkpoint's step, which is that of the last row, so that nothing is lost."""
    (name,) = checkpoints(run)
    assert int(name.removeprefix("step-")) == rows(run)[-1]["step"]
    return rows(run)[-1]["step"]


def trainers(config) -> list[int]:
    """Processes that train, among them loader workers, but no launchers."""
    lines = processes_with(str(config))
    return [pid for pid, line in lines.items() if "launch" not in line and "run --" not in line]


def wait_for_end(config) -> float:
    started = time.monotonic()
    while processes_with(str(config)):
        assert time.monotonic() - started < SECONDS, processes_with(str(config))
        time.sleep(0.1)
    return time.monotonic() - started


def test_a_stopped_run_saves_its_step_and_the_same_command_goes_on(tmp_path):
    """The signal goes to the whole process group, loader workers included, as from a terminal."""
    config = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 59), *LONG)
    path = write_config(tmp_path / "c.yaml", config)
    process = start("scripts/train.py", str(path))
    wait_for_step(process, tmp_path / "run", 5)
    os.killpg(process.pid, signal.SIGINT)
    output = finish(process, STOPPED)
    assert "stopped by SIGINT; the same command goes on" in output and "Traceback" not in output
    step = saved_step(tmp_path / "run")
    assert not processes_with(str(path))
    train(tiny_config(tmp_path / "run", tmp_path / "data", f"train.duration={step + 2} steps"))
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("handled", [True, False], ids=["told of USR1", "as it is"])
def test_a_signal_to_the_launcher_stops_all_with_a_checkpoint(tmp_path, launcher, number, handled):
    config = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 59), *LONG)
    path = write_config(tmp_path / "c.yaml", config)
    extra = {"PET_SIGNALS_TO_HANDLE": ALL_SIGNALS} if handled else {}
    process = start(*LAUNCHERS[launcher], "scripts/train.py", str(path), **extra)
    wait_for_step(process, tmp_path / "run", 5)
    os.kill(process.pid, number)
    wait_for_end(path)
    output, _ = process.communicate()
    assert process.returncode not in (0, 2), output
    assert "the same command goes on" in output
    saved_step(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_one_rank_stops_both_at_one_step(tmp_path, number):
    config = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 59), *LONG)
    path = write_config(tmp_path / "c.yaml", config)
    process = start(*LAUNCHERS["torchrun, two"], "scripts/train.py", str(path))
    wait_for_step(process, tmp_path / "run", 5)
    writer = int((tmp_path / "run" / ".lock").read_text().split()[1])
    others = [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and int(pid) != writer and parent_and_rank(int(pid)) == (process.pid, "1")
    ]
    os.kill(*others, number)
    wait_for_end(path)
    output, _ = process.communicate()
    assert process.returncode == 1 and f"exitcode: {STOPPED}" in output.replace(" ", "").replace(
        "exitcode:", "exitcode: "
    )
    saved_step(tmp_path / "run")


def parent_and_rank(pid: int) -> tuple[int, str]:
    try:
        with open(f"/proc/{pid}/status") as file:
            parent = next(int(line.split()[1]) for line in file if line.startswith("PPid"))
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return 0, ""
    return parent, next((v.decode() for k, _, v in pairs if k == b"RANK"), "")

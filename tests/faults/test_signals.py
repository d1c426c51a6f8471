"""Requests to stop, through the launchers where users send them there (F04, F05, F06).

Measured with torch 2.14 and accelerate 1.15: one-process `accelerate launch` passes no signal on;
torchrun passes SIGTERM, SIGINT and SIGHUP on, and SIGUSR1 if PET_SIGNALS_TO_HANDLE names it, else
it dies of it. In each case the trainers must not be left behind.
"""

import contextlib
import importlib
import os
import re
import signal
import time
from pathlib import Path

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
from multimodal.evaluate import retrieval as retrieving
from multimodal.files import file_hash
from multimodal.train import checkpoint, loop, signals
from multimodal.train.loop import train
from multimodal.train.signals import SIGNALS

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


def ended(process, config) -> str:
    """Wait until launcher and trainers have ended, all of them in time; what they wrote."""
    started = time.monotonic()
    while left := processes_with(str(config)):
        assert time.monotonic() - started < SECONDS, left
        time.sleep(0.1)
    return process.communicate()[0]


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
@pytest.mark.parametrize(
    ("launcher", "number", "handled"),
    [
        ("accelerate, one process", signal.SIGTERM, ""),
        ("accelerate, one process", signal.SIGUSR1, ""),
        ("accelerate, two", signal.SIGTERM, ""),
        ("torchrun, two", signal.SIGTERM, ""),
        ("torchrun, two", signal.SIGUSR1, ""),
        ("torchrun, two", signal.SIGUSR1, ALL_SIGNALS),
    ],
)
def test_a_signal_to_the_launcher_stops_all_with_a_checkpoint(tmp_path, launcher, number, handled):
    path = write_config(
        tmp_path / "c.yaml",
        tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 59), *LONG),
    )
    extra = {"PET_SIGNALS_TO_HANDLE": handled} if handled else {}
    process = start(*LAUNCHERS[launcher], "scripts/train.py", str(path), **extra)
    wait_for_step(process, tmp_path / "run", 5)
    os.kill(process.pid, number)
    output = ended(process, path)
    assert process.returncode == (1 if "two" in launcher and (handled or number == 15) else -number)
    assert "the same command goes on" in output
    saved_step(tmp_path / "run")


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_at_one_step(tmp_path):
    path = write_config(
        tmp_path / "c.yaml",
        tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 59), *LONG),
    )
    process = start(*LAUNCHERS["torchrun, two"], "scripts/train.py", str(path))
    wait_for_step(process, tmp_path / "run", 5)
    (second,) = [pid for pid in processes_with(str(path)) if is_rank(pid, 1, process.pid)]
    os.kill(second, signal.SIGUSR1)
    output = ended(process, path)
    assert process.returncode == 1
    assert re.search(rf"exitcode *: {STOPPED}\b", output)
    saved_step(tmp_path / "run")


def is_rank(pid: int, number: int, launcher: int) -> bool:
    """Whether a process is a trainer, and not one of its loader workers."""
    status = Path(f"/proc/{pid}/status").read_text()
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    return f"PPid:\t{launcher}\n" in status and f"\0RANK={number}\0".encode() in environment


# --- In one process, at chosen moments -----------------------------------------------------------


@contextlib.contextmanager
def signal_at(monkeypatch, where, name, number, *, call=1):
    """Send this process a signal when a function is called for the n-th time."""
    real, calls = getattr(where, name), []

    def function(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, function)
        yield
    assert len(calls) >= call


SETTINGS = ("train.duration=9 steps", "checkpoint.every=4 steps")


def made_config(folder):
    shards = make_shards(folder / "data", 37)
    tree = tiny_tree(folder / "run", shards, *SETTINGS)
    tree["evaluate"] = {"shapes": retrieval(shards, "3 steps")}
    return check(tree, Config)


@pytest.fixture
def config(tmp_path):
    return made_config(tmp_path)


def told(run) -> list:
    """Rows without what depends on the machine, and the weights' hash."""
    clocks = ("samples_per_second", "data_wait", "mfu", "peak_memory_mb")
    lines = [{k: v for k, v in row.items() if k not in clocks} for row in rows(run)]
    return [*lines, file_hash(run / "model" / "model.safetensors")]


@pytest.fixture(scope="module")
def goes_on_like_the_twin(tmp_path_factory):
    """Whether the run, started again, tells and ends like one that was never stopped."""
    folder = tmp_path_factory.mktemp("twin")
    train(made_config(folder))
    twin = told(folder / "run")

    def check_run(config) -> bool:
        train(config)
        return told(Path(config.run)) == twin

    return check_run


def test_a_signal_before_the_first_step_ends_at_once_and_gives_the_handlers_back(
    config, tmp_path, monkeypatch, goes_on_like_the_twin
):
    before = [signal.getsignal(number) for number in SIGNALS]
    with (
        signal_at(monkeypatch, loop, "starting_model", signal.SIGTERM),
        pytest.raises(StopRequested, match="SIGTERM") as caught,
    ):
        train(config)
    assert caught.value.code == STOPPED
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert goes_on_like_the_twin(config)


def test_a_signal_during_an_evaluation_saves_the_step_and_the_evaluation_is_made_up_for(
    config, tmp_path, monkeypatch, goes_on_like_the_twin
):
    """Step 6 is evaluated and not due for a checkpoint."""
    with (
        signal_at(monkeypatch, retrieving, "encode_texts", signal.SIGUSR1, call=2),
        pytest.raises(StopRequested),
    ):
        train(config)
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    assert [row["step"] for row in rows(tmp_path / "run") if "eval" in row] == [3]
    assert goes_on_like_the_twin(config)


def test_a_second_signal_while_saving_changes_nothing(
    config, tmp_path, monkeypatch, goes_on_like_the_twin
):
    with (
        signal_at(monkeypatch, loop, "train_step", signal.SIGTERM, call=6),
        signal_at(monkeypatch, checkpoint, "save_file", signal.SIGTERM, call=2),
        pytest.raises(StopRequested),
    ):
        train(config)
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    assert goes_on_like_the_twin(config)


def test_a_second_interrupt_waits_for_no_more_than_what_is_being_written(
    config, tmp_path, monkeypatch, goes_on_like_the_twin
):
    monkeypatch.setattr(signals, "_IMPATIENT_AFTER", 0)
    with (
        signal_at(monkeypatch, loop, "train_step", signal.SIGINT, call=6),
        signal_at(monkeypatch, checkpoint, "save_file", signal.SIGINT, call=2),
        pytest.raises(KeyboardInterrupt),
    ):
        train(config)
    assert checkpoints(tmp_path / "run") == ["step-00000004", "step-00000006"]
    assert goes_on_like_the_twin(config)


def test_a_signal_during_the_last_save_still_ends_in_a_finished_run(
    config, tmp_path, monkeypatch, goes_on_like_the_twin
):
    with (
        signal_at(monkeypatch, checkpoint, "save_file", signal.SIGTERM, call=3),
        pytest.raises(StopRequested),
    ):
        train(config)
    assert checkpoints(tmp_path / "run")[-1] == "step-00000009"
    assert goes_on_like_the_twin(config)


# --- On one of two ranks -------------------------------------------------------------------------


def stopped_on_rank_1(config, module, name, call):
    """Train with a signal to rank 1 at the n-th call of a function."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        if rank() == 1:
            where = importlib.import_module(module)
            stack.enter_context(signal_at(patch, where, name, signal.SIGTERM, call=call))
        try:
            train(config)
        except StopRequested as request:
            return request.reason


@pytest.mark.parametrize(
    ("module", "name", "call", "saved"),
    [
        (loop, "train_step", 4, ["step-00000004", "step-00000005"]),
        (retrieving, "encode_texts", 2, ["step-00000004", "step-00000006"]),
        (loop, "starting_model", 1, None),
    ],
    ids=["in a step", "in an evaluation", "at the start"],
)
def test_a_signal_to_one_rank_is_followed_by_the_other(config, tmp_path, module, name, call, saved):
    reasons = on_ranks(2, stopped_on_rank_1, config, module.__name__, name, call)
    assert reasons[1] == "SIGTERM" and reasons[0] in ("SIGTERM", "a signal to another process")
    folder = tmp_path / "run" / "checkpoints"
    assert (checkpoints(tmp_path / "run") if folder.exists() else None) == saved

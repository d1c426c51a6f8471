"""Processes that die, hang or leave early, through the launchers where users start them
(F19 to F22, F25)."""

import datetime
import os
import re
import signal
import socket
import time

import pytest
import torch.distributed as dist
from tools import (
    finish,
    free_port,
    make_shards,
    on_ranks,
    processes_with,
    retrieval,
    rows,
    start,
    tiny_tree,
    wait_for_step,
    write_config,
)

from multimodal import launcher as launching
from multimodal.config import Config
from multimodal.config_io import check
from multimodal.distributed import failing_together, on_main, rank
from multimodal.errors import RunStopped
from multimodal.evaluate import retrieval as retrieving
from multimodal.launcher import Launcher
from multimodal.train import checkpoint, loop, machine, report, watchdog
from multimodal.train.loop import train

TORCHRUN = ("-m", "torch.distributed.run")
TWO = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
TRAIN_WITH_A_FAULT = """
import os, signal, sys, time
from multimodal.cli import main
from multimodal.train import loop

real = loop.train_step

def train_step(*args, step, **kwargs):
    if os.environ["RANK"] == "1" and step + 1 == 4:
        FAULT
    return real(*args, step=step, **kwargs)

loop.train_step = train_step
sys.argv.insert(1, "train")
main()
"""
LOST = r"rank 0, step \d, phase '\w+': another process has ended: "


def train_with_a_fault(tmp_path, fault, *settings):
    """Two launched processes, the second of which has a fault in step 4; what they wrote."""
    script = tmp_path / "script.py"
    script.write_text(TRAIN_WITH_A_FAULT.replace("FAULT", fault))
    tree = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 37), *settings)
    path = write_config(tmp_path / "c.yaml", tree)
    output = finish(start(*TWO, str(script), str(path)), code=1)
    assert not processes_with(str(path))
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "first", "then"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", LOST + "killed", "exitcode *: -9"),
        ("os._exit(0)", LOST + "killed", "exitcode *: 1"),
        (
            "sys.exit(0)",
            r"error: rank 1, step 4, phase 'step': sys.exit\(0\) before the end",
            LOST + "rank 1, step 4",
        ),
        (
            'raise RuntimeError("no more tea")',
            r"RuntimeError: no more tea\n(?:\[rank1\]: )?on rank 1, step 4, phase 'step'",
            LOST + "rank 1, step 4, phase 'step': RuntimeError: no more tea",
        ),
    ],
    ids=["killed", "ended without a word", "sys.exit(0)", "an exception"],
)
def test_a_rank_that_dies_ends_the_run_and_is_named(tmp_path, fault, first, then):
    output = train_with_a_fault(tmp_path, fault)
    assert re.search(first, output) and re.search(then, output), output
    assert "another process has ended" in output


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_step_phase_and_stack(tmp_path):
    output = train_with_a_fault(tmp_path, "time.sleep(1000)", "train.timeout=0.1 min")
    assert "rank 1, step 4, phase 'step': nothing has moved for 0.1" in output
    assert "time.sleep(1000)" in output and "ending with code 1" in output


@pytest.mark.slow
@pytest.mark.timeout(1200)  # ten launches, which on a busy machine take half a minute each
def test_two_processes_end_cleanly_ten_times_out_of_ten(tmp_path):
    shards = make_shards(tmp_path / "data", 37)
    for number in range(10):
        tree = tiny_tree(tmp_path / f"{number}", shards, "train.duration=2 steps", "data.workers=1")
        path = write_config(tmp_path / f"{number}.yaml", tree)
        output = finish(start(*TWO, "scripts/train.py", str(path)))
        assert "Signal" not in output and not processes_with(str(path))


@pytest.mark.slow
def test_a_port_that_is_taken_is_named_at_once(tmp_path):
    """Nothing of ours runs by then; torchrun's words must do. `--standalone` finds a free port."""
    path = write_config(tmp_path / "c.yaml", tiny_tree(tmp_path / "run", tmp_path))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        launch = (*TORCHRUN, "--nproc-per-node=2", f"--master-port={port}")
        output = finish(start(*launch, "scripts/train.py", str(path)), code=1)
    assert time.monotonic() - started < 60
    assert "EADDRINUSE" in output and str(port) in output


@pytest.mark.slow
def test_two_nodes_train_like_one_process(tmp_path):
    shards = make_shards(tmp_path / "data", 59)
    paths = {}
    for name in ("one", "two"):
        tree = tiny_tree(tmp_path / name, shards, "data.augment.flip=0.5", "data.workers=1")
        paths[name] = str(write_config(tmp_path / f"{name}.yaml", tree))
    finish(start("scripts/train.py", paths["one"]))
    node = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=7", "--rdzv-backend=c10d")
    node += (f"--rdzv-endpoint=localhost:{free_port()}",)
    nodes = [start(*TORCHRUN, *node, "scripts/train.py", paths["two"]) for _ in range(2)]
    outputs = [finish(node) for node in nodes]
    assert "2 process(es) with 4 pairs each on cpu" in "".join(outputs)
    for ours, theirs in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        assert ours["batch_hash"] == theirs["batch_hash"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_node_that_is_stopped_stops_the_other_one_too(tmp_path):
    long = ("train.duration=100000 steps", "checkpoint.every=100000 steps")
    tree = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 59), *long)
    path = write_config(tmp_path / "c.yaml", tree)
    node = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=7", "--rdzv-backend=c10d")
    node += (f"--rdzv-endpoint=localhost:{free_port()}",)
    nodes = [start(*TORCHRUN, *node, "scripts/train.py", str(path)) for _ in range(2)]
    wait_for_step(nodes[0], tmp_path / "run", 5)
    nodes[1].send_signal(signal.SIGTERM)
    for node in nodes:
        finish(node, code=1)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("[!.]*")
    assert int(saved.name.removeprefix("step-")) == rows(tmp_path / "run")[-1]["step"]


# --- Frozen processes, where rank 0 holds what ranks post, as under srun --------------------------

FREEZE = """
import os, signal, sys
who, place, then = os.environ["FROZEN"], sys.argv.pop(), sys.argv.pop()
mine = os.environ["RANK"] == who

def freeze(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)

if mine and place == "join":
    freeze()
from multimodal.cli import main
from multimodal.train import loop, saving, watchdog

if place == "start" and mine:
    loop.starting_model = freeze
if place == "save":
    watchdog._PATIENCE["save"] = 1
    if mine:
        saving.Saver.save = freeze
if place == "step":
    real = loop.train_step

    def train_step(*args, step, **kwargs):
        if step + 1 == 4:
            if mine:
                freeze()
            exec(then)
        return real(*args, step=step, **kwargs)

    loop.train_step = train_step
sys.argv.insert(1, "train")
main()
"""


def left_by_a_frozen_one(tmp_path, frozen, place, then, timeout):
    """Two processes without a launcher, one of which freezes; what the other one wrote."""
    script = tmp_path / "script.py"
    script.write_text(FREEZE)
    shards = make_shards(tmp_path / "data", 37)
    settings = (f"train.timeout={timeout} min", "checkpoint.background=false")
    tree = tiny_tree(tmp_path / "run", shards, *settings)
    path = write_config(tmp_path / "c.yaml", tree)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [
        start(
            *(str(script), str(path), then, place),
            **(meet | {"WORLD_SIZE": "2", "RANK": str(r), "LOCAL_RANK": str(r)}),
            FROZEN=str(frozen),
        )
        for r in range(2)
    ]
    try:
        return finish(both[1 - frozen], code=1, within=90)
    finally:
        both[frozen].kill()
        both[frozen].communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "place", "timeout", "stands"),
    [
        (0, "join", 0.05, "step 0, phase 'join'"),
        (0, "start", 0.05, "step 0, phase 'start'"),
        (1, "start", 0.05, "step 0, phase 'start'"),
        (0, "step", 0.1, "step 4, phase 'step'"),
        (1, "step", 0.1, "step 4, phase 'step'"),
        (0, "save", 0.1, "step 4, phase 'save'"),
        (1, "save", 0.1, "step (4, phase 'save'|5, phase 'step')"),  # it may save without the other
    ],
)
def test_a_frozen_rank_ends_the_other_one_in_time(tmp_path, frozen, place, timeout, stands):
    output = left_by_a_frozen_one(tmp_path, frozen, place, "", timeout)
    assert re.search(f"rank {1 - frozen}, {stands}: nothing has moved for", output), output
    assert "It was here:\n" in output and "ending with code 1" in output


@pytest.mark.slow
def test_an_error_is_told_though_a_frozen_rank_holds_the_notes(tmp_path):
    output = left_by_a_frozen_one(tmp_path, 0, "step", "raise RuntimeError('no more tea')", 1)
    told = r"RuntimeError: no more tea\n(?:\[rank1\]: )?on rank 1, step 4, phase 'step'"
    assert re.search(told, output), output


def test_a_process_that_cannot_join_says_so(tmp_path, monkeypatch):
    def fail(**kwargs):
        raise dist.DistNetworkError("The client socket has timed out after 600000ms")

    monkeypatch.setattr(loop, "make_accelerator", fail)
    monkeypatch.setenv("RANK", "1")
    config = check(tiny_tree(tmp_path / "run", tmp_path), Config)
    told = "rank 1, step 0, phase 'join': cannot join the other processes: The client socket"
    with pytest.raises(RunStopped, match=told):
        train(config)


# --- F25: an error on rank 0 only ----------------------------------------------------------------


def trained_with_an_error(config, where):
    """Train; rank 0 has an error of the system. What each rank ends with, and after how long."""

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if rank() == 0:
        match where:
            case "evaluation":
                retrieving.open_source = fail
            case "encoding":
                retrieving.encode_texts = fail
            case "logging":
                report.Report._append = fail
            case "saving":
                checkpoint.save_file = fail
    started = time.monotonic()
    try:
        train(config)
    except (RuntimeError, OSError) as error:
        return str(error), time.monotonic() - started


@pytest.mark.parametrize("where", ["evaluation", "encoding", "logging", "saving"])
def test_an_error_on_rank_0_only_ends_the_other_at_once(tmp_path, where):
    shards = make_shards(tmp_path / "data", 37)
    tree = tiny_tree(tmp_path / "run", shards)
    tree["evaluate"] = {"shapes": retrieval(shards, "3 steps")}
    for told, seconds in on_ranks(2, trained_with_an_error, check(tree, Config), where):
        assert "No space left on device" in told
        assert seconds < 60


# --- Waiting for a rank that works ---------------------------------------------------------------


def waited_for_main(seconds):
    """`on_main`, where collectives wait much shorter than rank 0 works."""
    dist.barrier()  # else joining would have no more time either
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))
    return on_main(lambda: time.sleep(seconds) or "done")


def test_ranks_wait_for_rank_0_longer_than_collectives_do():
    assert on_ranks(2, waited_for_main, 5) == ["done", "done"]


def failed_together():
    try:
        with failing_together():
            if rank() == 1:
                raise OSError("lost disk")
    except (RuntimeError, OSError) as error:
        return type(error).__name__, str(error)


def test_an_error_on_any_rank_is_raised_on_all():
    told = on_ranks(2, failed_together)
    assert told == [("RuntimeError", "lost disk"), ("OSError", "lost disk")]


# --- The watchdog and the launcher ---------------------------------------------------------------


@pytest.fixture
def dog(monkeypatch, caplog):
    """A watchdog of 0.2 s whose end is noted rather than that of this process."""
    ends = []
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ends.append(code))
    monkeypatch.setattr(watchdog.logging, "shutdown", lambda: None)
    with loop.Signals() as signals, watchdog.Watchdog(0.2, signals) as found:
        yield found, ends, caplog


def test_a_hang_ends_the_process_with_place_and_stack(dog):
    watch, ends, caplog = dog
    watch.at("data", 7)
    time.sleep(0.6)
    assert ends and set(ends) == {1}
    assert "rank 0, step 7, phase 'data': nothing has moved for" in caplog.text
    assert "test_a_hang_ends_the_process_with_place_and_stack" in caplog.text


def test_progress_and_long_phases_are_no_hang(dog):
    watch, ends, _ = dog
    watch.at("evaluate", 7)
    for _ in range(12):
        time.sleep(0.05)
        watch.progress()
    watch.at("save", 7)
    time.sleep(0.6)
    watch.at("step", 8)
    assert not ends


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ("accelerate launch --cpu --num_processes 2 train.py", 2),
        ("accelerate launch --num_processes=3 train.py", 3),
        ("accelerate launch train.py", None),
    ],
)
def test_fewer_processes_than_asked_for_are_an_error(monkeypatch, arguments, asked):
    found = Launcher(os.getppid(), tuple(arguments.split()))
    assert found.processes() == asked and not found.is_gone()
    monkeypatch.setattr(machine, "launcher", lambda: found)
    if asked is None:
        machine._check_launcher(1)
        return
    machine._check_launcher(asked)
    with pytest.raises(ValueError, match=f"asked for {asked} processes and has started 1"):
        machine._check_launcher(1)


@pytest.mark.parametrize(
    ("line", "environment", "found"),
    [
        (["python", "/v/bin/torchrun", "--standalone"], {}, True),
        (["python", "-m", "torch.distributed.run"], {}, True),
        (["python", "/v/bin/accelerate", "launch"], {}, True),
        (["-bash"], {}, False),
        (["bash", "my accelerate script.sh"], {}, False),
        (["bash", "script.sh"], {"TORCHELASTIC_RUN_ID": "1"}, True),
    ],
)
def test_only_launchers_count_as_launchers(monkeypatch, line, environment, found):
    """A shell that a run was started from may end, as after `nohup`, and the run goes on."""
    monkeypatch.setattr(launching, "_command_line", lambda process: tuple(line))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    by = launching.launcher.__wrapped__()
    assert (by is not None) == found
    assert by is None or not by.is_gone()


def test_a_gpu_that_torch_does_not_see_is_said(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(machine, "_NVIDIA_DRIVER", tmp_path)
    machine._check_devices(on_cpu=True)
    assert "training on the CPU: this machine has an NVIDIA driver" in caplog.text

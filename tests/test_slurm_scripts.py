"""The job scripts for SLURM, with its commands played by stand-ins."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts" / "slurm").glob("*.sh")])
JOBS = ("one_node.sh", "many_nodes.sh")
STAND_INS = {
    "srun": 'shift; exec "$@"',
    "scontrol": '[ "$1" = show ] && echo first-host || echo "$@" >> "$FOLDER/queue"',
    # As torchrun that was told of USR1: it passes the signal on, and ends with code 1.
    "torchrun": """
        echo "$PET_SIGNALS_TO_HANDLE $*" > "$FOLDER/started"
        trap 'echo saved; exit 1' USR1
        for _ in $(seq 100); do [ -e "$FOLDER/end" ] && exit "$(cat "$FOLDER/end")"; sleep 0.1; done
    """,
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_bash(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    checker = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if checker is None:
        pytest.skip("shellcheck is not installed")
    # SC1091: files that scripts source are looked at by themselves.
    done = subprocess.run([checker, "--exclude=SC1091", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def start_job(folder: Path, name: str) -> subprocess.Popen:
    for command, text in STAND_INS.items():
        (folder / command).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / command).chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder)}
    slurm = {"JOB_ID": "12345", "JOB_NUM_NODES": "4", "GPUS_ON_NODE": "8", "JOB_NODELIST": "n[1-4]"}
    own |= {f"SLURM_{key}": value for key, value in slurm.items()} | {"SLURM_SUBMIT_DIR": str(ROOT)}
    job = subprocess.Popen(
        ["bash", ROOT / "scripts" / "slurm" / name, "a.yaml", "optim.lr=1e-3"],
        env=os.environ | own,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (folder / "started").exists():
        assert job.poll() is None
        time.sleep(0.02)
    return job


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_nears_its_time_limit_saves_and_queues_up_again(tmp_path, name):
    job = start_job(tmp_path, name)
    time.sleep(0.3)  # for the stand-in to be ready for the signal
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 0 and "saved" in output
    assert (tmp_path / "queue").read_text() == "requeue 12345\n"
    signals, _, arguments = (tmp_path / "started").read_text().partition(" ")
    assert "SIGUSR1" in signals.split(",") and "SIGTERM" in signals.split(",")
    assert arguments.split()[-3:] == ["scripts/train.py", "a.yaml", "optim.lr=1e-3"]
    assert "--nproc-per-node=8" in arguments
    if name == "many_nodes.sh":
        assert "--nnodes=4" in arguments and "--rdzv-endpoint=first-host:22345" in arguments


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_ends_by_itself_is_not_queued_up_again(tmp_path, code):
    job = start_job(tmp_path, "one_node.sh")
    (tmp_path / "end").write_text(str(code))
    job.communicate(timeout=30)
    assert job.returncode == code and not (tmp_path / "queue").exists()

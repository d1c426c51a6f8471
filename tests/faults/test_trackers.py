"""F45 and F46: Weights & Biases is missing, unreachable, refuses, breaks or hangs, and the run does
not notice. Real runs; what W&B does in the middle of one is played by a package of that name."""

import contextlib
import http.server
import io
import logging
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
from tools import finish, make_shards, on_ranks, rows, start, tiny_tree, write_config
from wandb_files import history

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.train import tracker
from multimodal.train.loop import train

STAND_IN = """
import os, time
from types import SimpleNamespace

def Settings(**settings):
    return settings

def teardown():
    pass

def init(mode, dir, **settings):
    fault = os.environ["FAULT"]
    if mode == "online" and fault == "start raises":
        raise RuntimeError("no\\nserver")
    if mode == "online" and fault == "start hangs":
        time.sleep(1000)
    return Run(mode, dir, fault)

class Run:
    url = "https://wandb.example/run"

    def __init__(self, mode, dir, fault):
        self.mode, self.fault, self.steps = mode, fault, 0
        self.folder = os.path.join(dir, "wandb", mode + "-run-1")
        self.dir = os.path.join(self.folder, "files")
        os.makedirs(self.folder, exist_ok=True)

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, row):
        self.steps += 1
        if self.mode == "online" and self.steps == 2:
            if self.fault == "middle raises":
                raise BrokenPipeError("service gone")
            if self.fault == "middle hangs":
                time.sleep(1000)
            if self.fault == "middle dies":
                os.kill(os.getpid(), 9)
        with open(os.path.join(self.folder, "rows"), "a") as file:
            print(row["step"], file=file)

    def finish(self):
        if self.fault == "end hangs":
            time.sleep(1000)
"""


def config_tree(tmp_path, *overrides, mode="online"):
    shards = make_shards(tmp_path / "data", 20)
    tree = tiny_tree(tmp_path / "run", shards, "train.duration=3 steps", *overrides)
    tree["log"]["wandb"] = {"mode": mode, "project": "tiny"}
    return tree


def stand_in(tmp_path, content=STAND_IN) -> str:
    """A PYTHONPATH with a package `wandb` of ours before the checkout."""
    (tmp_path / "packages" / "wandb").mkdir(parents=True)
    (tmp_path / "packages" / "wandb" / "__init__.py").write_text(content)
    return f"{tmp_path / 'packages'}{os.pathsep}{Path(__file__).parents[2]}"


def train_and_tell(config, environment, patience) -> tuple[str, float, float]:
    """The run's log, its seconds, and how many of them W&B's start and end took."""
    os.environ |= environment
    tracker._LAST_ROWS_SECONDS = patience
    told, waited = io.StringIO(), []
    logging.basicConfig(level=logging.INFO, stream=told, format="%(message)s", force=True)
    for name in ("__init__", "finish"):
        setattr(tracker.Tracker, name, timed(getattr(tracker.Tracker, name), waited))
    started = time.monotonic()
    train(config)
    return told.getvalue(), time.monotonic() - started, sum(waited)


def timed(function, waited):
    def call(*args):
        started = time.monotonic()
        function(*args)
        waited.append(time.monotonic() - started)

    return call


def run(tree, patience=10.0, **environment) -> tuple[str, float]:
    """The log of a run that must succeed, and how long it waited for W&B."""
    config = check(tree, Config)
    ((told, _, waited),) = on_ranks(1, train_and_tell, config, environment, patience)
    return told, waited


def assert_whole(tmp_path, steps=3):
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, steps + 1))
    assert (tmp_path / "run" / "model").is_dir()


LATE = r"W&B has not taken the last rows .* wandb sync \S+/wandb/\*run-\*"
OFFLINE = r"wandb sync \S+/wandb/offline-run-1$"
FAULTS = {
    "start raises": (r"W&B failed \(no server\)", OFFLINE),
    "start hangs": (r"W&B failed \(no answer within 8 seconds\)", OFFLINE),
    "middle raises": (r"W&B failed \(service gone\)", OFFLINE),
    "middle hangs": (r"online-run-1", LATE),
    "middle dies": (r"W&B: logging offline instead", OFFLINE),
    "end hangs": (r"online-run-1", LATE),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.slow) if "hangs" in f else f for f in FAULTS]
)
def test_whatever_wandb_does_the_run_ends_well_and_says_how_to_sync(tmp_path, fault):
    message, hint = FAULTS[fault]
    patience = 10.0 if fault == "start hangs" else 3.0  # a start has 8 seconds
    told, waited = run(config_tree(tmp_path), patience, PYTHONPATH=stand_in(tmp_path), FAULT=fault)
    assert_whole(tmp_path)
    assert re.search(message, told), told
    assert re.search(hint, told, re.M), told
    assert waited < 15
    if hint == OFFLINE:
        sent = (tmp_path / "run/wandb/offline-run-1/rows").read_text().split()
        assert list(map(int, sent)) == [1, 2, 3]


@pytest.mark.slow
def test_a_missing_wandb_is_said_once_and_costs_nothing(tmp_path):
    missing = stand_in(tmp_path, "raise ImportError('No module named wandb')")
    path = write_config(tmp_path / "c.yaml", config_tree(tmp_path, mode="offline"))
    told = finish(start("-m", "multimodal", "train", str(path), PYTHONPATH=missing))
    assert_whole(tmp_path)
    assert told.count("`pip install wandb`") == 1


# --- The real one --------------------------------------------------------------------------------


@contextlib.contextmanager
def silent_server():
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class Refuse(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_error(401, "invalid API key")

    do_GET = do_POST

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def refusing_server():
    """Answers as W&B does to a wrong key."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextlib.contextmanager
def no_server():
    yield "http://127.0.0.1:9"


@pytest.mark.slow
@pytest.mark.parametrize("server", [silent_server, refusing_server, no_server])
def test_without_a_working_server_the_rows_are_logged_offline(tmp_path, server):
    with server() as url:
        key = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
        told, waited = run(config_tree(tmp_path), 30.0, **key)
    assert_whole(tmp_path)
    assert waited < 25
    assert re.search(r"W&B failed \(.*\)", told), told
    found = re.search(r"wandb sync (\S+/wandb/offline-run-\S+)", told)
    assert found is not None and len(history(Path(found[1]))) == 3


@pytest.mark.slow
def test_online_without_a_login_does_not_ask(tmp_path):
    home = {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    told, _ = run(config_tree(tmp_path), 30.0, **home)
    assert_whole(tmp_path)
    assert re.search(r"W&B failed \(.*\)", told), told


def test_a_resumed_run_goes_on_in_its_place_and_no_row_is_lost(tmp_path):
    """F46: the rows of steps that are done again come a second time, with a lower step."""
    tree = config_tree(tmp_path, "checkpoint.every=2 steps", "checkpoint.keep=3", mode="offline")
    run(tree, 30.0)
    first = (tmp_path / "run/wandb/id").read_text()
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000003")
    shutil.rmtree(tmp_path / "run/model")
    time.sleep(1)  # W&B names its folder by the second
    run(tree, 30.0)
    assert_whole(tmp_path)
    assert (tmp_path / "run/wandb/id").read_text() == first
    logs = [history(path) for path in sorted((tmp_path / "run/wandb").glob("offline-run-*"))]
    assert [[row["step"] for row in log] for log in logs] == [[1, 2, 3], [3]]
    assert logs[1][0]["loss"] == rows(tmp_path / "run")[2]["loss"]

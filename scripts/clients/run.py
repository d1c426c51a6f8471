"""Export, let every client read, and show a table: see scripts/third_party.sh."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import environments

log = logging.getLogger(__name__)
HERE = Path(__file__).parent


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _arguments()
    out: Path = arguments.out
    if not Path(arguments.run).exists() or not Path(arguments.data).exists():
        log.error("error: %s or %s is missing", arguments.run, arguments.data)
        log.error("run scripts/quickstart.sh first, or name others with --run and --data")
        return 2
    environments.make(arguments.environments)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    prepare = [sys.executable, str(HERE / "prepare.py"), str(out), arguments.run, arguments.data]
    subprocess.run(prepare, check=True)
    rows = [row for name in environments.ENVIRONMENTS for row in _check(name, arguments)]
    failed = [row for row in rows if not row["passed"]]
    (out / "clients.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(_table(rows))
    print(f"{len(rows)} comparisons, {len(failed)} failed; {out / 'clients.json'}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/quickstart", help="a trained model")
    parser.add_argument("--data", default="data/openmoji/concepts", help="shards of OpenMoji")
    parser.add_argument("--environments", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--out", type=Path, default=Path("runs/clients"), help="replaced")
    return parser.parse_args()


def _check(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one environment's clients, each in a process of its own."""
    python = environments.python_of(arguments.environments, name)
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own
    rows = []
    for client in environments.ENVIRONMENTS[name].clients:
        results, log_file = (arguments.out / f"{name}-{client}.{end}" for end in ("json", "log"))
        command = [str(python), str(HERE / "check.py"), client, str(arguments.out), str(results)]
        with log_file.open("w") as output:
            subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if results.is_file():
            found = json.loads(results.read_text())
        else:
            about = {"client": client, "version": "", "model": "", "what": f"see {log_file}"}
            found = [about | {"difference": math.inf, "allowed": 0.0}]
        log.info("%s: %s, %d comparisons", name, client, len(found))
        rows += [{"environment": name} | _judged(row) for row in found]
    return rows


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    difference = row["difference"]
    passed = difference <= row["allowed"]
    return row | {"passed": passed, "difference": difference if difference < math.inf else None}


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [("environment", "client", "version", "model", "difference", "allowed", "", "what")]
    for row in rows:
        number = "none" if row["difference"] is None else f"{row['difference']:.1e}"
        state = "ok" if row["passed"] else "FAILED"
        names = (row["environment"], row["client"], row["version"], row["model"])
        lines.append((*names, number, f"{row['allowed']:.0e}", state, row["what"]))
    widths = [max(len(line[i]) for line in lines) for i in range(7)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True))
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())

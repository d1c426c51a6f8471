"""Copies a run's `metrics.jsonl` to Weights & Biases, in a process of its own.

    python -P wandb_copy.py METRICS OFFSET < settings

`tracker.Tracker` starts it. Standard input brings one line, what `wandb.init` takes as JSON, and
ends with the run. Standard output takes lines `LEVEL TEXT` for the run's log. It copies the rows
from the byte OFFSET on and follows the file as `tail -f` does, so neither a slow server nor an
error can reach the run.

A row is sent with its own `step` as the horizontal axis of all charts. W&B's step, which it counts
itself, only ever grows, whereas it would drop the rows of a resumed run whose step is lower.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

INIT_SECONDS = 8
"""That W&B's server has to answer before the copy goes on offline."""
_FINISH_SECONDS = 60
"""That the last rows may take when the run was killed and nobody waits."""
_POLL_SECONDS = 0.5


def main() -> None:
    """Copy until standard input ends, which it does with the run.

    Going online is tried in a process of its own, which can be ended whatever it is busy with.
    """
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what W&B prints is not for the run's log
    settings = json.loads(sys.stdin.buffer.readline())
    if settings["mode"] == "online" and _goes_online(settings, told):
        return
    if not _attempt({**settings, "mode": "offline"}, told, lambda: None):
        _tell(told, "warning", f"W&B has no copy of this run; {_NOTHING_LOST}")


_NOTHING_LOST = "metrics.jsonl has every row"


def _goes_online(settings: dict[str, Any], told: TextIO) -> bool:
    """Whether all rows went to the server."""
    hears, says = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(0 if _attempt(settings, told, lambda: os.write(says, b".")) else 1)
    os.close(says)
    if not select.select([hears], [], [], INIT_SECONDS)[0]:
        _tell(told, "warning", f"W&B failed (no answer within {INIT_SECONDS} seconds)")
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status:
        _tell(told, "warning", "W&B: logging offline instead")
    return status == 0


def _attempt(settings: dict[str, Any], told: TextIO, begun: Callable[[], Any]) -> bool:
    """Copy; on any error, say so."""
    try:
        _copy(settings, told, begun)
        return True
    except ImportError as error:
        reason = f"{error}; `pip install wandb`"
    except Exception as error:  # whatever it is, the run does not need W&B
        reason = " ".join(str(error).split()) or type(error).__name__
    _tell(told, "warning", f"W&B failed ({reason})")
    return False


def _copy(settings: dict[str, Any], told: TextIO, begun: Callable[[], Any]) -> None:
    import wandb

    resume: dict[str, Any] = {"resume": "allow"} if settings["mode"] == "online" else {}
    run = wandb.init(**settings, **resume, settings=wandb.Settings(console="off"))
    begun()
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    folder = Path(run.dir).parent
    if settings["mode"] == "online":
        _tell(told, "info", f"W&B: {run.url}; should rows be missing: wandb sync {folder}")
    else:
        _tell(told, "info", f"W&B: offline; to send it later: wandb sync {folder}")
    with Path(sys.argv[1]).open("rb") as rows:
        rows.seek(int(sys.argv[2]))
        for row in _follow(rows):
            run.log(tracked(row))
    signal.alarm(_FINISH_SECONDS)
    run.finish()


def tracked(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `metrics.jsonl` under W&B's names; those of an evaluation are `NAME/METRIC`."""
    prefix = f"{row['eval']}/" if "eval" in row else ""
    columns = {k: v for k, v in row.items() if k not in ("step", "eval") and v is not None}
    return {"step": row["step"], **{prefix + k: v for k, v in columns.items()}}


def _follow(rows: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield each whole line that is or will be in the file, until standard input ends."""
    over, rest = False, b""
    while True:
        *lines, rest = (rest + rows.read()).split(b"\n")
        yield from map(json.loads, lines)
        if over:
            return
        over = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])


def _tell(told: TextIO, level: str, text: str) -> None:
    with suppress(OSError):  # the run is dead
        print(level, text, file=told, flush=True)


if __name__ == "__main__":
    main()

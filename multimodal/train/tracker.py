"""A run's copy on Weights & Biases, which the run can neither wait for nor fail with.

A process of its own (`wandb_copy`) reads `metrics.jsonl` while the run writes it. The run starts
it, hands on what it has to say to the log, and gives it some seconds at the end.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from multimodal.config import Config
from multimodal.files import write_atomically

log = logging.getLogger(__name__)

_COPY = Path(__file__).with_name("wandb_copy.py")
_LAST_ROWS_SECONDS = 10
"""That the copy has at the end of the run, and once more if W&B has not even begun by then.
Launchers kill 30 seconds after they ask to stop."""


class Tracker:
    """The copying process; made after the rows of steps that are done again have been dropped.

    Its id is kept in `RUN/wandb/id`, so that a resumed run goes on in the same place on W&B. What
    W&B itself prints is in `RUN/wandb/console.txt`.
    """

    def __init__(self, config: Config):
        self._folder = Path(config.run) / "wandb"
        self._folder.mkdir(exist_ok=True)
        metrics = Path(config.run) / "metrics.jsonl"
        metrics.touch()
        settings = {
            "mode": config.log.wandb.mode,
            "project": config.log.wandb.project,
            "dir": config.run,
            "id": _own_id(self._folder / "id"),
            "name": Path(config.run).name,
            "config": config.model_dump(),
        }
        # -P: else modules in the script's own folder would stand in for others of the same name.
        # A session of its own has no terminal to ask for a key, and no Ctrl-C.
        with (self._folder / "console.txt").open("ab") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_COPY), str(metrics), str(metrics.stat().st_size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                start_new_session=True,
            )
        self._begun = False
        self._ear = threading.Thread(target=self._hand_on, daemon=True)
        self._ear.start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()

    def _hand_on(self) -> None:
        """Bring what the copy says into the run's log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            level, _, text = line.decode(errors="replace").strip().partition(" ")
            self._begun |= level == "info"
            log.log(logging.INFO if level == "info" else logging.WARNING, "%s", text)

    def finish(self) -> None:
        """Give the last rows some seconds, then end the copy."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._wait()
            if code != 0:
                self._say_what_to_do(f"W&B's copy has ended early (exit code {code})")
        except subprocess.TimeoutExpired:
            self._say_what_to_do(
                f"W&B has not taken the last rows within {_LAST_ROWS_SECONDS} seconds"
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._ear.join(1)

    def _wait(self) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_LAST_ROWS_SECONDS)
        return self._process.wait(0 if self._begun else _LAST_ROWS_SECONDS)

    def _say_what_to_do(self, trouble: str) -> None:
        log.warning(
            "%s; to send what it got: wandb sync %s/*run-*; metrics.jsonl has every row",
            *(trouble, self._folder),
        )


def _own_id(path: Path) -> str:
    if not path.exists():
        own = secrets.token_hex(4)
        write_atomically(path, lambda file: file.write_text(own))
    return path.read_text()

"""When the state of a run becomes a checkpoint: now, or in a thread while the run goes on.

The state is copied first, between two steps, so a checkpoint is the same in both ways. At most one
is in flight: the next save waits for it. Hashing, writing and fsync let go of Python's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from multimodal.config import Config
from multimodal.distributed import is_main, on_main
from multimodal.errors import RunStopped
from multimodal.train.best import best_steps, metric_values
from multimodal.train.checkpoint import Checkpoint, Checkpoints, SaveFailed
from multimodal.train.report import read_rows
from multimodal.train.snapshot import Snapshot, take_snapshot
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)


class Saver:
    """Saves on rank 0. All ranks call every method, and get the same. A context manager.

    Args:
        found: the checkpoint that the run resumes from.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, found: Checkpoint | None):
        self._section = config.checkpoint
        self._metrics = Path(config.run) / "metrics.jsonl"
        self._checkpoints = checkpoints
        self._newest = found
        self.last_step = found.step if found else 0
        """The step that was saved last, complete or not."""
        self._failure: str | None = None
        self._pending: int | None = None
        self._future: Future[Checkpoint] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._buffers = Buffers()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: object) -> None:
        """Whatever ends the run, wait for what is being written; the log tells of a failure."""
        self._thread.shutdown()

    def save(
        self,
        state: dict[str, Any],
        pretrained: Pretrained,
        optimizer: torch.optim.Optimizer,
        ema: AveragedModel | None = None,
    ) -> None:
        """Save the state of the run, once the checkpoint before is complete.

        Raises:
            RunStopped: when that one, or without `background` this one, has failed and
                `checkpoint.on_error` is `stop`.
        """
        self.newest()
        earlier, self._failure = self._failure, None
        self._buffers.restart()
        copy = self._buffers.copy if is_main() else Tensor.detach
        snapshot = take_snapshot(state, pretrained, optimizer, ema, copy=copy)
        self._pending = self.last_step = state["step"]
        if is_main():
            _synchronize()
            protected = self._best({state["step"]})
            self._future = self._thread.submit(self._write, snapshot, protected)
        if earlier is not None and self._section.on_error == "stop":
            self.newest()  # what can be saved by now is saved, though the run ends
            self._failure = earlier
        if not self._section.background or self._failure is not None:
            self.wait()

    def wait(self) -> None:
        """Let what is being written become complete.

        Raises:
            RunStopped: when it has failed and `checkpoint.on_error` is `stop`.
        """
        self.newest()
        if self._failure is not None and self._section.on_error == "stop":
            self._stop()

    def is_best(self, step: int) -> bool:
        """Whether a step that has been evaluated is among the best and has no checkpoint yet."""
        if self._section.best is None or step == self._pending:
            return False
        return on_main(lambda: self._is_best(step))

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, once what is being written is complete or has failed."""
        if self._pending is not None:
            self._pending = None
            outcome = on_main(self._outcome)
            if isinstance(outcome, Checkpoint):
                self._newest = outcome
            else:
                self._failure = outcome
        return self._newest

    def finish(self, step: int) -> Checkpoint:
        """The complete checkpoint of the last step; those that nothing protects any more are gone.

        Raises:
            RunStopped: when it could not be saved, whatever `checkpoint.on_error` is.
        """
        newest = self.newest()
        if newest is None or newest.step < step:
            self._stop()
        assert newest is not None
        on_main(lambda: self._checkpoints.retire(self._best()))
        return newest

    def _stop(self) -> None:
        raise RunStopped(f"{self._failure}, then run the same command again")

    def _write(self, snapshot: Snapshot, protected: list[int]) -> Checkpoint:
        started, step = time.monotonic(), snapshot.state["step"]
        try:
            saved = self._checkpoints.save(snapshot, protected=protected)
        except Exception as error:
            log.error("%s", error)
            raise
        log.info("step %d  saved %s in %.1f s", step, saved.path, time.monotonic() - started)
        return saved

    def _outcome(self) -> Checkpoint | str:
        assert self._future is not None, "a save is pending"
        try:
            return self._future.result()
        except SaveFailed as error:
            return str(error)

    def _is_best(self, step: int) -> bool:
        pending = {self._pending} if self._pending else set()
        return step not in self._checkpoints.steps() and step in self._best({step} | pending)

    def _best(self, further: Set[int] = frozenset()) -> list[int]:
        """The best of the steps that have a checkpoint and of `further` ones."""
        best = self._section.best
        if best is None:
            return []
        steps = self._checkpoints.steps() | further
        return best_steps(best, metric_values(best, read_rows(self._metrics)), steps)


class Buffers:
    """CPU memory that takes each snapshot's copies: new memory would cost more than the copying.

    It is page-locked for copies from a GPU.
    """

    def __init__(self):
        self._kept: list[Tensor] = []
        self._used = 0

    def restart(self) -> None:
        """Let the next snapshot overwrite the last one."""
        self._used = 0

    def copy(self, x: Tensor) -> Tensor:
        """A copy, which on a GPU is complete only once the GPU is synchronized."""
        number, self._used = self._used, self._used + 1
        fits = number < len(self._kept) and _alike(self._kept[number], x)
        if not fits:
            own = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
            self._kept[number:] = [own]
        return self._kept[number].copy_(x.detach(), non_blocking=True)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()

"""What must not go on: too many unreadable samples, and steps that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from multimodal.config import Config
from multimodal.data.batch import Batch
from multimodal.data.source import WHOLE_SHARD
from multimodal.distributed import gather_objects
from multimodal.errors import RunStopped
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.report import Report, Row
from multimodal.train.schedule import Schedule
from multimodal.train.step import StepResult

_SUSPECT = (
    "; that checkpoint's weights are those that gave these steps: if they are to blame, remove it, "
    "and the run goes on from the one before"
)
_FAIR_SAMPLE = 10_000
"""Samples (or one epoch, if that is less) over which unreadable ones are judged at least."""


class Guard:
    """Counts what was left out, and stops the run when it is too much.

    Args:
        found: the checkpoint that the run resumes from; its counts go on.
        shards: shards, or other groups, of the training data.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        report: Report,
        found: Checkpoint | None,
        *,
        shards: int,
    ):
        self._config = config
        self._schedule = schedule
        self._report = report
        self._shards = shards
        self._lost: set[str] = set()
        state = found.state if found else {}
        self._skipped: int = state.get("skipped", 0)
        nonfinite = state.get("nonfinite", {})
        self._nonfinite: int = nonfinite.get("total", 0)
        self._in_a_row: int = nonfinite.get("in_a_row", 0)

    @property
    def in_a_row(self) -> int:
        """Steps that were left out, up to the last one."""
        return self._in_a_row

    def counts(self) -> Row:
        """For a row of metrics."""
        return {"skipped": self._skipped, "nonfinite": self._nonfinite}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        nonfinite = {"total": self._nonfinite, "in_a_row": self._in_a_row}
        return {"skipped": self._skipped, "nonfinite": nonfinite}

    def check(
        self,
        step: int,
        result: StepResult,
        batch: Batch,
        newest: Callable[[], Checkpoint | None],
    ) -> None:
        """Look at a step, on all ranks.

        Args:
            newest: gives the newest checkpoint, asked for when the run must stop.

        Raises:
            RunStopped: on all ranks, saying what was too much and where it is listed.
        """
        if result.skipped:
            self._skipped += result.skipped
            skips = [skip for own in gather_objects(batch.skipped) for skip in own]
            self._report.skips(step, skips)
            self._lost |= {skip.place for skip in skips if skip.index == WHOLE_SHARD}
            self._check_budget(step)
        if result.finite:
            self._in_a_row = 0
            return
        self._nonfinite += 1
        self._in_a_row += 1
        self._report.nonfinite(_nonfinite_row(self._schedule, step, result))
        if self._in_a_row >= self._config.train.max_nonfinite:
            raise RunStopped(self._why_stopped(step, result, newest()))

    def _check_budget(self, step: int) -> None:
        allowed = self._config.data.max_skipped
        schedule = self._schedule
        seen = max(schedule.samples(step), min(schedule.data_size, _FAIR_SAMPLE))
        if self._skipped > allowed * seen:
            raise RunStopped(
                f"step {step}: {self._skipped} samples were unreadable, more than data.max_skipped="
                f"{allowed} of {seen}; see {Path(self._config.run) / 'skipped.jsonl'}, repair the "
                "data or raise data.max_skipped, then run the same command again"
            )
        if len(self._lost) > allowed * self._shards:
            raise RunStopped(
                f"step {step}: {len(self._lost)} of {self._shards} shards are missing, cut or "
                f"damaged, more than data.max_skipped={allowed} allows: "
                f"{', '.join(sorted(self._lost)[:8])}; repair them, name only the others in "
                "data.train.path, or raise data.max_skipped"
            )

    def _why_stopped(self, step: int, result: StepResult, last: Checkpoint | None) -> str:
        keys = result.suspects
        more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
        samples = f"samples with broken embeddings: {', '.join(keys[:8])}{more}" if keys else ""
        listed = Path(self._config.run) / "nonfinite.jsonl"
        return (
            f"step {step}: loss {result.loss} and gradient norm {result.grad_norm} must be finite; "
            f"{self._in_a_row} steps in a row were not (train.max_nonfinite="
            f"{self._config.train.max_nonfinite}) and left the weights as they were. "
            f"{samples or 'no embedding is broken'}; {listed} lists the steps. Last checkpoint: "
            f"{last.path if last else 'none yet'}. Look at the samples, lower optim.lr, or "
            "lengthen optim.warmup, then run the same command again"
            + (_SUSPECT if last is not None and last.step == step - self._in_a_row else "")
        )


def _nonfinite_row(schedule: Schedule, step: int, result: StepResult) -> Row:
    first = schedule.samples(step - 1)
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "positions": [first, first + schedule.batch_size - 1],
        "suspects": list(result.suspects),
    }

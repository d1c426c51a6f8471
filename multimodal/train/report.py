"""What a run tells: the console, `metrics.jsonl` and lists of what was left out, a copy to W&B.

`metrics.jsonl` is the source of truth: one JSON object a line, either a training row (`step, epoch,
samples, loss, lr, grad_norm, logit_scale, batch_hash, image_to_text_top1, text_to_image_top1,
positive_similarity, negative_similarity, samples_per_second, data_wait, skipped, nonfinite`, the
columns of `train.diagnostics`, and `logit_bias` where there is one) or an evaluation (`step, eval,
METRIC...`). The top-1 shares and mean cosines are over the step's batch, as
`losses.metrics.LossMetrics` defines them. `samples_per_second` and `data_wait`, the share of the
time spent waiting for data, are over the steps since the row before, on rank 0, without evaluations
and checkpoints. `skipped` counts unreadable samples and `nonfinite` the steps left out, both since
the run's start; `skipped.jsonl` and `nonfinite.jsonl` list them, and `spikes.jsonl` the steps whose
loss left its band. `skipped_summary.json` counts the unreadable ones by reason and by shard, table
or folder. A number that is not finite is written as null.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from multimodal.config import Config
from multimodal.data.batch import hash64
from multimodal.data.source import Skip
from multimodal.distributed import gather_rows, is_main
from multimodal.files import to_disk, write_atomically
from multimodal.train.tracker import Tracker

log = logging.getLogger(__name__)

Row = dict[str, Any]
_ROWS = ("metrics.jsonl", "skipped.jsonl", "nonfinite.jsonl", "spikes.jsonl")
_SKIPPED_SUMMARY = "skipped_summary.json"
_PLACES_SHOWN = 5


class Report:
    """Writes on rank 0; on the others every call does nothing. A context manager.

    Args:
        start_step: steps the run starts from; rows of later steps, which an interrupted run left
            behind, are dropped, so that each step has one row.
    """

    def __init__(self, config: Config, *, start_step: int, total_steps: int):
        self._run = Path(config.run)
        self._tracker: Tracker | None = None
        self._bar: Progress | None = None
        self._streams: list[tuple[logging.StreamHandler, Any]] = []
        self._late: dict[str, str] = {}
        """Rows by file that could not be written yet."""
        if not is_main():
            return
        for name in _ROWS:
            drop_rows_after(self._run / name, start_step)
        self._skipped = Counter(
            _reason_and_place(r) for r in read_rows(self._run / "skipped.jsonl")
        )
        if config.log.wandb.mode != "disabled":
            try:
                self._tracker = Tracker(config)
            except OSError as error:
                log.warning("W&B gets no copy of this run: %s", error)
        if Console(stderr=True).is_terminal:
            self._bar = _progress_bar()
            self._task = self._bar.add_task("train", total=total_steps, completed=start_step)

    def __enter__(self) -> Report:
        if self._bar is not None:
            self._bar.start()
            self._streams = _log_above_the_bar()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler, stream in self._streams:
            handler.setStream(stream)
        try:
            if is_main():
                self._sum_up_skips()
        except OSError as failed:
            log.warning("the unreadable samples could not be summed up: %s", failed)
        finally:
            if self._tracker is not None:
                self._tracker.finish()

    def step(self, step: int) -> None:
        """Move the progress bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def metrics(self, row: Row) -> None:
        """Write a training row."""
        if not is_main():
            return
        text = (
            f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  scale {row['logit_scale']:.2f}  "
            f"{row['samples_per_second']:.0f} samples/s  data wait {row['data_wait']:.0%}"
        )
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            log.info("step %d  epoch %.2f  %s", row["step"], row["epoch"], text)
        self._append("metrics.jsonl", row)

    def evaluation(self, step: int, name: str, metrics: Row) -> None:
        """Write the figures of one evaluation."""
        if not is_main():
            return
        log.info("step %d  %s: %s", step, name, ", ".join(_shown(metrics)))
        self._append("metrics.jsonl", {"step": step, "eval": name, **metrics})

    def skips(self, step: int, skips: Iterable[Skip]) -> None:
        """Write one row for each unreadable sample."""
        if not is_main():
            return
        for skip in skips:
            log.warning("step %d: skipped %s in %s: %s", step, skip.key, skip.place, skip.reason)
            row = {"step": step, **asdict(skip)}
            self._append("skipped.jsonl", row)
            self._skipped[_reason_and_place(row)] += 1

    def nonfinite(self, row: Row) -> None:
        """Write the row of a step that was left out."""
        if not is_main():
            return
        log.warning(
            "step %d left out: loss %s, gradient norm %s; %d samples with broken embeddings",
            *(row["step"], row["loss"], row["grad_norm"], len(row["suspects"])),
        )
        self._append("nonfinite.jsonl", row)

    def spike(self, row: Row) -> None:
        """Write the row of a step whose loss left its band."""
        if not is_main():
            return
        log.warning(
            "step %d: loss %.4f is above %.4f, the band of the steps before it; spikes.jsonl lists "
            "its samples",
            *(row["step"], row["loss"], row["limit"]),
        )
        self._append("spikes.jsonl", row)

    def _sum_up_skips(self) -> None:
        """Say at the end of the run, whatever ended it, what was unreadable and where."""
        path = self._run / _SKIPPED_SUMMARY
        if not self._skipped:
            path.unlink(missing_ok=True)
            return
        reasons: dict[str, dict[str, int]] = {}
        for (reason, place), count in self._skipped.most_common():
            reasons.setdefault(reason, {})[place] = count
        total = self._skipped.total()
        text = json.dumps({"skipped": total, "reasons": reasons}, indent=1) + "\n"
        write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
        log.warning("unreadable samples: %d; all are listed in skipped.jsonl", total)
        for reason, places in reasons.items():
            shown = [f"{n} in {place}" for place, n in list(places.items())[:_PLACES_SHOWN]]
            more = (
                f" and {len(places) - len(shown)} more places" if len(places) > len(shown) else ""
            )
            log.warning("  %d x %s: %s%s", sum(places.values()), reason, ", ".join(shown), more)

    def flush(self) -> None:
        """Force the rows to the disk, so that no checkpoint is newer than they are."""
        for name in list(self._late):
            self._write(name)
        for name in _ROWS:
            if is_main() and (self._run / name).exists():
                to_disk(self._run / name)

    def _append(self, name: str, row: Row) -> None:
        line = json.dumps({k: _finite(v) for k, v in row.items()}) + "\n"
        self._late[name] = self._late.get(name, "") + line
        self._write(name)

    def _write(self, name: str) -> None:
        """Write what is waiting for a file; what a full disk does not take waits on."""
        path, text = self._run / name, self._late.pop(name)
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if "\n" not in text[:-1]:
                log.warning("%s cannot be written, its rows wait: %s", path, error)
            with suppress(OSError):
                os.truncate(path, size)
            self._late[name] = text


class Meter:
    """Time of the steps since the last row."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self._samples, self._waited, self._busy = 0, 0.0, 0.0

    def start(self) -> None:
        """A step begins, and with it the wait for its batch."""
        self._started = time.perf_counter()

    def arrived(self) -> None:
        """The batch is there."""
        self._waited += time.perf_counter() - self._started

    def done(self, samples: int) -> None:
        """The step is over."""
        self._busy += time.perf_counter() - self._started
        self._samples += samples

    def figures(self) -> Row:
        return {
            "samples_per_second": self._samples / self._busy,
            "data_wait": self._waited / self._busy,
        }


def _reason_and_place(row: Row) -> tuple[str, str]:
    return row["reason"], row["place"]


def batch_hash(keys: list[str]) -> str:
    """Hash of a step's sample keys in global order, the same for any number of ranks.

    Args:
        keys: those of this rank. Call it on all ranks.

    Returns:
        The first 16 hexadecimal digits of the SHA-256 of all keys' 64-bit BLAKE2b hashes.
    """
    hashes = gather_rows(hash64(keys))
    return hashlib.sha256(hashes.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def read_rows(path: Path) -> list[Row]:
    """The rows of a .jsonl file, without a last line that was cut by a crash.

    Raises:
        ValueError: when another line is no row, naming it.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows += [json.loads(line)] if line else []
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}); remove the line, or restore the file"
            ) from None
    return rows


def drop_rows_after(path: Path, step: int) -> None:
    """Remove rows of steps after `step`, and a last line that was cut by a crash."""
    if not path.exists():
        return
    kept = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step]
    if path.read_text(encoding="utf-8") != "".join(kept):
        write_atomically(path, lambda file: file.write_text("".join(kept), encoding="utf-8"))


def _progress_bar() -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
    )


def _log_above_the_bar() -> list[tuple[logging.StreamHandler, Any]]:
    """Let console handlers write through the running bar, which has replaced sys.stderr."""
    handlers = [h for h in logging.getLogger().handlers if type(h) is logging.StreamHandler]
    return [(handler, handler.setStream(sys.stderr)) for handler in handlers]


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(metrics: Row) -> Iterable[str]:
    """Rates without those of chance, and no counts."""
    for name, value in metrics.items():
        if isinstance(value, float) and "chance" not in name:
            yield f"{name} {value:.3f}"

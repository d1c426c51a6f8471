"""The checkpoints of a run for people and programs: `multimodal checkpoints`."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from multimodal.config import Config
from multimodal.config_io import check, read_yaml
from multimodal.train.best import best_steps, metric_values
from multimodal.train.checkpoint import missing_state, read_state
from multimodal.train.report import Row, read_rows
from multimodal.weights.checkpoints import FOLDER, find_damage, newest_first, step_of

_HIDDEN = re.compile(r"\.(old-)?step-\d+")


@dataclass(frozen=True)
class Listed:
    """A checkpoint on the disk, whatever its state."""

    path: str
    step: int
    epoch: float | None
    date: str
    """Local time, ISO 8601."""
    bytes: int
    state: Literal["sound", "complete", "damaged", "incomplete"]
    """`complete`: all files have their sizes, and nobody has compared the hashes."""
    problem: str | None
    """Which file is damaged, and how."""
    resume: bool
    """Whether a resumed run would take it."""
    best: int | None
    """Its place among those that `checkpoint.best` keeps, from 1."""
    loss: float | None
    """Of the step's batch."""
    evaluations: dict[str, Row]
    """Figures of the step by evaluation."""

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def bytes_of(run: Path) -> int:
    """Size of all checkpoints that have their name."""
    return sum(_bytes(path) for path in newest_first(run))


def list_checkpoints(
    run: Path, *, verify: bool = True, progress: Callable[[int], None] | None = None
) -> list[Listed]:
    """All checkpoints of a run, by step. Nothing is locked or changed; the run may be going on.

    Args:
        verify: compare hashes too, which reads all files.
        progress: called with the bytes of each file that was compared.

    Raises:
        ValueError: when the folder has none.
    """
    folder = run / FOLDER
    hidden = [path for path in folder.glob(".*") if _HIDDEN.fullmatch(path.name)]
    named = newest_first(run)
    if not named and not hidden:
        raise ValueError(f"{run} has no checkpoints; give the folder of a run that has saved one")
    problems = {
        path: find_damage(path, hashes=verify, progress=progress) or missing_state(path)
        for path in named
    }
    sound = [path for path in named if problems[path] is None]
    rows = read_rows(run / "metrics.jsonl")
    places = _places(run, rows, {_step(path) for path in sound})
    good = "sound" if verify else "complete"

    def entry(path: Path) -> Listed:
        state = "incomplete" if path in hidden else "damaged" if problems[path] else good
        step = _step(path)
        return Listed(
            path=str(path),
            step=step,
            epoch=_epoch(path) if path in sound else None,
            date=datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds"),
            bytes=_bytes(path),
            state=state,
            problem=problems.get(path),
            resume=path in sound[:1],
            best=places.get(step) if path in sound else None,
            loss=next((r["loss"] for r in rows if r["step"] == step and "loss" in r), None),
            evaluations={
                r["eval"]: {k: v for k, v in r.items() if k not in ("step", "eval")}
                for r in rows
                if r["step"] == step and "eval" in r
            },
        )

    found = []
    for path in (*hidden, *named):
        with suppress(FileNotFoundError):  # a run that goes on has removed it meanwhile
            found.append(entry(path))
    return sorted(found, key=lambda entry: entry.step)


def print_list(found: list[Listed], console: Console | None = None) -> None:
    """Show them as a table, and below it what is wrong."""
    table = Table("step", "epoch", "date", "MB", "state", "", "metrics")
    for entry in found:
        marks = ["resume"] * entry.resume + [f"best {entry.best}"] * (entry.best is not None)
        epoch = "-" if entry.epoch is None else f"{entry.epoch:.2f}"
        size = f"{entry.bytes / 1e6:.1f}"
        cells = (str(entry.step), epoch, entry.date, size, entry.state, ", ".join(marks))
        table.add_row(*cells, _shown(entry))
    console = console or Console()
    console.print(table)
    for entry in found:
        if entry.problem is not None:
            line = f"{entry.path}: {entry.problem}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shown(entry: Listed) -> str:
    """The loss, and the first rate of each evaluation."""
    lines = [] if entry.loss is None else [f"loss {entry.loss:.4f}"]
    for name, figures in entry.evaluations.items():
        rates = [(key, value) for key, value in figures.items() if isinstance(value, float)]
        lines += [f"{name}/{key} {value:.1%}" for key, value in rates[:1]]
    return "\n".join(lines)


def _places(run: Path, rows: list[Row], steps: set[int]) -> dict[int, int]:
    """Place of each step among the best, from 1; empty where the run's settings name no metric."""
    try:
        best = check(read_yaml(run / "config.yaml"), Config).checkpoint.best
    except (OSError, ValueError):
        best = None
    if best is None:
        return {}
    ranked = best_steps(best, metric_values(best, rows), steps)
    return {step: place for place, step in enumerate(ranked, start=1)}


def _step(path: Path) -> int:
    return step_of(path) or int(path.name.rpartition("-")[2])


def _epoch(path: Path) -> float:
    return read_state(path)["epoch"]


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

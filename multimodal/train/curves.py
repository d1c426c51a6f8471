"""`report.png`: the course of a run at a glance, and what its model sees in pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase

from multimodal.files import write_atomically
from multimodal.train.report import Row

_TRAINING = ("loss", "lr", "samples_per_second", "logit_scale")
_SHARES = ("recall", "acc")
"""Starts and middles of the names of figures that are worth a curve."""


def write_report(
    run: Path, rows: list[Row], draw_pictures: Callable[[FigureBase], None] | None = None
) -> None:
    """Draw training rows and evaluations over the steps, and pictures beside them.

    Args:
        run: run folder.
        rows: of its `metrics.jsonl`.
        draw_pictures: fills the right half of the report; without it there is no such half.
    """
    figure = Figure(figsize=(20 if draw_pictures else 10, 13), layout="constrained")
    FigureCanvasAgg(figure)
    halves = figure.subfigures(1, 2 if draw_pictures else 1, squeeze=False)[0]
    halves[0].suptitle(f"{run.name}: {rows[-1]['step'] if rows else 0} steps")
    _draw_curves(halves[0], rows)
    if draw_pictures is not None:
        draw_pictures(halves[1])
    write_atomically(run / "report.png", lambda file: figure.savefig(file, format="png", dpi=110))


def _draw_curves(figure: FigureBase, rows: list[Row]) -> None:
    steps = [row for row in rows if "eval" not in row]
    curves = _evaluation_curves(rows)
    panels = [*_TRAINING, *curves]
    height = (len(panels) + 1) // 2
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(height, 2, number + 1)
        axes.set_title(panel, fontsize=10)
        axes.grid(alpha=0.3)
        if panel in curves:
            for metric, points in curves[panel].items():
                axes.plot(*zip(*points, strict=True), marker=".", label=metric)
            axes.legend(fontsize=6, framealpha=0.5, loc="lower right")
        else:
            axes.plot([row["step"] for row in steps], [row[panel] for row in steps])


def _evaluation_curves(rows: list[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Points (step, value) of each share, by evaluation and metric."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for metric, value in row.items():
            is_share = any(s in metric for s in _SHARES) and not metric.endswith("chance")
            if "eval" in row and isinstance(value, float) and is_share:
                curves[row["eval"]][metric].append((row["step"], value))
    return curves

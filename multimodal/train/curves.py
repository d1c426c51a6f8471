"""`report.png`: the course of a run at a glance."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from multimodal.train.files import write_atomically
from multimodal.train.report import Row

_TRAINING = ("loss", "lr", "samples_per_second", "logit_scale")
_SHARES = ("recall", "acc")
"""Starts and middles of the names of figures that are worth a curve."""


def write_curves(run: Path, rows: list[Row]) -> None:
    """Draw training rows and evaluations of `metrics.jsonl` over the steps."""
    steps = [row for row in rows if "eval" not in row]
    curves = _evaluation_curves(rows)
    panels = [*_TRAINING, *curves]
    height = (len(panels) + 1) // 2
    figure = Figure(figsize=(10, 2.6 * height), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(height, 2, number + 1)
        axes.set_title(panel, fontsize=10)
        axes.grid(alpha=0.3)
        if panel in curves:
            for metric, points in curves[panel].items():
                axes.plot(*zip(*points, strict=True), marker=".", label=metric)
            axes.legend(fontsize=7)
        else:
            axes.plot([row["step"] for row in steps], [row[panel] for row in steps])
    figure.suptitle(f"{run.name}: {rows[-1]['step'] if rows else 0} steps")
    write_atomically(run / "report.png", lambda file: figure.savefig(file, dpi=110))


def _evaluation_curves(rows: list[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Points (step, value) of each share, by evaluation and metric."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for metric, value in row.items():
            if "eval" in row and isinstance(value, float) and any(s in metric for s in _SHARES):
                curves[row["eval"]][metric].append((row["step"], value))
    return curves

"""Results for people: figures beside chance, and a sheet of pictures with their names."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from rich.console import Console
from rich.table import Table
from torch import Tensor

from multimodal.data.source import BadSample, Source
from multimodal.evaluate.run import Metrics
from multimodal.weights.pretrained import Pretrained

_COLUMNS = 4
_TOP = 3
_LINES_SHARE = 0.6
"""Height of the lines below a picture, as a share of its own."""


def print_results(results: Mapping[str, Metrics], console: Console | None = None) -> None:
    """Show the figures of evaluations beside what chance gives."""
    console = console or Console()
    for name, metrics in results.items():
        console.print(results_table(name, metrics))


def results_table(name: str, metrics: Metrics) -> Table:
    """One evaluation: rates as rows, counts (integers) in the caption below."""
    counts = {key: value for key, value in metrics.items() if isinstance(value, int)}
    table = Table(title=name, caption=", ".join(f"{n} {key}" for key, n in counts.items()))
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("chance", justify="right")
    for key, value in metrics.items():
        if key not in counts and not key.endswith("chance"):
            table.add_row(key, _percent(value), _percent(chance_of(key, metrics)))
    return table


def chance_of(key: str, metrics: Metrics) -> float | None:
    """What chance gives for a figure, where that is known."""
    if key in ("acc1", "mean_per_class_recall"):
        return metrics["chance"]
    return metrics.get(f"{key}_chance")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def draw_predictions(
    pretrained: Pretrained,
    source: Source,
    candidates: Sequence[str],
    figure: FigureBase,
    *,
    count: int = 24,
    templates: Sequence[str] = ("{}",),
) -> None:
    """Draw pictures of a source, each with its three most probable names.

    The pictures are spread evenly over the source and shown as the model sees them. A name that is
    among the picture's captions is green; when none is, the first caption is written below in red.

    Args:
        pretrained: the model.
        source: where the pictures come from.
        candidates: the names.
        figure: a figure or a part of one, to draw in.
        count: number of pictures; unreadable ones leave fewer.
        templates: prompts around a name.

    Raises:
        ValueError: when no picture can be read.
    """
    names = list(candidates)
    count = min(count, len(source))
    indices = [i * len(source) // count for i in range(count)]
    classes = pretrained.class_embeddings(names, templates)
    cells = []
    for batch, features in pretrained.encode_source(source, indices, batch_size=count, workers=0):
        top = (pretrained.logit_scale() * features @ classes.T).softmax(dim=1)
        top = top.topk(min(_TOP, len(names)), dim=1)
        cells += zip(batch.images, batch.captions, top.values, top.indices, strict=True)
    if not cells:
        raise ValueError(f"{source.description}: none of {count} pictures can be read")
    height = math.ceil(len(cells) / _COLUMNS)
    for place, (pixels, captions, values, rows) in enumerate(cells, start=1):
        axes = figure.add_subplot(height, _COLUMNS, place)
        found = [(names[row], value) for row, value in zip(rows, values.tolist(), strict=True)]
        _draw_cell(axes, pixels, captions, found)


def first_captions(source: Source) -> list[str]:
    """The first caption of each readable sample, each text once."""
    texts: dict[str, None] = {}
    for index in range(len(source)):
        try:
            captions = source.read(index).captions
        except BadSample:
            continue
        texts.update(dict.fromkeys(captions[:1]))
    return list(texts)


def _draw_cell(
    axes: Axes, pixels: Tensor, captions: tuple[str, ...], found: list[tuple[str, float]]
) -> None:
    axes.imshow(pixels.permute(1, 2, 0).numpy(), extent=(0, 1, 0, 1))
    axes.set_axis_off()
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-_LINES_SHARE, 1.06)
    right = {caption.lower() for caption in captions}
    lines = [
        (f"{value:.0%} {_short(name)}", "green" if name.lower() in right else "black")
        for name, value in found
    ]
    if captions and all(color == "black" for _, color in lines):
        lines.append((f"is: {_short(captions[0])}", "firebrick"))
    for number, (line, color) in enumerate(lines):
        height = -0.04 - 0.14 * number
        axes.text(0, height, line, color=color, fontsize=7.5, va="top", parse_math=False)


def _short(text: str) -> str:
    return textwrap.shorten(text, width=32, placeholder="...")

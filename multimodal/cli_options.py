"""What several commands of the command line share: their options, help texts and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from multimodal.config import Model
from multimodal.config.foreign import FORMS, split_name

OF_USERS = (
    *(FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError),
    PermissionError,
)
"""Errors that come from the paths that a user gave."""

A_SOURCE = (
    "Shards, a table, a folder of pictures, or a YAML file with the settings of one source, as "
    "they stand below data.train (kind: hub, name: ...)."
)
ModelArgument = Annotated[
    str,
    typer.Argument(help=f"Folder of a run, a checkpoint or a model, or {FORMS}."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
BatchSize = Annotated[int, typer.Option(help="Pictures encoded at once.", min=1)]
Workers = Annotated[int, typer.Option(help="Loader processes.", min=0)]
ImageColumn = Annotated[str, typer.Option(help="Column of a table with paths or pictures.")]
CaptionColumn = Annotated[str, typer.Option(help="Column of a table with captions.")]
Separator = Annotated[
    str | None,
    typer.Option(help="Character between the columns of a CSV or TSV table, if not , or tab."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def verbatim(text: str) -> str:
    """Keep click from rewrapping a help text."""
    return "\n\n".join("\b\n" + part for part in text.split("\n\n"))


def look_for_model(model: str) -> None:
    """Tell now, before seconds of imports, that there is no such model."""
    if split_name(model).library is None and not Path(model).exists():
        raise ValueError(
            f"no model at {model!r}: there is no such folder; give a run folder, a model folder, "
            f"or {FORMS}"
        )


def describe_model(path_or_name: str) -> Model:
    """The settings of a model."""
    from multimodal.weights.describe import describe

    return describe(path_or_name)


@contextmanager
def progress(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; yields what moves it by a number of samples."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)

"""The `multimodal` command: arguments to one call each. Torch is imported only when a call runs.

A user's mistake ends in one clear sentence and exit code 2; set MULTIMODAL_TRACEBACK=1 to see
where it was noticed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from pydantic import BaseModel

from multimodal.cli_convert import app as convert_command
from multimodal.cli_data import app as data_commands
from multimodal.cli_options import (
    A_SOURCE,
    OF_USERS,
    AsJson,
    BatchSize,
    CaptionColumn,
    Device,
    ImageColumn,
    ModelArgument,
    Separator,
    Workers,
    describe_model,
    look_for_model,
    progress,
    verbatim,
)
from multimodal.config import Config, EvaluateConfig
from multimodal.config_init import load_run
from multimodal.config_io import dump_yaml, expand_home, help_text, is_override, load_config
from multimodal.errors import RunStopped
from multimodal.launcher import launcher

_PATIENCE = 10
"""Seconds that a launcher has to end a process which keeps quiet, since another tells why."""

app = typer.Typer(
    name="multimodal",
    help="Train, evaluate and use CLIP-style image-text models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command(
    epilog=verbatim(
        "Example:\n  multimodal train configs/recipes/quickstart.yaml optim.lr=1e-3\n\n"
        "Settings (files merge left to right, then key=value):\n" + help_text(Config)
    ),
)
def train(
    config: Annotated[list[str], typer.Argument(help="YAML files and key=value overrides.")],
    show: Annotated[
        bool, typer.Option("--print", help="Show the resolved config and stop.")
    ] = False,
) -> None:
    """Train, evaluate on the way, checkpoint. The same command again resumes.

    Exit code: 0 finished; 75 stopped by a signal, with a checkpoint saved; 2 a mistake in settings
    or data; 1 any other error.
    """
    launcher()  # asked at once, since imports take seconds
    with _told_once_a_machine():
        resolved = load_run(config, describe_model)
        if show:
            typer.echo(dump_yaml(resolved), nl=False)
            return
        _look_at_data(resolved)
    from multimodal.train.loop import train as run

    try:
        run(resolved)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on from the last checkpoint", err=True)
        sys.exit(130)


@app.command(
    epilog=verbatim(
        "Example:\n  multimodal checkpoints runs/quickstart\n\n"
        "Exit code 1 when there are checkpoints and none is sound."
    ),
)
def checkpoints(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    verify: Annotated[bool, typer.Option(help="Read all files and compare their hashes.")] = True,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run: their state and metrics, and which one a resume takes."""
    from multimodal.train import checkpoint_list

    with progress("verify", checkpoint_list.bytes_of(run) if verify else None) as advance:
        found = checkpoint_list.list_checkpoints(run, verify=verify, progress=advance)
    if as_json:
        typer.echo(json.dumps([entry.as_dict() for entry in found], indent=2))
    else:
        checkpoint_list.print_list(found)
    if not any(entry.resume for entry in found):
        sys.exit(1)


@app.command(
    epilog=verbatim(
        "Example:\n  multimodal evaluate runs/quickstart configs/data/openmoji.yaml\n\n"
        "Without a config the run's own evaluations are repeated."
    ),
)
def evaluate(
    model: ModelArgument,
    config: Annotated[
        list[str] | None, typer.Argument(help="YAML files and key=value with `evaluate:`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
    device: Device = "auto",
    batch_size: BatchSize = 64,
    workers: Workers = 0,
    as_json: AsJson = False,
) -> None:
    """Zero-shot classification and retrieval on any data source."""
    arguments = config or []
    look_for_model(model)
    if all(is_override(argument) for argument in arguments):
        # A model, a checkpoint and the model in it lie one to three folders below their run.
        folders = [Path(model), *Path(model).absolute().parents[:3]]
        own = next((path for x in folders if (path := x / "config.yaml").is_file()), None)
        if own is None:
            raise ValueError(
                f"{model} is not a run with evaluations of its own; name a CONFIG with `evaluate:`"
            )
        arguments = [str(own), *arguments]
    section = load_config(arguments, EvaluateConfig, only=True)
    _look_at_data(section)
    from multimodal.evaluate.report import print_results
    from multimodal.evaluate.run import evaluate_all
    from multimodal.weights.load import load

    results = evaluate_all(
        load(model, device=device), section.evaluate, batch_size=batch_size, workers=workers
    )
    text = json.dumps(results, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        print_results(results)


@app.command(
    epilog=verbatim(
        'Example:\n  multimodal classify runs/quickstart pizza.png --labels "cat,pizza"'
    ),
)
def classify(
    model: ModelArgument,
    images: Annotated[list[Path], typer.Argument(help="Picture files or folders of pictures.")],
    labels: Annotated[str, typer.Option(help="Names with commas between, or a file of lines.")],
    template: Annotated[
        list[str] | None, typer.Option(help="Prompt around a name, such as 'a photo of {}.'")
    ] = None,
    top: Annotated[int, typer.Option(help="Labels shown for each picture.", min=1)] = 5,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Zero-shot classification of pictures by names."""
    from multimodal.data.folder import picture_files

    names = _read_labels(labels)
    files = [path for image in images for path in picture_files(image)]
    look_for_model(model)
    from multimodal.weights.load import load

    pretrained = load(model, device=device)
    paths, broken = pretrained.readable(files)
    for path, reason in broken.items():
        typer.echo(f"{path}: left out: {reason}", err=True)
    probabilities = pretrained.classify(paths, names, templates=template)
    scores, order = probabilities.topk(min(top, len(names)), dim=1)
    rows = [
        {"image": str(path), "labels": [names[i] for i in row], "probabilities": values}
        for path, row, values in zip(paths, order.tolist(), scores.tolist(), strict=True)
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            found = zip(row["labels"], row["probabilities"], strict=True)
            typer.echo(f"{row['image']}: " + ", ".join(f"{name} {p:.1%}" for name, p in found))
    if broken:
        sys.exit(1)


def _read_labels(labels: str) -> list[str]:
    path = Path(labels)
    if os.path.isfile(path):  # unlike Path.is_file, no error for a very long text
        return _read_lines(path)
    if path.suffix == ".txt":
        raise ValueError(f"--labels {labels}: there is no such file")
    return [name.strip() for name in labels.split(",") if name.strip()]


def _read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--labels {path}: not a text file; give one name a line") from None
    return [line.strip() for line in lines if line.strip()]


@app.command(epilog=verbatim("Example:\n  multimodal embed runs/quickstart photos/ embeddings/"))
def embed(
    model: ModelArgument,
    data: Annotated[str, typer.Argument(help=A_SOURCE)],
    out: Annotated[Path, typer.Argument(help="Folder to write; an unfinished one is completed.")],
    dtype: Annotated[
        Literal["float16", "float32"], typer.Option(help="Number format of the vectors.")
    ] = "float16",
    rows_per_part: Annotated[int, typer.Option(help="Rows of each file.", min=1)] = 10_000,
    image_column: ImageColumn = "image",
    caption_column: CaptionColumn = "caption",
    separator: Separator = None,
    device: Device = "auto",
    batch_size: BatchSize = 64,
    workers: Workers = 0,
) -> None:
    """Export unit-length embeddings with metadata, in the layout of clip-retrieval."""
    look_for_model(model)
    from multimodal.data.build import source_from_path

    source = source_from_path(
        data, image_column=image_column, caption_column=caption_column, separator=separator
    )
    from multimodal.embed.export import export
    from multimodal.weights.load import load

    with progress("embed", len(source)) as advance:
        export(
            load(model, device=device),
            source,
            out,
            model_path=str(Path(model).resolve()) if Path(model).exists() else model,
            dtype=dtype,
            rows_per_part=rows_per_part,
            batch_size=batch_size,
            workers=workers,
            progress=advance,
        )


@app.command(epilog=verbatim('Example:\n  multimodal search embeddings/ "a slice of pizza"'))
def search(
    index: Annotated[Path, typer.Argument(help="Folder written by `multimodal embed`.")],
    query: Annotated[str, typer.Argument(help="A text, or the path of a picture.")],
    model: Annotated[
        str | None, typer.Option(help="Model for the query; default: the one of the folder.")
    ] = None,
    top: Annotated[int, typer.Option(help="Rows shown.", min=1)] = 10,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find pictures by a text or by a picture."""
    from multimodal.data.source import has_picture_ending
    from multimodal.embed.format import read_manifest
    from multimodal.embed.search import search as find
    from multimodal.weights.load import load

    is_picture = os.path.isfile(query)
    if not query.strip() or (not is_picture and has_picture_ending(query)):
        raise ValueError(f"query {query!r}: no such picture; give a picture file or a text")
    pretrained = load(model or read_manifest(index).model_path, device=device)
    encode = pretrained.encode_image if is_picture else pretrained.encode_text
    rows = find(index, encode([query]), k=top, fingerprint=pretrained.fingerprint())[0]
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    for row in rows:
        place = ", ".join(str(row.metadata[n]) for n in ("key", "url") if row.metadata.get(n))
        typer.echo(f"{row.score:.3f}  {row.metadata['caption']}  ({place})")


app.add_typer(data_commands)
app.add_typer(convert_command)


def _look_at_data(settings: BaseModel) -> None:
    """Tell mistakes in paths and columns now, before seconds of imports."""
    from multimodal.data.first_look import first_look

    if problems := first_look(settings):
        raise ValueError("\n  ".join(problems))


@contextmanager
def _told_once_a_machine() -> Iterator[None]:
    """All processes of a machine read the same arguments and files, and one tells what is wrong."""
    try:
        yield
    except (ValueError, *OF_USERS):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            _leave_quietly(2)
        raise


def _leave_quietly(code: int) -> NoReturn:
    """End after the process that tells why: at the first end a launcher kills the others."""
    time.sleep(_PATIENCE)
    sys.exit(code)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        app([expand_home(argument) for argument in sys.argv[1:]])
    except (ValueError, *OF_USERS) as error:
        _fail(error, code=2)
    except (RunStopped, OSError) as error:
        _fail(error, code=1)
    except RuntimeError as error:
        if not hasattr(error, "told_elsewhere"):
            raise
        _fail(error, code=1)


def _fail(error: Exception, *, code: int) -> NoReturn:
    if os.environ.get("MULTIMODAL_TRACEBACK"):
        raise error
    if hasattr(error, "told_elsewhere"):
        _leave_quietly(code)
    typer.echo(f"error: {error}", err=True)
    sys.exit(code)

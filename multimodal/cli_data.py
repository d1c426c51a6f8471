"""The commands for data: `pack` and `check`. Torch is imported only when a call runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from multimodal.cli_options import (
    A_SOURCE,
    OF_USERS,
    AsJson,
    CaptionColumn,
    ImageColumn,
    Separator,
    describe_model,
    progress,
    verbatim,
)
from multimodal.config_init import load_run
from multimodal.config_io import is_override, is_yaml, read_yaml

app = typer.Typer()


@app.command(
    epilog=verbatim(
        "Examples:\n  multimodal pack photos/ shards/ --short-side 256 --format jpeg --quality 90\n"
        "  multimodal pack table.csv shards/ --image-column file --splits val=0.01,test=0.01\n"
        "  multimodal pack source.yaml shards/    # in it: kind: hub, name: ..., split: ...\n"
        "  multimodal pack demo:openmoji data/openmoji"
    ),
)
def pack(
    source: Annotated[str, typer.Argument(help=f"{A_SOURCE} Or demo:openmoji.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; a stopped pack is completed.")],
    samples_per_shard: Annotated[int, typer.Option(help="Samples in a shard.", min=1)] = 10_000,
    short_side: Annotated[
        int | None, typer.Option(help="Scale larger pictures down to this short side.", min=1)
    ] = None,
    format: Annotated[
        Literal["jpeg", "webp"] | None,
        typer.Option(help="Encode all others anew in this format; default: only scaled, as jpeg."),
    ] = None,
    quality: Annotated[
        int, typer.Option(help="Of pictures that are encoded anew.", min=1, max=100)
    ] = 90,
    splits: Annotated[
        str | None, typer.Option(help="Sub-folders and their shares, such as val=0.01,test=0.01.")
    ] = None,
    image_column: ImageColumn = "image",
    caption_column: CaptionColumn = "caption",
    separator: Separator = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes; default: one a CPU if pictures are encoded anew.", min=0),
    ] = None,
) -> None:
    """Write tar shards in the WebDataset layout; a picture without a caption is left out.

    Pictures are kept byte for byte, or, with --short-side or --format, encoded anew where they are
    larger or of another format: upright, without metadata. The result is the same for any number
    of processes.
    """
    if source == "demo:openmoji":
        from multimodal.data.demo import pack_openmoji

        with progress("draw", None) as advance:
            pack_openmoji(out, progress=advance)
        return
    from multimodal.data.build import source_from_path
    from multimodal.data.splits import REST, parse_splits

    shares = parse_splits(splits) if splits else None
    opened = source_from_path(
        source, image_column=image_column, caption_column=caption_column, separator=separator
    )
    from multimodal.data.pack import pack as write
    from multimodal.data.recode import Recode

    pictures = Recode(short_side, format, quality)
    if workers is None:
        workers = (os.cpu_count() or 1) if pictures.changes else 0
    with progress("pack", len(opened)) as advance:
        packed = write(
            opened,
            out,
            samples_per_shard=samples_per_shard,
            pictures=pictures,
            splits=shares,
            workers=workers,
            progress=advance,
        )
    name, place = (REST, f"{out}/{REST}") if shares else ("", out)
    advice = f"; train on it with data.train.kind=shards data.train.path={place}"
    typer.echo(
        f"{out}: {packed.samples} samples in {packed.shards} shard(s)"
        + (advice if packed.splits[name].finished else "")
    )


@app.command(
    epilog=verbatim(
        "Examples:\n  multimodal check photos/ --html check.html\n"
        "  multimodal check configs/recipes/quickstart.yaml optim.lr=1e-3\n\n"
        "Exit code 2 when a config would fail; warnings leave it at 0."
    ),
)
def check(
    subject: Annotated[
        list[str],
        typer.Argument(help=f"A data source: {A_SOURCE} Or YAML files and key=value of a run."),
    ],
    samples: Annotated[int, typer.Option(help="Samples looked at, evenly spread.", min=1)] = 10_000,
    image_column: ImageColumn = "image",
    caption_column: CaptionColumn = "caption",
    separator: Separator = None,
    html: Annotated[Path | None, typer.Option(help="Page with pictures to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at data, or try a run before it starts: what is wrong, and what will limit it."""
    config, run, source, tokenizer = None, None, None, None
    with _page_of_mistake(html, subject):
        if len(subject) == 1 and _is_source(subject[0]):
            from multimodal.data.build import source_from_path

            source = source_from_path(
                subject[0],
                image_column=image_column,
                caption_column=caption_column,
                separator=separator,
            )
        else:
            config = load_run(subject, describe_model)
            from multimodal.data.first_look import first_look

            for problem in first_look(config):
                typer.echo(f"problem: {problem}", err=True)
            from multimodal.train.check import check_run

            run = check_run(config)
            source = run.source
            tokenizer = run.pretrained.tokenizer if run.pretrained is not None else None
    from multimodal.data import check_page
    from multimodal.data.check import check_data

    data = None
    if source is not None:
        with progress("look", min(samples, len(source))) as advance:
            data = check_data(
                source,
                tokenizer=tokenizer,
                most=samples,
                threads=os.cpu_count() or 1,
                progress=advance,
            )
    problems, warnings = [], []
    if run is not None and config is not None:
        from multimodal.train.check import data_problems, data_warnings

        problems = run.problems + (data_problems(config, data) if data is not None else [])
        warnings = run.warnings + (data_warnings(config, data) if data is not None else [])
    if html is not None:
        page = check_page.html_page(data, problems, title=" ".join(subject))
        html.write_text(page, encoding="utf-8", errors="replace")
    if as_json:
        found = {"data": None if data is None else data.as_dict()}
        if run is not None:
            found |= {"problems": problems, "warnings": warnings, "run": run.facts}
        typer.echo(json.dumps(found, indent=2))
    else:
        check_page.print_report(data, run.facts if run else {}, problems, warnings)
    if problems:
        sys.exit(2)


@contextmanager
def _page_of_mistake(html: Path | None, subject: list[str]) -> Iterator[None]:
    """Write the page also when what is asked for cannot be opened; it then says why."""
    from multimodal.data.check_page import html_page

    try:
        yield
    except (ValueError, *OF_USERS) as error:
        if html is not None:
            page = html_page(None, [str(error)], title=" ".join(subject))
            html.write_text(page, encoding="utf-8", errors="replace")
        raise


def _is_source(subject: str) -> bool:
    """Whether an argument is data or settings of data; those of a run have no kind."""
    if is_yaml(subject):
        return "kind" in read_yaml(subject)
    return not is_override(subject)

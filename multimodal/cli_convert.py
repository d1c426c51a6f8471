"""The command `convert`. Torch is imported only when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from multimodal.cli_options import AsJson, ModelArgument, look_for_model, verbatim
from multimodal.files import refuse_filled
from multimodal.weights.targets import Target

app = typer.Typer()
_MOST_PICTURES = 32


@app.command(
    epilog=verbatim(
        "Examples:\n  multimodal convert runs/quickstart exported/ --to hf\n"
        "  multimodal convert hf:clip-vit-base-patch32/ exported/ --to open_clip\n\n"
        "Exit code 2 when the format cannot hold the model; 1 when the other library does not give "
        "the same."
    ),
)
def convert(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    to: Annotated[
        Target,
        typer.Option(
            help="transformers CLIP (also for sentence-transformers, which then reads it back) or "
            "SigLIP, OpenCLIP, ONNX, timm."
        ),
    ],
    pictures: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder of pictures to compare on (at most {_MOST_PICTURES}); default: made ones."
        ),
    ] = None,
    drop_logit_bias: Annotated[
        bool,
        typer.Option(
            "--drop-logit-bias",
            help="For hf: leave out the logit bias of a model trained with the sigmoid loss, "
            "which CLIP does not have. No ranking changes.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for other tools, read it with the other library and compare.

    parity.json in OUT has every difference. A model that the format cannot hold is refused.
    """
    look_for_model(model)
    refuse_filled(out)
    from multimodal.weights.card import read_card
    from multimodal.weights.convert import convert as run
    from multimodal.weights.load import load

    pretrained = load(model)
    images = None
    if pictures is not None:
        from multimodal.data.folder import picture_files

        images = _opened(pretrained.readable(picture_files(pictures)[:_MOST_PICTURES])[0])
    options = {"pictures": images, "drop_logit_bias": drop_logit_bias, "card": read_card(model)}
    done = run(pretrained, out, to, **options)
    report = done.report
    if as_json:
        typer.echo(json.dumps(report.as_dict() | {"out": str(out)}, indent=2))
        return
    for row in report.rows:
        typer.echo(row.line())
    if report.not_checked is not None:
        typer.echo(f"not checked: {report.not_checked}", err=True)
    typer.echo(f"{out}: read it with {done.usage}")


def _opened(paths: list[Path]) -> list:
    from PIL import Image

    return [Image.open(path) for path in paths]

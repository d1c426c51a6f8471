"""From our model to files that other tools read, each proven by reading it back with that tool.

    write into OUT.part -> reopen with the real library -> compare -> parity.json -> rename to OUT

What a failed conversion leaves in OUT.part is for a look; the next one replaces it.

A target is a module with `write` and `reopen`, and one line in `_writer`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

from PIL import Image

import multimodal
from multimodal.errors import RunStopped
from multimodal.files import LOCK, Lock, move_folder, refuse_filled, write_atomically
from multimodal.weights.card import converted_card
from multimodal.weights.parity import Row, Theirs, compare
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.save import CARD_FILE
from multimodal.weights.targets import Target

PARITY_FILE = "parity.json"


class Writer(NamedTuple):
    """How a format is written and read back."""

    write: Callable[[Pretrained, Path], None]
    """Into a folder that is there and empty. Raises a ValueError that lists all that the format
    cannot hold, before it writes anything."""
    reopen: Callable[[Path], Theirs]
    """Read with the real library. Raises an ImportError when that is not installed."""
    usage: str
    """How others read it; `{out}` stands for the folder."""


@dataclass(frozen=True)
class Report:
    """What the comparison gave."""

    library: str | None
    """What read the files; None when it is not installed."""
    rows: Sequence[Row]
    not_checked: str | None
    """Why nothing was compared."""
    fingerprint: str
    """Of the model that was converted."""

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if not row.passed]

    def as_dict(self) -> dict:
        """Plain JSON values, as in parity.json."""
        return {
            "multimodal": multimodal.__version__,
            "fingerprint": self.fingerprint,
            "library": self.library,
            "not_checked": self.not_checked,
            "passed": None if self.not_checked else not self.failed,
            "rows": [row.as_dict() for row in self.rows],
        }


class Converted(NamedTuple):
    """Attributes:
    report: What the comparison gave.
    usage: A line with which the other library reads the result.
    """

    report: Report
    usage: str


def convert(
    pretrained: Pretrained,
    out: Path,
    to: Target,
    *,
    pictures: Sequence[Image.Image] | None = None,
    drop_logit_bias: bool = False,
    card: str | None = None,
) -> Converted:
    """Write a model for another library, read it with that library and compare.

    Args:
        pretrained: the model, on the CPU.
        out: the folder to make.
        to: the format.
        pictures: real ones for the comparison; by default some are made.
        drop_logit_bias: leave the offset of the logits out of a format that has none.
        card: the model's card, of which the result gets its own.

    Raises:
        ValueError: when the format cannot hold the model, or `out` is there already.
        RunStopped: when the other library does not give the same; the files are in `OUT.part`.
    """
    writer = _writer(to, drop_logit_bias=drop_logit_bias)
    refuse_filled(out)
    part = Path(os.path.abspath(out)).with_name(f"{out.absolute().name}.part")
    _refuse_foreign(part)
    lock = Lock(part, str(out), "another OUT")
    try:
        _empty(part)
        _note(part, {"passed": False, "unfinished": True})
        _write(writer, pretrained, part)
        if card is not None:
            text = converted_card(card, to, writer.usage.format(out="FOLDER"))
            (part / CARD_FILE).write_text(text, encoding="utf-8")
        report = _check(pretrained, part, writer, pictures)
        _note(part, report.as_dict())
    finally:
        lock.remove()
    if report.failed:
        wrong = "\n  ".join(row.line() for row in report.failed)
        raise RunStopped(
            f"{report.library} does not give the same as this model; the files, not to be used, "
            f"are in {part}:\n  {wrong}"
        )
    if out.is_dir():
        out.rmdir()
    move_folder(part, out)
    return Converted(report, writer.usage.format(out=str(out)))


def _writer(to: Target, *, drop_logit_bias: bool) -> Writer:
    if drop_logit_bias and to not in ("hf", "sentence-transformers"):
        raise ValueError(f"drop_logit_bias is for hf and sentence-transformers, not for {to}")
    bias = {"drop_logit_bias": drop_logit_bias}
    match to:
        case "hf":
            from multimodal.weights import hf_folder as hf

            write, reopen = partial(hf.write_clip, **bias), partial(hf.reopen, **bias)
            return Writer(write, reopen, hf.CLIP_USAGE)
        case "sentence-transformers":
            from multimodal.weights import hf_folder as hf
            from multimodal.weights import sentence_folder

            write = partial(hf.write_clip, **bias)
            return Writer(write, sentence_folder.reopen, sentence_folder.USAGE)
        case "siglip":
            from multimodal.weights import hf_folder as hf

            return Writer(hf.write_siglip, hf.reopen, hf.SIGLIP_USAGE)
        case "open_clip":
            from multimodal.weights import openclip_folder

            return Writer(openclip_folder.write, openclip_folder.reopen, openclip_folder.USAGE)
        case "onnx":
            from multimodal.weights import onnx_towers

            return Writer(onnx_towers.write, onnx_towers.reopen, onnx_towers.USAGE)
        case "onnx-int8":
            from multimodal.weights import onnx_towers

            return Writer(
                partial(onnx_towers.write, numbers="int8"),
                partial(onnx_towers.reopen, numbers="int8"),
                onnx_towers.INT8_USAGE,
            )
        case "timm":
            from multimodal.weights import timm_folder

            return Writer(timm_folder.write, timm_folder.reopen, timm_folder.USAGE)
        case _:
            raise ValueError(f"{to!r} is not a format; known are {', '.join(get_args(Target))}")


def _write(writer: Writer, pretrained: Pretrained, folder: Path) -> None:
    try:
        writer.write(pretrained, folder)
    except ValueError:
        shutil.rmtree(folder)
        raise


def _check(
    pretrained: Pretrained, folder: Path, writer: Writer, pictures: Sequence[Image.Image] | None
) -> Report:
    fingerprint = pretrained.fingerprint()
    try:
        theirs = writer.reopen(folder)
        rows = compare(pretrained, theirs, pictures)
    except ImportError as error:
        return Report(None, [], str(error), fingerprint)
    except Exception as error:  # of another library, which may raise any
        raise RunStopped(
            f"the files in {folder} cannot be used: {type(error).__name__}: {error}"
        ) from error
    return Report(theirs.library, rows, None, fingerprint)


def _note(folder: Path, content: dict) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(folder / PARITY_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def _refuse_foreign(part: Path) -> None:
    """Refuse a folder in the place of ours that no conversion has left."""
    if part.is_file() or (part.is_dir() and any(part.iterdir()) and not _is_ours(part)):
        raise ValueError(
            f"{part} is in the way: the result is prepared there, and it is not what a conversion "
            "left; move it, or give another OUT"
        )


def _is_ours(part: Path) -> bool:
    return (part / PARITY_FILE).is_file() or [path.name for path in part.iterdir()] == [LOCK]


def _empty(folder: Path) -> None:
    """Remove what a failed conversion has left."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()

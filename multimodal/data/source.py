"""What every data source offers: samples read by number, in groups that lie together on disk.

A sample that cannot be used never passes silently: a source counts what it leaves out when it is
opened (`problems`), and `read` raises `BadSample` for what only shows on reading.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
"""File name endings that count as pictures, in any case."""
NO_CAPTION = "no caption"
"""Reason for a picture without a text."""
NOT_UTF8 = "text is not UTF-8"
"""Reason for a text in some other encoding, or damaged."""
WHOLE_SHARD = -1
"""`Skip.index` of a shard that is lost, or its end."""

Scalar = str | int | float | bool | None
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One picture with its texts, as stored.

    Attributes:
        key: Name of the sample within its source.
        image: The encoded picture.
        captions: All captions, stripped and not empty; may be none.
        meta: Further scalar fields; a class is under `cls`.
    """

    key: str
    image: bytes | None
    captions: tuple[str, ...]
    meta: dict[str, Scalar]


class BadSample(Exception):
    """A sample that cannot be used.

    Args:
        reason: Short and without particulars, so that samples can be counted by it.
        key: Name of the sample, where known.
        detail: The particulars.
    """

    def __init__(self, reason: str, key: str = "", detail: str = ""):
        super().__init__(reason, key, detail)
        self.reason = reason
        self.key = key
        self.detail = detail

    def __str__(self) -> str:
        text = f"{self.reason} ({self.detail})" if self.detail else self.reason
        return f"{self.key}: {text}" if self.key else text


@dataclass(frozen=True)
class Skip:
    """A sample that could not be used.

    Attributes:
        key: Its name, where it could be read.
        place: Shard, table or folder that holds it.
        reason: Short text to count by.
        detail: The particulars.
        index: Its number in the source, of a stream in its shard; or `WHOLE_SHARD`.
        position: Its global position in the training order; -1 outside training.
    """

    key: str
    place: str
    reason: str
    detail: str
    index: int
    position: int = -1


class Source(Protocol):
    """Samples by number. Must survive pickling, so that loader processes can use it."""

    description: str
    """For people: kind and place."""
    problems: dict[str, int]
    """How many entries were left out when the source was opened, by reason."""

    def __len__(self) -> int: ...

    def groups(self) -> list[int]:
        """Sizes of the groups of samples that lie together, in order; their sum is `len`."""
        ...

    def read(self, index: int) -> Sample:
        """Read one sample.

        Raises:
            BadSample: when it cannot be used.
        """
        ...

    def place(self, index: int) -> str:
        """Name of the file or folder that holds a sample, for reports."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 of names, sizes and counts: equal for an untouched copy elsewhere."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """A source that fetches what it reads from elsewhere, and is told what will be read next."""

    def check_window(self, window: int) -> None:
        """See that what an order with this window needs at once has room.

        Raises:
            ValueError: when it has not.
        """
        ...

    def fetch_ahead(self, indices: Iterable[int]) -> None:
        """Begin to fetch these samples with their groups, in this order, as far as they fit."""
        ...


def split_name(name: str) -> tuple[str, str]:
    """Split `a.b/cat no. 2.JPG` into the key `a.b/cat no. 2` and the ending `jpg`."""
    key, dot, extension = name.rpartition(".")
    if not dot or "/" in extension:
        return name, ""
    return key, extension.lower()


def has_picture_ending(name: str) -> bool:
    """Whether a file of this name would be read as a picture."""
    return split_name(name)[1] in IMAGE_EXTENSIONS


def even_groups(count: int, size: int = 1000) -> list[int]:
    """Cut `count` samples that need no locality into small groups, so that they mix well."""
    whole, rest = divmod(count, size)
    return [size] * whole + [rest] * (rest > 0)


def report_problems(description: str, problems: Mapping[str, int]) -> None:
    """Log what a source left out."""
    if problems:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(problems.items()))
        log.warning("%s: left out: %s", description, reasons)


def read_file(path: str | os.PathLike[str], key: str) -> bytes:
    """Read a whole file.

    Raises:
        BadSample: when it is missing or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise BadSample("missing file", key, str(path)) from None
    except (OSError, ValueError) as error:
        raise BadSample("unreadable file", key, str(error)) from error


def clean_captions(value: object) -> tuple[str, ...]:
    """Captions in a text or a list of texts, stripped, without empty ones."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())


def parse_sidecars(
    key: str, *, text: bytes | None, record: bytes | None, label: bytes | None
) -> tuple[tuple[str, ...], dict[str, Scalar]]:
    """Captions and metadata from the files beside a picture.

    Captions are the list `captions` of the JSON record; else the whole text file as one caption;
    else the text `caption` of the record. Metadata are the record's other scalars, and `cls`
    from the label file (a whole number where it is one).

    Raises:
        BadSample: when a file is not UTF-8 or the record is not a JSON object.
    """
    meta: dict[str, Scalar] = {}
    listed = single = None
    if record is not None:
        fields = _json_object(record, key)
        listed, single = fields.pop("captions", None), fields.pop("caption", None)
        meta = {k: v for k, v in fields.items() if isinstance(v, Scalar)}
    if isinstance(listed, list):
        captions = clean_captions(listed)
    else:
        captions = clean_captions(single if text is None else _decode(text, key))
    if label is not None:
        meta["cls"] = _label(_decode(label, key).strip())
    return captions, meta


def _json_object(record: bytes, key: str) -> dict[str, object]:
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise BadSample("damaged JSON", key, str(error)) from error
    if not isinstance(fields, dict):
        raise BadSample("damaged JSON", key, f"a {type(fields).__name__}, not an object")
    return fields


def _decode(data: bytes, key: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(NOT_UTF8, key, str(error)) from error


def _label(text: str) -> str | int:
    return int(text) if text.isascii() and text.removeprefix("-").isdigit() else text

"""CSV, TSV, JSONL and Parquet tables with one picture a row.

A picture is a path relative to the table (or absolute), or, in Parquet, its bytes: a binary column
or a struct with a field `bytes`, as the Hugging Face datasets library writes it. Every other
column with scalar values becomes metadata. Text such as `None`, `NA` or `007` stays text.
"""

from __future__ import annotations

import codecs
import csv as plain_csv
import difflib
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute
from pyarrow import csv, parquet

from multimodal.data.row_file import RowFile
from multimodal.data.source import (
    NOT_UTF8,
    BadSample,
    Sample,
    Scalar,
    clean_captions,
    even_groups,
    read_file,
)
from multimodal.files import file_hash

log = logging.getLogger(__name__)

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
compute: Any = pyarrow.compute  # whose functions are made at run time
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_SAVE_AS_UTF8 = "save the table as UTF-8 (in a spreadsheet: `CSV UTF-8`)"
_NO_ROWS = "{}: the table has no rows; it needs one for each picture"
_IN_MEMORY = 256 << 20
"""Bytes, unpacked, above which a Parquet table with pictures is not held in memory."""


class TableSource:
    """Samples of a table, in the order of its rows.

    Args:
        path: The table; its ending names the format.
        image_column: Column with the picture's path or bytes.
        caption_column: Column with the caption, or with a list of captions; or several columns,
            whose captions follow each other.
        separator: Character between the columns of a CSV or TSV table; None goes by the ending.

    Raises:
        ValueError: when the table cannot be read, lacks a column, or has no rows.
    """

    def __init__(
        self,
        path: str,
        image_column: str = "image",
        caption_column: str | Sequence[str] = "caption",
        separator: str | None = None,
    ):
        self._path = Path(path)
        self._image = image_column
        single = isinstance(caption_column, str)
        self._captions = (caption_column,) if single else tuple(caption_column)
        self.description = f"table {path}"
        self.problems: dict[str, int] = {}
        needed = (image_column, *self._captions)
        check_table(path, needed, separator)
        self._rows = _open_rows(self._path, needed, separator)
        if not len(self):
            raise ValueError(_NO_ROWS.format(path))
        _check_paths(self._path, self._rows, image_column)

    def __len__(self) -> int:
        return sum(self._rows.groups)

    def groups(self) -> list[int]:
        return list(self._rows.groups)

    def read(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = f"{index:08d}"
        try:
            row = self._rows.row(index)
        except UnicodeDecodeError as error:
            raise BadSample(NOT_UTF8, number, str(error)) from error
        except ValueError as error:
            raise BadSample("damaged row", number, str(error)) from error
        picture = row.pop(self._image, None)
        captions = tuple(
            caption for name in self._captions for caption in clean_captions(row.pop(name, None))
        )
        meta = {name: value for name, value in row.items() if isinstance(value, Scalar)}
        if isinstance(picture, str) and picture:
            data = read_file(self._path.parent / picture, picture)
            return Sample(picture, data, captions, meta)
        if isinstance(picture, dict):
            picture = picture.get("bytes")
        if not isinstance(picture, bytes) or not picture:
            raise BadSample("no image", number)
        return Sample(number, picture, captions, meta)

    def place(self, index: int) -> str:
        return self._path.name

    def fingerprint(self) -> str:
        is_parquet = self._path.suffix.lower() == ".parquet"
        content = _footer_hash(self._path) if is_parquet else file_hash(self._path)
        text = f"{self._path.name}\t{content}\t{self._image}\t{self._captions}\n"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _footer_hash(path: Path) -> str:
    """Hash of a Parquet file's size and its footer, which has sizes and limits of every column."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(size - 8)
        file.seek(size - 8 - int.from_bytes(file.read(4), "little"))
        return hashlib.sha256(f"{size}\n".encode() + file.read()).hexdigest()


class _Rows(Protocol):
    groups: list[int]

    def row(self, index: int) -> dict[str, Any]:
        """One row; ValueError when it is damaged."""
        ...


def check_table(path: str, needed: Sequence[str], separator: str | None) -> None:
    """See that a table is there and has the needed columns, without reading the whole of it.

    Raises:
        ValueError: when it is not there, is no table, or lacks a column.
    """
    place = Path(path)
    ending = place.suffix.lower()
    if not place.is_file():
        raise ValueError(f"{path}: there is no such table")
    if ending in _SEPARATORS:
        separator = separator or _SEPARATORS[ending]
        _check_is_not_utf16(place)
        check_columns(place, _header(place, separator), needed, separator)
    elif ending == ".jsonl":
        _check_is_not_utf16(place)
        check_columns(place, _first_names(place), needed)
    elif ending == ".parquet":
        with _pyarrows_errors(place):
            check_columns(place, parquet.read_schema(place).names, needed)
    else:
        raise ValueError(f"{path}: unknown kind of table; use one of {', '.join(ENDINGS)}")


@contextmanager
def _pyarrows_errors(path: Path) -> Iterator[None]:
    """As mistakes in a table."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if "straddling" in str(error):
            raise ValueError(
                f"{path}: a row is longer than 1 MB, which a quote without a partner makes of all "
                "that follows: double a quote that is part of a text, and put the text in quotes; "
                "if the row is meant, save the table as .jsonl or .parquet"
            ) from error
        raise ValueError(
            f"{path}: not a sound {path.suffix.lower()} table: {error}; a text that holds a "
            "separator, a quote or a line break must stand in double quotes"
        ) from error


def _open_rows(path: Path, needed: Sequence[str], separator: str | None) -> _Rows:
    """Rows of a table that `check_table` has looked at."""
    ending = path.suffix.lower()
    with _pyarrows_errors(path):
        if ending == ".jsonl":
            return _JsonRows(path)
        if ending == ".parquet":
            return _open_parquet(path, needed)
        separator = separator or _SEPARATORS[ending]
        return _MemoryRows(_read_csv(path, separator, _header(path, separator), needed))


def check_columns(
    path: Path | str, names: list[str], needed: Sequence[str], separator: str | None = None
) -> None:
    """See that columns are there, and that no name stands for two of them.

    Raises:
        ValueError: naming the columns found, the nearest name, and what to do.
    """
    twice = dict.fromkeys(name for name in names if name and names.count(name) > 1)
    if twice:
        raise ValueError(
            f"{path}: several columns are called {', '.join(twice)}; rename all but one of them"
        )
    missing = [name for name in needed if name not in names]
    if not missing:
        return
    near = [match for name in missing for match in difflib.get_close_matches(name, names, n=1)]
    hint = f"did you mean {', '.join(near)}? " if near else ""
    hint += (
        "Rename its columns, or set image_column and caption_column in a config, --image-column "
        "and --caption-column on the command line"
    )
    others = [other for other in "\t,;|" if other != separator and other in "".join(names)]
    if separator and len(names) == 1 and others:
        hint = (
            f"its columns seem to be separated by {others[0]!r}, not by {separator!r}: set "
            "separator in a config, --separator on the command line, or rename the file: .csv "
            "means commas and .tsv means tabs"
        )
    raise ValueError(f"{path}: no column {', '.join(missing)}; it has {names}; {hint}")


def _check_paths(path: Path, rows: _Rows, image: str) -> None:
    try:
        first = rows.row(0)[image]
    except ValueError:  # reported when the row is read
        return
    if isinstance(first, str) and "://" in first:
        raise ValueError(
            f"{path}: column {image!r} holds URLs ({first!r}); only local files are read: fetch "
            "the pictures first, for example with img2dataset"
        )


def _check_is_not_utf16(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start:
        raise ValueError(f"{path}: the text is UTF-16; {_SAVE_AS_UTF8}")


def _header(path: Path, separator: str) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        names = next(plain_csv.reader(file, delimiter=separator), [])
    if any("\udc80" <= letter <= "\udcff" for letter in "".join(names)):
        raise ValueError(
            f"{path}: the names of its columns are not UTF-8 but perhaps Latin-1; {_SAVE_AS_UTF8}"
        )
    if not names:
        raise ValueError(f"{path}: the table is empty; its first line must name the columns")
    return names


def _first_names(path: Path) -> list[str]:
    """Fields of the first line that is not empty."""
    with path.open("rb") as file:
        line = next((line for line in file if line.removeprefix(_BOM).strip()), None)
    if line is None:
        raise ValueError(_NO_ROWS.format(path))
    try:
        return list(_json_row(line.removeprefix(_BOM)))
    except ValueError as error:
        raise ValueError(
            f"{path}: its first line is not a JSON object: {error}; a .jsonl table has one "
            "object a line"
        ) from error


def _read_csv(path: Path, separator: str, names: list[str], texts: Sequence[str]) -> pa.Table:
    """All columns in memory; `texts` are kept as text, and text is never read as null."""
    table = csv.read_csv(
        path,
        parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        # Text that is not UTF-8 then spoils its own row, on reading, and not the table.
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )
    for i, name in enumerate(table.column_names):
        if name not in texts:
            table = table.set_column(i, name, _typed(table.column(i)))
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        log.warning(
            "%s: some texts are not UTF-8, and their rows cannot be used; if they are Latin-1 or "
            "Windows-1252, %s",
            *(path, _SAVE_AS_UTF8),
        )
    _warn_of_joined_rows(path, table, separator, texts)
    return table


def _warn_of_joined_rows(path: Path, table: pa.Table, separator: str, texts: Sequence[str]) -> None:
    """A quote without its partner makes one text of all rows up to the next quote."""
    looks_joined = rf"\n[^\n]*{re.escape(separator)}"
    counts = (
        compute.sum(compute.match_substring_regex(table.column(name), looks_joined)).as_py()
        for name in texts
    )
    if joined := sum(count or 0 for count in counts):
        log.warning(
            "%s: %d texts hold a line break and then %r; if these are rows, a quote before has "
            "no partner: double it, and put the text in quotes",
            *(path, joined, separator),
        )


_TYPES = (
    (pa.int64(), r"^-?(0|[1-9][0-9]{0,17})$"),
    (pa.float64(), r"^-?(0|[1-9][0-9]{0,14})([.][0-9]+)?([eE][+-]?[0-9]{1,2})?$"),
    (pa.bool_(), r"^(true|false|True|False)$"),
)
"""Types of metadata, and how their values are written: `007` and a long serial number are text."""


def _typed(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as numbers or truth values where all of it is, with nulls for empty fields."""
    empty = compute.equal(column, "")
    for kind, pattern in _TYPES:
        fits = compute.match_substring_regex(column, pattern)
        if compute.any(fits).as_py() and compute.all(compute.or_(fits, empty)).as_py():
            return compute.if_else(empty, None, column).cast(kind)
    return column


def _open_parquet(path: Path, needed: Sequence[str]) -> _Rows:
    schema = parquet.read_schema(path)
    names = [f.name for f in schema if f.name in needed or _is_scalar(f.type)]
    metadata = parquet.read_metadata(path)
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    if not _is_text(schema.field(needed[0]).type) and size > _IN_MEMORY:
        return RowFile(path, names)
    return _MemoryRows(parquet.read_table(path, columns=names))


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_scalar(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return _is_text(kind) or is_number or pa.types.is_boolean(kind)


class _MemoryRows:
    """Rows of a table in memory."""

    def __init__(self, table: pa.Table):
        self._names = table.column_names
        self.groups = even_groups(table.num_rows)
        self._table = table

    def row(self, index: int) -> dict[str, Any]:
        columns = zip(self._names, self._table.columns, strict=True)
        return {name: column[index].as_py() for name, column in columns}


_BOM = b"\xef\xbb\xbf"


class _JsonRows:
    """Lines of a JSONL file in memory; a line is parsed when it is read."""

    def __init__(self, path: Path):
        lines = path.read_bytes().removeprefix(_BOM).splitlines()
        self._lines = pa.array([line for line in lines if line.strip()], pa.large_binary())
        self.groups = even_groups(len(self._lines))

    def row(self, index: int) -> dict[str, Any]:
        return _json_row(self._lines[index].as_py())


def _json_row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    return row

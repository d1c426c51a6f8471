"""CSV, TSV, JSONL and Parquet tables with one picture a row.

A picture is a path relative to the table (or absolute), or, in Parquet, its bytes: a binary column
or a struct with a field `bytes`, as the Hugging Face datasets library writes it. Every other
column with scalar values becomes metadata. Text such as `None` or `NA` stays text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import csv, parquet

from multimodal.data.source import BadSample, Sample, Scalar, clean_captions, even_groups, read_file

ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_KEPT_ROW_GROUPS = 8
log = logging.getLogger(__name__)


class TableSource:
    """Samples of a table, in the order of its rows.

    Args:
        path: The table; its ending names the format.
        image_column: Column with the picture's path or bytes.
        caption_column: Column with the caption, or with a list of captions.

    Raises:
        ValueError: when the table cannot be read, lacks a column, or has no rows.
    """

    def __init__(self, path: str, image_column: str = "image", caption_column: str = "caption"):
        self._path = Path(path)
        self._image, self._caption = image_column, caption_column
        self.description = f"table {path}"
        self.problems: dict[str, int] = {}
        if not self._path.is_file():
            raise ValueError(f"{path}: there is no such table")
        self._rows = _open_rows(self._path, image_column, caption_column)
        if not len(self):
            raise ValueError(f"{path}: the table has no rows; it needs one for each picture")
        _check_columns(self._path, self._rows.names, image_column, caption_column)
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
        except ValueError as error:
            raise BadSample("damaged row", number, str(error)) from error
        picture, caption = row.pop(self._image, None), row.pop(self._caption, None)
        meta = {name: value for name, value in row.items() if isinstance(value, Scalar)}
        if isinstance(picture, str) and picture:
            data = read_file(self._path.parent / picture, picture)
            return Sample(picture, data, clean_captions(caption), meta)
        if isinstance(picture, dict):
            picture = picture.get("bytes")
        if not isinstance(picture, bytes) or not picture:
            raise BadSample("no image", number)
        return Sample(number, picture, clean_captions(caption), meta)

    def place(self, index: int) -> str:
        return self._path.name

    def fingerprint(self) -> str:
        text = f"{self._path.name}\t{self._path.stat().st_size}\t{len(self)}\n"
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class _Rows(Protocol):
    names: list[str]
    groups: list[int]

    def row(self, index: int) -> dict[str, Any]:
        """One row; ValueError when it is damaged."""
        ...


def _open_rows(path: Path, image: str, caption: str) -> _Rows:
    ending = path.suffix.lower()
    try:
        if ending in _SEPARATORS:
            return _MemoryRows(_read_csv(path, _SEPARATORS[ending], (image, caption)))
        if ending == ".jsonl":
            return _JsonRows(path)
        if ending == ".parquet":
            return _open_parquet(path, image, caption)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path}: not a sound {ending} table: {error}; a text that holds a separator, a quote "
            "or a line break must stand in double quotes"
        ) from error
    raise ValueError(f"{path}: unknown kind of table; use one of {', '.join(ENDINGS)}")


def _check_columns(path: Path, names: list[str], *needed: str) -> None:
    missing = [name for name in needed if name not in names]
    if not missing:
        return
    hint = "rename its columns, or set image_column and caption_column in a config"
    if len(names) == 1 and any(separator in names[0] for separator in "\t,;|"):
        hint = "its separator seems wrong: .csv means commas and .tsv means tabs"
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


def _read_csv(path: Path, separator: str, texts: tuple[str, ...]) -> pa.Table:
    """All columns in memory; `texts` are kept as text, and text is never read as null."""
    table = csv.read_csv(
        path,
        parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        # Text that is not UTF-8 then spoils its own row, on reading, and not the table.
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()),
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )
    times = [i for i, kind in enumerate(table.schema.types) if pa.types.is_temporal(kind)]
    for i in times:
        table = table.set_column(i, table.schema.names[i], table.column(i).cast(pa.string()))
    return table


def _open_parquet(path: Path, image: str, caption: str) -> _Rows:
    schema = parquet.read_schema(path)
    names = [f.name for f in schema if f.name in (image, caption) or _is_scalar(f.type)]
    if image in names and not _is_text(schema.field(image).type):
        return _ParquetRows(path, names)
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
        self.names = table.column_names
        self.groups = even_groups(table.num_rows)
        self._table = table

    def row(self, index: int) -> dict[str, Any]:
        columns = zip(self.names, self._table.columns, strict=True)
        return {name: column[index].as_py() for name, column in columns}


class _JsonRows:
    """Lines of a JSONL file in memory; a line is parsed when it is read."""

    def __init__(self, path: Path):
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
        self._lines = pa.array([line for line in lines if line.strip()], pa.large_binary())
        self.groups = even_groups(len(self._lines))
        try:
            self.names = list(self.row(0)) if len(self._lines) else []
        except ValueError as error:
            raise ValueError(
                f"{path}: its first line is not a JSON object: {error}; a .jsonl table has one "
                "object a line"
            ) from error

    def row(self, index: int) -> dict[str, Any]:
        row = json.loads(self._lines[index].as_py())
        if not isinstance(row, dict):
            raise ValueError(f"a {type(row).__name__}, not an object")
        return row


class _ParquetRows:
    """Rows of a Parquet file with pictures, of which a few row groups are kept in memory.

    A row group is read whole for one row of it, so order by row is quick and random order is slow.
    """

    def __init__(self, path: Path, names: list[str]):
        self.names = names
        self._path = path
        metadata = parquet.read_metadata(path)
        self.groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._owner = 0
        if len(self.groups) > _KEPT_ROW_GROUPS:
            log.warning("%s: random order is slow in a large Parquet file; pack it first", path)

    def row(self, index: int) -> dict[str, Any]:
        number = 0
        while index >= self.groups[number]:
            index -= self.groups[number]
            number += 1
        return self._group(number).row(index)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_kept")}

    def _group(self, number: int) -> _MemoryRows:
        # A forked process opens the file anew: its parent's handle has a position they would share.
        if self._owner != os.getpid() or not hasattr(self, "_file"):
            self._owner = os.getpid()
            self._file = parquet.ParquetFile(self._path)
            self._kept: OrderedDict[int, _MemoryRows] = OrderedDict()
        if number not in self._kept:
            table = self._file.read_row_group(number, columns=self.names, use_threads=False)
            self._kept[number] = _MemoryRows(table)
            if len(self._kept) > _KEPT_ROW_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

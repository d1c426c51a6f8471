"""Any row of a large Parquet table, without holding the table in memory.

Parquet packs thousands of rows into one compressed piece, which would have to be unpacked whole for
each picture of a shuffled order. So the rows are copied once, unpacked, to an Arrow file in the
cache folder, which is then mapped into memory: a row costs a read of its own bytes, and the
system's page cache is all the memory there is to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc, parquet

from multimodal.data.source import even_groups
from multimodal.files import cache_folder

_ROWS = 64
"""Rows of a batch in the Arrow file: small, since the batch that holds a row is looked at whole."""
_BUFFER = 1 << 20
"""Bytes read at a time; without a buffer, Parquet reads a whole column of a row group."""
log = logging.getLogger(__name__)


class RowFile:
    """Rows of some columns of a Parquet file, by way of a copy that can be read at any place.

    Args:
        path: The Parquet file.
        names: Columns that are wanted.

    Raises:
        ValueError: when there is no room for the copy.
    """

    def __init__(self, path: Path, names: list[str]):
        self.names = names
        self._copy = _copy_of(path, names)
        self._open()
        self.groups = even_groups(parquet.read_metadata(path).num_rows)

    def row(self, index: int) -> dict[str, Any]:
        batch = self._batches.get_batch(index // _ROWS)
        columns = zip(self.names, batch.columns, strict=True)
        return {name: column[index % _ROWS].as_py() for name, column in columns}

    def _open(self) -> None:
        self._batches = ipc.open_file(pa.memory_map(str(self._copy)))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_batches"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._open()


def _copy_of(path: Path, names: list[str]) -> Path:
    """The Arrow copy of these columns of this state of the file, made if it is not there."""
    state, folder = path.stat(), cache_folder()
    place = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]
    stamp = repr((state.st_size, state.st_mtime_ns, names))
    copy = folder / f"{place}-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.arrow"
    if copy.exists():
        return copy
    _check_room(path, folder)
    temporary = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}")
    try:
        _write(path, names, temporary)
        os.replace(temporary, copy)
    except OSError as error:
        raise ValueError(f"{path}: no copy for quick reading can be made: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    for old in folder.glob(f"{place}-*.arrow"):
        if old != copy:  # of the file before it changed
            with contextlib.suppress(OSError):
                old.unlink()
    return copy


def _check_room(path: Path, folder: Path) -> None:
    metadata = parquet.read_metadata(path)
    needed = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    log.info("%s: copying %.1f GB to %s, for random access", path, needed / 1e9, folder)
    if needed > free:
        raise ValueError(
            f"{path}: its pictures must be copied once for random access, which takes "
            f"{needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB free; make room, or set "
            "XDG_CACHE_HOME to a folder on a larger disk"
        )


def _write(path: Path, names: list[str], target: Path) -> None:
    file = parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
    batches = file.iter_batches(batch_size=_ROWS, columns=names, use_threads=False)
    schema = pa.schema([_plain(file.schema_arrow.field(name)) for name in names])
    with ipc.new_file(str(target), schema) as writer:
        for table in _evened(batches):
            writer.write(table.select(names).cast(schema))


def _plain(field: pa.Field) -> pa.Field:
    """Categories as their values: an Arrow file has room for one set of categories only."""
    kind = field.type
    return field.with_type(kind.value_type) if pa.types.is_dictionary(kind) else field


def _evened(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The same rows in batches of `_ROWS`, but for the last; row groups end anywhere."""
    rest: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        rest.append(batch)
        count += len(batch)
        if count >= _ROWS:
            table = pa.Table.from_batches(rest)
            yield table.slice(0, _ROWS).combine_chunks()
            rest, count = table.slice(_ROWS).to_batches(), count - _ROWS
    if count:
        yield pa.Table.from_batches(rest).combine_chunks()

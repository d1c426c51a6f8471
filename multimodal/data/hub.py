"""Data sets of the Hugging Face `datasets` library: saved, local or from its cache.

Rows are read one by one from the library's memory-mapped files, pictures as they are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from multimodal.data.source import BadSample, Sample, Scalar, clean_captions, even_groups, read_file
from multimodal.data.tables import check_columns

SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files that `save_to_disk` leaves: of one split, and of several."""
_FINGERPRINTED = 10_000
"""Rows, spread evenly, whose texts are part of the fingerprint."""


class HubSource:
    """Samples of one split of a data set, in the order of its rows.

    Args:
        name: Folder that `save_to_disk` wrote, folder of Parquet files or pictures that the library
            understands, or name on the hub, which is read from the cache or fetched into it.
        subset: Configuration of the data set, where it has several.
        split: Part of the data set.
        image_column: Column with the picture.
        caption_column: Column or columns with captions; None makes the class the caption.
        label_column: Column with the class; its name becomes `cls`.

    Raises:
        ValueError: when the library is missing, or there is no such data set, split or column.
    """

    def __init__(
        self,
        name: str,
        *,
        subset: str | None = None,
        split: str = "train",
        image_column: str = "image",
        caption_column: str | Sequence[str] | None = "caption",
        label_column: str | None = None,
    ):
        single = isinstance(caption_column, str)
        self._captions = (caption_column,) if single else tuple(caption_column or ())
        self._image, self._label = image_column, label_column
        self.description = f"data set {name}, split {split}"
        self.problems: dict[str, int] = {}
        rows = _load(name, subset, split)
        labels = [] if label_column is None else [label_column]
        check_columns(name, rows.column_names, [image_column, *self._captions, *labels])
        if not len(rows):
            raise ValueError(f"{name}: split {split!r} has no rows")
        self._rows = _light(rows, image_column, {image_column, *self._captions, *labels})
        self._texts = self._rows.remove_columns(image_column)
        self._classes = getattr(rows.features.get(label_column), "names", None)

    def __len__(self) -> int:
        return len(self._rows)

    def groups(self) -> list[int]:
        return even_groups(len(self))

    def read(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        key = f"{index:08d}"
        try:
            row = self._rows[index]
        except (pa.ArrowInvalid, ValueError) as error:
            raise BadSample("damaged row", key, str(error)) from error
        image = _bytes(row.pop(self._image), key)
        captions = tuple(text for name in self._captions for text in clean_captions(row.pop(name)))
        label = self._class_name(row.pop(self._label)) if self._label else None
        meta = {name: value for name, value in row.items() if isinstance(value, Scalar)}
        if label is not None:
            meta["cls"] = label
        return Sample(key, image, captions or self._class_caption(label), meta)

    def place(self, index: int) -> str:
        return self.description

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{len(self)}\t{self._rows.features}\t{self._captions}\n".encode())
        for index in range(0, len(self), max(1, len(self) // _FINGERPRINTED)):
            digest.update(json.dumps(self._texts[index], default=str).encode())
        return digest.hexdigest()

    def _class_name(self, value: Any) -> Scalar:
        if self._classes is not None and isinstance(value, int):
            return self._classes[value] if 0 <= value < len(self._classes) else None
        return value if isinstance(value, Scalar) else None

    def _class_caption(self, label: Scalar) -> tuple[str, ...]:
        return (str(label),) if not self._captions and label is not None else ()


def _load(name: str, subset: str | None, split: str) -> Any:
    """One split as a `datasets.Dataset`."""
    try:
        import datasets
        from datasets import exceptions
    except ImportError:
        raise ValueError(
            f"{name}: data sets of the Hugging Face library need it installed: "
            "pip install 'multimodal[hub]'"
        ) from None
    try:
        if not any((Path(name) / file).is_file() for file in SAVED):
            return datasets.load_dataset(name, subset, split=split)
        saved = datasets.load_from_disk(name)
    except ConnectionError as error:
        raise ValueError(
            f"{name}: there is no such folder, the data set is not in the cache, and the hub "
            f"cannot be reached ({error}); check the name, fetch it once where there is a network, "
            "or give a folder that save_to_disk wrote"
        ) from error
    except (OSError, ValueError, exceptions.DatasetsError) as error:
        raise ValueError(f"{name}: cannot be opened as a data set: {error}") from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise ValueError(f"{name}: no split {split!r}; it has {', '.join(map(str, saved))}")
    return saved[split]


def _light(rows: Any, image: str, needed: set[str]) -> Any:
    """The needed columns and those with scalars, with pictures as they are stored."""
    import datasets

    if isinstance(rows.features[image], datasets.Image):
        rows = rows.cast_column(image, datasets.Image(decode=False))
    scalars = [name for name, kind in rows.features.items() if _is_scalar(kind)]
    return rows.select_columns([c for c in rows.column_names if c in needed or c in scalars])


def _is_scalar(feature: Any) -> bool:
    kind = str(getattr(feature, "dtype", ""))
    return kind.startswith(("int", "uint", "float", "bool", "string", "large_string"))


def _bytes(picture: Any, key: str) -> bytes:
    """A picture's bytes, from the row or from the file that it names."""
    path = picture
    if isinstance(picture, dict):
        path, picture = picture.get("path"), picture.get("bytes")
    if isinstance(picture, bytes) and picture:
        return picture
    if isinstance(path, str) and os.path.isabs(path):
        return read_file(path, key)
    raise BadSample("no image", key)

"""Columns of an embedding folder's rows: our own, and those of the samples' metadata."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from multimodal.data.source import Scalar


def metadata_table(
    keys: Sequence[str],
    places: Sequence[str],
    captions: Sequence[str | None],
    similarity: Sequence[float | None],
    metas: Sequence[dict[str, Scalar]],
) -> pa.Table:
    """Table with a row for each sample.

    Columns are `image_path` and `key` (both the sample's key), `caption`, `place` (its shard, table
    or folder), `similarity` (cosine of picture and caption), and the metadata, null where a sample
    lacks it. A metadata field with one of those names gets `meta_` before it.
    """
    own = {
        "image_path": _column(keys),
        "caption": _column([caption or "" for caption in captions]),
        "key": _column(keys),
        "place": _column(places),
        "similarity": pa.array(similarity, pa.float32()),
    }
    fields = sorted({field for meta in metas for field in meta})
    further = {
        f"meta_{field}" if field in own else field: _column([meta.get(field) for meta in metas])
        for field in fields
    }
    return pa.table({**own, **further})


def _column(values: Sequence[Scalar]) -> pa.Array:
    """Values as they are where Arrow has one type for them, else as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pa.array([None if v is None else float(v) for v in values])
    try:
        if kinds == {str} or len(kinds) > 1:
            return pa.array([None if v is None else plain_text(v) for v in values], pa.string())
        return pa.array(values)
    except OverflowError:  # JSON has integers of any size
        return pa.array([None if v is None else str(v) for v in values], pa.string())


def plain_text(value: Scalar) -> str:
    """Text that Arrow takes: a file name that is not UTF-8 holds lone surrogates."""
    return str(value).encode("utf-8", "replace").decode("utf-8")

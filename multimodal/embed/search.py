"""Exact search in an embedding folder with numpy alone: files are mapped and read once, in order.

One pass costs what reading the vectors costs, so put all queries into one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from multimodal.embed.format import Manifest, metadata_file, read_manifest, vector_file

_CHUNK_ROWS = 16_384


@dataclass(frozen=True)
class Row:
    """A row that was found."""

    score: float
    """Cosine similarity to the query."""
    metadata: dict[str, Any]
    """Its columns, such as `image_path` and `caption`."""

    def as_dict(self) -> dict[str, Any]:
        """The score and the columns as one object."""
        return {"score": self.score, **self.metadata}


def search(
    folder: Path | str,
    queries: ArrayLike,
    k: int = 10,
    *,
    fingerprint: str,
    kind: Literal["image", "text"] = "image",
) -> list[list[Row]]:
    """Find the rows whose vectors have the highest cosine similarity.

    Args:
        folder: written by `export`.
        queries: float [Q, D]; scaled to unit length here, so sums of embeddings may be given.
        k: rows for each query; fewer come back when the folder has fewer.
        fingerprint: of the model that made the queries.
        kind: whether to compare with the pictures or with the captions.

    Returns:
        For each query its rows, best first; of equal scores the earlier row.

    Raises:
        ValueError: when the folder was made by another model, is not complete or was changed, or
            when queries have the wrong shape, are 0 or not finite.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    _check(folder, manifest, fingerprint)
    if k < 1:
        raise ValueError(f"k={k}; ask for at least 1 row")
    units = _unit_length(queries, manifest.dim)
    scores = np.empty((len(units), 0), np.float32)
    rows = np.empty((len(units), 0), np.int64)
    for start, vectors in _chunks(folder, manifest, kind):
        found = np.arange(start, start + len(vectors), dtype=np.int64)
        scores = np.concatenate([scores, units @ vectors.T], axis=1)
        rows = np.concatenate([rows, np.broadcast_to(found, (len(units), len(found)))], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores = np.take_along_axis(scores, best, axis=1)
        rows = np.take_along_axis(rows, best, axis=1)
    metadata = _metadata(folder, manifest, np.unique(rows))
    return [
        [Row(score, metadata[row]) for score, row in zip(*pair, strict=True)]
        for pair in zip(scores.tolist(), rows.tolist(), strict=True)
    ]


def _check(folder: Path, manifest: Manifest, fingerprint: str) -> None:
    if manifest.model_fingerprint != fingerprint:
        raise ValueError(
            f"{folder} was made by a model with fingerprint {manifest.model_fingerprint[:12]} "
            f"(from {manifest.model_path!r}), and the query by one with {fingerprint[:12]}: their "
            "vectors cannot be compared; use that model, or export again"
        )
    if not manifest.complete:
        raise ValueError(f"{folder} is not complete; run the same `multimodal embed` again")


def _unit_length(queries: ArrayLike, dim: int) -> np.ndarray:
    queries = np.asarray(queries, dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ValueError(f"queries have shape {queries.shape}; the folder needs [Q, {dim}]")
    length = np.linalg.norm(queries, axis=1, keepdims=True)
    if not (np.isfinite(length) & (length > 0)).all():
        raise ValueError("a query is 0 or not finite; it has no direction to search in")
    return queries / length


def _chunks(
    folder: Path, manifest: Manifest, kind: Literal["image", "text"]
) -> Iterator[tuple[int, np.ndarray]]:
    """Number of the first row, and float32 [n, D] rows."""
    first = 0
    for part in manifest.parts:
        if not part.rows:
            continue
        path = folder / vector_file(kind, part.name)
        vectors = _load(path)
        if vectors is None or vectors.shape != (part.rows, manifest.dim):
            raise ValueError(
                f"{path} is missing, damaged or not [{part.rows}, {manifest.dim}] as the manifest "
                "says; run `multimodal embed` again, which repairs it"
            )
        for start in range(0, part.rows, _CHUNK_ROWS):
            chunk = vectors[start : start + _CHUNK_ROWS].astype(np.float32)
            yield first + start, chunk
        first += part.rows


def _load(path: Path) -> np.ndarray | None:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None


def _metadata(folder: Path, manifest: Manifest, rows: np.ndarray) -> dict[int, dict[str, Any]]:
    """Columns of the rows, which are sorted; only files that hold one of them are read."""
    result = {}
    first = 0
    for part in manifest.parts:
        inside = rows[(rows >= first) & (rows < first + part.rows)]
        if len(inside):
            table = pq.read_table(folder / metadata_file(part.name)).take(inside - first)
            result.update(zip(inside.tolist(), table.to_pylist(), strict=True))
        first += part.rows
    return result

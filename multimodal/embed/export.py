"""From a source to an embedding folder: in parts, resumable, by any number of ranks.

Part p holds the samples p * R to (p + 1) * R of the source, whoever writes it, and batches start
anew with each part. So the files do not depend on the number of ranks, nor on how often the work
was interrupted. A sample that cannot be read leaves no row anywhere and is listed in
`errors.parquet`. The text of a sample is its first caption; one without captions is kept with the
empty text and no similarity.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from multimodal.data.source import Scalar, Skip, Source
from multimodal.distributed import barrier, on_main, rank, world_size
from multimodal.embed.format import (
    ERRORS_FILE,
    MANIFEST_FILE,
    Dtype,
    Manifest,
    Part,
    PartRecord,
    Skipped,
    metadata_file,
    part_name,
    read_manifest,
    read_record,
    record_file,
    vector_file,
    write_record,
)
from multimodal.embed.metadata import metadata_table, plain_text
from multimodal.files import file_hash, write_atomically
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)
_SAME_TO_RESUME = (
    "model_fingerprint",
    "source_fingerprint",
    "samples",
    "dtype",
    "rows_per_part",
)


class _Rows(NamedTuple):
    """Vectors, metadata and left-out samples of one part."""

    image: np.ndarray
    text: np.ndarray
    metadata: pa.Table
    skipped: list[Skipped]


def export(
    pretrained: Pretrained,
    source: Source,
    out: Path | str,
    *,
    model_path: str = "",
    dtype: Dtype = "float16",
    rows_per_part: int = 10_000,
    batch_size: int = 64,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Write unit-length embeddings of a source's pictures and first captions, with metadata.

    Call it on all ranks. Finished parts that are already there are kept; on a complete folder
    nothing is done. The layout is described in `format`.

    Args:
        pretrained: the model.
        source: what to embed.
        out: the folder.
        model_path: recorded, so that `search` can find the model again.
        dtype: number format of the vectors.
        rows_per_part: samples in a part: what is held in memory, and what a kill may cost.
        batch_size: pictures encoded at once.
        workers: loader processes of each rank.
        progress: called with the number of samples done since the last call, by each rank.

    Returns:
        The manifest of the complete folder.

    Raises:
        ValueError: when the folder holds other embeddings or foreign `.npy` files, or when no
            sample can be read.
    """
    out = Path(out)
    bias = pretrained.logit_bias()
    manifest = Manifest(
        model_path=model_path,
        model_fingerprint=pretrained.fingerprint(),
        logit_scale=pretrained.logit_scale(),
        logit_bias=bias,
        source=source.description,
        source_fingerprint=source.fingerprint(),
        samples=len(source),
        dim=pretrained.model.embed_dim,
        dtype=dtype,
        rows_per_part=rows_per_part,
        complete=False,
    )
    if on_main(lambda: _prepare(out, manifest)):
        log.info("%s is complete already", out)
        return read_manifest(out)
    for number in range(rank(), manifest.part_count(), world_size()):
        indices = range(number * rows_per_part, min((number + 1) * rows_per_part, len(source)))
        name = part_name(number)
        if not _is_finished(out, name):
            rows = _encode(pretrained, source, indices, dtype, batch_size, workers, progress)
            _write_part(out, name, rows)
            log.info("%s: part %d of %d", out, number + 1, manifest.part_count())
        elif progress is not None:
            progress(len(indices))
    barrier()
    return on_main(lambda: _finish(out, manifest))


def _prepare(out: Path, manifest: Manifest) -> bool:
    """Make or check the folder; True when it is complete already, and as it was written."""
    begun = (out / MANIFEST_FILE).is_file()
    complete = begun and _check_same(out, manifest).complete
    complete = complete and all(
        _is_finished(out, part_name(number)) for number in range(manifest.part_count())
    )
    expected = {
        vector_file(kind, part_name(number))
        for kind in ("image", "text")
        for number in range(manifest.part_count())
    }
    found = {path.relative_to(out).as_posix() for path in out.rglob("*.npy")}
    if foreign := sorted(found - expected if begun else found):
        raise ValueError(
            f"{out} holds {', '.join(foreign[:3])}, which other programs would read as embeddings "
            "of this export; choose an empty folder"
        )
    if not begun:
        for folder in ("img_emb", "text_emb", "metadata", "parts"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        write_record(out / MANIFEST_FILE, manifest)
    return complete


def _check_same(out: Path, manifest: Manifest) -> Manifest:
    """The manifest in the folder, which must be that of the same export."""
    earlier = read_manifest(out)
    for field in _SAME_TO_RESUME:
        old, new = getattr(earlier, field), getattr(manifest, field)
        if old != new:
            raise ValueError(
                f"{out} was begun with {field}={old}, and this export has {new}; continue with "
                "the same model, data and settings, or choose another folder"
            )
    return earlier


def _is_finished(out: Path, name: str) -> bool:
    if not (out / record_file(name)).is_file():
        return False
    files = read_record(out, name).part.files.items()
    return all((out / f).is_file() and file_hash(out / f) == digest for f, digest in files)


def _encode(
    pretrained: Pretrained,
    source: Source,
    indices: range,
    dtype: Dtype,
    batch_size: int,
    workers: int,
    progress: Callable[[int], None] | None,
) -> _Rows:
    keys: list[str] = []
    places: list[str] = []
    captions: list[str | None] = []
    metas: list[dict[str, Scalar]] = []
    image = torch.empty(len(indices), pretrained.model.embed_dim)
    skipped: list[Skipped] = []
    for batch, features in pretrained.encode_source(
        source, indices, batch_size=batch_size, workers=workers
    ):
        image[len(keys) : len(keys) + len(features)] = features
        keys += batch.keys
        places += map(source.place, batch.indices)
        captions += [texts[0] if texts else None for texts in batch.captions]
        metas += batch.metas
        skipped += [_skipped(skip) for skip in batch.skipped]
        if progress is not None:
            progress(len(batch.keys) + len(batch.skipped))
    image = image[: len(keys)]
    text = pretrained.encode_text([caption or "" for caption in captions])
    similarity = [
        None if caption is None else value
        for caption, value in zip(captions, (image * text).sum(dim=1).tolist(), strict=True)
    ]
    table = metadata_table(keys, places, captions, similarity, metas)
    return _Rows(image.numpy().astype(dtype), text.numpy().astype(dtype), table, skipped)


def _skipped(skip: Skip) -> Skipped:
    return Skipped(
        index=skip.index,
        key=plain_text(skip.key),
        place=plain_text(skip.place),
        reason=plain_text(skip.reason),
        detail=plain_text(skip.detail),
    )


def _write_part(out: Path, name: str, rows: _Rows) -> None:
    """Write the files of a part, and last the record that says it is finished."""
    image, text = vector_file("image", name), vector_file("text", name)
    files = []
    if len(rows.image):
        _save_vectors(out / image, rows.image)
        _save_vectors(out / text, rows.text)
        metadata = metadata_file(name)
        write_atomically(out / metadata, lambda path: pq.write_table(rows.metadata, path))
        files = [image, text, metadata]
    digests = {file: file_hash(out / file) for file in files}
    part = Part(name=name, rows=len(rows.image), files=digests)
    write_record(out / record_file(name), PartRecord(part=part, skipped=rows.skipped))


def _save_vectors(path: Path, vectors: np.ndarray) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # np.save would add .npy to the temporary name
            np.save(file, vectors)

    write_atomically(path, write)


def _finish(out: Path, manifest: Manifest) -> Manifest:
    records = [read_record(out, part_name(n)) for n in range(manifest.part_count())]
    skipped = [entry for record in records for entry in record.skipped]
    complete = manifest.model_copy(
        update={
            "complete": True,
            "parts": [record.part for record in records],
            "skipped": len(skipped),
        }
    )
    _write_errors(out / ERRORS_FILE, skipped)
    if not complete.rows():
        raise ValueError(
            f"none of {manifest.samples} samples of {manifest.source} can be read, so there is "
            f"nothing to export; {out / ERRORS_FILE} says why"
        )
    if skipped:
        reasons = Counter(entry.reason for entry in skipped)
        log.warning("%d samples were left out: %s", len(skipped), dict(reasons))
    write_record(out / MANIFEST_FILE, complete)
    log.info("%s is complete: %d rows", out, complete.rows())
    return complete


def _write_errors(path: Path, skipped: Iterable[Skipped]) -> None:
    texts = ("key", "place", "reason", "detail")
    schema = pa.schema([("index", pa.int64()), *((name, pa.string()) for name in texts)])
    table = pa.Table.from_pylist([entry.model_dump() for entry in skipped], schema=schema)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))

"""The embedding folder: what `export` writes, `search` reads, and other programs open.

    img_emb/img_emb_00000.npy             [rows, dim], unit length, float16 or float32
    text_emb/text_emb_00000.npy           the same rows
    metadata/metadata_00000.parquet       the same rows: see `export`
    parts/00000.json                      written last: this part is finished
    manifest.json                         which model and data; the finished parts; complete or not
    errors.parquet                        the samples that were left out

It is the layout of clip-retrieval, autofaiss and embedding-reader. Those read every `.npy` below
`img_emb` in order of name, and join by position.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from multimodal.files import write_atomically

MANIFEST_FILE = "manifest.json"
ERRORS_FILE = "errors.parquet"
Dtype = Literal["float16", "float32"]
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


R = TypeVar("R", bound=_Record)


class Skipped(_Record):
    """A sample that was left out."""

    index: Count
    """Number in the source."""
    key: str
    place: str
    """Shard, table or folder."""
    reason: str
    detail: str


class Part(_Record):
    """A finished part."""

    name: str
    """Five digits."""
    rows: Count
    """One for each sample that could be read."""
    files: dict[str, str]
    """SHA-256 by path; empty when every sample of the part was left out."""


class PartRecord(_Record):
    """What `parts/` says about a part."""

    part: Part
    skipped: list[Skipped]


class Manifest(_Record):
    """What an embedding folder holds."""

    format: Literal["multimodal-embeddings"] = "multimodal-embeddings"
    version: Literal[1] = 1
    model_path: str
    """Where the model was loaded from."""
    model_fingerprint: str
    """`Pretrained.fingerprint()`: vectors of other weights must not be mixed with these."""
    logit_scale: float
    logit_bias: float | None
    source: str
    source_fingerprint: str
    samples: Count
    dim: Count
    dtype: Dtype
    normalised: Literal[True] = True
    rows_per_part: Annotated[int, Field(gt=0)]
    """Samples of the source in a part; those left out make it shorter."""
    complete: bool
    parts: list[Part] = []
    """In order; filled when the folder is complete."""
    skipped: Count = 0
    """Samples left out; `errors.parquet` lists them."""

    def part_count(self) -> int:
        """Number of parts when complete."""
        return -(-self.samples // self.rows_per_part)

    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


def part_name(number: int) -> str:
    """Name of a part; readers sort by it as text, so its width is fixed."""
    return f"{number:05d}"


def vector_file(kind: Literal["image", "text"], part: str) -> str:
    """Path of a part's vectors, relative to the folder."""
    folder = {"image": "img_emb", "text": "text_emb"}[kind]
    return f"{folder}/{folder}_{part}.npy"


def metadata_file(part: str) -> str:
    """Path of a part's metadata, relative to the folder."""
    return f"metadata/metadata_{part}.parquet"


def record_file(part: str) -> str:
    """Path of a part's record, relative to the folder."""
    return f"parts/{part}.json"


def read_manifest(folder: Path | str) -> Manifest:
    """Read what a folder holds.

    Raises:
        ValueError: when it is not an embedding folder, or of another version.
    """
    return _read(Path(folder) / MANIFEST_FILE, Manifest)


def read_record(folder: Path, part: str) -> PartRecord:
    """Read the record of a finished part; see `read_manifest`."""
    return _read(folder / record_file(part), PartRecord)


def write_record(path: Path, record: Manifest | PartRecord) -> None:
    """Write a manifest or a part's record."""
    text = json.dumps(record.model_dump(), indent=2) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def _read(path: Path, record: type[R]) -> R:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, so {path.parent} is not a folder written by `multimodal embed`; "
            "give one, or run `multimodal embed` first"
        )
    try:
        return record.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{path} cannot be used: {'; '.join(wrong)}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; export again") from None

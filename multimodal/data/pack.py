"""From any source to tar shards with a card that says what they hold.

Shard s holds the samples [s * n, (s + 1) * n) of the source, each under the key that img2dataset
would give it: five digits of shard and at least four of place. Pictures are kept byte for byte.
Equal sources give equal bytes.
"""

from __future__ import annotations

import io
import json
import logging
import os
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from multimodal.data.source import NO_CAPTION, BadSample, Sample, Source
from multimodal.files import write_atomically

SAMPLES_PER_SHARD = 10_000
_STATE = "pack.json"
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
log = logging.getLogger(__name__)


@dataclass
class Packed:
    """State of a pack, kept as `pack.json` in its folder.

    Attributes:
        source: Description of the source.
        fingerprint: Fingerprint of the source.
        samples_per_shard: Places in a shard.
        complete: Whether every shard is there.
        samples: Number of samples in each shard.
        skipped: Samples left out, by reason.
    """

    source: str
    fingerprint: str
    samples_per_shard: int
    complete: bool = False
    samples: list[int] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)


def pack(
    source: Source,
    out: str | os.PathLike[str],
    *,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    progress: Callable[[int], None] | None = None,
) -> Packed:
    """Write a source as `{00000..}.tar`, a `README.md` and `pack.json`.

    A call that was stopped is taken up at the first shard that was not finished; a call for a
    finished pack changes nothing.

    Args:
        source: What is packed.
        out: The folder; it is made if it is not there.
        samples_per_shard: Places in a shard.
        progress: Called with the number of source samples that each step dealt with.

    Raises:
        ValueError: when the folder holds something else, or no sample can be used.
    """
    out = Path(out)
    fresh = Packed(source.description, source.fingerprint(), samples_per_shard)
    state = _resumed(out, fresh)
    total = len(source)
    if state.complete:
        log.info("%s: already packed, %d samples", out, sum(state.samples))
        return state
    out.mkdir(parents=True, exist_ok=True)
    _save_state(out, state)
    advance = progress or (lambda count: None)
    advance(min(total, len(state.samples) * samples_per_shard))
    for start in range(len(state.samples) * samples_per_shard, total, samples_per_shard):
        indices = range(start, min(total, start + samples_per_shard))
        _write_shard(source, out, indices, state, advance)
        _save_state(out, state)
    if not sum(state.samples):
        raise ValueError(f"{source.description}: no sample can be packed: {state.skipped}")
    state.complete = True
    write_atomically(
        out / "README.md", lambda path: path.write_text(_card(state), encoding="utf-8")
    )
    _save_state(out, state)
    return state


def _resumed(out: Path, fresh: Packed) -> Packed:
    """The state found in the folder, if it is of the same pack, else the fresh one.

    Raises:
        ValueError: when the folder holds anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return fresh
    try:
        found = Packed(**json.loads((out / _STATE).read_bytes()))
    except (OSError, ValueError, TypeError):
        raise ValueError(
            f"{out} is not empty and holds no pack; choose a new folder for the shards"
        ) from None
    if found.fingerprint != fresh.fingerprint:
        raise ValueError(
            f"{out} holds a pack of {found.source}, or of the same place before it changed; choose "
            "a new folder, or remove this one"
        )
    if found.samples_per_shard != fresh.samples_per_shard:
        raise ValueError(
            f"{out} was begun with samples_per_shard={found.samples_per_shard}, not "
            f"{fresh.samples_per_shard}; use the same number or a new folder"
        )
    return found


def _write_shard(
    source: Source,
    out: Path,
    indices: range,
    state: Packed,
    advance: Callable[[int], None],
) -> None:
    number = len(state.samples)
    digits = max(4, len(str(state.samples_per_shard - 1)))
    skipped = Counter(state.skipped)
    final = out / f"{number:05d}.tar"
    temporary = out / f".{final.name}.part"
    count = 0
    with open(temporary, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as shard:
            for place, index in enumerate(indices):
                try:
                    members = _members(source.read(index))
                except BadSample as error:
                    log.warning("not packed: %s", error)
                    skipped[error.reason] += 1
                else:
                    count += 1
                    for extension, content in members.items():
                        info = tarfile.TarInfo(f"{number:05d}{place:0{digits}d}.{extension}")
                        info.size = len(content)
                        shard.addfile(info, io.BytesIO(content))
                advance(1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, final)
    state.samples.append(count)
    state.skipped = dict(skipped)


def _members(sample: Sample) -> dict[str, bytes]:
    """File endings and contents for one sample.

    One caption is a text file. Of several, the first is the text file, for tools that know no more,
    and the JSON record has them all.

    Raises:
        BadSample: when it has no picture of a known format, or neither caption nor metadata.
    """
    image = sample.image or b""
    members = {_extension(image, sample.key): image}
    if not sample.captions and "cls" not in sample.meta:
        raise BadSample(NO_CAPTION, sample.key)
    record: dict[str, object] = {"key": sample.key, **sample.meta}
    if sample.captions:
        members["txt"] = sample.captions[0].encode("utf-8", "replace")
    if len(sample.captions) > 1:
        record["captions"] = list(sample.captions)
    if "cls" in sample.meta:
        members["cls"] = str(record.pop("cls")).encode("utf-8", "replace")
    members["json"] = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace")
    return members


def _extension(image: bytes, key: str) -> str:
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    for magic, extension in _MAGIC:
        if image.startswith(magic):
            return extension
    raise BadSample("not an image", key, f"starts with {image[:8]!r}")


def _save_state(out: Path, state: Packed) -> None:
    text = json.dumps(asdict(state), indent=1)
    write_atomically(out / _STATE, lambda path: path.write_text(text, encoding="utf-8"))


def _card(state: Packed) -> str:
    left_out = "".join(f"\n- left out: {n} x {reason}" for reason, n in state.skipped.items())
    return f"""# Image-text shards

- samples: {sum(state.samples)}
- shards: {len(state.samples)}, of up to {state.samples_per_shard} samples
- source: {state.source}
- fingerprint of the source: {state.fingerprint}{left_out}

The layout is WebDataset's: each sample is a picture `KEY.jpg` (or `.png`, `.webp`, ...), its
caption `KEY.txt` and its metadata `KEY.json`, with a class in `KEY.cls` where there is one. The
record has the sample's name in the source as `key`, and all `captions` where there are several.

To train on it: `data.train.kind=shards data.train.path=<this folder>`.
"""

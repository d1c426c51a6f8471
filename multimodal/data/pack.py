"""From any source to tar shards with a card that says what they hold.

Workers read the samples in order and encode their pictures anew where that is asked for; this
process alone writes. So the bytes depend on the source and the settings only, and a pack that was
stopped at any moment goes on at the sample that was noted last.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from multimodal.data.loader import Reading, in_workers
from multimodal.data.recode import Recode, ending_of, recode
from multimodal.data.shard_writer import ShardWriter, Written
from multimodal.data.source import NO_CAPTION, BadSample, Sample, Source
from multimodal.data.splits import REST, check_splits, split_of
from multimodal.files import write_atomically

SAMPLES_PER_SHARD = 10_000
_STATE = "pack.json"
_PIECE = 32
"""Samples that a worker hands over at once."""
_NOTED_EVERY = 1024
"""Samples after which the state is written; at most so many are done again after a stop."""
log = logging.getLogger(__name__)

Settings = dict[str, Any]


@dataclass
class Packed:
    """State of a pack, kept as `pack.json` in its folder.

    Attributes:
        source: Description of the source.
        fingerprint: Fingerprint of the source.
        settings: What decides the bytes besides the source.
        complete: Whether every shard is there.
        position: Number of source samples dealt with.
        splits: What was written for each split; one without a name if there are no splits.
        skipped: Samples left out, by reason.
    """

    source: str
    fingerprint: str
    settings: Settings
    splits: dict[str, Written]
    complete: bool = False
    position: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(sum(split.counts) for split in self.splits.values())

    @property
    def shards(self) -> int:
        return sum(len(split.counts) for split in self.splits.values())


def pack(
    source: Source,
    out: str | os.PathLike[str],
    *,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    pictures: Recode | None = None,
    splits: Mapping[str, float] | None = None,
    workers: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Packed:
    """Write a source as `{00000..}.tar` with their indices, a `README.md` and `pack.json`.

    A call that was stopped is taken up where it was; a call for a finished pack changes nothing.

    Args:
        source: What is packed.
        out: The folder; it is made if it is not there.
        samples_per_shard: Samples in every shard but the last.
        pictures: How pictures are stored; None keeps them byte for byte.
        splits: Share of the samples by name of the split. Each split is a sub-folder, and `train`
            has the rest. A hash of the sample's key decides, so a sample stays in its split when
            others come or go.
        workers: Processes that read and encode; 0 does it in this one.
        progress: Called with the number of source samples that each step dealt with.

    Raises:
        ValueError: when the folder holds something else, or no sample can be used.
    """
    out = Path(out)
    pictures, splits = pictures or Recode(), dict(splits or {})
    check_splits(splits)
    settings = {"samples_per_shard": samples_per_shard, **asdict(pictures), "splits": splits}
    names = [*splits, REST] if splits else [""]
    fresh = Packed(
        source.description, source.fingerprint(), settings, {name: Written() for name in names}
    )
    state = _resumed(out, fresh)
    if state.complete:
        log.info("%s: already packed, %d samples", out, state.samples)
        return state
    out.mkdir(parents=True, exist_ok=True)
    _save_state(out, state)
    writers = {
        name: ShardWriter(out / name, samples_per_shard, written)
        for name, written in state.splits.items()
    }
    try:
        _write_all(source, out, state, writers, pictures, workers, progress or (lambda count: None))
    finally:
        for writer in writers.values():
            writer.abandon()
    return state


def _write_all(
    source: Source,
    out: Path,
    state: Packed,
    writers: dict[str, ShardWriter],
    pictures: Recode,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    def note() -> None:
        for writer in writers.values():
            writer.sync()
        _save_state(out, state)

    advance(state.position)
    noted = state.position
    skipped = Counter(state.skipped)
    reading = Reading(source, workers)
    starts = range(state.position, len(source), _PIECE)
    for piece in in_workers(_Pieces(reading, pictures), reading, starts, workers):
        for item in piece:
            if isinstance(item, _LeftOut):
                log.warning("not packed: %s", item.text)
                skipped[item.reason] += 1
            else:
                writers[split_of(item.key, state.settings["splits"])].add(item.members)
        state.position += len(piece)
        state.skipped = dict(skipped)
        if state.position - noted >= _NOTED_EVERY:
            note()
            noted = state.position
        advance(len(piece))
    if not state.samples:
        raise ValueError(f"{source.description}: no sample can be packed: {state.skipped}")
    note()
    for name, writer in writers.items():
        writer.finish()
        if not writer.written.finished:
            log.warning("%s: no sample fell to the split %s", out, name)
    state.complete = True
    write_atomically(
        out / "README.md", lambda path: path.write_text(_card(state), encoding="utf-8")
    )
    _save_state(out, state)


# --- what workers do -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packable:
    key: str
    members: dict[str, bytes]


@dataclass(frozen=True)
class _LeftOut:
    reason: str
    text: str


class _Pieces(Dataset):
    """Map from the number of a first sample to what is to be written for it and those after it."""

    def __init__(self, reading: Reading, pictures: Recode):
        self._reading = reading
        self._pictures = pictures

    def __getitem__(self, start: int) -> list[_Packable | _LeftOut]:
        end = min(start + _PIECE, len(self._reading.source))
        return [self._prepared(index) for index in range(start, end)]

    def _prepared(self, index: int) -> _Packable | _LeftOut:
        try:
            sample = self._reading.read(index)
            return _Packable(sample.key, _members(sample, self._pictures))
        except BadSample as error:
            return _LeftOut(error.reason, str(error))


def _members(sample: Sample, pictures: Recode) -> dict[str, bytes]:
    """File endings and contents for one sample.

    One caption is a text file. Of several, the first is the text file, for tools that know no more,
    and the JSON record has them all.

    Raises:
        BadSample: when it has no sound picture, or neither caption nor class.
    """
    if not sample.captions and sample.meta.get("cls") is None:
        raise BadSample(NO_CAPTION, sample.key)
    try:
        image = recode(sample.image or b"", pictures)
        members = {ending_of(image): image}
    except BadSample as error:
        raise BadSample(error.reason, sample.key, error.detail) from error
    record: dict[str, object] = {"key": sample.key, **sample.meta}
    if sample.captions:
        members["txt"] = sample.captions[0].encode("utf-8", "replace")
    if len(sample.captions) > 1:
        record["captions"] = list(sample.captions)
    if sample.meta.get("cls") is not None:
        members["cls"] = str(record.pop("cls")).encode("utf-8", "replace")
    members["json"] = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace")
    return members


# --- state and card ------------------------------------------------------------------------------


def _resumed(out: Path, fresh: Packed) -> Packed:
    """The state found in the folder, if it is of the same pack, else the fresh one.

    Raises:
        ValueError: when the folder holds anything else.
    """
    begun = f"{_STATE}.tmp"  # all that is there after a stop while the first state was written
    if not out.exists() or (out.is_dir() and all(p.name == begun for p in out.iterdir())):
        return fresh
    try:
        stored = json.loads((out / _STATE).read_bytes())
        splits = {name: Written(**split) for name, split in stored["splits"].items()}
        found = Packed(**(stored | {"splits": splits}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{out} is not empty and holds no pack; choose a new folder for the shards"
        ) from None
    if found.fingerprint != fresh.fingerprint:
        raise ValueError(
            f"{out} holds a pack of {found.source}, or of the same place before it changed; choose "
            "a new folder, or remove this one"
        )
    for name, value in fresh.settings.items():
        if found.settings.get(name) != value:
            raise ValueError(
                f"{out} was begun with {name}={found.settings.get(name)}, not {value}; use the "
                "same or a new folder"
            )
    return found


def _save_state(out: Path, state: Packed) -> None:
    text = json.dumps(asdict(state), indent=1)
    write_atomically(out / _STATE, lambda path: path.write_text(text, encoding="utf-8"))


def _card(state: Packed) -> str:
    left_out = "".join(f"\n- left out: {n} x {reason}" for reason, n in state.skipped.items())
    splits = "".join(
        f"\n- {name}: {sum(split.counts)} samples in {len(split.counts)} shards"
        for name, split in state.splits.items()
        if name
    )
    settings = ", ".join(f"{k} {v}" for k, v in state.settings.items() if v)
    place = "<this folder>/<split>" if splits else "<this folder>"
    return f"""# Image-text shards

- samples: {state.samples}
- shards: {state.shards}{splits}
- settings: {settings}
- source: {state.source}
- fingerprint of the source: {state.fingerprint}{left_out}

The layout is WebDataset's: each sample is a picture `KEY.jpg` (or `.png`, `.webp`, ...), its
caption `KEY.txt` and its metadata `KEY.json`, with a class in `KEY.cls` where there is one. The
record has the sample's name in the source as `key`, and all `captions` where there are several.

To train on it: `data.train.kind=shards data.train.path={place}`.
"""

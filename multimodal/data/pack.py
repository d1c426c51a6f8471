"""From any source to tar shards with a card that says what they hold.

Workers read the samples in order and encode their pictures anew where that is asked for; this
process alone writes. So the bytes depend on the source and the settings only, and a pack that was
stopped at any moment goes on at the sample that was noted last.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from multimodal.data.left_out import LeftOut
from multimodal.data.loader import Reading, in_workers
from multimodal.data.recode import Recode, ending_of, recode
from multimodal.data.shard_writer import ShardWriter, Written
from multimodal.data.source import NO_CAPTION, BadSample, Sample, Skip, Source
from multimodal.data.splits import REST, check_splits, split_of
from multimodal.files import LOCK, Lock, write_atomically

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

    Samples that are left out are listed in `skipped.jsonl`.

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
        ValueError: when the folder holds something else, another process is writing to it, or no
            sample can be used.
    """
    out = Path(out)
    pictures, splits = pictures or Recode(), dict(splits or {})
    check_splits(splits)
    settings = {"samples_per_shard": samples_per_shard, **asdict(pictures), "splits": splits}
    names = [*splits, REST] if splits else [""]
    fresh = Packed(
        source.description, source.fingerprint(), settings, {name: Written() for name in names}
    )
    if (found := _resumed(out, fresh)).complete:
        log.info("%s: already packed, %d samples", out, found.samples)
        return found
    lock = Lock(out, str(out), "another folder")
    lock.sign()
    try:
        state = _resumed(out, fresh)  # as the one before has left it
        if not state.complete:
            _save_state(out, state)
            writing = _Writing(out, state)
            try:
                _write_all(source, state, writing, pictures, workers, progress or (lambda n: None))
            finally:
                writing.abandon()
    except BaseException:
        lock.release()
        raise
    lock.remove()
    if state.skipped:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in state.skipped.items())
        log.warning("%s: left out, and listed in skipped.jsonl: %s", out, reasons)
    return state


class _Writing:
    """What a pack writes: the shards of its splits, what was left out, and its state."""

    def __init__(self, out: Path, state: Packed):
        size = state.settings["samples_per_shard"]
        self._out, self._state = out, state
        self._writers = {n: ShardWriter(out / n, size, w) for n, w in state.splits.items()}
        self._left_out = LeftOut(out, sum(state.skipped.values()))

    def add(self, item: _Packable | Skip) -> None:
        if isinstance(item, _Packable):
            split = split_of(item.key, self._state.settings["splits"])
            self._writers[split].add(item.members)
            return
        log.warning("not packed: %s: %s", item.key, item.reason)
        self._left_out.add(item)
        counts = self._state.skipped
        counts[item.reason] = counts.get(item.reason, 0) + 1

    def note(self) -> None:
        """Bring all to the disk, and then the state that tells of it."""
        for file in (*self._writers.values(), self._left_out):
            file.sync()
        _save_state(self._out, self._state)

    def finish(self) -> None:
        out, state = self._out, self._state
        self.note()
        for name, writer in self._writers.items():
            writer.finish()
            if not writer.written.finished:
                log.warning("%s: no sample fell to the split %s; it has no folder", out, name)
        state.complete = True
        write_atomically(
            out / "README.md", lambda path: path.write_text(_card(state), encoding="utf-8")
        )
        _save_state(out, state)

    def abandon(self) -> None:
        """Let go of the files; what was noted of them stays."""
        for writer in self._writers.values():
            writer.abandon()
        self._left_out.close()


def _write_all(
    source: Source,
    state: Packed,
    writing: _Writing,
    pictures: Recode,
    workers: int,
    advance: Callable[[int], None],
) -> None:
    advance(state.position)
    noted = state.position
    reading = Reading(source, workers)
    starts = range(state.position, len(source), _PIECE)
    for piece in in_workers(_Pieces(reading, pictures), reading, starts, workers):
        for item in piece:
            writing.add(item)
        state.position += len(piece)
        if state.position - noted >= _NOTED_EVERY:
            writing.note()
            noted = state.position
        advance(len(piece))
    if not state.samples:
        raise ValueError(f"{source.description}: no sample can be packed: {state.skipped}")
    writing.finish()


# --- what workers do -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packable:
    key: str
    members: dict[str, bytes]


class _Pieces(Dataset):
    """Map from the number of a first sample to what is to be written for it and those after it."""

    def __init__(self, reading: Reading, pictures: Recode):
        self._reading = reading
        self._pictures = pictures

    def __getitem__(self, start: int) -> list[_Packable | Skip]:
        end = min(start + _PIECE, len(self._reading.source))
        return [self._prepared(index) for index in range(start, end)]

    def _prepared(self, index: int) -> _Packable | Skip:
        try:
            sample = self._reading.read(index)
            return _Packable(sample.key, _members(sample, self._pictures))
        except BadSample as error:
            place = self._reading.source.place(index)
            return Skip(error.key, place, error.reason, error.detail, index)


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
    begun = (LOCK, f"{_STATE}.tmp")  # all there is after a stop before the first state was written
    if not out.exists() or (out.is_dir() and all(p.name in begun for p in out.iterdir())):
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

"""Which samples a tar shard holds and where their parts lie; kept in a file beside the shard.

Samples whose parts are not all there, or are there twice, are left out and counted, and so is the
last one before a cut. A cut or damaged shard can thus lose samples, but never pairs a picture with
another sample's text. Samples whose parts do not stand side by side are read like any other, and
noted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multimodal.data.source import IMAGE_EXTENSIONS, NO_CAPTION, split_name
from multimodal.data.tar_scan import Finding, Findings, Member, Scan, scan_members
from multimodal.files import cache_folder

IMAGE, TEXT, RECORD, LABEL = range(4)
"""Rows of `Index.spans` for one sample."""
_KINDS = (IMAGE, TEXT, RECORD, LABEL)
FIELDS = dict.fromkeys(IMAGE_EXTENSIONS, IMAGE) | {"txt": TEXT, "json": RECORD, "cls": LABEL}
_UNSAFE = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(^|[/\\])\.\.([/\\]|$)")
"""Absolute names, and names that lead out of their folder, of Unix and of Windows."""
_HIDDEN = re.compile(r"(^|/)\.[^/]*$")
_VERSION = 3
LOST = (
    *("missing shard", "unreadable shard", "empty shard", "not a tar file"),
    *("truncated shard", "damaged shard", "data after the end of the shard"),
    "zeros for a part of the shard",
)
"""Reasons for a shard that is not there, or not there whole."""
APART = "parts that do not stand side by side"
"""Note on samples that webdataset, which joins neighbours only, would break."""


@dataclass(frozen=True)
class Index:
    """The usable samples of one shard.

    Attributes:
        names: UTF-8 keys one after the other, uint8 [total].
        ends: End of each key in `names`, int64 [samples].
        spans: Offset and size of picture, text, JSON and class, int64 [samples, 4, 2]; size -1
            where a part is missing.
        problems: What was left out, by reason, with the names of members or samples.
        notes: What is unusual and was kept.
    """

    names: np.ndarray
    ends: np.ndarray
    spans: np.ndarray
    problems: Findings
    notes: Findings

    def __len__(self) -> int:
        return len(self.ends)

    def key(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].tobytes().decode()


class Summary(NamedTuple):
    """What a source of many shards keeps of each.

    Attributes:
        samples: Number of usable samples.
        problems: As in `Index`.
        notes: As in `Index`.
        size: Bytes of the shard; 0 if it cannot be read.
        stored: Whether its index could be kept.
    """

    samples: int
    problems: Findings
    notes: Findings
    size: int
    stored: bool = True


def summarize(shard: Path) -> Summary:
    """Count a shard's samples, without reading the whole of its stored index if it has one.

    A shard that is not there or cannot be read has no samples and the problem that says so.
    """
    nothing, problems = Findings(), Findings()
    try:
        state = os.stat(shard)
        for place in _places(shard):
            if (about := _read_about(place, state)) is not None:
                return Summary(about["samples"], about["problems"], about["notes"], state.st_size)
        index, stored = _make_index(shard, state)
    except FileNotFoundError:
        problems.add("missing shard", [])
        return Summary(0, problems, nothing, 0)
    except OSError as error:
        problems.add("unreadable shard", [error.strerror or str(error)])
        return Summary(0, problems, nothing, 0)
    return Summary(len(index), index.problems, index.notes, state.st_size, stored)


def load_index(shard: Path) -> Index:
    """Index of a shard: from the file beside it or in the cache folder, else by a scan.

    A stored index counts only if the shard still has the size and time of change that it was made
    for.

    Raises:
        OSError: when the shard cannot be read.
    """
    state = os.stat(shard)
    for place in _places(shard):
        if (index := _read_stored(place, state)) is not None:
            return index
    return _make_index(shard, state)[0]


def _make_index(shard: Path, state: os.stat_result) -> tuple[Index, bool]:
    """A new index, and whether it could be stored."""
    index = scan(shard)
    return index, any(_store(place, index, state) for place in _places(shard))


def scan(shard: Path) -> Index:
    """Build the index of a shard from its headers."""
    problems, notes = Findings(), Findings()
    with open(shard, "rb", buffering=0) as file:
        found = scan_members(file.fileno(), problems)
    samples = _group(found, problems, notes)
    keys = [key.encode() for key in samples]
    spans = np.zeros((len(samples), len(_KINDS), 2), np.int64)
    spans[:, :, 1] = -1
    for row, parts in enumerate(samples.values()):
        for field, member in parts.items():
            spans[row, field] = member.offset, member.size
    return Index(
        names=np.frombuffer(b"".join(keys), np.uint8),
        ends=np.cumsum([len(key) for key in keys], dtype=np.int64),
        spans=spans,
        problems=problems,
        notes=notes,
    )


def _group(scan: Scan, problems: Findings, notes: Findings) -> dict[str, dict[int, Member]]:
    """Join members to samples by key, in the order of their first members.

    A key with two parts of one kind is left out: which text belongs to which picture is unknown.
    So is the key at which the shard is cut, since parts of it may be lost.
    """
    cut = None if scan.cut is None else split_name(scan.cut.removeprefix("./"))[0]
    samples: dict[str, dict[int, Member]] = {}
    doubled: set[str] = set()
    apart: dict[str, None] = {}
    last = ""
    for member in scan.members:
        name = member.name.removeprefix("./")
        key, extension = split_name(name)
        if reason := refusal(name, extension):
            problems.add(reason, [name])
            continue
        parts = samples.setdefault(key, {})
        if parts and key != last:
            apart[key] = None
        last = key
        if FIELDS[extension] in parts:
            doubled.add(key)
        parts[FIELDS[extension]] = member
    usable = {}
    if cut:
        problems.add("cut sample", [cut])
    for key, parts in samples.items():
        if key == cut:
            continue
        if fault := fault_of(parts, doubled=key in doubled):
            problems.add(fault, [key])
        else:
            usable[key] = parts
    for key in apart:
        if key in usable:
            notes.add(APART, [key])
    return usable


def fault_of(parts: Collection[int], *, doubled: bool) -> str | None:
    """Why members of one key are no sample; `doubled` when two of them are of one kind."""
    if doubled:
        return "duplicate key"
    if IMAGE not in parts:
        return "no image"
    return NO_CAPTION if len(parts) == 1 else None


def refusal(name: str, extension: str) -> str | None:
    """Why a member is no part of a sample."""
    if _UNSAFE.search(name):
        return "unsafe name"
    if _HIDDEN.search(name):
        return "hidden file"
    return None if extension in FIELDS else "unknown file type"


# --- the stored index ----------------------------------------------------------------------------


def _places(shard: Path) -> tuple[Path, Path]:
    """Beside the shard, and in the cache folder for shards in folders that are read only."""
    name = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:32]
    beside = shard.with_name(f"{shard.name}.index.npz")
    return beside, cache_folder() / f"{name}.index.npz"


def _stamp(state: os.stat_result) -> dict[str, int]:
    return {"version": _VERSION, "size": state.st_size, "mtime_ns": state.st_mtime_ns}


_UNREADABLE = (
    *(OSError, EOFError, zipfile.BadZipFile),
    *(ValueError, KeyError, TypeError, AttributeError),
)


def _read_about(place: Path, state: os.stat_result) -> dict[str, Any] | None:
    """The head of a stored index, if it is sound and of this state of the shard."""
    try:
        about = _about(place)
        found = {name: _findings(about[name]) for name in ("problems", "notes")}
        return about | found if about["stamp"] == _stamp(state) else None
    except _UNREADABLE:
        return None


def _read_stored(place: Path, state: os.stat_result) -> Index | None:
    about = _read_about(place, state)
    if about is None:
        return None
    try:
        with np.load(place, allow_pickle=False) as stored:
            index = Index(
                names=stored["names"],
                ends=stored["ends"],
                spans=stored["spans"],
                problems=about["problems"],
                notes=about["notes"],
            )
    except _UNREADABLE:
        return None
    return index if index.spans.shape == (about["samples"], len(_KINDS), 2) else None


def _findings(stored: dict[str, Any]) -> Findings:
    return Findings({reason: Finding(n, tuple(names)) for reason, (n, names) in stored.items()})


def _store(place: Path, index: Index, state: os.stat_result) -> bool:
    head = {
        "stamp": _stamp(state),
        "samples": len(index),
        "problems": index.problems,
        "notes": index.notes,
    }
    about = json.dumps(head).encode()
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(
                file,
                about=np.frombuffer(about, np.uint8),
                names=index.names,
                ends=index.ends,
                spans=index.spans,
            )
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True


class StoredHead(NamedTuple):
    """What a stored index says of a shard that need not be at hand.

    Attributes:
        samples: Number of usable samples.
        problems: What was left out, by reason.
    """

    samples: int
    problems: dict[str, int]


def stored_head(place: Path, size: int) -> StoredHead | None:
    """The head of an index file, if it is sound and of a shard of this size."""
    try:
        about = _about(place)
        stamp = about["stamp"]
        if (stamp["version"], stamp["size"]) != (_VERSION, size):
            return None
        return StoredHead(about["samples"], _findings(about["problems"]).counts())
    except _UNREADABLE:
        return None


def _about(place: Path) -> dict[str, Any]:
    """The head of an index file, without `np.load`.

    That parses the array's header as Python, which in threads fails now and then: "AST constructor
    recursion depth mismatch" (CPython issue 106905). The format is numpy.lib.format's version 1.
    """
    with zipfile.ZipFile(place) as stored:
        array = stored.read("about.npy")
    header = int.from_bytes(array[8:10], "little")
    return json.loads(array[10 + header :])

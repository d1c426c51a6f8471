"""Which samples a tar shard holds and where their parts lie; kept in a file beside the shard.

Samples whose parts are not all there, or are there twice, are left out and counted, so a cut or
damaged shard can lose samples but never pairs a picture with another sample's text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multimodal.data.source import IMAGE_EXTENSIONS, NO_CAPTION, split_name
from multimodal.data.tar_scan import Member, scan_members

IMAGE, TEXT, RECORD, LABEL = range(4)
"""Rows of `Index.spans` for one sample."""
_KINDS = (IMAGE, TEXT, RECORD, LABEL)
_FIELDS = dict.fromkeys(IMAGE_EXTENSIONS, IMAGE) | {"txt": TEXT, "json": RECORD, "cls": LABEL}
_UNSAFE = re.compile(r"^[/\\]|^[A-Za-z]:[/\\]|(^|[/\\])\.\.([/\\]|$)")
"""Absolute names, and names that lead out of their folder, of Unix and of Windows."""
_HIDDEN = re.compile(r"(^|/)\.[^/]*$")
_VERSION = 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Index:
    """The usable samples of one shard.

    Attributes:
        names: UTF-8 keys one after the other, uint8 [total].
        ends: End of each key in `names`, int64 [samples].
        spans: Offset and size of picture, text, JSON and class, int64 [samples, 4, 2]; size -1
            where a part is missing.
        problems: What was left out, by reason.
    """

    names: np.ndarray
    ends: np.ndarray
    spans: np.ndarray
    problems: dict[str, int]

    def __len__(self) -> int:
        return len(self.ends)

    def key(self, index: int) -> str:
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].tobytes().decode()


class Summary(NamedTuple):
    """What a source of many shards keeps of each.

    Attributes:
        samples: Number of usable samples.
        problems: What was left out, by reason.
        size: Bytes of the shard.
    """

    samples: int
    problems: dict[str, int]
    size: int


def summarize(shard: Path) -> Summary:
    """Count a shard's samples, without reading the whole of its stored index.

    Raises:
        OSError: when the shard cannot be read.
    """
    state = os.stat(shard)
    for place in _places(shard):
        if (about := _read_about(place, state)) is not None:
            return Summary(about["samples"], about["problems"], state.st_size)
    index = load_index(shard)
    return Summary(len(index), index.problems, state.st_size)


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
    index = scan(shard)
    if not any(_store(place, index, state) for place in _places(shard)):
        log.warning("%s: no place to keep its index; it is made anew each time", shard)
    return index


def scan(shard: Path) -> Index:
    """Build the index of a shard from its headers."""
    problems: Counter[str] = Counter()
    with open(shard, "rb", buffering=0) as file:
        members = scan_members(file.fileno(), problems)
    samples = _group(members, problems)
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
        problems=dict(problems),
    )


def _group(members: list[Member], problems: Counter[str]) -> dict[str, dict[int, Member]]:
    """Join members to samples by key, in the order of their first members.

    A key with two parts of one kind is left out: which text belongs to which picture is unknown.
    """
    samples: dict[str, dict[int, Member]] = {}
    doubled: set[str] = set()
    for member in members:
        name = member.name.removeprefix("./")
        key, extension = split_name(name)
        if reason := _refusal(name, extension):
            problems[reason] += 1
            continue
        parts = samples.setdefault(key, {})
        if _FIELDS[extension] in parts:
            doubled.add(key)
        parts[_FIELDS[extension]] = member
    usable = {}
    for key, parts in samples.items():
        if key in doubled:
            problems["duplicate key"] += 1
        elif IMAGE not in parts:
            problems["no image"] += 1
        elif len(parts) == 1:
            problems[NO_CAPTION] += 1
        else:
            usable[key] = parts
    return usable


def _refusal(name: str, extension: str) -> str | None:
    if _UNSAFE.search(name):
        return "unsafe name"
    if _HIDDEN.search(name):
        return "hidden file"
    return None if extension in _FIELDS else "unknown file type"


# --- the stored index ----------------------------------------------------------------------------


def _places(shard: Path) -> tuple[Path, Path]:
    """Beside the shard, and in the cache folder for shards in folders that are read only."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:32]
    beside = shard.with_name(f"{shard.name}.index.npz")
    return beside, Path(cache, "multimodal", f"{name}.index.npz")


def _stamp(state: os.stat_result) -> dict[str, int]:
    return {"version": _VERSION, "size": state.st_size, "mtime_ns": state.st_mtime_ns}


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


def _read_about(place: Path, state: os.stat_result) -> dict[str, Any] | None:
    """The head of a stored index, if it is sound and of this state of the shard."""
    try:
        with np.load(place, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
        return about if about["stamp"] == _stamp(state) else None
    except _UNREADABLE:
        return None


def _read_stored(place: Path, state: os.stat_result) -> Index | None:
    about = _read_about(place, state)
    if about is None:
        return None
    try:
        with np.load(place, allow_pickle=False) as stored:
            index = Index(stored["names"], stored["ends"], stored["spans"], about["problems"])
    except _UNREADABLE:
        return None
    return index if index.spans.shape == (about["samples"], len(_KINDS), 2) else None


def _store(place: Path, index: Index, state: os.stat_result) -> bool:
    head = {"stamp": _stamp(state), "samples": len(index), "problems": index.problems}
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

"""Where the samples of a tar shard lie, found by reading headers only.

The formats are ustar, GNU (long names, base-256 numbers) and pax (`path`, `size`), as in
https://www.gnu.org/software/tar/manual/html_node/Standard.html. A shard is read up to the first
place that is not sound, and samples whose parts are not all there are left out and counted, so a
cut or damaged shard can lose samples but never pairs a picture with another sample's text.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from multimodal.data.source import IMAGE_EXTENSIONS, NO_CAPTION, split_name

BLOCK = 512
IMAGE, TEXT, RECORD, LABEL = range(4)
"""Rows of `Index.spans` for one sample."""
_KINDS = (IMAGE, TEXT, RECORD, LABEL)
_FIELDS = dict.fromkeys(IMAGE_EXTENSIONS, IMAGE) | {"txt": TEXT, "json": RECORD, "cls": LABEL}
_LONGEST_EXTENSION_RECORD = 1 << 20
_VERSION = 1
log = logging.getLogger(__name__)


class Member(NamedTuple):
    """A regular file in a tar: its bytes are at `[offset, offset + size)`."""

    name: str
    offset: int
    size: int


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


def load_index(shard: Path) -> Index:
    """Index of a shard: from the file beside it or in the cache folder, else by a scan.

    A stored index counts only if the shard still has the size and time of change that it was made
    for.

    Raises:
        OSError: when the shard cannot be read.
    """
    state = os.stat(shard)
    places = [shard.with_name(f"{shard.name}.index.npz"), _cache_place(shard)]
    for place in places:
        if (index := _read_stored(place, state)) is not None:
            return index
    index = scan(shard)
    if not any(_store(place, index, state) for place in places):
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


def scan_members(descriptor: int, problems: Counter[str]) -> list[Member]:
    """Regular members of an open tar up to its end marker or the first damage."""
    members: list[Member] = []
    try:
        for kind, member in _entries(descriptor):
            if kind in b"0\x007":
                members.append(member)
            elif kind in b"12":
                problems["link in the shard"] += 1
            elif kind not in b"5":
                problems["special file in the shard"] += 1
    except _Broken as broken:
        problems[str(broken)] += 1
    return members


class _Broken(Exception):
    """The archive cannot be followed further."""


def _entries(descriptor: int) -> Iterator[tuple[int, Member]]:
    """Type and place of every member, with the names and sizes that extension records give."""
    total = os.fstat(descriptor).st_size
    offset = 0
    override: dict[str, str] = {}
    while (header := _header_at(descriptor, offset, total)) is not None:
        kind, name, size = header
        size = int(override.get("size", size))
        start = offset + BLOCK
        if start + size > total:
            raise _Broken("truncated shard")
        offset = start + -(-size // BLOCK) * BLOCK
        if kind in b"xL":
            data = os.pread(descriptor, min(size, _LONGEST_EXTENSION_RECORD), start)
            override |= _extension_record(kind, data)
        elif kind not in b"gK":
            sparse = any(key.startswith("GNU.sparse") for key in override)
            yield ord("S") if sparse else kind, Member(override.get("path", name), start, size)
            override = {}


def _header_at(descriptor: int, offset: int, total: int) -> tuple[int, str, int] | None:
    """Type, name and size from a header block; None at the end marker, a block of zeros."""
    header = os.pread(descriptor, BLOCK, offset)
    if len(header) < BLOCK:
        raise _Broken("truncated shard" if total else "empty shard")
    if header.count(0) == BLOCK:
        return None
    try:
        stored = _number(header[148:156])
        size = _number(header[124:136])
    except ValueError:
        stored = size = -1
    # The checksum counts its own eight bytes as spaces; some old writers summed signed bytes.
    rest = header[:148] + header[156:]
    sums = sum(rest), sum(rest) - 256 * sum(byte > 127 for byte in rest)
    if stored - 256 not in sums or size < 0:
        raise _Broken("damaged shard" if offset else "not a tar file")
    name = _text(header[:100])
    # GNU tar keeps times, not a prefix, in the bytes where ustar has the prefix.
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return header[156], name, size


def _number(field: bytes) -> int:
    """Octal digits, or base 256 where the first bit is set (GNU)."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    return int(field.split(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _extension_record(kind: int, data: bytes) -> dict[str, str]:
    """What a GNU long name (`L`) or a pax header (`x`) says about the next member."""
    if kind == ord("L"):
        return {"path": _text(data)}
    fields = {}
    while match := re.match(rb"(\d{1,9}) ([^=]+)=", data):
        length = int(match[1])
        if not match.end() < length <= len(data):
            break
        value = data[match.end() : length - 1].decode("utf-8", "backslashreplace")
        if match[2] != b"size" or value.isdecimal():
            fields[_text(match[2])] = value
        data = data[length:]
    return fields


def _group(members: list[Member], problems: Counter[str]) -> dict[str, dict[int, Member]]:
    """Join members to samples by key, in the order of their first members.

    A key with two parts of one kind is left out: which text belongs to which picture is unknown.
    """
    samples: dict[str, dict[int, Member]] = {}
    doubled: set[str] = set()
    for member in members:
        name = re.sub(r"^(\./)+", "", member.name)
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
    parts = re.split(r"[/\\]", name)
    if not parts[0] or re.match(r"[A-Za-z]:[/\\]", name) or ".." in parts:
        return "unsafe name"
    if parts[-1].startswith("."):
        return "hidden file"
    return None if extension in _FIELDS else "unknown file type"


# --- the stored index ----------------------------------------------------------------------------


def _cache_place(shard: Path) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(shard.absolute())).hexdigest()[:32]
    return Path(base) / "multimodal" / f"{name}.index.npz"


def _stamp(state: os.stat_result) -> dict[str, int]:
    return {"version": _VERSION, "size": state.st_size, "mtime_ns": state.st_mtime_ns}


def _read_stored(place: Path, state: os.stat_result) -> Index | None:
    try:
        with np.load(place, allow_pickle=False) as stored:
            about = json.loads(stored["about"].tobytes())
            if about["stamp"] != _stamp(state):
                return None
            index = Index(stored["names"], stored["ends"], stored["spans"], about["problems"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return index if index.spans.shape == (len(index.ends), len(_KINDS), 2) else None


def _store(place: Path, index: Index, state: os.stat_result) -> bool:
    about = json.dumps({"stamp": _stamp(state), "problems": index.problems}).encode()
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

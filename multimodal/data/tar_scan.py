"""The members of a tar archive: of a file by reading its headers only, or of a stream.

The formats are ustar, GNU (long names, base-256 numbers) and pax (`path`, `size`), as in
https://www.gnu.org/software/tar/manual/html_node/Standard.html. An archive is followed up to the
first place that is not sound, and it is complete only with its end marker.

What is found to be wrong is counted by reason, with the names of the first few cases, so that a
shard of a million bad members costs no more than one of ten.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

BLOCK = 512
RECORD = 20 * BLOCK
"""A tar is filled up with zeros to a multiple of this, unless its writer was told otherwise."""
_READ = 8 * BLOCK
_FLOW = 1 << 18
LARGEST_KEPT = 1 << 28
"""Bytes of one member of a stream; a larger one is passed over, not read."""
_LONGEST_EXTENSION_RECORD = 1 << 20
_NAMES = 10
_LONGEST_NAME = 200


class Finding(NamedTuple):
    """How often something was found, and the names of the first few cases."""

    count: int
    names: tuple[str, ...]


class Findings(dict[str, Finding]):
    """What was found, by reason."""

    def add(self, reason: str, names: Iterable[str], count: int = 1) -> None:
        """Count `count` more cases, of which `names` are some."""
        before = self.get(reason, Finding(0, ()))
        room = _NAMES - len(before.names)
        kept = before.names
        if room > 0:
            kept += tuple(_printable(name) for _, name in zip(range(room), names, strict=False))
        self[reason] = Finding(before.count + count, kept)

    def counts(self) -> dict[str, int]:
        return {reason: finding.count for reason, finding in self.items()}


def _printable(name: str) -> str:
    return (name if name.isprintable() else ascii(name))[:_LONGEST_NAME]


class Member(NamedTuple):
    """A regular file in a tar: its bytes are at `[offset, offset + size)`."""

    name: str
    offset: int
    size: int


class Scan(NamedTuple):
    """Regular members of a tar, and the name of the member at which it is cut or damaged."""

    members: list[Member]
    cut: str | None


def scan_members(descriptor: int, problems: Findings) -> Scan:
    """Members of an open tar up to its end marker or the first damage.

    Where the damage leaves the name of its member unknown, `cut` is the member before it, whose
    sample may have had further parts.
    """
    members: list[Member] = []
    try:
        for member in members_of(_Blocks(descriptor), problems):
            members.append(member)
    except Broken as broken:
        problems.add(broken.reason, [broken.place])
        return Scan(members, broken.cut)
    return Scan(members, None)


class Broken(Exception):
    """The archive cannot be followed further than an offset, or than a member.

    Attributes:
        reason: What is wrong, to count by.
        place: Where, for people.
        cut: Name of the member at which it is, or of the one before.
    """

    def __init__(self, reason: str, *, offset: int = 0, member: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.cut = member
        self.place = f"in {member}" if member else f"byte {offset}"


class Archive(Protocol):
    """The bytes of a tar. Each call asks for an offset that is not below those asked for before."""

    def at(self, offset: int) -> bytes:
        """The block at an offset; shorter at the end."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Bytes at an offset; fewer at the end."""
        ...

    def reaches(self, end: int) -> bool:
        """Whether there are so many bytes."""
        ...


def members_of(archive: Archive, problems: Findings) -> Iterator[Member]:
    """Regular members up to the end marker; `problems` counts what else there is.

    Raises:
        Broken: at the first place that is not sound.
    """
    last = ""
    try:
        for kind, member in _entries(archive):
            last = member.name
            if kind in b"0\x007":
                yield member
            elif kind in b"12":
                problems.add("link in the shard", [member.name])
            elif kind not in b"5":
                problems.add("special file in the shard", [member.name])
    except Broken as broken:
        broken.cut = broken.cut or last
        raise


def _entries(archive: Archive) -> Iterator[tuple[int, Member]]:
    """Type and place of every member, with the names and sizes that extension records give."""
    offset = 0
    name = ""
    override: dict[str, str] = {}
    while (header := _header_at(archive, offset)) is not None:
        kind, name, size = header
        size = int(override.get("size", size))
        start = offset + BLOCK
        if not archive.reaches(start + size):
            member = "" if kind in b"xgLK" else override.get("path", name)
            raise Broken("truncated shard", offset=offset, member=member)
        offset = start + -(-size // BLOCK) * BLOCK
        if kind in b"xL":
            data = archive.read(start, min(size, _LONGEST_EXTENSION_RECORD))
            override |= _extension_record(kind, data)
        elif kind not in b"gK":
            sparse = any(key.startswith("GNU.sparse") for key in override)
            yield ord("S") if sparse else kind, Member(override.get("path", name), start, size)
            override = {}
    _check_end(archive, offset, name)


def _check_end(archive: Archive, offset: int, last: str) -> None:
    """What follows the end marker may only fill the last record up.

    Zeros are also what a download leaves where it has not come to, and one shard may have been
    written behind another.
    """
    end = offset
    while rest := archive.read(end, _LONGEST_EXTENSION_RECORD):
        if rest.strip(b"\0"):
            raise Broken("data after the end of the shard", offset=offset, member=last)
        end += len(rest)
    if end - offset > 2 * RECORD:
        raise Broken("zeros for a part of the shard", offset=offset, member=last)


class _Blocks:
    """A file's. One read serves the headers that follow a small member, as a text's do."""

    def __init__(self, descriptor: int):
        self._size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._start = 0
        self._data = b""

    def reaches(self, end: int) -> bool:
        return end <= self._size

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def at(self, offset: int) -> bytes:
        place = offset - self._start
        if not 0 <= place <= len(self._data) - BLOCK:
            self._start, place = offset, 0
            self._data = os.pread(self._descriptor, _READ, offset)
        return self._data[place : place + BLOCK]


class Flow:
    """Of bytes that come in sequence, those that lie ahead of the last offset asked for.

    Args:
        read: Gives up to so many of the next bytes, and none at the end.
    """

    def __init__(self, read: Callable[[int], bytes]):
        self._more = read
        self._start = 0
        self._data = bytearray()

    def reaches(self, end: int) -> bool:
        self._fill(end)
        return end <= self._start + len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes at an offset; fewer at the end, and none of a member larger than is kept."""
        self._fill(offset)
        if offset < self._start:
            return b""
        del self._data[: offset - self._start]
        self._start = offset
        self._fill(offset + size)
        return bytes(memoryview(self._data)[:size])

    def at(self, offset: int) -> bytes:
        return self.read(offset, BLOCK)

    def _fill(self, end: int) -> None:
        while self._start + len(self._data) < end and (data := self._more(_FLOW)):
            if len(self._data) > LARGEST_KEPT:
                self._start += len(self._data)
                self._data.clear()
            self._data += data


def _header_at(archive: Archive, offset: int) -> tuple[int, str, int] | None:
    """Type, name and size from a header block; None at the end marker, a block of zeros."""
    header = archive.at(offset)
    if len(header) < BLOCK:
        end = offset + len(header)
        raise Broken("truncated shard" if end else "empty shard", offset=end)
    if header.count(0) == BLOCK:
        return None
    try:
        stored = _number(header[148:156])
        size = _number(header[124:136])
    except ValueError:
        stored = size = -1
    # The checksum is the sum of the bytes, its own eight as spaces. The lower half of Adler-32 is
    # one more than that sum, modulo 65521, and 30 times as fast as `sum`.
    total = zlib.adler32(header[:148] + b" " * 8 + header[156:]) & 0xFFFF
    if (stored + 1 - total) % 65521 or size < 0:
        raise Broken("damaged shard" if offset else "not a tar file", offset=offset)
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

"""Tar shards in the WebDataset layout, read by random access.

A sample is `KEY.jpg|jpeg|png|webp|gif|bmp|tif|tiff` with at least one of `KEY.txt`, `KEY.json` and
`KEY.cls`, wherever in the shard they stand. KEY is the name up to the last dot, so `cat no. 2.jpg`
belongs to `cat no. 2`. How captions are taken from the files is said at `source.parse_sidecars`.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import time
from bisect import bisect_right
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from multimodal.data.source import BadSample, Sample, parse_sidecars, report_problems
from multimodal.data.tar_index import (
    IMAGE,
    LABEL,
    RECORD,
    TEXT,
    Summary,
    load_index,
    summarize,
)
from multimodal.data.tar_scan import Finding, Findings

log = logging.getLogger(__name__)

_THREADS = 4
_REPORT_SECONDS = 10
_OPEN_SHARDS = 256
"""Shards kept open per process; far under the usual limit of 1024 open files."""


def find_shards(path: str) -> list[Path]:
    """The files that a folder, a .tar file, a brace pattern or a glob pattern stands for.

    Files named by a brace pattern are returned whether they exist or not.

    Raises:
        ValueError: for a pipe, a URL, or a path that leads to no shard.
    """
    if path.startswith("pipe:") or "://" in path:
        raise ValueError(
            f"{path!r} is a pipe or a URL; only local files are read: fetch the shards first"
        )
    if os.path.isdir(path):
        found = sorted(Path(path).glob("*.tar"))
    elif os.path.exists(path):
        found = [Path(path)]
    else:
        found = _expand(path)
    if not found:
        below = sorted({str(shard.parent) for shard in Path(path).glob("*/*.tar")})
        if below:
            raise ValueError(f"{path!r} has its shards in {', '.join(below)}; name one of them")
        raise ValueError(
            f"{path!r} leads to no shard; give a folder with .tar files, one .tar file, or a "
            "pattern such as 'data/{00000..00099}.tar' or 'data/*.tar'"
        )
    return found


def _expand(pattern: str) -> list[Path]:
    try:
        names = list(braceexpand(pattern))
    except ValueError:
        raise ValueError(f"{pattern!r}: braces do not match") from None
    found = []
    for name in names:
        if glob.has_magic(name):
            found += sorted(glob.glob(name))
        elif name != pattern:
            found.append(name)
    return [Path(name) for name in dict.fromkeys(found)]


class ShardSource:
    """Samples of tar shards, in the order of the shards and of the pictures in them.

    `problems` counts what was left out, `notes` what is unusual and was kept; `examples` has the
    first names of both, as `SHARD: NAME`.

    Args:
        path: As for `find_shards`.

    Raises:
        ValueError: when there is no shard, or no usable sample in any.
    """

    def __init__(self, path: str):
        self.description = f"shards {path}"
        self._shards = [shard.absolute() for shard in find_shards(path)]
        summaries = summarize_all(self.description, self._shards)
        self._counts = [summary.samples for summary in summaries]
        self._sizes = [summary.size for summary in summaries]
        self._ends = list(accumulate(self._counts))
        problems = _merged(self._shards, [summary.problems for summary in summaries])
        notes = _merged(self._shards, [summary.notes for summary in summaries])
        self.problems, self.notes = problems.counts(), notes.counts()
        self.examples = {reason: finding.names for reason, finding in (problems | notes).items()}
        _report(self.description, problems, notes)
        if unstored := sum(not summary.stored for summary in summaries):
            log.warning(
                "%s: no place to keep the index of %d shards, neither beside them nor in the cache "
                "folder; it is made anew each time",
                *(self.description, unstored),
            )
        if not len(self):
            raise ValueError(
                f"{path!r} has no usable sample in {len(self._shards)} shards: "
                f"{self.problems or 'they are empty'}; a sample is KEY.jpg (or {_OTHERS}) with "
                "KEY.txt, KEY.json or KEY.cls"
            )
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}

    def groups(self) -> list[int]:
        return list(self._counts)

    def read(self, index: int) -> Sample:
        number, local = self._locate(index)
        try:
            return self._read(self._opened(number), local)
        except OSError as error:
            raise BadSample("unreadable shard", detail=str(error)) from error

    def _read(self, shard: _OpenShard, local: int) -> Sample:
        key = shard.index.key(local)
        parts = shard.parts(local, key)
        captions, meta = parse_sidecars(
            key, text=parts[TEXT], record=parts[RECORD], label=parts[LABEL]
        )
        return Sample(key, parts[IMAGE], captions, meta)

    def place(self, index: int) -> str:
        return self._shards[self._locate(index)[0]].name

    def repeated_keys(self) -> Finding:
        """Keys that stand in several shards; each is a sample of its own, with its own texts.

        Every index is read for this, and every key kept in memory.
        """
        first: dict[str, int] = {}
        found = Findings()
        for number, shard in enumerate(self._shards):
            if not self._counts[number]:
                continue
            index = load_index(shard)
            for key in map(index.key, range(len(index))):
                before = first.setdefault(key, number)
                if before != number:
                    found.add("key", [f"{self._shards[before].name}, {shard.name}: {key}"])
        return found.get("key", Finding(0, ()))

    def fingerprint(self) -> str:
        shards = zip(self._shards, self._sizes, self._counts, strict=True)
        lines = [f"{shard.name}\t{size}\t{count}\n" for shard, size, count in shards]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self._counts[number])

    def _opened(self, number: int) -> _OpenShard:
        shard = self._open.get(number)
        if shard is None:
            shard = _OpenShard(self._shards[number])
            if len(shard.index) != self._counts[number]:
                raise BadSample("shard changed while in use")
            self._open[number] = shard
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return shard


def summarize_all(description: str, shards: list[Path]) -> list[Summary]:
    """Summaries in order. Threads, since a scan of new shards mostly waits for the disk."""
    summaries = []
    last = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as pool:
        for summary in pool.map(summarize, shards):
            summaries.append(summary)
            if time.monotonic() - last > _REPORT_SECONDS:
                last = time.monotonic()
                log.info("%s: indexed %d of %d shards", description, len(summaries), len(shards))
    return summaries


def _merged(shards: list[Path], parts: list[Findings]) -> Findings:
    whole = Findings()
    for shard, part in zip(shards, parts, strict=True):
        for reason, finding in part.items():
            names = [f"{shard.name}: {name}" for name in finding.names] or [shard.name]
            whole.add(reason, names, finding.count)
    return whole


def _report(description: str, problems: Findings, notes: Findings) -> None:
    report_problems(description, problems.counts())
    for reason, finding in problems.items():
        log.warning("  %s: %s", reason, _listed(finding))
    for note, finding in notes.items():
        log.info("%s: %d samples with %s: %s", description, finding.count, note, _listed(finding))


def _listed(finding: Finding) -> str:
    more = finding.count - len(finding.names)
    return ", ".join(finding.names) + (f" and {more} more" if more else "")


_OTHERS = "jpeg, png, webp, gif, bmp, tif, tiff in any case"


class _OpenShard:
    """A shard's index and descriptor. `pread` keeps no position, so forked processes may share."""

    def __init__(self, path: Path):
        self.index = load_index(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def parts(self, local: int, key: str) -> list[bytes | None]:
        """Picture, text, JSON and class of a sample; None for a part that it lacks."""
        spans = self.index.spans[local].tolist()
        return [None if size < 0 else self._read(offset, size, key) for offset, size in spans]

    def _read(self, offset: int, size: int, key: str) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise BadSample("shard changed while in use", key)
        return data

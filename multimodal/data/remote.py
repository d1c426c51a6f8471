"""Tar shards on a remote store, by way of a local cache that is filled ahead of need.

Any store that fsspec knows will do: `s3://`, `gs://`, `https://`, ... A shard is fetched whole when
the first of its samples is read, or before, as the order of training comes near it. Its index is
taken from beside the shard (`multimodal pack` leaves it there), or else built from the fetched
shard; it stays in the cache when the shard itself has to go.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from braceexpand import braceexpand

from multimodal.data.shard_cache import Held, ShardCache, touch
from multimodal.data.shards import ShardSource
from multimodal.data.source import BadSample, Sample, report_problems
from multimodal.data.tar_index import StoredHead, stored_head, summarize
from multimodal.files import cache_folder

_THREADS = 8
_TRIES = 3
T = TypeVar("T")
_GB = 10**9
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteShard:
    """A shard where it is stored.

    Attributes:
        url: Its address.
        size: Its bytes.
        entry: Name of its folder in the cache, which changes when the shard does.
    """

    url: str
    size: int
    entry: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def is_remote(path: str) -> bool:
    """Whether a path is a URL; a pipe is none, and never read."""
    return "://" in path and not path.startswith("pipe:")


class RemoteSource:
    """Samples of remote tar shards, in the order of the shards and of the pictures in them.

    Args:
        path: URL of one shard or of a folder with .tar files, or a pattern with braces or `*`.
        cache_dir: The cache; None takes a folder for this path in the user's cache folder.
        cache_size: Its largest size in GB (1e9 bytes).

    Raises:
        ValueError: when no shard or no usable sample is found, or a shard does not fit the cache.
    """

    def __init__(self, path: str, cache_dir: str | None = None, cache_size: float = 50.0):
        self.description = f"shards {path}"
        own = hashlib.sha256(path.encode()).hexdigest()[:16]
        folder = Path(cache_dir) if cache_dir else cache_folder() / "shards" / own
        self._cache = ShardCache(folder, int(cache_size * _GB))
        self._forget()
        self._shards, missing = _find(path)
        largest = max(self._shards, key=lambda shard: shard.size)
        if largest.size > self._cache.limit:
            raise ValueError(
                f"{largest.url} has {largest.size / _GB:.2f} GB and does not fit the cache of "
                f"cache_size={cache_size} GB; set a larger cache_size"
            )
        at_once = self._cache.limit // max(1, largest.size)
        with ThreadPoolExecutor(min(_THREADS, at_once)) as pool:
            heads = list(pool.map(self._head, self._shards))
        problems = Counter({"missing shard": missing} if missing else {})
        for head in heads:
            problems.update(head.problems)
        self._counts = [head.samples for head in heads]
        self._ends = list(accumulate(self._counts))
        self.problems = dict(problems)
        report_problems(self.description, problems)
        if not len(self):
            raise ValueError(
                f"{path!r} has no usable sample in {len(self._shards)} shards: {self.problems}; a "
                "sample is a picture KEY.jpg (or png, ...) with KEY.txt, KEY.json or KEY.cls"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_open", "_wanted", "_fetcher")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._forget()

    def groups(self) -> list[int]:
        return list(self._counts)

    def read(self, index: int) -> Sample:
        number, local = self._locate(index)
        try:
            return self._opened(number).read(local)
        except OSError as error:
            raise BadSample("shard cannot be fetched", detail=str(error)) from error

    def place(self, index: int) -> str:
        return self._shards[self._locate(index)[0]].name

    def fingerprint(self) -> str:
        shards = zip(self._shards, self._counts, strict=True)
        lines = [f"{shard.name}\t{shard.size}\t{count}\n" for shard, count in shards]
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def check_window(self, window: int) -> None:
        """See that the shards of two windows, the one in use and the next, fit the cache.

        Raises:
            ValueError: when they do not, and each shard would be fetched again and again.
        """
        whole = sum(shard.size for shard in self._shards)
        needed = min(whole, 2 * window * whole // len(self))
        if needed > self._cache.limit:
            raise ValueError(
                f"{self.description}: two windows of data.shuffle_window={window} samples take "
                f"{needed / _GB:.1f} GB, and cache_size is {self._cache.limit / _GB:.1f} GB, so "
                "shards would be fetched again and again; set cache_size above that, or "
                f"data.shuffle_window to {self._cache.limit * len(self) // (2 * whole)} or less"
            )

    def fetch_ahead(self, indices: Iterable[int]) -> None:
        """Begin to fetch the shards of these samples, in this order, as far as they fit."""
        self._renew_in_child()
        numbers = list(dict.fromkeys(self._locate(index)[0] for index in indices))
        if numbers == self._wanted:
            return
        self._wanted = numbers
        self._release_others(numbers)
        room = self._cache.limit
        fitting = []
        for number in numbers:
            room -= self._shards[number].size
            if room < 0:
                break
            fitting.append(number)
            touch(self._path(number))
        self._fetcher.start(fitting)

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self._counts[number])

    def _path(self, number: int) -> Path:
        shard = self._shards[number]
        return self._cache.path(shard.entry, shard.name)

    # --- shards in the cache ---------------------------------------------------------------------

    def _forget(self) -> None:
        self._open: dict[int, tuple[ShardSource, Held]] = {}
        self._wanted: list[int] = []
        self._fetcher = _Fetcher(self._fetch_number)
        self._owner = os.getpid()

    def _renew_in_child(self) -> None:
        """A forked process has no threads, and locks that it would share with its parent."""
        if self._owner != os.getpid():
            self._release_others()
            self._forget()

    def _opened(self, number: int) -> ShardSource:
        self._renew_in_child()
        if number in self._open:
            return self._open[number][0]
        shard = self._shards[number]
        held = self._held(shard, short_of_room=self._release_others)
        try:
            source = ShardSource(str(held.path))
        except ValueError as error:
            held.release()
            raise BadSample("shard changed while in use", detail=str(error)) from error
        if len(source) != self._counts[number]:
            held.release()
            raise BadSample("shard changed while in use", detail=shard.url)
        self._release_others({number, *self._wanted})
        self._open[number] = source, held
        return source

    def _release_others(self, needed: Collection[int] = ()) -> None:
        """Let go of shards that are not about to be read, so that they may leave the cache."""
        for number in [number for number in self._open if number not in needed]:
            self._open.pop(number)[1].release()

    def _held(self, shard: RemoteShard, short_of_room: Callable[[], None] = lambda: None) -> Held:
        path = self._cache.path(shard.entry, shard.name)
        return self._cache.hold(
            path, shard.size, lambda part: _download(shard, part), short_of_room=short_of_room
        )

    def _fetch_number(self, number: int) -> None:
        shard = self._shards[number]
        self._cache.fetch_ahead(self._path(number), shard.size, lambda part: _download(shard, part))

    def _head(self, shard: RemoteShard) -> StoredHead:
        """What the index of a shard says, wherever it can be had from."""
        index = _index_path(self._cache.path(shard.entry, shard.name))
        if (head := stored_head(index, shard.size)) is not None:
            return head
        index.parent.mkdir(exist_ok=True)
        try:
            if _described(shard.url + _INDEX, hidden_is_absent=True) is not None:
                patiently(lambda: _get(shard.url + _INDEX, index))
                if (head := stored_head(index, shard.size)) is not None:
                    return head
            held = self._held(shard)
        except OSError as error:
            raise ValueError(f"{shard.url} cannot be fetched: {error}") from error
        try:
            summarize(held.path)
            head = stored_head(index, shard.size)
        finally:
            held.release()
        assert head is not None, "the cache folder can be written, and so has the index"
        return head


class _Fetcher:
    """A thread that fetches shards in order until it is given others."""

    def __init__(self, fetch: Callable[[int], None]):
        self._fetch = fetch
        self._turn = 0

    def start(self, numbers: list[int]) -> None:
        self._turn += 1
        threading.Thread(target=self._run, args=(self._turn, numbers), daemon=True).start()

    def _run(self, turn: int, numbers: list[int]) -> None:
        for number in numbers:
            if turn != self._turn:
                return
            try:
                self._fetch(number)
            except OSError as error:  # met again, and reported, when the shard is read
                log.warning("a shard could not be fetched ahead: %s", error)


# --- the remote store ----------------------------------------------------------------------------

_INDEX = ".index.npz"


def _index_path(shard: Path) -> Path:
    return shard.with_name(shard.name + _INDEX)


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it; found anew, since a child must not share it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url}: {error}") from error


def find_urls(path: str) -> list[str]:
    """The URLs of shards that a URL or pattern stands for, whether they are there or not.

    Raises:
        ValueError: when there is none, or what should list them cannot.
    """
    if "::" in path:
        raise ValueError(f"{path!r}: chained addresses are not read; give a plain URL")
    scheme, _, rest = path.partition("://")
    named = list(dict.fromkeys(f"{scheme}://{name}" for name in braceexpand(rest)))
    urls = []
    for url in named:
        if url.endswith(".tar") and "*" not in url:
            urls.append(url)
            continue
        pattern = url if "*" in url else f"{url.rstrip('/')}/*.tar"
        try:
            urls += patiently(lambda pattern=pattern: _listed(pattern))
        except OSError as error:
            raise ValueError(f"{url}: cannot be listed: {error}") from error
    if not urls:
        raise _no_shard(path)
    return urls


def _no_shard(path: str) -> ValueError:
    return ValueError(
        f"{path!r} leads to no shard; give the URL of one .tar file, of a folder with .tar "
        "files, or a pattern such as 's3://bucket/data/{00000..00099}.tar'"
    )


def _find(path: str) -> tuple[list[RemoteShard], int]:
    """The shards that are there, and how many named ones are not."""
    urls = find_urls(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = [shard for shard in pool.map(_stored, urls) if shard is not None]
    if not found:
        raise _no_shard(path)
    return found, len(urls) - len(found)


def _listed(pattern: str) -> list[str]:
    filesystem, place = filesystem_of(pattern)
    return [filesystem.unstrip_protocol(path) for path in sorted(filesystem.glob(place))]


def _stored(url: str) -> RemoteShard | None:
    """A shard as its store describes it; None where it is not there."""
    try:
        about = _described(url)
    except OSError as error:
        raise ValueError(f"{url} cannot be reached: {error}") from error
    if about is None:
        return None
    if not isinstance(about.get("size"), int):
        raise ValueError(f"{url}: its server does not say how large it is; fetch it first")
    version = [about.get(k) for k in ("ETag", "etag", "generation", "LastModified", "mtime")]
    name = hashlib.sha256(repr((url, about["size"], version)).encode()).hexdigest()[:32]
    return RemoteShard(url, about["size"], name)


def _described(url: str, *, hidden_is_absent: bool = False) -> dict[str, Any] | None:
    """What a store says of a file; None where it is not there.

    Args:
        hidden_is_absent: Some stores forbid to ask for what is not there.

    Raises:
        OSError: when it says nothing in three tries.
    """

    def ask() -> dict[str, Any] | None:
        filesystem, path = filesystem_of(url)
        try:
            return filesystem.info(path)
        except PermissionError:
            if hidden_is_absent:
                return None
            raise
        except FileNotFoundError as error:
            if _may_pass(error.__cause__):
                raise
            return None

    return patiently(ask)


def _may_pass(cause: BaseException | None) -> bool:
    """Whether it is only for now that a file is not found: fsspec says so of every web error."""
    status = getattr(cause, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in (408, 425, 429)
    return isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")


def _download(shard: RemoteShard, target: Path) -> None:
    """Fetch a shard whole.

    Raises:
        OSError: when it cannot be fetched in three tries.
    """

    def fetch() -> None:
        _get(shard.url, target)
        if (found := target.stat().st_size) != shard.size:
            raise OSError(f"{found} bytes came instead of {shard.size}")

    try:
        patiently(fetch)
    except OSError as error:
        raise OSError(f"{shard.url}: {error}") from error


def _get(url: str, target: Path) -> None:
    filesystem, path = filesystem_of(url)
    filesystem.get_file(path, str(target))


def patiently(ask: Callable[[], T]) -> T:
    """Ask a store up to three times, waiting longer each time.

    Raises:
        OSError: what it said last.
    """
    for attempt in range(_TRIES):
        try:
            return ask()
        except ValueError:  # a user's mistake in the address
            raise
        except Exception as error:  # each store has errors of its own
            if attempt == _TRIES - 1:
                raise OSError(str(error) or type(error).__name__) from error
            time.sleep(2**attempt)
    raise AssertionError("the last try returns or raises")

"""Copies of remote files in a folder of bounded size, shared by any number of processes.

Each file has a folder of its own with a lock: exclusive while the file is fetched or removed,
shared while it is read. So a file is there whole or not at all, is fetched once however many
processes want it, and is never removed under a reader. What was used longest ago goes first.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_PART = ".part"


class Held:
    """A file that stays in the cache as long as this object lives.

    Attributes:
        path: Where it lies.
    """

    def __init__(self, path: Path, lock: IO[str]):
        self.path = path
        self._lock = lock

    def release(self) -> None:
        self._lock.close()


class ShardCache:
    """The folder.

    Args:
        folder: Where it is; made if it is not there.
        limit: Bytes that its files may take, but for files in use that alone take more.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder = folder
        self.limit = limit
        folder.mkdir(parents=True, exist_ok=True)
        with self._one_at_a_time():
            self._make_room(0)

    def path(self, entry: str, name: str) -> Path:
        """Where a file lies if it is there. Small files beside it are never removed."""
        return self.folder / entry / name

    def hold(
        self,
        path: Path,
        size: int,
        fetch: Callable[[Path], None],
        *,
        short_of_room: Callable[[], None],
    ) -> Held:
        """The file, fetched if it is not there; waits while another process fetches it.

        Args:
            path: As from `path`.
            size: Its bytes.
            fetch: Writes it to a path.
            short_of_room: Called when only files in use are left; may release some.

        Raises:
            OSError: when it cannot be fetched.
        """
        lock = _lock_file(path)
        try:
            while True:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if path.exists():
                    touch(path)
                    return Held(path, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._fetch(path, size, fetch, short_of_room)
        except BaseException:
            lock.close()
            raise

    def fetch_ahead(self, path: Path, size: int, fetch: Callable[[Path], None]) -> None:
        """See that the file is there, unless another process is at it or there is no room.

        Raises:
            OSError: when it cannot be fetched.
        """
        with _lock_file(path) as lock:
            if _locked(lock):
                self._fetch(path, size, fetch, None)

    def _fetch(
        self,
        path: Path,
        size: int,
        fetch: Callable[[Path], None],
        short_of_room: Callable[[], None] | None,
    ) -> None:
        """Fetch a file whose lock is held, if nobody has done so meanwhile."""
        if path.exists():
            return
        part = path.with_name(f"{path.name}.{size}{_PART}")
        with self._one_at_a_time():
            part.unlink(missing_ok=True)
            if not self._make_room(size):
                if short_of_room is None:
                    return
                short_of_room()
                if not self._make_room(size):
                    log.warning("%s: more than its limit is in use at once", self.folder)
            part.touch()  # its space counts as taken from here on
        try:
            fetch(part)
            if (found := part.stat().st_size) != size:
                raise OSError(f"{path.name}: {found} bytes came instead of {size}")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, size: int) -> bool:
        """Remove files not in use, oldest use first, until `size` more bytes fit."""
        files = dict(self._files())
        sizes = {path: _space(path, state) for path, state in files.items()}
        taken = sum(sizes.values())
        for path in sorted(files, key=lambda path: files[path].st_atime_ns):
            if taken + size <= self.limit:
                return True
            with _lock_file(path) as lock:
                if _locked(lock):
                    path.unlink(missing_ok=True)
                    taken -= sizes[path]
        return taken + size <= self.limit

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """What takes space. A file just made whole may be there twice, but is not missed."""
        for pattern in (f"*/*{_PART}", "*/*.tar"):
            for path in self.folder.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.stat()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def touch(path: Path) -> None:
    """Mark a file as used now; its time of change stays."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _space(path: Path, state: os.stat_result) -> int:
    """Bytes of a file; of one that is being fetched, those it will have, which its name tells."""
    if not path.name.endswith(_PART):
        return state.st_size
    told = path.name.removesuffix(_PART).rpartition(".")[2]
    return max(state.st_size, int(told) if told.isdigit() else 0)


def _lock_file(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return (path.parent / "lock").open("a")


def _locked(lock: IO[str]) -> bool:
    """Whether nobody else has the lock; then it is ours."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

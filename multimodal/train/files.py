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
        _to_disk(path)
    aside = target.with_name(f".old-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    _to_disk(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then put it in the place of `path`."""
    temporary = path.with_name(f".{path.name}")
    write(temporary)
    _to_disk(temporary)
    temporary.replace(path)
    _to_disk(path.parent)


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

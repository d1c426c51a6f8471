"""The checkpoints of a run as they lie on the disk: which there are, and which are sound.

checkpoints/step-00000100/     a complete one; manifest.json has size and SHA-256 of its files
checkpoints/.step-00000100/    one that is being written, or was when its process ended
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from multimodal.files import file_hash

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
MODEL_FOLDER, EMA_FOLDER = "model", "ema"
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_model(checkpoint: Path) -> Path:
    """The model folder of a checkpoint to use: of the averaged weights if there are any."""
    ema = checkpoint / EMA_FOLDER
    return ema if ema.is_dir() else checkpoint / MODEL_FOLDER


def step_of(path: Path) -> int | None:
    """The step in the name of a complete checkpoint; None for other files."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(run: Path) -> list[Path]:
    """Checkpoints of a run that are complete by their names, sound or not."""
    found = {path: step_of(path) for path in (run / FOLDER).glob("step-*")}
    named = {path: step for path, step in found.items() if step is not None}
    return sorted(named, key=lambda path: named[path], reverse=True)


def read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file of a checkpoint, by its name.

    Raises:
        ValueError: when there is no manifest, or none that can be understood.
    """
    try:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{MANIFEST} is unreadable") from None
    if "state.json" not in expected:
        raise ValueError(f"{MANIFEST} does not list state.json")
    return expected


def find_damage(
    path: Path,
    *,
    under: str = "",
    hashes: bool = True,
    progress: Callable[[int], None] | None = None,
) -> str | None:
    """Compare a checkpoint with its manifest; None if it is sound, else what is wrong.

    Args:
        under: look only at files whose names begin so.
        hashes: read the files' content too, and not only their sizes.
        progress: called with the size of each file that was looked at.
    """
    try:
        expected = read_manifest(path)
    except ValueError as error:
        return str(error)
    for name, (size, digest) in expected.items():
        if not name.startswith(under):
            continue
        try:
            problem = _fault(path / name, size, digest if hashes else None)
        except OSError as error:
            problem = f"is unreadable ({error})"
        if problem is not None:
            return f"{name} {problem}"
        if progress is not None:
            progress(size)
    return None


def _fault(file: Path, size: int, digest: str | None) -> str | None:
    if not file.is_file():
        return "is missing"
    if file.stat().st_size != size:
        return f"has {file.stat().st_size} bytes instead of {size}"
    if digest is not None and file_hash(file) != digest:
        return "has changed since it was written (SHA-256 differs)"
    return None

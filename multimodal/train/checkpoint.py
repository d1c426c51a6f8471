"""Save the state of a run so that no crash, full disk or damaged file can lose it.

    checkpoints/step-00000100/
        model/                 a model folder, which `multimodal.load` reads
        ema/                   another one, of the average of the weights, if the run keeps it
        optimizer.safetensors  `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME` of every parameter
        state.json             step, samples, skips, configuration, versions, data fingerprint
        manifest.json          size and SHA-256 of every other file, written last

A checkpoint is written into a temporary folder, forced to the disk and renamed, and only then are
older ones removed. Safetensors and JSON cannot run code, and the manifest finds what they do not
notice: a flipped bit. `saving` decides when, and in which thread; `weights.checkpoints` reads.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from multimodal.files import file_hash, move_folder
from multimodal.train.snapshot import OPTIMIZER_FILE, Snapshot
from multimodal.weights.checkpoints import (
    EMA_FOLDER,
    FOLDER,
    MANIFEST,
    MODEL_FOLDER,
    find_damage,
    newest_first,
    step_of,
)
from multimodal.weights.save import save_model

log = logging.getLogger(__name__)

_STATE = (
    *("step", "epoch", "samples", "processes", "data", "config", "versions"),
    *("skipped", "nonfinite", "micro_batch_size"),
)
"""What a state.json must say: a run that resumed without it would be another run."""
_PACKAGES = ("multimodal", "torch", "accelerate", "safetensors", "timm", "transformers", "numpy")


@dataclass(frozen=True)
class Checkpoint:
    """A sound checkpoint on the disk."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Finished steps."""
        return self.state["step"]

    @property
    def model(self) -> Path:
        """Its model folder."""
        return self.path / MODEL_FOLDER

    @property
    def ema(self) -> Path:
        """The model folder of the average of the weights, if there is one."""
        return self.path / EMA_FOLDER


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the message says which and why."""


class Checkpoints:
    """The checkpoints of a run folder. Only the process that holds the folder's lock writes."""

    def __init__(self, run: Path, *, keep: int):
        self._run = run
        self._folder = run / FOLDER
        self._keep = keep
        self._sound: set[Path] = set()
        self._damaged: set[Path] = set()

    def find_resume(self) -> Checkpoint | None:
        """The newest sound checkpoint, or None in a run that has saved none.

        Each damaged one is named in the log and passed over.

        Raises:
            ValueError: when there are checkpoints and none is sound.
        """
        damaged = []
        for path in newest_first(self._run):
            problem = find_damage(path) or missing_state(path)
            if problem is None:
                self._sound.add(path)
                return Checkpoint(path, read_state(path))
            self._damaged.add(path)
            log.warning("checkpoint %s is damaged and not used: %s", path, problem)
            damaged.append(f"{path.name}: {problem}")
        if damaged:
            raise ValueError(
                f"no checkpoint in {self._folder} is sound:\n  " + "\n  ".join(damaged) + "\n"
                "Restore one from a copy, or start anew with another folder (run=...)"
            )
        return None

    def remove_incomplete(self) -> None:
        """Remove what a stopped process was writing; it never had the name of a checkpoint."""
        for pattern in (".step-*", ".old-step-*"):
            for path in self._folder.glob(pattern):
                log.info("removing the incomplete checkpoint %s", path)
                _discard(path)

    def steps(self) -> set[int]:
        """Steps that have a checkpoint, as far as can be told without reading all of it."""
        found = set()
        for path in newest_first(self._run):
            sized = path in self._sound or find_damage(path, hashes=False) is None
            if sized and path not in self._damaged:
                found.add(step_of(path))
        return found

    def save(self, snapshot: Snapshot, *, protected: Collection[int] = ()) -> Checkpoint:
        """Write a checkpoint, then retire old ones.

        Args:
            protected: steps whose checkpoints are kept, however old.

        Raises:
            SaveFailed: when the disk does not take it; what was written of it is removed.
        """
        path = self._folder / f"step-{snapshot.state['step']:08d}"
        temporary = path.with_name(f".{path.name}")
        try:
            state = _write(snapshot, temporary)
            move_folder(temporary, path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise SaveFailed(self._why_failed(path, snapshot, error)) from error
        self._sound.add(path)
        self._damaged.discard(path)
        self.retire(protected)
        return Checkpoint(path, state)

    def retire(self, protected: Collection[int] = ()) -> None:
        """Remove all that is older than the newest `keep` sound checkpoints."""
        sound = 0
        for path in newest_first(self._run):
            if sound < self._keep:
                sound += self._is_sound(path)
            elif step_of(path) not in protected or not self._is_sound(path):
                self._remove(path)

    def _is_sound(self, path: Path) -> bool:
        if path not in self._sound and find_damage(path) is None:
            self._sound.add(path)
        return path in self._sound

    def _remove(self, path: Path) -> None:
        """Its name goes at once, so that a crash cannot leave a half of it as a checkpoint."""
        aside = path.with_name(f".old-{path.name}")
        try:
            path.rename(aside)
        except OSError as error:
            log.warning("the old checkpoint %s could not be removed: %s", path, error)
        else:
            _discard(aside)

    def _why_failed(self, path: Path, snapshot: Snapshot, error: Exception) -> str:
        needed = _size(snapshot) / 1e9
        try:
            place = next(p for p in path.parents if p.exists())
            free = f"{shutil.disk_usage(place).free / 1e9:.2g} GB are free there"
        except OSError as asked:
            free = f"nobody knows what is free there ({asked})"
        newest = next((p.name for p in newest_first(self._run)), "none yet")
        return (
            f"checkpoint {path} could not be written: {error}. It takes {needed:.2g} GB, and "
            f"{free}; the newest complete one is {newest}. Free some space, "
            "lower checkpoint.keep, or move the run folder"
        )


def _discard(path: Path) -> None:
    """Remove a folder, or the link or file that stands where one should."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def missing_state(path: Path) -> str | None:
    """What a resume would need and state.json does not say; None when nothing is missing."""
    try:
        state = read_state(path)
    except (OSError, ValueError):
        return "state.json is unreadable"
    missing = [name for name in _STATE if name not in state]
    return f"state.json lacks {', '.join(missing)}" if missing else None


def _write(snapshot: Snapshot, folder: Path) -> dict[str, Any]:
    """Write all files of a checkpoint; returns the content of state.json."""
    state, pretrained = {**snapshot.state, "versions": _versions()}, snapshot.pretrained
    folder.mkdir(parents=True)
    for name, weights in ((MODEL_FOLDER, snapshot.weights), (EMA_FOLDER, snapshot.ema)):
        if weights is not None:
            save_model(
                folder / name,
                model=pretrained.model,
                section=pretrained.config,
                tokenizer=pretrained.tokenizer,
                weights=weights,
            )
    save_file(snapshot.optimizer, folder / OPTIMIZER_FILE)
    _write_json(folder / "state.json", state)
    files = [p for p in folder.rglob("*") if p.is_file()]
    manifest = {
        p.relative_to(folder).as_posix(): {"size": p.stat().st_size, "sha256": file_hash(p)}
        for p in sorted(files)
    }
    _write_json(folder / MANIFEST, {"files": manifest})
    return state


def _size(snapshot: Snapshot) -> int:
    """Bytes of all tensors of a snapshot."""
    groups = [part for part in vars(snapshot).values() if isinstance(part, dict)]
    return sum(x.nbytes for group in groups for x in group.values() if isinstance(x, Tensor))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions

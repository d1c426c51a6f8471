"""Save the state of a run so that no crash, full disk or damaged file can lose it.

    checkpoints/step-00000100/
        model/                 a model folder, which `multimodal.load` reads
        optimizer.safetensors  `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME` of every parameter
        state.json             step, samples, skips, configuration, versions, data fingerprint
        manifest.json          size and SHA-256 of every other file, written last

A checkpoint is written into a temporary folder, forced to the disk and renamed, and only then are
older ones removed. Safetensors and JSON cannot run code, and the manifest finds what they do not
notice: a flipped bit.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from multimodal.files import file_hash, move_folder
from multimodal.train.snapshot import OPTIMIZER_FILE, Snapshot
from multimodal.weights.save import save_model

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
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
        return self.path / "model"


class Checkpoints:
    """The checkpoints of a run folder. Only the process that holds the folder's lock writes."""

    def __init__(self, run: Path, *, keep: int):
        self._folder = run / "checkpoints"
        self._keep = keep
        self._sound: set[Path] = set()

    def find_resume(self) -> Checkpoint | None:
        """The newest sound checkpoint, or None in a run that has saved none.

        Each damaged one is named in the log and passed over.

        Raises:
            ValueError: when there are checkpoints and none is sound.
        """
        damaged = []
        for path in self._newest_first():
            problem = find_damage(path)
            if problem is None:
                self._sound.add(path)
                return Checkpoint(path, json.loads((path / "state.json").read_text()))
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
        for path in self._folder.glob(".*"):
            log.info("removing the incomplete checkpoint %s", path)
            shutil.rmtree(path)

    def save(self, snapshot: Snapshot) -> Checkpoint:
        """Write a checkpoint, then retire old ones."""
        state, pretrained = snapshot.state, snapshot.pretrained
        path = self._folder / f"step-{state['step']:08d}"
        temporary = path.with_name(f".{path.name}")
        temporary.mkdir(parents=True)
        save_model(
            temporary / "model",
            model=pretrained.model,
            section=pretrained.config,
            tokenizer=pretrained.tokenizer,
            weights=snapshot.weights,
        )
        save_file(snapshot.optimizer, temporary / OPTIMIZER_FILE)
        _write_json(temporary / "state.json", {**state, "versions": _versions()})
        files = [p for p in temporary.rglob("*") if p.is_file()]
        manifest = {
            p.relative_to(temporary).as_posix(): {"size": p.stat().st_size, "sha256": file_hash(p)}
            for p in sorted(files)
        }
        _write_json(temporary / "manifest.json", {"files": manifest})
        move_folder(temporary, path)
        self._sound.add(path)
        self._retire()
        return Checkpoint(path, state)

    def _retire(self) -> None:
        """Remove all that is older than the newest `keep` sound checkpoints."""
        sound = 0
        for path in list(self._newest_first()):
            if sound >= self._keep:
                shutil.rmtree(path)
            elif path in self._sound or find_damage(path) is None:
                self._sound.add(path)
                sound += 1

    def _newest_first(self) -> Iterator[Path]:
        found = [p for p in self._folder.glob("step-*") if _NAME.fullmatch(p.name)]
        yield from sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def find_damage(path: Path) -> str | None:
    """Compare a checkpoint with its manifest; None if it is sound, else what is wrong."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())["files"]
        expected = {name: (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except FileNotFoundError:
        return "manifest.json is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is unreadable"
    if "state.json" not in expected:
        return "manifest.json does not list state.json"
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if file_hash(file) != digest:
            return f"{name} has changed since it was written (SHA-256 differs)"
    return None


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

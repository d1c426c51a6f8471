"""The folder of a run: one process at a time, one configuration, and an end.

config.yaml      the resolved configuration
parameters.json  which parameters learn, at what rate and weight decay
metrics.jsonl    one row for each logged step and each evaluation
skipped.jsonl    one row for each unreadable sample; skipped_summary.json counts them at the end
nonfinite.jsonl  one row for each step left out, since its loss or gradient was not finite
spikes.jsonl     one row for each step whose loss left the band of those before, with its samples
checkpoints/     what a run resumes from
results.json, report.png, model/     written at the end, in this order
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multimodal.config import Config
from multimodal.config_io import check, dump_yaml, read_yaml
from multimodal.distributed import on_main
from multimodal.files import Lock, file_hash, move_folder, write_atomically
from multimodal.weights.checkpoints import checkpoint_model
from multimodal.weights.save import CARD_FILE

MAY_CHANGE = (
    "run",
    "optim",
    "train.duration",
    "train.micro_batch_size",
    "train.checkpoint_activations",
    "train.compile",
    "train.ema",
    "train.max_nonfinite",
    "train.timeout",
    "evaluate",
    "checkpoint",
    "log",
    "card",
    "data.workers",
    "data.max_skipped",
)
"""Settings that a resumed run may have changed; all others would make it another run."""
_MAY_NOT = ("optim.groups",)
"""But these: what is frozen has no state that an optimiser could go on with."""


@contextmanager
def locked(run: Path) -> Iterator[Lock | None]:
    """Hold the folder's lock on rank 0, which alone writes; the others get None.

    Raises:
        ValueError: on all ranks, when another process holds it or the folder is not a run's.
    """
    locks: list[Lock] = []
    on_main(lambda: _take(run, locks))
    try:
        yield locks[0] if locks else None
    finally:
        for lock in locks:
            lock.release()


def _take(run: Path, locks: list[Lock]) -> None:
    found = sorted(p.name for p in run.glob("[!.]*")) if run.is_dir() else []
    if found and not (run / "config.yaml").exists():
        raise ValueError(
            f"run={str(run)!r} holds {', '.join(found[:5])} but no config.yaml, so it is not a run "
            "that can be resumed; choose another folder with run=..."
        )
    locks.append(Lock(run, f"run={str(run)!r}", "another folder with run=..."))


def changed_settings(run: Path, config: Config) -> list[str]:
    """Compare with the configuration that the folder's run was started with.

    Returns:
        Changes that a resumed run may have, as lines for the log; empty for a new run.

    Raises:
        ValueError: when a setting has changed that may not, listing all of those.
    """
    path = run / "config.yaml"
    if not path.exists():
        return []
    old, new = _flat(_completed(read_yaml(path))), _flat(config.model_dump())
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    lines = {name: f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in names}
    refused = [lines[name] for name in names if not _may_change(name)]
    if refused:
        raise ValueError(
            f"run={str(run)!r} was started with other settings:\n  "
            + "\n  ".join(refused)
            + f"\nUndo the change, or start a new run with run=...; a resumed run may change "
            f"{', '.join(MAY_CHANGE[1:])}, but not {', '.join(_MAY_NOT)}"
        )
    return [lines[name] for name in names if name != "run"]


def _completed(tree: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of settings that did not exist when the run was started."""
    try:
        return check(tree, Config).model_dump()
    except ValueError:  # some setting is no more; it shows in the comparison
        return tree


def _may_change(name: str) -> bool:
    def is_below(parts: tuple[str, ...]) -> bool:
        return any(name == part or name.startswith(f"{part}.") for part in parts)

    return is_below(MAY_CHANGE) and not is_below(_MAY_NOT)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(
            _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
        )
    return flat


def write_config(run: Path, config: Config) -> None:
    """Write config.yaml if it is missing or differs."""
    path, text = run / "config.yaml", dump_yaml(config)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_parameters(run: Path, rows: list[dict[str, Any]]) -> None:
    """Write how the parameters are treated."""
    text = json.dumps(rows, indent=1) + "\n"
    path = run / "parameters.json"
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def is_finished(run: Path, checkpoint: Path, evaluations: list[str]) -> bool:
    """Whether the end of the run has been written from this checkpoint, its last."""
    try:
        results = read_results(run)
    except (OSError, ValueError):
        return False
    model = checkpoint_model(checkpoint)
    names = _files(model)
    return (
        sorted(results) == sorted(evaluations)
        and (run / "report.png").exists()
        and sorted([*names, CARD_FILE]) == _files(run / "model")
        and all(file_hash(run / "model" / n) == file_hash(model / n) for n in names)
    )


def read_results(run: Path) -> dict[str, dict[str, Any]]:
    """The figures of all evaluations by name."""
    return json.loads((run / "results.json").read_text(encoding="utf-8"))


def write_results(run: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the figures of all evaluations by name."""
    text = json.dumps(results, indent=2) + "\n"
    write_atomically(run / "results.json", lambda file: file.write_text(text, encoding="utf-8"))


def publish_model(run: Path, checkpoint: Path, card: str) -> None:
    """Copy a checkpoint's model (EMA weights, if it has any) to `model/`, whole or not at all.

    Args:
        card: text of the model card, which a finished run leaves to people to edit.
    """
    temporary = run / ".model"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(checkpoint_model(checkpoint), temporary)
    (temporary / CARD_FILE).write_text(card, encoding="utf-8")
    move_folder(temporary, run / "model")


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

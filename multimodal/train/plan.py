"""What a run will take, before it starts: memory by part, time of a step, hours, and doubts.

Memory is predicted from sizes, and from what a forward pass of two pairs keeps for the backward
pass; a dry step then says how near that is on this device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multimodal.config import Config, parse_duration
from multimodal.data.batch import Batch
from multimodal.data.build import open_source
from multimodal.distributed import world_size
from multimodal.losses.tiles import tile_rows
from multimodal.models.two_tower import TwoTower
from multimodal.train.schedule import Schedule, to_steps
from multimodal.weights.pretrained import Pretrained

_FLOAT = 4
_MOMENTS = 2
"""That AdamW holds of each parameter that learns."""
_PROBE = 2
"""Pairs whose activations are scaled to a micro-batch."""
_FEW_PAIRS = 64
"""In a batch: fewer negatives tell little."""
_FEW_A_PROCESS = 16
_LONG_WARMUP = 0.5
_EVALUATED = 64
"""Pictures that are embedded to tell how long an evaluation takes."""
_WAIT = 0.05
"""Of a step's time that is worth a word."""


def saved_bytes(model: TwoTower, batch: Batch, device: torch.device) -> int:
    """Bytes that a forward pass keeps for the backward pass, besides the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(x)  # else its memory would be found again by another
        return x

    moved = batch.to(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.forward(moved.images, moved.tokens, moved.lengths)
    return sum(kept.values())


def peak_bytes(device: torch.device, function: Callable[[], Any]) -> int | None:
    """How much more memory a call takes at its peak than before; None if the system does not say.

    On a CPU it is resident memory of this process, of which the allocator may still hold some.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    try:
        reset.write_text("5")
    except OSError:
        function()
        return None
    before = _status(status, "VmRSS:")
    function()
    return max(0, _status(status, "VmHWM:") - before)


def _status(path: Path, name: str) -> int:
    return 1024 * int(path.read_text().partition(name)[2].split()[0])


class Sizes(NamedTuple):
    """What the memory of a step follows from."""

    parameters: int
    learning: int
    buffers: int
    embed_dim: int
    activations_a_pair: float
    pixels_a_pair: int
    """Bytes of a pair as it comes from the loader."""


def sizes_of(model: TwoTower, batch: Batch, device: torch.device) -> Sizes:
    """Before the model is wrapped."""
    pair = batch.images[:1].nbytes + batch.tokens[:1].nbytes
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        learning=sum(p.numel() for p in model.parameters() if p.requires_grad),
        buffers=sum(b.nbytes for b in model.buffers()),
        embed_dim=model.embed_dim,
        activations_a_pair=saved_bytes(model, batch.part(slice(0, _PROBE)), device) / _PROBE,
        pixels_a_pair=pair,
    )


def predict(sizes: Sizes, *, local: int, micro: int, whole: int, device: str) -> dict[str, int]:
    """Bytes of each part on a process with `local` of `whole` pairs, `micro` of them at once."""
    tile = tile_rows(whole, local, device) * whole
    return {
        "parameters": sizes.parameters * _FLOAT + sizes.buffers,
        "gradients": sizes.learning * _FLOAT,
        "optimizer": sizes.learning * _FLOAT * _MOMENTS,
        "activations": int(sizes.activations_a_pair * min(micro, local)),
        # Logits and the exponentials beside them; both sides' features, gathered texts, gradients.
        "loss": 2 * tile * _FLOAT + (4 * local + 3 * whole) * sizes.embed_dim * _FLOAT,
        "batch": sizes.pixels_a_pair * min(micro, local),
    }


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that are held after a step, as they are."""
    states = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "parameters": sum(x.nbytes for x in tensors),
        "optimizer": sum(x.nbytes for x in states if x.dim()),
    }


def memory_table(
    run: dict[str, int], dry: dict[str, int], measured: dict[str, int]
) -> dict[str, dict[str, float | None]]:
    """Megabytes (10^6 bytes) of each part, of all together, and of a checkpoint on the disk.

    Returns:
        By part: `run_mb`, predicted for the run on each process; `dry_mb`, predicted for a step on
        a part of a batch; `measured_mb` in that step, or None where it cannot be told.
    """
    parts = {name: (run[name], dry[name]) for name in run}
    parts["together"] = (sum(run.values()), sum(dry.values()))
    saved = tuple(name for name in ("parameters", "optimizer", "ema") if name in run)
    parts["checkpoint"] = (sum(run[name] for name in saved), sum(dry[name] for name in saved))
    measured = {**measured, "checkpoint": sum(measured[name] for name in saved)}
    return {
        name: {
            "run_mb": round(of_run / 1e6, 2),
            "dry_mb": round(of_dry / 1e6, 2),
            "measured_mb": round(measured[name] / 1e6, 2) if name in measured else None,
        }
        for name, (of_run, of_dry) in parts.items()
    }


def step_seconds(pairs_per_second: float, *, local: int, micro: int, dry: int) -> float:
    """Seconds of a step on `local` pairs, from the rate of a dry step on `dry` of them.

    With k micro-batches the towers do (4k - 1) / 3k times the work of one.
    """

    def work(pairs: int) -> float:
        k = -(-pairs // min(micro, pairs))
        return (4 * k - 1) / (3 * k)

    return local / pairs_per_second * work(local) / work(dry)


def evaluation_hours(config: Config, pretrained: Pretrained, schedule: Schedule) -> float:
    """Hours that all evaluations take, from embedding the first pictures and texts of each.

    Ranking what is embedded comes on top.
    """
    total = 0.0
    for section in config.evaluate.values():
        source = open_source(section.data)
        indices = range(min(_EVALUATED, len(source)))
        if not indices:
            continue
        started, texts = time.perf_counter(), []
        for batch, _ in pretrained.encode_source(source, indices, batch_size=_EVALUATED, workers=0):
            texts += [text for captions in batch.captions for text in captions]
        if section.kind == "retrieval" and texts:
            pretrained.encode_text(texts)
        once = (time.perf_counter() - started) / len(indices) * len(source) / world_size()
        weights = 1 if config.train.ema is None else 2
        total += once * weights * _times(section.every, schedule)
    return total / 3600


def _times(every: str | None, schedule: Schedule) -> float:
    """How often something happens in a run, counting its end; in minutes it cannot be told."""
    steps = _interval(every, schedule)
    return 1.0 if steps is None else max(1.0, schedule.total_steps / steps)


def _interval(every: str | None, schedule: Schedule) -> int | None:
    if every is None or parse_duration(every).unit == "minutes":
        return None
    return to_steps(
        every,
        batch_size=schedule.batch_size,
        data_size=schedule.data_size,
        total_steps=schedule.total_steps,
    )


def device_bytes(device: torch.device) -> int | None:
    """Memory of the device; on a CPU of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def plan_warnings(
    config: Config, schedule: Schedule, facts: dict[str, Any], memory: int | None
) -> list[str]:
    """Doubts about a run that would not fail.

    Args:
        facts: as `check_run` found them.
        memory: bytes of the device.
    """
    return [
        *_batch_warnings(config),
        *_length_warnings(config, schedule),
        *_cost_warnings(config, facts, memory),
    ]


def _batch_warnings(config: Config) -> list[str]:
    found = []
    whole, micro = config.train.batch_size, config.train.micro_batch_size
    local = whole // world_size()
    if whole < _FEW_PAIRS:
        found.append(
            f"train.batch_size={whole} gives each pair {whole - 1} negatives, and few negatives "
            "teach little; take hundreds or thousands, with train.micro_batch_size if memory is "
            "short"
        )
    elif local < _FEW_A_PROCESS:
        found.append(
            f"train.batch_size={whole} leaves {local} pairs to each of {world_size()} processes, "
            "which cannot keep a device busy; raise it, or start fewer processes"
        )
    if isinstance(micro, int) and micro < local and local % micro:
        found.append(
            f"train.micro_batch_size={micro} does not divide the {local} pairs of a process, so "
            "the last micro-batch is smaller and the device idles; take a divisor"
        )
    if local >= _FEW_PAIRS and local % 8:
        found.append(
            f"train.batch_size={whole} gives a process {local} pairs, not a multiple of 8, which "
            "matrix units are made for"
        )
    cores = os.cpu_count() or 1
    here = config.data.workers * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > cores:
        found.append(
            f"data.workers={config.data.workers} makes {here} loader processes on {cores} CPU "
            f"core(s), which then wait for each other; take at most {cores} on a machine"
        )
    return found


def _length_warnings(config: Config, schedule: Schedule) -> list[str]:
    total, found = schedule.total_steps, []
    if schedule.warmup_steps >= total:
        found.append(
            f"optim.warmup={config.optim.warmup!r} is {schedule.warmup_steps} steps and the run "
            f'has {total}, so the learning rate only rises; a warm-up such as "5%" fits any length'
        )
    elif schedule.warmup_steps > _LONG_WARMUP * total:
        found.append(
            f"optim.warmup={config.optim.warmup!r} is more than half of the run's {total} steps"
        )
    intervals = {"log.every": config.log.every, "checkpoint.every": config.checkpoint.every}
    intervals |= {f"evaluate.{n}.every": s.every for n, s in config.evaluate.items() if s.every}
    for name, every in intervals.items():
        steps = _interval(every, schedule)
        if steps is not None and steps > total:
            found.append(
                f"{name}={every!r} is {steps} steps and the run has {total}, so it happens at the "
                "end only"
            )
    return found


def _cost_warnings(config: Config, facts: dict[str, Any], memory: int | None) -> list[str]:
    found = []
    needed = facts["memory"]["together"]["run_mb"] if "memory" in facts else 0.0
    if memory is not None and 1e6 * needed > memory:
        found.append(
            f"a step needs about {needed / 1e3:.1f} GB and the device has {memory / 1e9:.1f} GB; "
            "lower train.micro_batch_size, or set train.checkpoint_activations"
        )
    if facts.get("evaluation_hours", 0) > facts.get("hours", float("inf")):
        found.append(
            f"the evaluations take {facts['evaluation_hours']:.2g} hours and training "
            f"{facts['hours']:.2g}; evaluate on less data, or lengthen evaluate.*.every"
        )
    if facts.get("data_wait", 0) > _WAIT:
        found.append(
            f"data comes at {facts['data_per_second']:.0f} samples/s and the device takes "
            f"{facts['compute_per_second']:.0f}, so it waits {facts['data_wait']:.0%} of the time; "
            "raise data.workers, or pack the pictures smaller (`multimodal pack`)"
        )
    return found

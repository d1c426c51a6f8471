"""What would go wrong in a run, and what will limit it, before anything of it is made."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator

from multimodal.config import Config
from multimodal.data.batch import Batch
from multimodal.data.build import open_training
from multimodal.data.check import DataReport
from multimodal.data.loader import step_positions
from multimodal.data.stream import TrainingSource
from multimodal.distributed import world_size
from multimodal.losses.build import build_loss
from multimodal.models.two_tower import Features, TwoTower
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.machine import make_accelerator
from multimodal.train.micro_batch import check_micro_batch_size
from multimodal.train.optim import build_optimizer
from multimodal.train.parameters import Treatment, parameter_table, table_lines
from multimodal.train.plan import (
    device_bytes,
    evaluation_hours,
    held_bytes,
    memory_table,
    peak_bytes,
    plan_warnings,
    predict,
    saved_bytes,
    sizes_of,
    step_seconds,
)
from multimodal.train.run_folder import changed_settings, locked
from multimodal.train.schedule import Schedule, plan
from multimodal.train.sharding import refuse_sharding
from multimodal.train.start import (
    check_evaluations,
    check_shards,
    prepare,
    starting_model,
    training_batches,
)
from multimodal.train.step import train_step
from multimodal.weights.pretrained import Pretrained

T = TypeVar("T")
_SECONDS = 5
"""That each rate is measured for at least, where there is enough data."""
_MANY = 0.1
"""Captions for each sample that are worth a word."""
_LARGEST = 512
"""Pairs of a step that is tried."""
_FLOAT = 4
"""Bytes of a weight; a checkpoint also holds AdamW's two moments of each that learns."""


@dataclass(frozen=True)
class RunReport:
    """What is wrong with a configuration, and facts about the run it describes."""

    problems: list[str]
    facts: dict[str, Any]
    """`steps`, `epochs`, `parameters`, how many of them are `learning`, and in which `groups`;
    `checkpoint_bytes`; of this process, `data_per_second` and
    `compute_per_second` in samples, which of them is the `limit`, and `data_wait`, the share of its
    time that the device will wait for data; `step_seconds` of the whole batch, `hours` of training
    and `evaluation_hours` of embedding for evaluations, as if all processes were as fast and their
    talk cost nothing; `memory` as `plan.memory_table` has it. What a problem has kept from being
    found is missing."""
    warnings: list[str]
    """Doubts about a run that would not fail."""
    source: TrainingSource | None
    pretrained: Pretrained | None


def check_run(config: Config) -> RunReport:
    """Do all that a run does before its first step, and that step on a part of a batch.

    Nothing is written. Every problem is listed, as far as it can be seen behind the others.

    Raises:
        ValueError: when the machine does not fit, since nothing can be tried then.
    """
    accelerator = make_accelerator()
    refuse_sharding()
    problems: list[str] = []

    def attempt(function: Callable[[], T]) -> T | None:
        try:
            return function()
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
            return None

    train = config.train
    facts: dict[str, Any] = {}
    attempt(lambda: check_micro_batch_size(train, accelerator.device))
    attempt(lambda: step_positions(0, batch_size=train.batch_size, rank=0, world_size=world_size()))
    attempt(lambda: _check_folder(config))
    attempt(lambda: check_evaluations(config))
    source = attempt(lambda: open_training(config.data.train))
    if source is None:
        return RunReport(problems, facts, [], None, None)
    attempt(lambda: check_shards(source, config.data))
    schedule = attempt(lambda: plan(train, config.optim, data_size=len(source)))
    pretrained = attempt(lambda: starting_model(config, source, None, accelerator.device))
    treated = attempt(lambda: _prepared(pretrained, config)) if pretrained is not None else None
    if pretrained is not None and treated is not None and schedule is not None:
        facts["groups"] = table_lines(parameter_table(pretrained.model, treated))
        facts |= _size(config, schedule, pretrained)
        attempt(lambda: _check_space(config, facts["checkpoint_bytes"]))
        if not problems:
            attempt(lambda: facts.update(_rates(config, accelerator, source, pretrained, schedule)))
    warnings = []
    if schedule is not None:
        warnings = plan_warnings(config, schedule, facts, device_bytes(accelerator.device))
    return RunReport(problems, facts, warnings, source, pretrained)


def _prepared(pretrained: Pretrained, config: Config) -> dict[str, Treatment]:
    return prepare(pretrained.model.train(), config.train, config.optim)


def data_problems(config: Config, report: DataReport) -> list[str]:
    """Why the training data, once looked at, would stop the run."""
    broken, allowed = sum(report.broken.values()), config.data.max_skipped
    if broken <= allowed * report.looked_at:
        return []
    return [
        f"data.train: {broken} of {report.looked_at} samples looked at are broken, more than "
        f"data.max_skipped={allowed} allows; repair them, or raise data.max_skipped"
    ]


def data_warnings(config: Config, report: DataReport) -> list[str]:
    """What could be better for these data, though the run would not fail."""
    found = []
    if config.loss.duplicates == "negative" and report.repeated_captions > _MANY * report.looked_at:
        found.append(
            f"{report.repeated_captions} captions repeat others, and each is a wrong negative of "
            "its equals; set loss.duplicates=positive or ignore"
        )
    if report.cut and report.cut > _MANY * report.looked_at:
        found.append(
            f"{report.cut} captions are longer than model.text.context_length="
            f"{report.context_length}, and their ends are not read; lengthen it, or shorten them"
        )
    return found


def _check_folder(config: Config) -> None:
    """Whether the run may be begun or resumed in its folder.

    Raises:
        ValueError: when not.
    """
    run = Path(config.run)
    place = next(path for path in (run, *run.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        raise ValueError(f"run={config.run!r} cannot be made: {place} is not writable")
    if run.exists():
        with locked(run):
            changed_settings(run, config)
            Checkpoints(run, keep=config.checkpoint.keep).find_resume()


def _size(config: Config, schedule: Schedule, pretrained: Pretrained) -> dict[str, Any]:
    parameters = sum(p.numel() for p in pretrained.model.parameters())
    learning = sum(p.numel() for p in pretrained.model.parameters() if p.requires_grad)
    return {
        "steps": schedule.total_steps,
        "epochs": round(schedule.epoch(schedule.total_steps), 2),
        "parameters": parameters,
        "learning": learning,
        "checkpoint_bytes": _FLOAT * (parameters * (2 if config.train.ema else 1) + 2 * learning),
    }


def _check_space(config: Config, checkpoint_bytes: int) -> None:
    run = Path(config.run).absolute()
    place = next(path for path in (run, *run.parents) if path.exists())
    free = shutil.disk_usage(place).free
    best = config.checkpoint.best
    kept = config.checkpoint.keep + (best.keep if best else 0)
    needed = (kept + 1) * checkpoint_bytes
    if free < needed:
        raise ValueError(
            f"{kept} checkpoints (checkpoint.keep, .best.keep) and one being written take "
            f"{needed / 1e9:.1f} GB, but {place} has {free / 1e9:.1f} GB left; free some, lower "
            "checkpoint.keep, or put the run elsewhere with run=..."
        )


def _rates(
    config: Config,
    accelerator: Accelerator,
    source: TrainingSource,
    pretrained: Pretrained,
    schedule: Schedule,
) -> dict[str, Any]:
    """Samples a second that the loader gives and the device takes."""
    batches = iter(training_batches(config, source, pretrained, start=0, end=schedule.total_steps))
    started, count, batch = time.perf_counter(), 0, None
    # What workers hold ready at the end was made in the same time.
    for batch in batches:
        count += len(batch.keys)
        if time.perf_counter() - started > _SECONDS:
            break
    assert batch is not None, "a run has a step"
    data = count / (time.perf_counter() - started)
    del batches  # and with it the workers, which would take time from the device
    dry = _dry_run(config, accelerator, pretrained, batch)
    compute = dry.pairs_per_second
    slower = min(data, compute) * world_size()
    return {
        "data_per_second": round(data, 1),
        "compute_per_second": round(compute, 1),
        "data_wait": round(max(0.0, 1 - data / compute), 3),
        "step_seconds": round(dry.step_seconds, 4),
        "memory": dry.memory,
        "evaluation_hours": round(evaluation_hours(config, pretrained, schedule), 4),
        "limit": "data" if data < compute else "compute",
        "hours": round(schedule.samples(schedule.total_steps) / slower / 3600, 2),
    }


class _DryRun(NamedTuple):
    pairs_per_second: float
    step_seconds: float
    """Of a step of the run, if all processes are as fast and their talk costs nothing."""
    memory: dict[str, dict[str, float | None]]


def _dry_run(
    config: Config, accelerator: Accelerator, pretrained: Pretrained, batch: Batch
) -> _DryRun:
    """Some steps on a part of a batch."""
    device = accelerator.device
    local, setting = len(batch.keys), config.train.micro_batch_size
    dry = min(local, _LARGEST)
    micro = min(setting, local) if isinstance(setting, int) else local
    part = batch.part(slice(0, dry))
    with accelerator.autocast():
        sizes = sizes_of(pretrained.model, batch, device)
        kept = saved_bytes(pretrained.model, part.part(slice(0, min(micro, dry))), device)
    model = accelerator.prepare_model(pretrained.model)
    optimizer, loss = build_optimizer(pretrained.model, config.optim), build_loss(config.loss)
    gradients: list[int] = []

    def look(tower: TwoTower, _: Features) -> dict[str, float]:
        gradients.append(sum(p.grad.nbytes for p in tower.parameters() if p.grad is not None))
        return {}

    def step(number: int) -> float:
        started = time.perf_counter()
        result = train_step(
            model,
            loss,
            optimizer,
            part,
            accelerator=accelerator,
            step=number,
            seed=config.seed,
            lr=config.optim.lr,
            clip_grad_norm=config.optim.clip_grad_norm,
            micro_batch_size=micro,
            look=look if number == 0 else None,
        )
        if not result.finite:
            raise ValueError("the first step's loss or gradient is not finite; look at the data")
        return time.perf_counter() - started

    peak = peak_bytes(device, lambda: step(0))
    measured = held_bytes(pretrained.model, optimizer)
    measured |= {"gradients": gradients[0], "activations": kept}
    if peak is not None:
        measured["together"] = measured["parameters"] + peak
    whole = config.train.batch_size
    memory = {
        "run": predict(sizes, local=local, micro=micro, whole=whole, device=device.type),
        "dry_step": predict(sizes, local=dry, micro=micro, whole=dry, device=device.type),
    }
    if config.train.ema is not None:
        memory["run"]["ema"], memory["dry_step"]["ema"] = 4 * sizes.parameters, 0
        measured["ema"] = 0
    rate = dry / min(step(1), step(2))
    return _DryRun(
        rate,
        step_seconds(rate, local=local, micro=micro, dry=dry),
        memory_table(memory["run"], memory["dry_step"], measured),
    )

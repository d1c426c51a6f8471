"""What would go wrong in a run, and what will limit it, before anything of it is made."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator

from multimodal.config import Config
from multimodal.data.batch import Batch
from multimodal.data.build import open_training
from multimodal.data.check import DataReport
from multimodal.data.loader import step_positions
from multimodal.data.stream import TrainingSource
from multimodal.distributed import world_size
from multimodal.losses.build import build_loss
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.machine import make_accelerator
from multimodal.train.micro_batch import check_micro_batch_size
from multimodal.train.optim import build_optimizer
from multimodal.train.run_folder import changed_settings, locked
from multimodal.train.schedule import Schedule, plan
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
_BYTES_A_PARAMETER = 12
"""Of a checkpoint: the weight and AdamW's two moments in float32."""


@dataclass(frozen=True)
class RunReport:
    """What is wrong with a configuration, and facts about the run it describes."""

    problems: list[str]
    facts: dict[str, Any]
    """`steps`, `epochs`, `parameters`, `checkpoint_bytes`; of this process, `data_per_second` and
    `compute_per_second` in samples, which of them is the `limit`, and the `hours` that follow for
    all processes. What a problem has kept from being found is missing."""
    source: TrainingSource | None
    pretrained: Pretrained | None


def check_run(config: Config) -> RunReport:
    """Do all that a run does before its first step, and that step on a part of a batch.

    Nothing is written. Every problem is listed, as far as it can be seen behind the others.

    Raises:
        ValueError: when the machine does not fit, since nothing can be tried then.
    """
    accelerator = make_accelerator()
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
        return RunReport(problems, facts, None, None)
    attempt(lambda: check_shards(source, config.data))
    schedule = attempt(lambda: plan(train, config.optim, data_size=len(source)))
    pretrained = attempt(lambda: starting_model(config, source, None, accelerator.device))
    if pretrained is not None and schedule is not None:
        facts |= _size(config, schedule, pretrained)
        attempt(lambda: _check_space(config, facts["checkpoint_bytes"]))
        if not problems:
            attempt(lambda: facts.update(_rates(config, accelerator, source, pretrained, schedule)))
    return RunReport(problems, facts, source, pretrained)


def data_problems(config: Config, report: DataReport) -> list[str]:
    """Why the training data, once looked at, would stop the run."""
    broken, allowed = sum(report.broken.values()), config.data.max_skipped
    if broken <= allowed * report.looked_at:
        return []
    return [
        f"data.train: {broken} of {report.looked_at} samples looked at are broken, more than "
        f"data.max_skipped={allowed} allows; repair them, or raise data.max_skipped"
    ]


def data_advice(config: Config, report: DataReport) -> list[str]:
    """What could be better for these data, though the run would not fail."""
    advice = []
    if config.loss.duplicates == "negative" and report.repeated_captions > _MANY * report.looked_at:
        advice.append(
            f"{report.repeated_captions} captions repeat others, and each is a wrong negative of "
            "its equals; set loss.duplicates=positive or ignore"
        )
    if report.cut and report.cut > _MANY * report.looked_at:
        advice.append(
            f"{report.cut} captions are longer than model.text.context_length="
            f"{report.context_length}, and their ends are not read; lengthen it, or shorten them"
        )
    return advice


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
    return {
        "steps": schedule.total_steps,
        "epochs": round(schedule.epoch(schedule.total_steps), 2),
        "parameters": parameters,
        "checkpoint_bytes": parameters * _BYTES_A_PARAMETER,
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
    compute = _compute_rate(config, accelerator, pretrained, batch)
    slower = min(data, compute) * world_size()
    return {
        "data_per_second": round(data, 1),
        "compute_per_second": round(compute, 1),
        "limit": "data" if data < compute else "compute",
        "hours": round(schedule.samples(schedule.total_steps) / slower / 3600, 2),
    }


def _compute_rate(
    config: Config, accelerator: Accelerator, pretrained: Pretrained, batch: Batch
) -> float:
    prepare(pretrained.model.train(), config.train)
    model = accelerator.prepare_model(pretrained.model)
    optimizer, loss = build_optimizer(pretrained.model, config.optim), build_loss(config.loss)
    micro = config.train.micro_batch_size
    size = min(len(batch.keys), _LARGEST)
    part = batch.part(slice(0, size))

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
            micro_batch_size=micro if isinstance(micro, int) else None,
        )
        if not result.finite:
            raise ValueError("the first step's loss or gradient is not finite; look at the data")
        return time.perf_counter() - started

    step(0)
    return size / min(step(1), step(2))

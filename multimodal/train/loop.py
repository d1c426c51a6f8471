"""Training, from a configuration to a finished run folder. Read `train`, then `_run`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from multimodal.config import Config
from multimodal.data.loader import step_positions
from multimodal.data.mixture import samples_by_source
from multimodal.data.stream import TrainingSource
from multimodal.distributed import is_main, on_main, rank, shutdown, world_size
from multimodal.errors import StopRequested
from multimodal.evaluate.report import print_results
from multimodal.losses.build import build_loss
from multimodal.losses.pairs import PairLoss
from multimodal.train.checkpoint import Checkpoint, Checkpoints
from multimodal.train.clock import Clock
from multimodal.train.diagnostics import Diagnostics
from multimodal.train.evaluating import evaluate_due, finish
from multimodal.train.guard import Guard
from multimodal.train.machine import make_accelerator
from multimodal.train.micro_batch import check_micro_batch_size, choose_micro_batch_size
from multimodal.train.optim import build_optimizer
from multimodal.train.parameters import parameter_table, table_lines
from multimodal.train.report import Meter, Report, Row, batch_hash
from multimodal.train.run_folder import (
    changed_settings,
    is_finished,
    locked,
    read_results,
    write_config,
    write_parameters,
)
from multimodal.train.run_weights import RunWeights, evaluation_names
from multimodal.train.saving import Saver
from multimodal.train.schedule import Schedule, plan
from multimodal.train.sharding import check_sharded, loading_device
from multimodal.train.signals import Signals
from multimodal.train.snapshot import load_optimizer
from multimodal.train.start import (
    check_fingerprint,
    check_start,
    open_data,
    prepare,
    starting_model,
    training_batches,
)
from multimodal.train.step import StepResult, rehearse, train_step
from multimodal.train.watchdog import Watchdog, timeout_seconds
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)


def train(config: Config) -> None:
    """Train, resume, or find the run finished. Call it in every process of a launch.

    Raises:
        ValueError: before anything is written, when settings, data, machine and run folder do not
            fit together.
        RunStopped: when loss or gradient stay not finite for `train.max_nonfinite` steps, or more
            samples are unreadable than `data.max_skipped` allows, or another process has ended.
        StopRequested: when a signal has asked for it, with a checkpoint of the last step.
    """
    limit = timeout_seconds(config.train.timeout)
    with Signals() as signals:
        try:
            with Watchdog(limit, signals) as watch:
                accelerator = make_accelerator(timeout=limit)
                watch.at("start", 0)
                _train(config, accelerator, watch)
        except StopRequested as request:
            log.warning("stopped by %s; the same command goes on from the last checkpoint", request)
            raise
        finally:
            shutdown()


def _train(config: Config, accelerator: Accelerator, watch: Watchdog) -> None:
    """Open what the run needs, look at what it has left before, and go on from there."""
    if not is_main():
        logging.getLogger("multimodal").setLevel(logging.WARNING)
    run = Path(config.run)
    check_micro_batch_size(config.train, accelerator.device)
    check_sharded(config.train)
    step_positions(0, batch_size=config.train.batch_size, rank=rank(), world_size=world_size())
    source = open_data(config)
    check_start(config)
    schedule = plan(config.train, config.optim, data_size=len(source))
    with locked(run) as lock:
        changes = on_main(lambda: changed_settings(run, config))
        checkpoints = Checkpoints(run, keep=config.checkpoint.keep)
        found = on_main(checkpoints.find_resume)
        fingerprint = check_fingerprint(source, found)
        for change in changes:
            log.info("changed since the run was started: %s", change)
        if found is not None and on_main(lambda: _is_finished(config, schedule, found)):
            log.info("finished: %s holds %d steps; nothing to do", run, found.step)
            on_main(lambda: print_results(read_results(run)))
            return
        if lock is not None:
            lock.sign()
            checkpoints.remove_incomplete()
        _run(config, accelerator, source, schedule, checkpoints, found, fingerprint, watch)


def _is_finished(config: Config, schedule: Schedule, found: Checkpoint) -> bool:
    return found.step >= schedule.total_steps and is_finished(
        Path(config.run), found.path, evaluation_names(config)
    )


def _run(
    config: Config,
    accelerator: Accelerator,
    source: TrainingSource,
    schedule: Schedule,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    fingerprint: str,
    watch: Watchdog,
) -> None:
    """From the checkpoint, or from fresh weights, to the end."""
    start = found.step if found else 0
    parts = _set_up(config, accelerator, source, schedule, found)
    weights, diagnostics = parts.weights, parts.diagnostics
    batches = iter(
        training_batches(config, source, weights.pretrained, start=start, end=schedule.total_steps)
    )
    meter, clock, due, minutes = Meter(), Clock(config), False, (0.0, 0.0)

    with (
        Report(config, start_step=start, total_steps=schedule.total_steps) as report,
        Saver(config, checkpoints, found) as saver,
    ):
        guard = Guard(config, schedule, report, found, shards=len(source.groups()))

        def save(step: int) -> None:
            watch.at("save", step)
            report.flush()
            state = _state(config, source, schedule, step, fingerprint)
            state |= guard.state() | diagnostics.state()
            state["micro_batch_size"] = parts.micro_batch_size
            state["precision"] = accelerator.mixed_precision
            saver.save(state, weights.pretrained, parts.optimizer, weights.ema)

        def evaluated(step: int, minutes: tuple[float, float] = (0.0, 0.0)) -> bool:
            watch.at("evaluate", step)
            return evaluate_due(
                config, schedule, weights, report, step, minutes, progress=watch.progress
            )

        watch.signals.hold()
        if found is not None:
            evaluated(start)
        for step in range(start + 1, schedule.total_steps + 1):
            logs = schedule.is_time(config.log.every, step, minutes=minutes)
            meter.start()
            watch.at("data", step)
            batch = next(batches)
            meter.arrived()
            watch.at("step", step)
            result = train_step(
                parts.model,
                parts.loss,
                parts.optimizer,
                batch,
                accelerator=accelerator,
                step=step - 1,
                seed=config.seed,
                lr=schedule.lr(step - 1),
                clip_grad_norm=config.optim.clip_grad_norm,
                micro_batch_size=parts.micro_batch_size,
                stop=watch.signals.requested is not None,
                look=diagnostics.look if logs else None,
            )
            if result.finite:
                weights.update()
            meter.done(schedule.batch_size)
            minutes = clock.tick()
            report.step(step)
            guard.check(step, result, batch, saver.newest)
            diagnostics.check(step, result, batch, report)

            if logs:
                row = _row(schedule, step, result, batch_hash(batch.keys))
                row |= result.metrics | meter.figures() | guard.counts()
                row |= diagnostics.speed(row["samples_per_second"], batch)
                row |= samples_by_source(source, config.seed, schedule.samples(step))
                report.metrics(row)
                meter.restart()

            # Amid broken steps the weights may be what breaks them; keep the older checkpoints.
            sound, stop = result.finite or step == schedule.total_steps, result.stop
            due |= schedule.is_time(config.checkpoint.every, step, minutes=minutes)
            if (due or stop) and sound:
                due = False
                save(step)
            try:
                wanted = not stop and evaluated(step, minutes) and saver.is_best(step)
            except StopRequested:
                wanted = stop = True
            if wanted and result.finite and saver.last_step < step:
                save(step)
            if stop:
                newest = saver.newest()
                if newest is None or newest.step < step:
                    log.warning("step %d is not saved; it will be done again", step)
                saver.wait()
                raise watch.stopped()

        watch.at("finish", schedule.total_steps)
        last = saver.finish(schedule.total_steps)
        watch.signals.release()
        if guard.in_a_row:
            log.warning("the last %d step(s) were not finite and left out", guard.in_a_row)
        finish(config, weights, source, last)


class _Parts(NamedTuple):
    """What a run works with."""

    weights: RunWeights
    model: nn.Module
    """To call in training: spread over the ranks."""
    loss: PairLoss
    optimizer: torch.optim.Optimizer
    micro_batch_size: int
    diagnostics: Diagnostics


def _set_up(
    config: Config,
    accelerator: Accelerator,
    source: TrainingSource,
    schedule: Schedule,
    found: Checkpoint | None,
) -> _Parts:
    """Make the parts, or read them from the checkpoint, and begin the run folder."""
    pretrained = starting_model(config, source, found, loading_device(accelerator))
    treated = prepare(pretrained.model, config.train, config.optim)
    on_main(lambda: write_config(Path(config.run), config))
    _announce(accelerator, source, schedule, pretrained, found)
    rows = parameter_table(pretrained.model, treated)
    on_main(lambda: write_parameters(Path(config.run), rows))
    for line in table_lines(rows):
        log.info("%s", line)
    diagnostics = Diagnostics(schedule, pretrained, accelerator, found)
    weights = RunWeights(pretrained, decay=config.train.ema, found=found)
    model = weights.distribute(accelerator)
    optimizer = build_optimizer(pretrained.model, config.optim)
    if found:
        load_optimizer(found.path, optimizer)
    loss = build_loss(config.loss)
    rehearse(model, loss, pretrained, accelerator=accelerator)
    micro_batch_size = choose_micro_batch_size(
        config.train, model, pretrained, accelerator=accelerator, found=found
    )
    return _Parts(weights, model, loss, optimizer, micro_batch_size, diagnostics)


def _announce(
    accelerator: Accelerator,
    source: TrainingSource,
    schedule: Schedule,
    pretrained: Pretrained,
    found: Checkpoint | None,
) -> None:
    """Say what follows from the settings, and where the run starts."""
    log.info(
        "%s: %d samples; %d steps of %d pairs (%.2f epochs), %d of them warm-up",
        source.description,
        len(source),
        schedule.total_steps,
        schedule.batch_size,
        schedule.epoch(schedule.total_steps),
        schedule.warmup_steps,
    )
    log.info(
        "%d parameters; %d process(es) with %d pairs each on %s, precision %s",
        sum(p.numel() for p in pretrained.model.parameters()),
        world_size(),
        schedule.batch_size // world_size(),
        accelerator.device.type,
        accelerator.mixed_precision,
    )
    if found is not None:
        log.info("resuming after step %d from %s", found.step, found.path)
        if found.step > schedule.total_steps:
            log.warning("train.duration is shorter than the run already is; it ends here")


def _row(schedule: Schedule, step: int, result: StepResult, hashed: str) -> Row:
    row = {
        "step": step,
        "epoch": schedule.epoch(step),
        "samples": schedule.samples(step),
        "loss": result.loss,
        "lr": schedule.lr(step - 1),
        "grad_norm": result.grad_norm,
        "logit_scale": result.logit_scale,
        "logit_bias": result.logit_bias,
        "batch_hash": hashed,
    }
    return row if result.logit_bias is not None else {k: row[k] for k in row if k != "logit_bias"}


def _state(
    config: Config, source: TrainingSource, schedule: Schedule, step: int, fingerprint: str
) -> dict[str, Any]:
    """What a checkpoint says about itself and the run."""
    return {
        "step": step,
        "epoch": schedule.epoch(step),
        "samples": schedule.samples(step),
        "processes": world_size(),
        "data": {
            "fingerprint": fingerprint,
            "samples": len(source),
            "description": source.description,
        },
        "config": config.model_dump(),
    }

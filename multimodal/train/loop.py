"""Training, from a configuration to a finished run folder. Read `train`, then `_run`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from matplotlib.figure import FigureBase

from multimodal.config import Config, Retrieval, parse_duration
from multimodal.data.build import open_source
from multimodal.data.loader import step_positions
from multimodal.data.mixture import samples_by_source
from multimodal.data.source import Source
from multimodal.distributed import (
    broadcast_object,
    gather_objects,
    is_main,
    on_main,
    rank,
    shutdown,
    world_size,
)
from multimodal.errors import RunStopped
from multimodal.evaluate.report import draw_predictions, first_captions, print_results
from multimodal.evaluate.run import evaluate
from multimodal.losses.build import build_loss
from multimodal.train.checkpoint import Checkpoint, Checkpoints, load_optimizer
from multimodal.train.curves import write_report
from multimodal.train.machine import make_accelerator
from multimodal.train.micro_batch import check_micro_batch_size, choose_micro_batch_size
from multimodal.train.optim import build_optimizer
from multimodal.train.report import Meter, Report, Row, batch_hash, read_rows
from multimodal.train.run_folder import (
    changed_settings,
    is_finished,
    locked,
    publish_model,
    read_results,
    write_config,
    write_results,
)
from multimodal.train.schedule import Schedule, plan
from multimodal.train.start import (
    check_fingerprint,
    check_tokenizer,
    open_data,
    prepare,
    starting_model,
    training_batches,
)
from multimodal.train.step import StepResult, rehearse, train_step
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)

_SUSPECT = (
    "; that checkpoint's weights are those that gave these steps: if they are to blame, remove it, "
    "and the run goes on from the one before"
)
_FAIR_SAMPLE = 10_000
"""Samples (or one epoch, if that is less) over which unreadable ones are judged at least."""


def train(config: Config) -> None:
    """Train, resume, or find the run finished. Call it in every process of a launch.

    Raises:
        ValueError: before anything is written, when settings, data, machine and run folder do not
            fit together.
        RunStopped: when loss or gradient stay not finite for `train.max_nonfinite` steps, or more
            samples are unreadable than `data.max_skipped` allows.
    """
    accelerator = make_accelerator(tracker=None if config.log.wandb.mode == "disabled" else "wandb")
    if not is_main():
        logging.getLogger("multimodal").setLevel(logging.WARNING)
    run = Path(config.run)
    try:
        check_micro_batch_size(config.train, accelerator.device)
        step_positions(0, batch_size=config.train.batch_size, rank=rank(), world_size=world_size())
        source = open_data(config)
        check_tokenizer(config)
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
            _run(config, accelerator, source, schedule, checkpoints, found, fingerprint)
    finally:
        shutdown()


def _is_finished(config: Config, schedule: Schedule, found: Checkpoint) -> bool:
    return found.step >= schedule.total_steps and is_finished(
        Path(config.run), found.path, list(config.evaluate)
    )


def _run(
    config: Config,
    accelerator: Accelerator,
    source: Source,
    schedule: Schedule,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    fingerprint: str,
) -> None:
    """From the checkpoint, or from fresh weights, to the end."""
    start, skipped = (found.step, found.state["skipped"]) if found else (0, 0)
    broken = _Broken(**found.state.get("nonfinite", {})) if found else _Broken()
    pretrained = starting_model(config, source, found, accelerator.device)
    on_main(lambda: write_config(Path(config.run), config))
    prepare(pretrained.model, config.train)
    _announce(accelerator, source, schedule, pretrained, found)
    optimizer = build_optimizer(pretrained.model, config.optim)
    if found:
        load_optimizer(found.path, optimizer)
    model = accelerator.prepare_model(pretrained.model.train())
    loss = build_loss(config.loss)
    rehearse(model, loss, pretrained, accelerator=accelerator)
    micro_batch_size = choose_micro_batch_size(
        config.train, model, pretrained, accelerator=accelerator, found=found
    )
    batches = iter(
        training_batches(config, source, pretrained, start=start, end=schedule.total_steps)
    )
    meter, clock, due = Meter(), _Clock(config), False

    with Report(config, accelerator, start_step=start, total_steps=schedule.total_steps) as report:
        if found is not None:
            _evaluate_due(config, schedule, pretrained, report, start)
        for step in range(start + 1, schedule.total_steps + 1):
            meter.start()
            batch = next(batches)
            meter.arrived()
            result = train_step(
                model,
                loss,
                optimizer,
                batch,
                accelerator=accelerator,
                step=step - 1,
                seed=config.seed,
                lr=schedule.lr(step - 1),
                clip_grad_norm=config.optim.clip_grad_norm,
                micro_batch_size=micro_batch_size,
            )
            meter.done(schedule.batch_size)
            minutes = clock.tick()
            report.step(step)

            if result.skipped:
                skipped += result.skipped
                report.skips(step, [s for own in gather_objects(batch.skipped) for s in own])
                _check_budget(config, schedule, step, skipped)

            broken = broken.after(result)
            if not result.finite:
                report.nonfinite(_nonfinite_row(schedule, step, result))
                _check_nonfinite(config, step, result, broken, found)

            if schedule.is_time(config.log.every, step, minutes=minutes):
                hashed = batch_hash(batch.keys)
                counts = {"skipped": skipped, "nonfinite": broken.total}
                counts |= samples_by_source(source, config.seed, schedule.samples(step))
                row = _row(schedule, step, result, hashed)
                report.metrics(row | result.metrics | meter.figures() | counts)
                meter.restart()

            due |= schedule.is_time(config.checkpoint.every, step, minutes=minutes)
            # Amid broken steps the weights may be what breaks them; keep the older checkpoints.
            if due and (result.finite or step == schedule.total_steps):
                due = False
                report.flush()
                state = _state(config, source, schedule, step, fingerprint)
                state |= {"skipped": skipped, "nonfinite": asdict(broken)}
                state |= {"micro_batch_size": micro_batch_size}
                found = _save(config, checkpoints, state, pretrained, optimizer)

            _evaluate_due(config, schedule, pretrained, report, step, minutes)

        assert found is not None, "the last step saves a checkpoint"
        if broken.in_a_row:
            log.warning("the last %d step(s) were not finite and left out", broken.in_a_row)
        _finish(config, pretrained, found)


def _announce(
    accelerator: Accelerator,
    source: Source,
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


def _evaluate_due(
    config: Config,
    schedule: Schedule,
    pretrained: Pretrained,
    report: Report,
    step: int,
    minutes: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Run the evaluations that belong to a step and have no row yet.

    They come after the checkpoint, which a broken evaluation then cannot cost; a run that was
    stopped between the two makes up for them when it resumes.
    """
    sections = config.evaluate.items()
    due = [name for name, s in sections if schedule.is_time(s.every, step, minutes=minutes)]
    if due:
        done = on_main(lambda: _evaluations_at(Path(config.run), step))
        for name in (n for n in due if n not in done):
            figures = evaluate(pretrained, config.evaluate[name], workers=config.data.workers)
            report.evaluation(step, name, figures)


def _check_budget(config: Config, schedule: Schedule, step: int, skipped: int) -> None:
    """Stop, on all ranks, when more samples are unreadable than allowed.

    Raises:
        RunStopped: naming the numbers and where the samples are listed.
    """
    seen = max(schedule.samples(step), min(schedule.data_size, _FAIR_SAMPLE))
    if skipped > config.data.max_skipped * seen:
        raise RunStopped(
            f"step {step}: {skipped} samples were unreadable, more than data.max_skipped="
            f"{config.data.max_skipped} of {seen}; see {Path(config.run) / 'skipped.jsonl'}, "
            "repair the data or raise data.max_skipped, then run the same command again"
        )


@dataclass(frozen=True)
class _Broken:
    """Steps left out because loss or gradient was not finite."""

    total: int = 0
    in_a_row: int = 0
    """Up to the last step."""

    def after(self, result: StepResult) -> _Broken:
        if result.finite:
            return replace(self, in_a_row=0)
        return _Broken(self.total + 1, self.in_a_row + 1)


def _nonfinite_row(schedule: Schedule, step: int, result: StepResult) -> Row:
    first = schedule.samples(step - 1)
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "positions": [first, first + schedule.batch_size - 1],
        "suspects": list(result.suspects),
    }


def _check_nonfinite(
    config: Config, step: int, result: StepResult, broken: _Broken, found: Checkpoint | None
) -> None:
    """Stop, on all ranks, when too many steps in a row had to be left out.

    Raises:
        RunStopped: naming the numbers, the samples and the checkpoint to go on from.
    """
    if broken.in_a_row < config.train.max_nonfinite:
        return
    keys = result.suspects
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    samples = f"samples with broken embeddings: {', '.join(keys[:8])}{more}" if keys else ""
    raise RunStopped(
        f"step {step}: loss {result.loss} and gradient norm {result.grad_norm} must be finite; "
        f"{broken.in_a_row} steps in a row were not (train.max_nonfinite="
        f"{config.train.max_nonfinite}) and left the weights as they were. "
        f"{samples or 'no embedding is broken'}; {Path(config.run) / 'nonfinite.jsonl'} lists the "
        f"steps. Last checkpoint: {found.path if found else 'none yet'}. Look at the samples, "
        "lower optim.lr, or lengthen optim.warmup, then run the same command again"
        + (_SUSPECT if found is not None and found.step == step - broken.in_a_row else "")
    )


def _state(
    config: Config, source: Source, schedule: Schedule, step: int, fingerprint: str
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


def _save(
    config: Config,
    checkpoints: Checkpoints,
    state: dict[str, Any],
    pretrained: Pretrained,
    optimizer: torch.optim.Optimizer,
) -> Checkpoint:
    path = on_main(
        lambda: checkpoints.save(
            state=state,
            model=pretrained.model,
            section=pretrained.config,
            tokenizer=pretrained.tokenizer,
            optimizer=optimizer,
        )
    )
    log.info("step %d  saved %s", state["step"], path)
    return Checkpoint(path, state)


def _finish(config: Config, pretrained: Pretrained, last: Checkpoint) -> None:
    """Write what is left of the run: results, report, the model."""
    run = Path(config.run)

    def write() -> None:
        results = _evaluations_at(run, last.step)
        write_results(run, {name: results[name] for name in config.evaluate})
        pictures = _picture_sheet(config, pretrained)
        write_report(run, read_rows(run / "metrics.jsonl"), pictures)
        publish_model(run, last.path)

    on_main(write)
    log.info("finished: %s after %d steps; the model is in %s", run, last.step, run / "model")
    on_main(lambda: print_results(read_results(run)))


def _picture_sheet(config: Config, pretrained: Pretrained) -> Callable[[FigureBase], None] | None:
    """What draws pictures of the first retrieval evaluation with their most probable captions."""
    for section in config.evaluate.values():
        if isinstance(section, Retrieval):
            source = open_source(section.data)
            captions = first_captions(source)
            return lambda figure: draw_predictions(pretrained, source, captions, figure)
    return None


def _evaluations_at(run: Path, step: int) -> dict[str, Row]:
    rows = [r for r in read_rows(run / "metrics.jsonl") if r["step"] == step and "eval" in r]
    return {r["eval"]: {k: v for k, v in r.items() if k not in ("step", "eval")} for r in rows}


class _Clock:
    """Minutes of training as rank 0 counts them, asked for only if an interval is in minutes."""

    def __init__(self, config: Config):
        intervals = [config.log.every, config.checkpoint.every]
        intervals += [section.every for section in config.evaluate.values() if section.every]
        self._used = any(parse_duration(every).unit == "minutes" for every in intervals)
        self._start = time.monotonic()
        self._now = 0.0

    def tick(self) -> tuple[float, float]:
        """Minutes at the last tick and now, the same on all ranks."""
        before = self._now
        if self._used:
            self._now = broadcast_object((time.monotonic() - self._start) / 60)
        return before, self._now

"""How long, how fast and how often: pure functions of the number of samples seen."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from fractions import Fraction

from multimodal.config import Optim, Train, parse_duration

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """The numbers that follow from the durations in the config and the size of the data.

    A step is a global batch, so nothing here knows of ranks or micro-batches.
    """

    batch_size: int
    data_size: int
    total_steps: int
    warmup_steps: int
    peak_lr: float
    final_lr: float
    """As a share of the peak."""

    def samples(self, step: int) -> int:
        """Samples seen after `step` steps."""
        return step * self.batch_size

    def epoch(self, step: int) -> float:
        """Passes over the data after `step` steps."""
        return self.samples(step) / self.data_size

    def lr(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished steps.

        Rises linearly and reaches the peak with the last warm-up step, then falls on half a
        cosine towards the final rate (arXiv 1608.03983).
        """
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        share = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.peak_lr * (self.final_lr + (1 - self.final_lr) * share)

    def is_time(
        self, every: str | None, step: int, *, minutes: tuple[float, float] = (0.0, 0.0)
    ) -> bool:
        """Whether what happens `every` so often happens after `step` steps.

        It does when an interval ended within this step, and always at the end of the run. None
        means only at the end.

        Args:
            every: a duration of the config.
            step: finished steps, from 1.
            minutes: minutes of training before and after this step, the same on all ranks.
        """
        if step >= self.total_steps:
            return True
        if every is None:
            return False
        duration = parse_duration(every)
        if duration.unit == "minutes":
            before, now = minutes
            return now // duration.value > before // duration.value
        period = _samples(every, self.batch_size, self.data_size, self.samples(self.total_steps))
        return self.samples(step) // period > self.samples(step - 1) // period


def plan(train: Train, optim: Optim, *, data_size: int) -> Schedule:
    """Work out the schedule of a run.

    Raises:
        ValueError: when the run has no step.
    """
    if data_size == 0:
        raise ValueError("the training data holds no sample; check data.train")
    if parse_duration(train.duration).unit == "percent":
        raise ValueError(
            f"train.duration={train.duration!r}: the length of the run cannot be a share of "
            'itself; write "1000 steps", "3 epochs" or "2e6 samples"'
        )
    total = to_steps(train.duration, batch_size=train.batch_size, data_size=data_size)
    if total < 1:
        raise ValueError(f"train.duration={train.duration!r} is no step; give at least 1 step")
    if train.batch_size > data_size:
        log.warning(
            "train.batch_size=%d is more than the %d samples: a batch then holds pictures several "
            "times, each a wrong negative of its copies unless loss.duplicates is ignore or "
            "positive; use at most %d",
            train.batch_size,
            data_size,
            data_size,
        )
    warmup = to_steps(
        optim.warmup, batch_size=train.batch_size, data_size=data_size, total_steps=total
    )
    if warmup > total:
        log.warning(
            "optim.warmup=%r is %d steps and the run has %d: the learning rate will not reach "
            'optim.lr; a warm-up such as "5%%" fits any length',
            optim.warmup,
            warmup,
            total,
        )
    return Schedule(train.batch_size, data_size, total, warmup, optim.lr, optim.final_lr)


def to_steps(duration: str, *, batch_size: int, data_size: int, total_steps: int = 0) -> int:
    """The smallest number of steps that covers a duration.

    Args:
        total_steps: what a percentage refers to.
    """
    samples = _samples(duration, batch_size, data_size, total_steps * batch_size)
    return math.ceil(samples / batch_size)


def _samples(duration: str, batch_size: int, data_size: int, total_samples: int) -> Fraction:
    """Exact, since a rounded interval would drift away from the epochs."""
    value, unit = parse_duration(duration)
    amount = Fraction(str(value))
    match unit:
        case "steps":
            return amount * batch_size
        case "epochs":
            return amount * data_size
        case "samples":
            return amount
        case "percent":
            return amount * total_samples / 100
        case _:
            raise AssertionError(f"{duration} is not an amount of samples")

"""Cost of what a run tells of itself at a logged step, beside the step.

    python scripts/bench/diagnostics.py

Takes turns between plain steps of the quickstart model and steps that are looked at; the median of
each counts, by processor time, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from accelerate import Accelerator
from step import PRESET, random_batch

from multimodal.config import Model, Optim
from multimodal.config_io import check, read_yaml
from multimodal.losses import ContrastiveLoss
from multimodal.models.build import build_model
from multimodal.train.diagnostics import Diagnostics
from multimodal.train.optim import build_optimizer
from multimodal.train.step import Look, train_step


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    section = check(read_yaml(options.model)["model"], Model)
    model = build_model(section).train()
    optimizer, accelerator = build_optimizer(model, Optim()), Accelerator(cpu=True)
    batch, size = random_batch(options.batch_size), SimpleNamespace(size=section.image.image_size)
    pretrained = cast(Any, SimpleNamespace(model=model, config=section, transform=size))
    schedule = cast(Any, SimpleNamespace(batch_size=options.batch_size, warmup_steps=0))
    started = time.perf_counter()
    diagnostics = Diagnostics(schedule, pretrained, accelerator, None)
    ready = time.perf_counter() - started

    def seconds(look: Look | None) -> float:
        started = time.process_time()
        train_step(
            model,
            ContrastiveLoss(),
            optimizer,
            batch,
            accelerator=accelerator,
            step=0,
            seed=0,
            lr=1e-4,
            clip_grad_norm=1.0,
            look=look,
        )
        return time.process_time() - started

    looked: list[float] = []

    def look(*args: Any) -> dict[str, float]:
        started = time.process_time()
        found = diagnostics.look(*args)
        looked.append(time.process_time() - started)
        return found

    seconds(None)
    plain = statistics.median(seconds(None) for _ in range(options.rounds))
    for _ in range(options.rounds):
        seconds(look)
    cost = statistics.median(looked)
    print(
        f"quickstart model, batch {options.batch_size}: a step {1e3 * plain:.0f} ms, made ready "
        f"in {ready:.2f} s"
    )
    print(
        f"a look {1e3 * cost:.1f} ms: {cost / plain:.2%} of a step, "
        f"{cost / (10 * plain):.3%} of the time at log.every=10 steps"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=PRESET)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()

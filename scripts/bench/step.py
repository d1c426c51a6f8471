"""Cost of a step in micro-batches beside the plain one, and the memory of a large global batch.

    python scripts/bench/step.py --out step.json
    python scripts/bench/step.py --batch-size 16384 --micro-batch-size 256 --rounds 1

Steps of the quickstart model on random pictures and texts: forward, loss, backward, update, at the
same batch, whole and in micro-batches. One thread; the ways take turns, and the best round of each
counts, by processor time. A process of its own takes one step for each peak of resident memory.
`--micro-batch-size` measures that size alone, whose activations need not fit as a whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator

from multimodal.config import Model, Optim
from multimodal.config_io import check, read_yaml
from multimodal.data.batch import Batch
from multimodal.losses import ContrastiveLoss
from multimodal.models.build import build_model
from multimodal.train.optim import build_optimizer
from multimodal.train.step import train_step

PRESET = Path(__file__).parents[2] / "configs" / "model" / "quickstart.yaml"
TOKENS = 16


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    step = Step(options)
    size = options.micro_batch_size
    if options.one_step:
        step(size)
        print(peak_kib())
        return
    whole, batch = options.batch_size, options.batch_size
    sizes = [size] if size else [whole, *(-(-batch // k) for k in options.parts)]
    rounds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(options.rounds):
        for size in sizes:
            start = time.process_time()
            step(size)
            rounds[size].append(time.process_time() - start)
    report = {
        "rows": [
            {
                "micro_batch_size": size,
                "micro_batches": -(-batch // size),
                "seconds": min(times),
                "ratio": min(times) / min(rounds[sizes[0]]),
                "peak_mib": peak(size),
            }
            for size, times in rounds.items()
        ],
        "batch_size": batch,
        "checkpoint_activations": options.checkpoint_activations,
        "threads": options.threads,
        "versions": {name: version(name) for name in ("torch", "accelerate")},
    }
    print(f"quickstart model, batch {batch}, {options.threads} thread(s)")
    for row in report["rows"]:
        print(
            f"{row['micro_batches']:4} x {row['micro_batch_size']:5}"
            f"{row['seconds']:9.2f} s  {row['ratio']:5.2f} x the first"
            f"{row['peak_mib']:8.0f} MiB resident at most"
        )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 8], help="Micro-batches.")
    parser.add_argument("--micro-batch-size", type=int, help="Only this size.")
    parser.add_argument("--checkpoint-activations", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    parser.add_argument("--one-step", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Step:
    """A step of the quickstart model on one random batch."""

    def __init__(self, options: argparse.Namespace):
        torch.manual_seed(0)
        self.model = build_model(check(read_yaml(PRESET)["model"], Model)).train()
        self.model.checkpoint_activations(options.checkpoint_activations)
        self.optimizer = build_optimizer(self.model, Optim())
        self.accelerator = Accelerator(cpu=True)
        self.batch = random_batch(options.batch_size)

    def __call__(self, micro_batch_size: int) -> None:
        train_step(
            self.model,
            ContrastiveLoss(),
            self.optimizer,
            self.batch,
            accelerator=self.accelerator,
            step=0,
            seed=0,
            lr=1e-4,
            clip_grad_norm=1.0,
            micro_batch_size=micro_batch_size,
        )


def random_batch(size: int) -> Batch:
    keys = [str(i) for i in range(size)]
    return Batch(
        images=torch.randint(0, 256, (size, 3, 64, 64), dtype=torch.uint8),
        tokens=torch.randint(0, 2048, (size, TOKENS)),
        lengths=torch.randint(3, TOKENS + 1, (size,)),
        keys=keys,
        positions=torch.arange(size),
        captions=keys,
        image_ids=torch.arange(size),
        text_ids=torch.arange(size),
    )


def peak_kib() -> int:
    """Of this process; `getrusage` would count the parent's memory at the fork too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def peak(micro_batch_size: int) -> float:
    """Peak resident memory in MiB of a process that takes one such step."""
    command = [sys.executable, *sys.argv, "--one-step", "--micro-batch-size", str(micro_batch_size)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1]) / 1024


if __name__ == "__main__":
    main()

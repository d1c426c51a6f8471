"""Cost of a checkpoint to the step loop, written in a thread and in the foreground.

    python scripts/bench/checkpoint.py --out checkpoint.json
    python scripts/bench/checkpoint.py --batch-size 512 --device cuda --steps 50

Steps of a preset on one random batch: forward, loss, backward, update, as the loop makes them. The
ways take turns, a round of `--steps` steps each: without a checkpoint, with one in the foreground
before the first step, and with one that a thread writes while the steps go on.

Seconds are of the clock, and beside them of the processor, which other programs do not disturb: of
the main thread for the steps and for what it does itself in a save, of the rest for the writing.
From these follow two shares of the time of `--every` steps: `idle`, where a core is free for the
thread, so that the loop pays for the copy of the state only; and `busy`, where the thread's work
is taken from the steps in full. `clock` is what the clock says, and means little beside other
programs. A checkpoint's cost does not grow with the batch, so it is a smaller share of a larger
step. The first save, which also fetches the memory for the copy, is apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator

from multimodal.config import BpeTokenizer, Config, Model, Optim
from multimodal.config_io import check, read_yaml
from multimodal.data.batch import Batch
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.losses import ContrastiveLoss
from multimodal.models.build import build_model
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.optim import build_optimizer
from multimodal.train.saving import Saver
from multimodal.train.step import train_step
from multimodal.weights.pretrained import Pretrained

PRESETS = Path(__file__).parents[2] / "configs" / "model"
WAYS = ("none", "foreground", "background")


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    bench.round("none", 2)
    first = bench.round("background", 1)
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            rounds[way].append(bench.round(way, options.steps))
    plain = {kind: median(rounds["none"], kind) / options.steps for kind in ("steps", "steps_cpu")}
    report = {
        "preset": options.preset,
        "batch_size": options.batch_size,
        "step": {"clock": plain["steps"], "cpu": plain["steps_cpu"]},
        "checkpoint_bytes": bench.bytes,
        "first_save": vars(first),
        "every": options.every,
        "rows": [
            {"way": way} | shares(way, rounds[way], plain, options.every, options.steps)
            for way in WAYS[1:]
        ],
        "rounds": {way: [vars(r) for r in rounds[way]] for way in WAYS},
        "device": options.device,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "safetensors")},
    }
    show(report)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def median(rounds: list[Round], kind: str) -> float:
    return statistics.median(getattr(r, kind) for r in rounds)


def shares(
    way: str, rounds: list[Round], plain: dict[str, float], every: int, steps: int
) -> dict[str, float]:
    """Of one way of saving: medians of its rounds, and its cost as shares of `every` steps."""
    kinds = ("save", "save_cpu", "steps", "steps_cpu", "writing_cpu", "complete")
    row = {kind: median(rounds, kind) for kind in kinds}
    slowed = row["steps"] - steps * plain["steps"]
    used = every * plain["steps_cpu"]
    both = row["save_cpu"] + row["writing_cpu"]
    return row | {
        "clock_share": (row["save"] + slowed) / (every * plain["steps"]),
        "idle_share": (row["save_cpu"] if way == "background" else both) / used,
        "busy_share": both / used,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="clip-b-32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="Of a round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=50, help="Steps between checkpoints.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="Where to write; default: the temporary one.")
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    return parser.parse_args()


@dataclass
class Round:
    """Seconds of a round, by the clock and of the processor."""

    save: float = 0.0
    save_cpu: float = 0.0
    steps: float = 0.0
    steps_cpu: float = 0.0
    writing_cpu: float = 0.0
    """Of all threads but the main one."""
    complete: float = 0.0
    """From the begin of the save until the checkpoint was seen to be there, after a step."""


class Bench:
    """Steps of one model, and the saver of a run that does not exist."""

    def __init__(self, options: argparse.Namespace):
        torch.manual_seed(0)
        section = check(read_yaml(PRESETS / f"{options.preset}.yaml")["model"], Model)
        self.accelerator = Accelerator(cpu=options.device == "cpu")
        self.model = build_model(section).train().to(options.device)
        self.optimizer = build_optimizer(self.model, Optim())
        tokenizer = build_tokenizer(
            BpeTokenizer(kind="bpe"),
            context_length=section.text.context_length,
            fixed_length=False,
            vocab_size=300,
            captions=["a b"],
        )
        size = section.image.image_size
        self.pretrained = Pretrained(
            self.model, ImageTransform(size, section.preprocess), tokenizer, section
        )
        self.batch = random_batch(options.batch_size, size, section.text.context_length)
        self.folder, self.step, self.bytes = options.folder, 0, 0

    def round(self, way: str, steps: int) -> Round:
        """Make `steps` steps, with a save before them unless `way` is `none`."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return self._round(Path(folder), way, steps)

    def _round(self, run: Path, way: str, steps: int) -> Round:
        result, all_cpu, main_cpu = Round(), time.process_time(), time.thread_time()
        with self._saver(run, way) as saver:
            started = time.perf_counter()
            if way != "none":
                saver.save({"step": self.step, "config": {}}, self.pretrained, self.optimizer)
            saved, saved_cpu = time.perf_counter(), time.thread_time()
            for _ in range(steps):
                self._train_step()
                if not result.complete and any(run.glob("checkpoints/step-*")):
                    result.complete = time.perf_counter() - started
            result.save, result.save_cpu = saved - started, saved_cpu - main_cpu
            result.steps = time.perf_counter() - saved
            result.steps_cpu = time.thread_time() - saved_cpu
            saver.newest()
        result.complete = result.complete or time.perf_counter() - started
        others = time.process_time() - all_cpu - (time.thread_time() - main_cpu)
        result.writing_cpu = others
        for path in run.glob("checkpoints/step-*"):
            self.bytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        return result

    def _saver(self, run: Path, way: str) -> Saver:
        """The same buffers each time, as in a run."""
        tree = {
            "run": str(run),
            "model": read_yaml(PRESETS / "tiny.yaml")["model"],
            "data": {"train": {"kind": "shards", "path": "none"}},
            "checkpoint": {"background": way == "background"},
        }
        saver = Saver(check(tree, Config), Checkpoints(run, keep=1), None)
        self.buffers = saver._buffers = getattr(self, "buffers", saver._buffers)
        return saver

    def _train_step(self) -> None:
        train_step(
            self.model,
            ContrastiveLoss(),
            self.optimizer,
            self.batch,
            accelerator=self.accelerator,
            step=self.step,
            seed=0,
            lr=1e-5,
            clip_grad_norm=1.0,
        )
        self.step += 1


def random_batch(size: int, pixels: int, tokens: int) -> Batch:
    keys = [str(i) for i in range(size)]
    return Batch(
        images=torch.randint(0, 256, (size, 3, pixels, pixels), dtype=torch.uint8),
        tokens=torch.randint(0, 300, (size, tokens)),
        lengths=torch.full((size,), tokens),
        keys=keys,
        positions=torch.arange(size),
        captions=keys,
        image_ids=torch.arange(size),
        text_ids=torch.arange(size),
    )


def show(report: dict) -> None:
    step = report["step"]
    print(
        f"{report['preset']}, batch {report['batch_size']}, {report['device']}, "
        f"{report['threads']} thread(s) of {report['cores']} cores: {step['clock']:.2f} s a step "
        f"({step['cpu']:.2f} s of the processor); a checkpoint has "
        f"{report['checkpoint_bytes'] / 1e9:.2f} GB; the first save of all took "
        f"{report['first_save']['save']:.2f} s ({report['first_save']['save_cpu']:.2f} s)"
    )
    for row in report["rows"]:
        print(
            f"{row['way']:>10}: stands still {row['save']:6.2f} s ({row['save_cpu']:.2f} s), "
            f"writes for {row['writing_cpu']:.2f} s of the processor, complete after "
            f"{row['complete']:6.2f} s; of {report['every']} steps {row['clock_share']:.2%} by the "
            f"clock, {row['idle_share']:.2%} with an idle core, {row['busy_share']:.2%} without"
        )


if __name__ == "__main__":
    main()

"""Time and memory of the losses, beside OpenCLIP's ClipLoss and SigLipLoss on the same embeddings.

    python scripts/bench/loss.py --batch-sizes 8192 --out loss.json

Forward and backward on B random unit vectors of 512 numbers, float32, one process, one thread. The
four take turns, and the best round of each counts. `cpu` is processor time, which other programs on
the machine disturb less than the clock.

Memory is measured once for each in a fresh process: how far the largest resident set of one forward
and backward pass lies above the resident set just before it, when libraries, the embeddings and a
small warm-up pass are already there. So it holds the two gradients of B x 512 that any loss leaves.
Before the pass the kernel's high-water mark is reset (Linux, /proc/self/clear_refs).

Needs the extra `dev`; ClipLoss and SigLipLoss take about 17 B^2 and 21 B^2 bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH = 512
PAIRS_OF = {"ClipLoss": "contrastive", "SigLipLoss": "sigmoid"}
"""Which of ours stands beside which of theirs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*PAIRS_OF, *PAIRS_OF.values()])
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    options = parser.parse_args()
    names = options.only or [*PAIRS_OF, *PAIRS_OF.values()]
    torch.set_num_threads(1)
    results = []
    for batch_size in options.batch_sizes:
        memory = {name: in_fresh_process(peak_memory, name, batch_size) for name in names}
        rounds = measure(names, batch_size, options.rounds)
        best = {
            name: {key: min(run[key] for run in runs) for key in runs[0]}
            for name, runs in rounds.items()
        }
        rows = {name: best[name] | {"MiB": memory[name]} for name in names}
        ratios = {
            ours: {key: round(rows[theirs][key] / rows[ours][key], 2) for key in rows[ours]}
            for theirs, ours in PAIRS_OF.items()
            if theirs in rows and ours in rows
        }
        results.append({"batch_size": batch_size, "best": rows, "ratio": ratios, "rounds": rounds})
        print_table(results[-1])
    report = {
        "results": results,
        "width": WIDTH,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "open_clip_torch")},
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def print_table(result: dict) -> None:
    print(f"\nB = {result['batch_size']:<12}{'clock s':>10}{'cpu s':>10}{'MiB':>10}")
    for name, row in result["best"].items():
        print(f"{name:16}{row['clock']:10}{row['cpu']:10}{row['MiB']:10}")
    for name, row in result["ratio"].items():
        print(f"{name + ' ratio':16}{row['clock']:10}{row['cpu']:10}{row['MiB']:10}", flush=True)


def measure(names: list[str], batch_size: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of one forward and backward pass, in turns."""
    passes = {name: build(name) for name in names}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, loss in passes.items():
            arguments = embeddings(name, batch_size)
            clock, cpu = time.perf_counter(), time.process_time()
            loss(*arguments).backward()
            spent = {"clock": time.perf_counter() - clock, "cpu": time.process_time() - cpu}
            results[name].append({key: round(value, 3) for key, value in spent.items()})
    return results


def peak_memory(name: str, batch_size: int) -> float:
    """MiB by which one pass raises the largest resident set."""
    torch.set_num_threads(1)
    loss = build(name)
    loss(*embeddings(name, 64)).backward()
    arguments = embeddings(name, batch_size)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loss(*arguments).backward()
    return round((status("VmHWM") - before) / 1024, 1)


def status(field: str) -> int:
    """KiB of a memory field of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}; this bench needs Linux")


def in_fresh_process(function: Callable[..., float], *arguments: object) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def build(name: str) -> Callable[..., Tensor]:
    if name in PAIRS_OF:
        from open_clip import loss

        return getattr(loss, name)()
    from multimodal import losses

    return {"contrastive": losses.ContrastiveLoss, "sigmoid": losses.SigmoidLoss}[name]()


def embeddings(name: str, batch_size: int) -> tuple[Tensor, ...]:
    """Image and text embeddings, and the temperature as CLIP starts it; for the sigmoid losses also
    the bias as SigLIP starts it."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, batch_size, WIDTH, generator=generator)
    image, text = (F.normalize(x, dim=-1).requires_grad_() for x in both)
    scale, bias = (torch.tensor(x, requires_grad=True) for x in (1 / 0.07, -10.0))
    return (image, text, scale, bias) if name in ("SigLipLoss", "sigmoid") else (image, text, scale)


if __name__ == "__main__":
    main()

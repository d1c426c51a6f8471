"""Time of a training step's forward and backward pass of ViT-B/32, beside OpenCLIP's.

    python scripts/bench/padding.py --out padding.json

Both have the same architecture and see the same pictures and texts, whose lengths have a mean of
20 tokens. OpenCLIP pads texts to 77 tokens; here a batch is as long as its longest text, rounded up
to a multiple of 8, and the features are the same. One thread; the two take turns, and the best
round of each counts, by processor time.

Needs the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import open_clip
import torch
from open_clip.loss import ClipLoss
from torch import Tensor

from multimodal.config import Model
from multimodal.config_io import check, read_yaml
from multimodal.losses import ContrastiveLoss
from multimodal.models.build import build_model

PRESET = Path(__file__).parents[2] / "configs" / "model" / "clip-b-32.yaml"
CONTEXT, END, PAD = 77, 49407, 0
MEAN, DEVIATION, SHORTEST = 20.0, 5.0, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.rand(options.batch_size, 3, 224, 224)
    tokens, lengths = make_texts(options.batch_size)
    longest = -(-int(lengths.max()) // 8) * 8
    cut = tokens[:, :longest]
    ours = build_model(check(read_yaml(PRESET)["model"], Model)).train()
    theirs = open_clip.create_model("ViT-B-32-quickgelu").train()
    whole, trimmed = ours.encode_text(tokens, lengths), ours.encode_text(cut, lengths)

    steps = {
        "openclip at 77": lambda: run_openclip(theirs, images, tokens),
        "ours at 77": lambda: run_ours(ours, images, tokens, lengths),
        f"ours at {longest}": lambda: run_ours(ours, images, cut, lengths),
    }
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            rounds[name].append(time.process_time() - start)
    best = {name: min(times) for name, times in rounds.items()}
    base = best["openclip at 77"]
    print(f"batch {options.batch_size}, mean length {lengths.float().mean():.1f}")
    difference = (whole - trimmed).abs().max().item()
    print(f"largest difference of text features at 77 and {longest}: {difference:.1e}")
    for name, seconds in best.items():
        print(f"{name:16}{seconds:8.2f} s  {base / seconds:5.2f} times as fast as OpenCLIP")
    report = {
        "seconds": best,
        "ratio": {name: base / seconds for name, seconds in best.items()},
        "mean_length": lengths.float().mean().item(),
        "batch_size": options.batch_size,
        "versions": {name: version(name) for name in ("torch", "open_clip_torch")},
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def make_texts(count: int) -> tuple[Tensor, Tensor]:
    """Random tokens int64 [count, 77], each text closed by the end token, and lengths [count]."""
    lengths = torch.normal(MEAN, DEVIATION, (count,)).round().long().clamp(SHORTEST, CONTEXT)
    tokens = torch.randint(1, END - 1, (count, CONTEXT))
    places = torch.arange(CONTEXT)
    tokens[places >= lengths[:, None]] = PAD
    tokens[torch.arange(count), lengths - 1] = END
    return tokens, lengths


def run_openclip(model: torch.nn.Module, images: Tensor, tokens: Tensor) -> None:
    image_features, text_features, scale = model(images, tokens)
    ClipLoss()(image_features, text_features, scale).backward()
    model.zero_grad(set_to_none=True)


def run_ours(model: torch.nn.Module, images: Tensor, tokens: Tensor, lengths: Tensor) -> None:
    ContrastiveLoss()(*model(images, tokens, lengths)).backward()
    model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()

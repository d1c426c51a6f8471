"""Samples a second of one loader worker, beside OpenCLIP's `get_wds_dataset` on the same shards.

    python scripts/bench/loader.py --out loader.json

Both read the same 500x375 JPEGs (made here), cut a random part of 0.9 to 1.0 of the area, and scale
it to 224 pixels with an antialiased bicubic filter, in one worker process. OpenCLIP's batch is
float32, normalised by the worker; ours is uint8, normalised by the model on its device. The two
take turns, and the best round of each counts. `cpu` is the worker's own processor time, which
other programs on the machine disturb less than the clock.

Needs the extra `dev`. OpenCLIP asks for webdataset <= 0.2.86 and fails with later ones, which mark
the end of a shard in the stream of files; the mark is then switched off, and nothing else changed.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import multiprocessing
import os
import tarfile
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

SHARDS, DIFFERENT = 4, 64
WIDTH, HEIGHT, SIZE = 500, 375, 224
WARM_UP = 4
"""Batches before the clock starts: what a worker makes ahead, and the start itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kilobytes = make_shards(Path(folder), options.samples)
        loaders = {"openclip": openclip_loader, "multimodal": our_loader}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
        for _ in range(options.rounds):
            for name, build in loaders.items():
                rounds[name].append(measure(build(folder, options)))
                print(f"{name:12} {rounds[name][-1]}", flush=True)
    best = {
        name: {key: max(run[key] for run in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    ratio = {k: round(v / best["openclip"][k], 2) for k, v in best["multimodal"].items()}
    print(f"\n{'samples/s':12}{'clock':>10}{'cpu':>10}   ({kilobytes:.0f} KB a picture)")
    for name, row in (best | {"ratio": ratio}).items():
        print(f"{name:12}{row['clock']:10}{row['cpu']:10}")
    packages = ("torch", "torchvision", "pillow", "open_clip_torch", "webdataset")
    report = {
        "best": best,
        "ratio": ratio,
        "rounds": rounds,
        "kilobytes": round(kilobytes, 1),
        "batch_size": options.batch_size,
        "samples": options.samples,
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in packages},
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(loader: Iterable[Any]) -> dict[str, float]:
    """Samples a second by the clock and by the worker's processor time, after the warm-up."""
    samples = start = busy = end = end_busy = 0.0
    for number, batch in enumerate(loader):
        if number < WARM_UP:
            start, busy = time.perf_counter(), worker_seconds()
        else:
            images = batch[0] if isinstance(batch, list | tuple) else batch.images
            samples += len(images)
            end, end_busy = time.perf_counter(), worker_seconds()
    return {
        "clock": round(samples / (end - start), 1),
        "cpu": round(samples / (end_busy - busy), 1),
    }


def worker_seconds() -> float:
    """Processor time of the living child processes (Linux)."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def our_loader(folder: str, options: argparse.Namespace) -> Iterable[Any]:
    from multimodal import config
    from multimodal.data.loader import train_loader
    from multimodal.data.shards import ShardSource
    from multimodal.data.text import build_tokenizer
    from multimodal.data.transforms import ImageTransform

    source = ShardSource(folder)
    section = config.ShardsSource(kind="shards", path=folder)
    data = config.Data(train=section, workers=1, augment=config.Augment(scale=[0.9, 1.0]))
    tokenizer = build_tokenizer(
        config.BpeTokenizer(kind="bpe"),
        context_length=77,
        fixed_length=False,
        vocab_size=1000,
        captions=[caption(i) for i in range(DIFFERENT)],
    )
    return train_loader(
        source,
        data=data,
        transform=ImageTransform(SIZE, config.Preprocess(), data.augment),
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        start_step=0,
        end_step=options.samples // options.batch_size,
        rank=0,
        world_size=1,
        seed=0,
    )


def openclip_loader(folder: str, options: argparse.Namespace) -> Iterable[Any]:
    import open_clip
    from open_clip.transform import AugmentationCfg, image_transform
    from open_clip_train import data

    if int(version("webdataset").split(".")[0]) >= 1 and not isinstance(
        data.tar_file_expander, functools.partial
    ):
        data.tar_file_expander = functools.partial(data.tar_file_expander, eof_value=None)
    arguments = SimpleNamespace(
        train_data=f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar",
        train_num_samples=options.samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=options.batch_size,
        workers=1,
        world_size=1,
        seed=0,
    )
    transform = image_transform(SIZE, is_train=True, aug_cfg=AugmentationCfg(scale=(0.9, 1.0)))
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    return data.get_wds_dataset(arguments, transform, is_train=True, tokenizer=tokenizer).dataloader


def make_shards(folder: Path, samples: int) -> float:
    """Write the shards; `DIFFERENT` pictures are used over and over. Returns KB a picture."""
    pictures = [picture(seed) for seed in range(DIFFERENT)]
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for place in range(samples // SHARDS):
                number = shard * (samples // SHARDS) + place
                jpeg, text = pictures[number % DIFFERENT], caption(number).encode()
                for ending, content in (("jpg", jpeg), ("txt", text), ("json", b"{}")):
                    info = tarfile.TarInfo(f"{shard:05d}{place:04d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return sum(map(len, pictures)) / DIFFERENT / 1000


def picture(seed: int) -> bytes:
    """A JPEG of about 54 KB with what a photograph has: smooth areas, edges and grain."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    for cells, weight in ((3, 90), (9, 50), (27, 28), (81, 14)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        layer = np.asarray(noise.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        pixels += weight * (layer / 255 - 0.5)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    for _ in range(12):
        angle, shift = rng.uniform(0, 2 * np.pi), rng.uniform(0, 400)
        side = columns * np.cos(angle) + rows * np.sin(angle) > shift
        pixels[side] += rng.uniform(-25, 25, 3)
    pixels += rng.normal(0, 7, pixels.shape)
    file = io.BytesIO()
    Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def caption(number: int) -> str:
    things = ("a dog", "two children", "an old bicycle", "a red house", "some boats", "a market")
    places = ("by the sea", "in the snow", "at night", "under a bridge", "on a hill", "in the rain")
    return f"a photo of {things[number % 6]} {places[number // 6 % 6]}, number {number % 97}"


if __name__ == "__main__":
    main()

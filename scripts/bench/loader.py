"""Samples a second and core of the loader, beside OpenCLIP's `get_wds_dataset` on the same shards.

    python scripts/bench/loader.py --out loader.json

Both read the same JPEGs (made here, of three sizes), cut a random part of 0.9 to 1.0 of the area,
and scale it to 224 pixels with an antialiased bicubic filter, in this process and one thread.
OpenCLIP's batch is float32, normalised; ours is uint8, normalised by the model on its device. What
it costs to hand a batch over from a worker, four times as much for float32, is left out.

The two make one batch each in turn, so that other programs on the machine slow both alike, and the
fastest batch of each counts: by the clock, and by processor time, which they disturb less. `psnr`
compares our training crops with Pillow's, decoded whole and resized by it.

Needs the extra `dev`. OpenCLIP asks for webdataset <= 0.2.86 and fails with later ones, which mark
the end of a shard in the stream of files; the mark is then switched off, and nothing else changed.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import random
import tarfile
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

SHARDS, DIFFERENT, SIZE = 4, 16, 224
WARM_UP = 1
"""Batches before the clock starts."""


class Pictures(NamedTuple):
    """A kind of picture to measure.

    Attributes:
        grain: Standard deviation of the noise; it sets the size of the file.
        part: Our loader decodes it at 1 / `part` of its size.
    """

    width: int
    height: int
    grain: float
    part: int


KINDS = (
    Pictures(341, 256, grain=7, part=1),
    Pictures(500, 375, grain=7, part=1),
    Pictures(1600, 1200, grain=4.6, part=2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=40, help="That are measured of each kind.")
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'':18}{'openclip':>16}{'multimodal':>16}{'ratio':>14}")
    print(
        f"{'':12}{'KB':>6}" + f"{'clock':>9}{'cpu':>7}" * 2 + f"{'clock':>8}{'cpu':>6}{'psnr':>7}"
    )
    for kind in KINDS:
        row = compare(kind, options)
        rows.append(row)
        print(
            f"{row['picture']:12}{row['kilobytes']:6.0f}"
            + "".join(f"{row[x]['clock']:9.0f}{row[x]['cpu']:7.0f}" for x in LOADERS)
            + f"{row['ratio']['clock']:8.2f}{row['ratio']['cpu']:6.2f}{row['psnr']:7.1f}",
            flush=True,
        )
    packages = ("torch", "torchvision", "pillow", "open_clip_torch", "webdataset")
    report = {
        "rows": rows,
        "batch_size": options.batch_size,
        "batches": options.batches,
        "versions": {name: version(name) for name in packages},
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def compare(kind: Pictures, options: argparse.Namespace) -> dict[str, Any]:
    """Both loaders on one kind of picture, a batch each in turn."""
    jpegs = [picture(kind, seed) for seed in range(DIFFERENT)]
    samples = (WARM_UP + options.batches) * options.batch_size
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in LOADERS}
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder), jpegs, samples)
        loaders = {
            name: iter(build(folder, samples, options.batch_size))
            for name, build in LOADERS.items()
        }
        for _ in range(WARM_UP + options.batches):
            for name, batches in loaders.items():
                clock, cpu = time.perf_counter(), time.process_time()
                next(batches)
                seconds[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    speed = {
        name: dict(
            zip(
                ("clock", "cpu"),
                (options.batch_size / np.min(times[WARM_UP:], axis=0)).round(1).tolist(),
                strict=True,
            )
        )
        for name, times in seconds.items()
    }
    ours, theirs = speed["multimodal"], speed["openclip"]
    return {
        "picture": f"{kind.width}x{kind.height}",
        "kilobytes": round(sum(map(len, jpegs)) / DIFFERENT / 1000, 1),
        **speed,
        "ratio": {key: round(ours[key] / theirs[key], 2) for key in ours},
        "psnr": round(psnr(kind, jpegs), 1),
    }


def psnr(kind: Pictures, jpegs: list[bytes]) -> float:
    """Peak signal to noise ratio in dB of our training crops, against Pillow's."""
    from multimodal import config
    from multimodal.data.transforms import ImageTransform, random_box

    augment = config.Augment(scale=[0.9, 1.0])
    transform = ImageTransform(SIZE, config.Preprocess(), augment)
    errors = []
    for seed, data in enumerate(jpegs):
        height, width = kind.height // kind.part, kind.width // kind.part
        box = random_box(height, width, augment, random.Random(seed))
        top, left, height, width = (side * kind.part for side in box)
        whole = Image.open(io.BytesIO(data)).crop((left, top, left + width, top + height))
        expected = np.asarray(whole.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float64)
        ours = transform(data, seed).permute(1, 2, 0).numpy()
        errors.append(np.square(ours - expected).mean())
    return 10 * np.log10(255**2 / np.mean(errors))


def our_loader(folder: str, samples: int, batch_size: int) -> Iterable[Any]:
    from multimodal import config
    from multimodal.data.loader import train_loader
    from multimodal.data.shards import ShardSource
    from multimodal.data.text import build_tokenizer
    from multimodal.data.transforms import ImageTransform

    source = ShardSource(folder)
    section = config.ShardsSource(kind="shards", path=folder)
    data = config.Data(train=section, workers=0, augment=config.Augment(scale=[0.9, 1.0]))
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
        batch_size=batch_size,
        start_step=0,
        end_step=samples // batch_size,
        rank=0,
        world_size=1,
        seed=0,
    )


def openclip_loader(folder: str, samples: int, batch_size: int) -> Iterable[Any]:
    import open_clip
    from open_clip.transform import AugmentationCfg, image_transform
    from open_clip_train import data

    if int(version("webdataset").split(".")[0]) >= 1 and not isinstance(
        data.tar_file_expander, functools.partial
    ):
        data.tar_file_expander = functools.partial(data.tar_file_expander, eof_value=None)
    arguments = SimpleNamespace(
        train_data=f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar",
        train_num_samples=samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=batch_size,
        workers=0,
        world_size=1,
        seed=0,
    )
    transform = image_transform(SIZE, is_train=True, aug_cfg=AugmentationCfg(scale=(0.9, 1.0)))
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    return data.get_wds_dataset(arguments, transform, is_train=True, tokenizer=tokenizer).dataloader


LOADERS = {"openclip": openclip_loader, "multimodal": our_loader}


def make_shards(folder: Path, jpegs: list[bytes], samples: int) -> None:
    """Write the shards; the few pictures are used over and over."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for place in range(samples // SHARDS):
                number = shard * (samples // SHARDS) + place
                jpeg, text = jpegs[number % DIFFERENT], caption(number).encode()
                for ending, content in (("jpg", jpeg), ("txt", text), ("json", b"{}")):
                    info = tarfile.TarInfo(f"{shard:05d}{place:04d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def picture(kind: Pictures, seed: int) -> bytes:
    """A JPEG with what a photograph has: smooth areas, edges and grain."""
    width, height = kind.width, kind.height
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((3, 90), (9, 50), (27, 28), (81, 14)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        layer = np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        pixels += weight * (layer / 255 - 0.5)
    rows, columns = np.mgrid[:height, :width]
    for _ in range(12):
        angle, shift = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.8 * width)
        side = columns * np.cos(angle) + rows * np.sin(angle) > shift
        pixels[side] += rng.uniform(-25, 25, 3)
    pixels += rng.normal(0, kind.grain, pixels.shape)
    file = io.BytesIO()
    Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def caption(number: int) -> str:
    things = ("a dog", "two children", "an old bicycle", "a red house", "some boats", "a market")
    places = ("by the sea", "in the snow", "at night", "under a bridge", "on a hill", "in the rain")
    return f"a photo of {things[number % 6]} {places[number // 6 % 6]}, number {number % 97}"


if __name__ == "__main__":
    main()

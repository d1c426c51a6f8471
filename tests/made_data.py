"""Small pictures and archives for the tests of data."""

import io
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from multimodal import config
from multimodal.data.loader import train_loader
from multimodal.data.source import Source


def photo(width: int = 53, height: int = 41, seed: int = 0) -> Image.Image:
    """Smooth colours with some grain, as a photograph has."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = rng.normal(0, 4, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(seed: int = 0, width: int = 53, height: int = 41) -> bytes:
    return encode(photo(width, height, seed), quality=90)


def write_tar(path: Path, members: list[tuple[str, bytes]], **options) -> Path:
    """Write a tar with these members, in this order; names may repeat."""
    with tarfile.open(path, "w", **options) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pairs(names: list[str]) -> list[tuple[str, bytes]]:
    """Members for samples whose picture and text can be told from their key."""
    made = []
    for name in names:
        made += [(f"{name}.jpg", b"picture of " + name.encode()), (f"{name}.txt", name.encode())]
    return made


class Texts(NamedTuple):
    tokens: torch.Tensor
    lengths: torch.Tensor


class StandIn:
    """Stands for the transform and the tokenizer, which have no part in what is tested."""

    def __call__(self, data: bytes, seed: int | None = None) -> torch.Tensor:
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    def is_blank(self, text: str) -> bool:
        return False

    def encode(self, texts: list[str]) -> Texts:
        return Texts(torch.zeros(len(texts), 8, dtype=torch.int64), torch.ones(len(texts)))


def keys_in_order(
    source: Source, data: config.Data, *, steps: range, batch_size: int, ranks: int = 1
) -> list[str]:
    """Names of what the training loaders of all ranks read, in global order."""
    stand_in: Any = StandIn()
    loaders = [
        train_loader(
            source,
            data=data,
            transform=stand_in,
            tokenizer=stand_in,
            batch_size=batch_size,
            start_step=steps.start,
            end_step=steps.stop,
            rank=rank,
            world_size=ranks,
            seed=0,
        )
        for rank in range(ranks)
    ]
    return [key for step in zip(*loaders, strict=True) for batch in step for key in batch.keys]

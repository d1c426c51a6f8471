"""Pictures as tensors, and how far apart two of them are."""

import io
import struct
import zlib

import numpy as np
import torch
from PIL import Image


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def distance(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest difference in grey levels."""
    return int((a.int() - b.int()).abs().max())


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Peak signal to noise ratio in dB, of pictures or lists of pictures stacked."""
    error = (a.double() - b.double()).square().mean().item()
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


def is_channel_last(pixels: torch.Tensor) -> bool:
    return pixels[None].is_contiguous(memory_format=torch.channels_last)


def png(width: int, height: int, depth: int, colour: int, rows: bytes = b"") -> bytes:
    """A PNG of these rows, each with its filter byte, as they are."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, body: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + body))
    return struct.pack(">I", len(body)) + name + body + check

"""Pictures made smaller and encoded anew, as a pack stores them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from multimodal.data.decode import decode
from multimodal.data.source import BadSample

_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
_ENDINGS = {"jpeg": "jpg", "webp": "webp"}


@dataclass(frozen=True)
class Recode:
    """How pictures are stored. Without a side and a format all stay byte for byte.

    Attributes:
        short_side: Largest short side in pixels; larger pictures are scaled down to it.
        format: Format of all pictures; None keeps the format of those that are not scaled, and
            makes those that are scaled JPEGs.
        quality: Quality of what is encoded anew, 1 to 100.
    """

    short_side: int | None = None
    format: Literal["jpeg", "webp"] | None = None
    quality: int = 90

    def __post_init__(self):
        if self.short_side is not None and self.short_side < 1:
            raise ValueError(f"short_side={self.short_side}: a picture needs at least 1 pixel")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality={self.quality} must be from 1 to 100")

    @property
    def changes(self) -> bool:
        """Whether any picture may be encoded anew."""
        return self.short_side is not None or self.format is not None


def recode(image: bytes, how: Recode) -> bytes:
    """The picture as it is to be stored.

    What is encoded anew is upright, without metadata and transparency, and scaled as training
    scales it. What is not stays byte for byte, but is decoded, so that a damaged picture is found.

    Raises:
        BadSample: when it cannot be decoded, or not be encoded in the format.
    """
    if not how.changes:
        return image
    pixels = decode(image)
    height, width = pixels.shape[1:]
    short = min(height, width)
    scaled = how.short_side is not None and short > how.short_side
    if not scaled and (how.format is None or ending_of(image) == _ENDINGS[how.format]):
        return image
    if scaled:
        assert how.short_side is not None
        size = [round(side * how.short_side / short) for side in (height, width)]
        pixels = F.interpolate(pixels[None], size, mode="bicubic", antialias=True)[0]
    return _encode(pixels, how.format or "jpeg", how.quality)


def _encode(pixels: Tensor, kind: str, quality: int) -> bytes:
    file = io.BytesIO()
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    try:
        picture.save(file, kind, quality=quality)
    except (OSError, ValueError) as error:  # sides beyond the format's limit
        raise BadSample(f"no {kind} can hold it", detail=str(error)) from error
    return file.getvalue()


def ending_of(image: bytes) -> str:
    """File ending for an encoded picture, from its first bytes.

    Raises:
        BadSample: when it is of no known format.
    """
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    for magic, ending in _MAGIC:
        if image.startswith(magic):
            return ending
    raise BadSample("not an image", detail=f"starts with {image[:8]!r}")

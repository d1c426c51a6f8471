"""Encoded pictures to uint8 tensors.

    header -> size within bounds? -> pixels -> upright -> 8 bits -> on white -> RGB

JPEGs go through torchvision (libjpeg-turbo), everything else through Pillow, and so do JPEGs that
may be decoded at a part of their size, which torchvision cannot do. A picture is used whole or not
at all: one that is cut short is a bad sample. (A JPEG that was cut and then closed with an end
marker cannot be told from a whole one, since libjpeg fills it up with grey.)
"""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from multimodal.data.source import BadSample

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:
    # Deprecated since 0.29 in favour of torchcodec, which needs FFmpeg and has no scaled decoding
    # either. Without it Pillow decodes the same pixels, 20 to 40 percent slower.
    decode_jpeg = None

MAX_PIXELS = 100_000_000
"""Largest picture that is decoded; 300 MB as RGB."""
MAX_SIDE = 65_535
"""Longest side that is decoded, which is JPEG's own limit."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What Pillow may open. Of its many other formats, some start programs (EPS)."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS, least: int | None = None) -> Tensor:
    """Decode a picture to RGB, upright by its EXIF orientation.

    Transparent pixels are laid over white, 16-bit values are scaled to 8 bits, and of an animation
    the first frame is taken.

    Args:
        data: The encoded picture.
        max_pixels: Largest picture that is decoded; its header tells.
        least: Where given, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, as long as its
            shorter side keeps `least` pixels. libjpeg then computes a smaller inverse DCT, which
            is about a box filter: 55 dB from full decoding once it is scaled down 2 times more.

    Returns:
        uint8 [3, H, W], with the channel last in memory.

    Raises:
        BadSample: when it is empty, damaged, cut short, of an unknown format, or too large.
    """
    if not data:
        raise BadSample("empty image")
    size = _jpeg_size(data)
    if size is None:
        return _decode_with_pillow(data, max_pixels)
    _check_size(*size, max_pixels)
    if least is not None and min(size) >= 2 * least:
        return _decode_with_pillow(data, max_pixels, least)
    pixels = _decode_with_torchvision(data)
    return _decode_with_pillow(data, max_pixels) if pixels is None else pixels


def from_pil(image: Image.Image) -> Tensor:
    """Pixels of a Pillow picture as `decode` gives them: uint8 [3, H, W], channel last in memory.

    Raises:
        BadSample: when its mode has no fixed range of values.
    """
    image.load()  # a TIFF is turned by this, and forgets its orientation
    turn = _UPRIGHT.get(_orientation(image))
    if turn is not None:
        image = image.transpose(turn)
    return torch.from_numpy(np.array(_to_rgb(image))).permute(2, 0, 1)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise BadSample(
            "image too large",
            detail=f"{width} x {height} pixels; at most {max_pixels} are decoded, "
            f"and {MAX_SIDE} on a side",
        )


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in a JPEG's frame header (ITU-T T.81, B.2.2), or None if none is found."""
    if data[:2] != b"\xff\xd8":
        return None
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # fill byte
            place += 1
        # SOF0 to SOF15; C4, C8 and CC are other segments.
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = int.from_bytes(data[place + 5 : place + 7], "big")
            return int.from_bytes(data[place + 7 : place + 9], "big"), height
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None


def _decode_with_torchvision(data: bytes) -> Tensor | None:
    """A JPEG's pixels, or None for rare kinds that only Pillow reads, and for damaged ones."""
    if decode_jpeg is None:
        return None
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        pixels = decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:
        return None
    assert isinstance(pixels, Tensor)
    return pixels.unsqueeze(0).contiguous(memory_format=torch.channels_last).squeeze(0)


def _decode_with_pillow(data: bytes, max_pixels: int, least: int | None = None) -> Tensor:
    # Pillow's plugins raise nearly every kind of exception on damaged input.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            _check_size(*image.size, max_pixels)
            if least is not None:
                image.draft(None, (least, least))
            return from_pil(image)
    except BadSample:
        raise
    except Image.DecompressionBombError as error:
        raise BadSample("image too large", detail=str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise BadSample("not an image", detail=f"starts with {data[:8]!r}") from error
    except Exception as error:
        reason = "image cut short" if "truncated" in str(error).lower() else "damaged image"
        raise BadSample(reason, detail=str(error)) from error


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken EXIF block says nothing about the pixels
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey values; Pillow's own conversion would cut all above 255 to white."""
    values = np.array(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise BadSample("image without a fixed range", detail=f"mode {image.mode}")
    result = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        result.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return result

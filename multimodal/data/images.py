"""Encoded pictures to uint8 tensors: decoding, random changes, and the size a tower takes.

JPEGs go through torchvision (libjpeg-turbo), everything else through Pillow. Pixels stay uint8 with
the channel last in memory, where PyTorch's antialiased resize is several times as fast as Pillow's.
On photographs the two differ by one grey level or two; on noise of black and white pixels, by up to
16. Nothing here draws from a global random state.
"""

from __future__ import annotations

import io
import math
import random
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from multimodal import config
from multimodal.data.source import BadSample

MAX_PIXELS = 100_000_000
"""Largest picture that is decoded; 300 MB as RGB."""
_LONGEST_ASPECT = 8
"""A picture longer than this is cut around its centre before it is resized."""
_CROP_TRIES = 10
_LUMA = torch.tensor([0.299, 0.587, 0.114])
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


# --- decoding ------------------------------------------------------------------------------------


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decode a picture to RGB, upright by its EXIF orientation.

    Transparent pixels are laid over white, 16-bit values are scaled to 8 bits, and of an animation
    the first frame is taken.

    Returns:
        uint8 [3, H, W], with the channel last in memory.

    Raises:
        BadSample: when it is empty, damaged, cut short, of an unknown format, or has more than
            `max_pixels` pixels (known from its header, before it is decoded).
    """
    if not data:
        raise BadSample("empty image")
    size = _jpeg_size(data)
    if size is None:
        return _decode_with_pillow(data, max_pixels)
    _check_size(*size, max_pixels)
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        pixels = decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
    except RuntimeError:
        # Rare kinds of JPEG that only Pillow reads; a damaged one fails there too.
        return _decode_with_pillow(data, max_pixels)
    assert isinstance(pixels, Tensor)
    return pixels.unsqueeze(0).contiguous(memory_format=torch.channels_last).squeeze(0)


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
    if width * height > max_pixels:
        raise BadSample(
            "image too large", detail=f"{width} x {height} pixels; at most {max_pixels} are decoded"
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


def _decode_with_pillow(data: bytes, max_pixels: int) -> Tensor:
    # Pillow's plugins raise nearly every kind of exception on damaged input.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data))
            _check_size(*image.size, max_pixels)
            return from_pil(image)
    except BadSample:
        raise
    except Image.DecompressionBombError as error:
        raise BadSample("image too large", detail=str(error)) from error
    except Image.UnidentifiedImageError as error:
        raise BadSample("not an image", detail=f"starts with {data[:8]!r}") from error
    except Exception as error:
        raise BadSample("damaged image", detail=str(error)) from error


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
    return image.convert("RGB")


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


# --- to the size of the tower --------------------------------------------------------------------


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


class ImageTransform:
    """A picture to the uint8 input of an image tower.

    Without `augment` it is the model's own preprocessing. With it, a random part is cut out and
    changed; every random value comes from the seed of the call.

    Args:
        size: Height and width of the result in pixels.
        preprocess: Interpolation and resize mode; mean and std are applied later, by the model.
        augment: Random changes, for training.
        max_pixels: As for `decode`.
    """

    def __init__(
        self,
        size: int,
        preprocess: config.Preprocess,
        augment: config.Augment | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
    ):
        self.size = size
        self.preprocess = preprocess
        self.augment = augment
        self.max_pixels = max_pixels

    def __call__(self, data: bytes, seed: int | None = None) -> Tensor:
        """Decode and transform: uint8 [3, size, size].

        Raises:
            BadSample: when the picture cannot be used.
        """
        return self.apply(decode(data, max_pixels=self.max_pixels), seed)

    def apply(self, pixels: Tensor, seed: int | None = None) -> Tensor:
        """Transform decoded pixels, uint8 [3, H, W], to uint8 [3, size, size]."""
        if self.augment is None:
            return self._preprocessed(pixels)
        if seed is None:
            raise ValueError("a transform with augment needs a seed for each picture")
        return self._augmented(pixels, self.augment, random.Random(seed))

    def _preprocessed(self, pixels: Tensor) -> Tensor:
        size = self.size
        if self.preprocess.resize_mode == "squash":
            return self._resized(pixels, size, size)
        pixels = _cut_longest(pixels)
        height, width = pixels.shape[1:]
        short = min(height, width)
        pixels = self._resized(pixels, int(size * height / short), int(size * width / short))
        top = round((pixels.shape[1] - size) / 2)
        left = round((pixels.shape[2] - size) / 2)
        return pixels[:, top : top + size, left : left + size]

    def _augmented(self, pixels: Tensor, augment: config.Augment, rng: random.Random) -> Tensor:
        box = random_box(pixels.shape[1], pixels.shape[2], augment, rng)
        pixels = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]
        pixels = self._resized(pixels, self.size, self.size)
        if rng.random() < augment.flip:
            pixels = pixels.flip(-1)
        jitter = rng.random() < augment.color_jitter
        gray = rng.random() < augment.grayscale
        if jitter or gray:
            strength = augment.color_strength if jitter else 0.0
            pixels = change_colors(pixels, strength, rng, gray=gray)
        return pixels

    def _resized(self, pixels: Tensor, height: int, width: int) -> Tensor:
        if pixels.shape[1:] == (height, width):
            return pixels
        mode = self.preprocess.interpolation
        return F.interpolate(pixels[None], (height, width), mode=mode, antialias=True)[0]


def _cut_longest(pixels: Tensor) -> Tensor:
    """Cut the middle out of a very long picture; the centre crop would drop the rest anyway."""
    height, width = pixels.shape[1:]
    limit = min(height, width) * _LONGEST_ASPECT
    top, left = max(0, height - limit) // 2, max(0, width - limit) // 2
    return pixels[:, top : top + min(height, limit), left : left + min(width, limit)]


def random_box(height: int, width: int, augment: config.Augment, rng: random.Random) -> Box:
    """Random resized crop of arXiv 1409.4842: area and log aspect ratio are uniform.

    After ten draws that do not fit, the largest centred part within the allowed ratios is taken.
    """
    low, high = augment.ratio
    log_low, log_high = math.log(low), math.log(high)
    for _ in range(_CROP_TRIES):
        area = height * width * rng.uniform(*augment.scale)
        ratio = math.exp(rng.uniform(log_low, log_high))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = rng.randint(0, height - box_height)
            return Box(top, rng.randint(0, width - box_width), box_height, box_width)
    box_width = min(width, max(1, round(height * high)))
    box_height = min(height, max(1, round(width / low)))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def change_colors(pixels: Tensor, strength: float, rng: random.Random, *, gray: bool) -> Tensor:
    """Random brightness, contrast, saturation and hue in one linear map of the colours.

    Brightness, contrast and saturation are factors from [1 - strength, 1 + strength], applied in
    this order as torchvision defines them; the hue is turned about the grey axis in YIQ by up to
    strength / 4 of a circle. Values are cut to [0, 255] once, at the end. `gray` keeps luma only.

    Args:
        pixels: uint8 [3, H, W].

    Returns:
        uint8 [3, H, W].
    """
    low = max(0.0, 1 - strength)
    brightness, contrast, saturation = (rng.uniform(low, 1 + strength) for _ in range(3))
    hue = rng.uniform(-strength / 4, strength / 4)
    to_gray = _LUMA.expand(3, 3)
    matrix = torch.zeros(3, 3) if gray else saturation * _turned_hue(hue)
    matrix = to_gray if gray else matrix + (1 - saturation) * to_gray
    values = pixels.reshape(3, -1).float()
    mean_luma = brightness * (_LUMA @ values.mean(dim=1))
    changed = (brightness * contrast * matrix) @ values + (1 - contrast) * mean_luma
    return changed.round_().clamp_(0, 255).to(torch.uint8).reshape(pixels.shape)


def _turned_hue(turn: float) -> Tensor:
    """Matrix that turns RGB about the grey axis at equal luma, `turn` in circles."""
    to_yiq = torch.tensor(
        [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
    )
    cos, sin = math.cos(math.tau * turn), math.sin(math.tau * turn)
    rotation = torch.tensor([[1.0, 0.0, 0.0], [0.0, cos, -sin], [0.0, sin, cos]])
    return torch.linalg.inv(to_yiq) @ rotation @ to_yiq

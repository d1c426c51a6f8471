"""Decoded pictures to the size an image tower takes, with random changes for training.

Pixels stay uint8 with the channel last in memory, where PyTorch's antialiased resize is several
times as fast as Pillow's. Photographs come out equal to one grey level, but for less than one value
in 10,000 that is two away where Pillow scales the height first; noise of black and white pixels
differs by up to 16 there. Nothing here draws from a global random state.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal import config
from multimodal.data.decode import MAX_PIXELS, decode

_LONGEST_ASPECT = 8
"""A picture longer than this is cut around its centre before it is resized."""
_CROP_TRIES = 10
_LUMA = torch.tensor([0.299, 0.587, 0.114])


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
        """Decode and transform: uint8 [3, size, size], contiguous.

        Raises:
            BadSample: when the picture cannot be used.
        """
        least = None if self.augment is None else _least_side(self.size, self.augment)
        return self.apply(decode(data, max_pixels=self.max_pixels, least=least), seed)

    def apply(self, pixels: Tensor, seed: int | None = None) -> Tensor:
        """Transform decoded pixels, uint8 [3, H, W], to uint8 [3, size, size], contiguous."""
        if self.augment is None:
            pixels = self._preprocessed(pixels)
        elif seed is None:
            raise ValueError("a transform with augment needs a seed for each picture")
        else:
            pixels = self._augmented(pixels, self.augment, random.Random(seed))
        # NumPy puts the channel first twice as fast as PyTorch does.
        return torch.from_numpy(np.ascontiguousarray(pixels.numpy()))

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
        # PyTorch scales the width first, which would make a tall narrow picture a large one.
        if pixels.shape[1] > _LONGEST_ASPECT * max(pixels.shape[2], height):
            pixels = self._interpolated(pixels, height, pixels.shape[2])
        return self._interpolated(pixels, height, width)

    def _interpolated(self, pixels: Tensor, height: int, width: int) -> Tensor:
        mode = self.preprocess.interpolation
        # Of a crop that still lies within its picture, the kernel would take a slow way.
        packed = pixels[None].contiguous(memory_format=torch.channels_last)
        return F.interpolate(packed, (height, width), mode=mode, antialias=True)[0]


def _least_side(size: int, augment: config.Augment) -> int:
    """Shorter side that leaves every crop twice as wide and high as the result.

    A crop of the share a of the area with the aspect ratio r or 1/r < 1 is at least sqrt(a r) of
    the shorter side on each side.
    """
    narrowest = min(augment.ratio[0], 1 / augment.ratio[1], 1.0)
    return math.ceil(2 * size / math.sqrt(augment.scale[0] * narrowest))


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

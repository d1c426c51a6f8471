"""The entry of every loss: shapes checked, 16-bit features widened, autocast off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_precision(
    image_features: Tensor, text_features: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the features in float32 (float64 stays) with autocast off.

    In bfloat16, logits of 64 to 128 are 0.5 apart, as much as the differences a loss is about.

    Raises:
        ValueError: when the features are not two [b, D] of the same shape.
    """
    if image_features.ndim != 2 or image_features.shape != text_features.shape:
        raise ValueError(
            f"image features {tuple(image_features.shape)} and text features "
            f"{tuple(text_features.shape)} must both be [pairs, embedding] and of one shape"
        )
    with torch.autocast(image_features.device.type, enabled=False):
        yield _widen(image_features), _widen(text_features)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

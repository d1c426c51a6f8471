"""How well the global batch is told apart, from numbers that the losses have at hand anyway."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.distributed import world_size
from multimodal.losses.duplicates import Duplicates


class LossMetrics(NamedTuple):
    """Scalars without gradient; like the loss they are a rank's share, to be averaged over ranks.

    Duplicates are negatives only where the loss takes them as such.
    """

    image_to_text_top1: Tensor
    """Share of pictures that are nearer to their own text than to any negative. Ties count as
    misses, so that embeddings which are all equal get 0."""
    text_to_image_top1: Tensor
    """The same of texts."""
    positive_similarity: Tensor
    """Mean cosine of a picture and its own text."""
    negative_similarity: Tensor
    """Mean cosine over all negatives; 0 if there are none."""


@torch.no_grad()
def loss_metrics(
    image: Tensor,
    text: Tensor,
    own: slice,
    *,
    top1: tuple[Tensor, Tensor],
    duplicates: Duplicates | None,
) -> LossMetrics:
    """No logits needed: over all pairs x.y sums to (sum x).(sum y); what is no negative goes off.

    Args:
        image: [b, D], this rank's.
        text: [B, D], all.
        own: the texts of this rank's pictures.
        top1: shares of pictures and of texts.
    """
    pairs = len(text)
    positive = (image * text[own]).sum()
    if duplicates is None:
        left_out, negatives = positive, pairs**2 - pairs
    else:
        left_out = (image * duplicates.sum(text)).sum()
        negatives = pairs**2 - int(duplicates.count.sum())
    rest = (image.sum(0) * text.sum(0)).sum() - left_out
    return LossMetrics(*top1, positive / len(image), world_size() * rest / max(negatives, 1))

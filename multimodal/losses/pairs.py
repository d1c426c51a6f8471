"""What all losses over image-text pairs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multimodal.config import DuplicatesMode
from multimodal.distributed import gather_with_grad, rank
from multimodal.losses.duplicates import Duplicates, find_duplicates
from multimodal.losses.full_precision import full_precision
from multimodal.losses.metrics import LossMetrics, loss_metrics


class Pairs(NamedTuple):
    """This rank's b pairs among the B of all ranks."""

    image: Tensor
    """[b, D], this rank's."""
    text: Tensor
    """[b, D], this rank's."""
    texts: Tensor
    """[B, D], all ranks', with a gradient that is summed over the ranks."""
    own: slice
    """Which of all pairs are this rank's."""
    scale: Tensor
    """Scalar."""
    bias: Tensor | None
    """Scalar."""
    duplicates: Duplicates | None
    """None when duplicates are negatives like all others."""


class Found(NamedTuple):
    """What a loss finds in the pairs."""

    value: Tensor
    """This rank's share of the loss."""
    image_to_text_top1: Tensor
    """See `LossMetrics`."""
    text_to_image_top1: Tensor


class PairLoss(nn.Module, ABC):
    """A loss over the global batch, exact over any number of ranks.

    A rank holds its pictures against the texts of all ranks and divides by its own number of pairs,
    so the mean over the ranks is the loss. Since a gathered text's gradient is summed over the
    ranks, the mean over the ranks (DDP) of the parameters' gradients is the gradient of the loss,
    whatever the number of ranks.

    Args:
        duplicates: what pairs with the same picture or the same caption are to each other:
            `negative` like any other pair; `ignore` leaves them out; `positive` counts them as
            matching.

    Attributes:
        metrics: of the last forward pass; None before it.
    """

    def __init__(self, *, duplicates: DuplicatesMode = "negative"):
        super().__init__()
        self.duplicates: DuplicatesMode = duplicates
        self.metrics: LossMetrics | None = None

    # Compiled, the tiles would be unrolled into one graph of thousands of operations.
    @torch.compiler.disable
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's share of the loss.

        Args:
            image_features: [b, D], unit length, the same b on every rank.
            text_features: [b, D], row i belongs to picture i.
            logit_scale: scalar, the factor itself.
            logit_bias: scalar offset of the logits; 0 if left out.
            image_ids: [b] int64, equal for equal pictures; read unless duplicates are negatives.
            text_ids: [b] int64, equal for equal captions.

        Returns:
            Scalar in float32 (float64 for float64 features), also under autocast.

        Raises:
            ValueError: when the features' shapes differ, or ids are needed and missing.
        """
        with full_precision(image_features, text_features) as (image, text):
            b = len(image)
            pairs = Pairs(
                image=image,
                text=text,
                texts=gather_with_grad(text),
                own=slice(rank() * b, (rank() + 1) * b),
                scale=logit_scale.to(image.dtype),
                bias=None if logit_bias is None else logit_bias.to(image.dtype),
                duplicates=find_duplicates(self.duplicates, image_ids, text_ids, pairs=b),
            )
            value, *top1 = self.find(pairs)
            self.metrics = loss_metrics(
                image,
                pairs.texts,
                pairs.own,
                top1=(top1[0], top1[1]),
                duplicates=pairs.duplicates,
            )
            return value

    @abstractmethod
    def find(self, pairs: Pairs) -> Found:
        """The loss of the pairs; called with autocast off."""

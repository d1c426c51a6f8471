"""InfoNCE over the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.distributed import gather_with_grad, rank
from multimodal.losses.full_precision import full_precision


class ContrastiveLoss(nn.Module):
    r"""Softmax cross-entropy of each picture over all texts and of each text over all pictures.

    With B pairs (x_i, y_i) of unit vectors and the factor s (arXiv 2103.00020, figure 3):

        L = -1/2B sum_i [ log softmax_j(s x_i.y_j)[i] + log softmax_j(s y_i.x_j)[i] ]

    A rank holds b of the B pairs as rows and gathers the others as columns. It returns the mean
    over its own rows, so the mean over the ranks is L. Since a gathered column's gradient is
    summed over the ranks, the mean over the ranks (DDP) of the parameters' gradients is the
    gradient of L, whatever the number of ranks.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's share of the loss.

        Args:
            image_features: [b, D], unit length, the same b on every rank.
            text_features: [b, D], row i belongs to picture i.
            logit_scale: scalar, the factor itself.
            logit_bias: scalar; softmax is blind to it, so it gets a gradient of exactly zero.

        Returns:
            Scalar in float32 (float64 for float64 features), also under autocast.

        Raises:
            ValueError: when the features' shapes differ.
        """
        with full_precision(image_features, text_features) as (image, text):
            target = torch.arange(len(image), device=image.device) + rank() * len(image)
            to_text = logit_scale * image @ gather_with_grad(text).T
            to_image = logit_scale * text @ gather_with_grad(image).T
            loss = (F.cross_entropy(to_text, target) + F.cross_entropy(to_image, target)) / 2
            return loss if logit_bias is None else loss + 0 * logit_bias

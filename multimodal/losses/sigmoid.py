"""Pairwise sigmoid loss over the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.distributed import gather_with_grad, rank
from multimodal.losses.full_precision import full_precision


class SigmoidLoss(nn.Module):
    r"""Binary cross-entropy of every picture-text pair: is this text that picture's own?

    With B pairs of unit vectors, factor s, offset o and z_ij = 1 if i = j else -1
    (arXiv 2303.15343, algorithm 1):

        L = -1/B sum_ij log sigmoid(z_ij (s x_i.y_j + o))

    A rank holds b rows of pictures against all B texts and divides by b, so the mean over the
    ranks is L, and DDP's mean of gradients is the gradient of L.
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
            logit_bias: scalar offset; 0 if left out.

        Returns:
            Scalar in float32 (float64 for float64 features), also under autocast.

        Raises:
            ValueError: when the features' shapes differ.
        """
        with full_precision(image_features, text_features) as (image, text):
            logits = logit_scale * image @ gather_with_grad(text).T
            if logit_bias is not None:
                logits = logits + logit_bias
            own = torch.arange(len(image), device=image.device) + rank() * len(image)
            sign = 2 * F.one_hot(own, num_classes=logits.shape[1]) - 1
            return -F.logsigmoid(sign * logits).sum() / len(image)

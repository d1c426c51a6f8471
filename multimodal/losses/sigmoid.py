"""Pairwise sigmoid loss over the global batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimodal.distributed import all_reduce_max
from multimodal.losses.duplicates import Duplicates
from multimodal.losses.pairs import Found, PairLoss, Pairs
from multimodal.losses.tiles import Tile, hardest_negatives, logit_tiles


class SigmoidLoss(PairLoss):
    r"""Binary cross-entropy of every picture-text pair: is this text that picture's own?

    With B pairs of unit vectors, factor s, offset o and z_ij = 1 if i = j else -1
    (arXiv 2303.15343, algorithm 1):

        L = -1/B sum_ij log sigmoid(z_ij (s x_i.y_j + o))

    The b x B logits are walked in tiles; as a pair's gradient needs nothing but its logit, it is
    formed on the way, and memory is O(tile x B + B x D).

    Args:
        duplicates: as in `PairLoss`; for those that are `positive`, z = 1.
    """

    def find(self, pairs: Pairs) -> Found:
        image, _, texts, own, scale, bias, duplicates = pairs
        bias = torch.zeros_like(scale) if bias is None else bias
        wanted = torch.is_grad_enabled() and any(
            x.requires_grad for x in (image, texts, scale, bias)
        )
        return Found(*_Sigmoid.apply(image, texts, scale, bias, own.start, duplicates, wanted))


def initial_bias(batch_size: int) -> float:
    """Offset at which a fresh model, whose cosines are near 0, has the least loss.

    One pair of a picture's `batch_size` is its own, so the best constant answer is sigmoid(o) =
    1 / batch_size, o = -log(batch_size - 1). For the 32,768 of arXiv 2303.15343 (section 3.2: start
    near the prior, so that the many negatives do not take over the first steps) this is -10.4,
    where the authors round to -10.
    """
    return -math.log(max(batch_size - 1, 1))


class _Sigmoid(torch.autograd.Function):
    """The loss and the two top-1 shares."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        texts: Tensor,
        scale: Tensor,
        bias: Tensor,
        first: int,
        duplicates: Duplicates | None,
        wanted: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        own, hardest = (image.new_empty(len(image)) for _ in range(2))
        columns_hardest = image.new_full((len(texts),), -torch.inf)
        toward_text = torch.empty_like(image) if wanted else None
        toward_image = torch.zeros_like(texts) if wanted else None
        loss, grad_bias = torch.zeros_like(scale), torch.zeros_like(scale)
        for tile in logit_tiles(image, texts, scale, first, duplicates):
            rows, logits = tile.rows, tile.logits.add_(bias)
            own[rows] = tile.own
            hardest[rows], columns = hardest_negatives(tile, duplicates)
            columns_hardest = torch.maximum(columns_hardest, columns)
            # With l for negatives and -l for positives, every term is softplus and its slope
            # sigmoid. Ignored pairs are at -inf, where both are 0. From 40 on softplus(l) = l
            # even in float64.
            positive = None
            if duplicates is not None and not duplicates.ignored:
                positive = duplicates.mask(rows)
            _negate(tile, positive)
            loss += F.softplus(logits, threshold=40).sum()
            if toward_text is not None and toward_image is not None:
                logits.sigmoid_()
                _negate(tile, positive)
                grad_bias += logits.sum()
                torch.mm(logits, texts, out=toward_text[rows])
                toward_image.addmm_(logits.T, image[rows])
        if toward_text is not None and toward_image is not None:
            # sum_ij G_ij x_i.y_j, the temperature's share, is <x, G y>.
            grad_scale = (image * toward_text).sum() / len(image)
            toward_text.mul_(scale / len(image))
            toward_image.mul_(scale / len(image))
            ctx.save_for_backward(toward_text, toward_image, grad_scale, grad_bias / len(image))
        columns_hardest = all_reduce_max(columns_hardest)[first : first + len(image)]
        top1 = (own > hardest).to(own), (own > columns_hardest).to(own)
        outputs = loss / len(image), top1[0].mean(), top1[1].mean()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *(grad * x for x in ctx.saved_tensors), None, None, None


def _negate(tile: Tile, positive: Tensor | None) -> None:
    """Turn the sign of the positive pairs: of the own ones, where there are no others."""
    if positive is None:
        tile.own.neg_()
    else:
        tile.logits.copy_(torch.where(positive, -tile.logits, tile.logits))

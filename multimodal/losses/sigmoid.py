"""Pairwise sigmoid loss over the global batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from multimodal.config import DuplicatesMode
from multimodal.distributed import all_reduce_max, gather_with_grad, rank
from multimodal.losses.duplicates import Duplicates, find_duplicates
from multimodal.losses.full_precision import full_precision
from multimodal.losses.metrics import LossMetrics, loss_metrics
from multimodal.losses.tiles import hardest_negatives, logit_tiles


class SigmoidLoss(nn.Module):
    r"""Binary cross-entropy of every picture-text pair: is this text that picture's own?

    With B pairs of unit vectors, factor s, offset o and z_ij = 1 if i = j else -1
    (arXiv 2303.15343, algorithm 1):

        L = -1/B sum_ij log sigmoid(z_ij (s x_i.y_j + o))

    A rank holds b rows of pictures against all B texts and divides by b, so the mean over the
    ranks is L, and DDP's mean of gradients is the gradient of L. The b x B logits are walked in
    tiles; as a pair's gradient needs nothing but its logit, it is formed on the way, and memory is
    O(tile x B + B x D).

    Args:
        duplicates: what pairs with the same picture or the same caption are to each other:
            `negative` like any other pair (z = -1); `ignore` leaves them out; `positive` z = 1.

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
            logit_bias: scalar offset; 0 if left out.
            image_ids: [b] int64, equal for equal pictures; read unless duplicates are negatives.
            text_ids: [b] int64, equal for equal captions.

        Returns:
            Scalar in float32 (float64 for float64 features), also under autocast.

        Raises:
            ValueError: when the features' shapes differ, or ids are needed and missing.
        """
        with full_precision(image_features, text_features) as (image, text):
            pairs = len(image)
            own = slice(rank() * pairs, (rank() + 1) * pairs)
            duplicates = find_duplicates(self.duplicates, image_ids, text_ids, pairs=pairs)
            texts = gather_with_grad(text)
            scale = logit_scale.to(image.dtype)
            bias = torch.zeros_like(scale) if logit_bias is None else logit_bias.to(image.dtype)
            wanted = torch.is_grad_enabled() and any(
                x.requires_grad for x in (image, texts, scale, bias)
            )
            loss, *top1 = _Sigmoid.apply(image, texts, scale, bias, own.start, duplicates, wanted)
            if duplicates is not None and not duplicates.ignored:
                # -log sigmoid(l) is -log sigmoid(-l) less l: a sum over the duplicates' logits.
                similarity = (image * (duplicates.sum(texts) - text)).sum()
                others = (duplicates.count[own] - 1).sum()
                loss = loss - (scale * similarity + bias * others) / pairs
            self.metrics = loss_metrics(
                image, texts, own, top1=(top1[0], top1[1]), duplicates=duplicates
            )
            return loss


def initial_bias(batch_size: int) -> float:
    """Offset at which a fresh model, whose cosines are near 0, has the least loss.

    One pair of a picture's `batch_size` is its own, so the best constant answer is sigmoid(o) =
    1 / batch_size, o = -log(batch_size - 1). For the 32,768 of arXiv 2303.15343 (section 3.2: start
    near the prior, so that the many negatives do not take over the first steps) this is -10.4,
    where the authors round to -10.
    """
    return -math.log(max(batch_size - 1, 1))


class _Sigmoid(torch.autograd.Function):
    """The loss with all pairs but the own ones as negatives, and the two top-1 shares."""

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
            # With l for negatives and -l for own pairs, every term is softplus and its slope
            # sigmoid. Ignored pairs are at -inf, where both are 0. From 40 on softplus(l) = l
            # even in float64.
            tile.own.neg_()
            loss += F.softplus(logits, threshold=40).sum()
            if toward_text is not None and toward_image is not None:
                logits.sigmoid_()
                tile.own.neg_()
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

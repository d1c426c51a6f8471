"""InfoNCE over the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimodal.config import DuplicatesMode
from multimodal.distributed import all_reduce_max, all_reduce_sum
from multimodal.losses.duplicates import Duplicates
from multimodal.losses.pairs import Found, PairLoss, Pairs
from multimodal.losses.tiles import hardest_negatives, logit_tiles


class ContrastiveLoss(PairLoss):
    r"""Softmax cross-entropy of each picture over all texts and of each text over all pictures.

    With B pairs (x_i, y_i) of unit vectors and the factor s (arXiv 2103.00020, figure 3):

        L = -1/2B sum_i [ log softmax_j(s x_i.y_j)[i] + log softmax_j(s y_i.x_j)[i] ]

    A rank's b x B block of logits serves both directions, as the columns' log-sum-exp is completed
    by an all-reduce of B numbers. The block is walked in tiles, and again in the backward pass;
    memory is O(tile x B + B x D).

    Args:
        label_smoothing: share of the target spread evenly over all candidates.
        duplicates: as in `PairLoss`; `ignore` takes them out of the softmax, `positive` shares the
            target equally among them.
    """

    def __init__(self, *, label_smoothing: float = 0.0, duplicates: DuplicatesMode = "negative"):
        super().__init__(duplicates=duplicates)
        self.label_smoothing = label_smoothing

    def find(self, pairs: Pairs) -> Found:
        image, text, texts, own, scale, bias, duplicates = pairs
        found = Found(*_InfoNCE.apply(image, texts, scale, own.start, duplicates))
        value = found.value
        if self.label_smoothing > 0 or self.duplicates == "positive":
            target = _target_text(texts, own, duplicates, self.label_smoothing)
            value = value + scale * (image * (text - target)).sum() / len(image)
        if bias is not None:  # softmax is blind to it, so its gradient is exactly zero
            value = value + 0 * bias
        return found._replace(value=value)


class _InfoNCE(torch.autograd.Function):
    """The loss with each picture's own text as its whole target, and the two top-1 shares."""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        texts: Tensor,
        scale: Tensor,
        first: int,
        duplicates: Duplicates | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        own, hardest, peak, total = (image.new_empty(len(image)) for _ in range(4))
        # The lowest number instead of -inf: a column may be ignored throughout a tile, and
        # -inf less -inf is no number.
        lowest = torch.finfo(image.dtype).min
        columns_hardest = image.new_full((len(texts),), -torch.inf)
        columns_peak = torch.full_like(columns_hardest, lowest)
        columns_total = torch.zeros_like(columns_peak)
        scratch: Tensor | None = None
        for tile in logit_tiles(image, texts, scale, first, duplicates):
            rows, logits = tile.rows, tile.logits
            scratch = torch.empty_like(logits) if scratch is None else scratch[: len(logits)]
            own[rows] = tile.own
            hardest[rows], columns = hardest_negatives(tile, duplicates)
            columns_hardest = torch.maximum(columns_hardest, columns)
            peak[rows] = logits.amax(1)
            torch.sub(logits, peak[rows, None], out=scratch).exp_()
            total[rows] = scratch.sum(1)
            new_peak = torch.maximum(columns_peak, logits.amax(0))
            torch.sub(logits, new_peak, out=scratch).exp_()
            columns_total = columns_total * (columns_peak - new_peak).exp() + scratch.sum(0)
            columns_peak = new_peak

        columns_hardest, all_peak = all_reduce_max(torch.stack([columns_hardest, columns_peak]))
        columns_total = all_reduce_sum(columns_total * (columns_peak - all_peak).exp())
        mine = slice(first, first + len(image))
        own_peak, own_total = all_peak[mine], columns_total[mine]

        # As (peak - own) + log(total), and p - 1 from the softmax rather than from the rounded
        # log-sum-exp: logits near 100 are 8e-6 apart, more than a well-trained pair's whole loss.
        loss = ((peak - own) + total.log() + (own_peak - own) + own_total.log()).mean() / 2
        own_gradient = (own - peak).exp() / total + (own - own_peak).exp() / own_total - 2
        ctx.save_for_backward(
            image, texts, scale, peak + total.log(), all_peak + columns_total.log(), own_gradient
        )
        ctx.first, ctx.duplicates = first, duplicates
        top1 = (own > hardest).to(own), (own > columns_hardest[mine]).to(own)
        outputs = loss, top1[0].mean(), top1[1].mean()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        image, texts, scale, rows_lse, columns_lse, own_gradient = ctx.saved_tensors
        toward_text, toward_image = torch.empty_like(image), torch.zeros_like(texts)
        scratch: Tensor | None = None
        # Whoever calls backward under autocast: it leaves products into given memory alone.
        for tile in logit_tiles(image, texts, scale, ctx.first, ctx.duplicates):
            rows, logits = tile.rows, tile.logits
            scratch = torch.empty_like(logits) if scratch is None else scratch[: len(logits)]
            torch.sub(logits, rows_lse[rows, None], out=scratch).exp_()
            logits.sub_(columns_lse).exp_().add_(scratch)
            tile.own.copy_(own_gradient[rows])
            torch.mm(logits, texts, out=toward_text[rows])
            toward_image.addmm_(logits.T, image[rows])
        # sum_ij G_ij x_i.y_j, the temperature's share, is <x, G y>.
        part = grad / (2 * len(image))
        grad_scale = part * (image * toward_text).sum()
        toward_text.mul_(part * scale)
        toward_image.mul_(part * scale)
        return toward_text, toward_image, grad_scale, None, None


def _target_text(
    texts: Tensor, own: slice, duplicates: Duplicates | None, smoothing: float
) -> Tensor:
    """[b, D]: the mean of all texts with a picture's targets as weights, over both directions.

    A cross-entropy is linear in its targets t: that with t is that with the own pair alone, plus
    s x_i.(y_i - sum_j t_ij y_j). So shared and smoothed targets need no pass over the logits.
    """
    target = texts[own]
    if duplicates is not None and not duplicates.ignored:
        target = _mean_both_ways(duplicates.sum, texts, duplicates.count, own)
    if smoothing == 0:
        return target
    evenly = texts.mean(0)
    if duplicates is not None and duplicates.ignored:

        def sum_of_candidates(x: Tensor) -> Tensor:
            return x.sum(0) - duplicates.sum(x) + x[own]

        candidates = len(texts) - duplicates.count + 1
        evenly = _mean_both_ways(sum_of_candidates, texts, candidates, own)
    return torch.lerp(target, evenly.expand_as(target), smoothing)


def _mean_both_ways(
    total: Callable[[Tensor], Tensor], texts: Tensor, count: Tensor, own: slice
) -> Tensor:
    """Half of picture i's mean, its sum over its own n_i, and half of its terms in each text j's
    mean, over n_j."""
    weight = 1 / count[:, None].to(texts.dtype)
    return (weight[own] * total(texts) + total(weight * texts)) / 2

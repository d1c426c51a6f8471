"""Ranks, recall, accuracy, and what chance would give. Pure functions of features and labels.

Ties never help a model. The rank of a query is the number of wrong candidates that score at least
as high as its best right one, and a right score of NaN is no rank at all, so a collapsed model and
one that returns NaN get about 0. (Counting strictly higher scores gives both of them 100 %.) Which
candidates are right is a matter of labels, never of scores: pictures that share a caption, and
captions of equal text, are equally right.

Legend: Q queries, M candidates, D embedding size, N samples, C classes.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

BLOCK_SCORES = 2**24
"""Scores held at once by `rank_candidates`: 64 MiB in float32, and 16 MiB for each mask."""
UNRANKED = torch.iinfo(torch.int64).max
"""Rank of a query without a right candidate, or whose right candidates all score NaN."""


class Ranks(NamedTuple):
    """One entry for each query."""

    rank: Int64[Tensor, "Q"]
    """Wrong candidates that score at least as high as the best right one; 0 is best."""
    right: Int64[Tensor, "Q"]
    """Number of right candidates."""


def rank_candidates(
    queries: Float[Tensor, "Q D"],
    candidates: Float[Tensor, "M D"],
    query_labels: Sequence[Set[int]],
    candidate_labels: Sequence[Set[int]],
    *,
    block_scores: int = BLOCK_SCORES,
) -> Ranks:
    """Rank candidates for each query by inner product.

    A candidate is right for a query when they share a label. Scores are made in blocks of whole
    rows, at most `block_scores` of them at once (or one row), whatever Q and M are.

    Args:
        queries: on any device.
        candidates: on the same device.
        query_labels: Q sets of labels.
        candidate_labels: M sets of labels.
        block_scores: largest number of scores in memory.

    Returns:
        Ranks on the CPU.
    """
    by_label: dict[int, list[int]] = {}
    for index, labels in enumerate(candidate_labels):
        for label in labels:
            by_label.setdefault(label, []).append(index)
    right = {label: torch.tensor(indices) for label, indices in by_label.items()}
    rows = max(1, block_scores // max(1, len(candidates)))
    blocks = [Ranks(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))]
    for start in range(0, len(queries), rows):
        scores = queries[start : start + rows] @ candidates.T
        is_right = torch.zeros(scores.shape, dtype=torch.bool)
        for row, labels in zip(is_right, query_labels[start : start + rows], strict=True):
            for label in right.keys() & labels:
                row[right[label]] = True
        blocks.append(_rank_block(scores, is_right.to(scores.device)))
    return Ranks(torch.cat([b.rank for b in blocks]), torch.cat([b.right for b in blocks]))


def _rank_block(scores: Float[Tensor, "Q M"], is_right: Bool[Tensor, "Q M"]) -> Ranks:
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best = scores.masked_fill(~is_right, -torch.inf).amax(dim=1, keepdim=True)
    rank = ((scores >= best) & ~is_right).sum(dim=1)
    rank = rank.masked_fill(best[:, 0] == -torch.inf, UNRANKED)
    return Ranks(rank.cpu(), is_right.sum(dim=1).cpu())


def recall_at(ranks: Ranks, k: int) -> float | None:
    """Share of queries with a right candidate among the first k; None without queries."""
    return _mean(ranks.rank < k)


def recall_chance(ranks: Ranks, candidates: int, k: int) -> float | None:
    """Expected `recall_at` of a random order of N candidates, R of them right.

    1 - C(N - R, k) / C(N, k), averaged over the queries; None without queries.
    """
    wrong = (candidates - ranks.right).double()
    miss = torch.ones_like(wrong)
    for drawn in range(min(k, candidates)):
        miss *= (wrong - drawn).clamp(min=0) / (candidates - drawn)
    return _mean(1 - miss)


def class_ranks(scores: Float[Tensor, "N C"], labels: Int64[Tensor, "N"]) -> Int64[Tensor, "N"]:
    """Wrong classes that score at least as high as the right one, as in `Ranks.rank`.

    Args:
        scores: of each sample for each class.
        labels: the right classes.
    """
    return _rank_block(scores, torch.nn.functional.one_hot(labels, scores.shape[1]).bool()).rank


def accuracy(
    ranks: Int64[Tensor, "N"], labels: Int64[Tensor, "N"], classes: int
) -> dict[str, float | int | None]:
    """Accuracy of a classifier.

    Args:
        ranks: what `class_ranks` gave.
        labels: the right classes.
        classes: number of classes C.

    Returns:
        `acc1`; `acc5` (None below 5 classes); `mean_per_class_recall` over the classes that have
        samples; `chance` (1 / C); `majority` (accuracy of always naming the most frequent class);
        `images` (N). Rates are None when N is 0.
    """
    counts = torch.bincount(labels, minlength=classes)
    hits = torch.bincount(labels[ranks < 1], minlength=classes)
    seen = counts > 0
    return {
        "acc1": _mean(ranks < 1),
        "acc5": _mean(ranks < 5) if classes >= 5 else None,
        "mean_per_class_recall": _mean(hits[seen] / counts[seen]),
        "chance": 1 / classes,
        "majority": counts.max().item() / len(labels) if len(labels) else None,
        "images": len(labels),
    }


def _mean(values: Tensor) -> float | None:
    return values.double().mean().item() if len(values) else None

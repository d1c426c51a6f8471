"""How embeddings lie on the sphere: what a loss alone does not tell.

Legend: N rows, D embedding. All in the features' own precision but for the effective rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

_T = 2.0
"""Exponent of the uniformity (arXiv 2005.10242, section 4.2)."""


def alignment(image: Tensor, text: Tensor) -> Tensor:
    """Mean squared distance of the two vectors of a pair; 0 is best (arXiv 2005.10242, alpha 2).

    Args:
        image: [N, D], unit length.
        text: [N, D], row i belongs to picture i.
    """
    return (image - text).square().sum(1).mean()


def uniformity(x: Tensor) -> Tensor:
    """Logarithm of the mean of exp(-2 |x_i - x_j|^2) over all pairs i < j (arXiv 2005.10242).

    0 when all rows are equal; about -4, and at least that for many rows, when they are spread
    evenly. Memory grows with the square of N.

    Args:
        x: [N, D], unit length; NaN for a single row, which has no pair.
    """
    squares = torch.pdist(x).square()
    return squares.mul(-_T).exp().mean().log()


def modality_gap(image: Tensor, text: Tensor) -> Tensor:
    """Distance of the pictures' mean from the texts' mean (arXiv 2203.02053, section 4.1)."""
    return torch.linalg.vector_norm(image.mean(0) - text.mean(0))


def effective_rank(x: Tensor) -> Tensor:
    """How many directions the rows use: between 1 and min(N, D).

    exp(-sum_k p_k log p_k) with p_k = s_k / sum s, the share of a singular value in their sum
    (Roy and Vetterli, "The effective rank", EUSIPCO 2007, definition 1). Singular values are roots
    of the eigenvalues of the smaller of x x^T and x^T x, in float64: in float32 a root would turn
    the rounding of zeros into thousandths of the largest.

    Args:
        x: [N, D].

    Returns:
        Scalar in float64; NaN when a number in x is not finite.
    """
    if not x.isfinite().all():
        return x.new_full((), torch.nan, dtype=torch.float64)
    wide = x.double()
    gram = wide @ wide.T if len(x) < x.shape[1] else wide.T @ wide
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    share = singular / singular.sum()
    return torch.special.entr(share).sum().exp()

"""How embeddings lie, against the definitions written out, and where the answer is known."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from multimodal.losses.geometry import alignment, effective_rank, modality_gap, uniformity


def rows(n, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, dim, generator=generator), dim=1)


@pytest.mark.parametrize(("n", "dim"), [(11, 7), (7, 11), (23, 23)])
def test_the_effective_rank_is_that_of_the_singular_values(n, dim):
    x = rows(n, dim)
    singular = np.linalg.svd(x.double().numpy(), compute_uv=False)
    share = singular / singular.sum()
    expected = math.exp(-sum(p * math.log(p) for p in share))
    assert float(effective_rank(x)) == pytest.approx(expected, rel=1e-6)
    assert float(effective_rank(3 * x)) == pytest.approx(expected, rel=1e-6), "scale is no matter"


@pytest.mark.parametrize("k", [1, 2, 5, 13])
def test_k_directions_used_alike_are_k(k):
    x = torch.eye(13)[:k].repeat(4, 1)
    assert float(effective_rank(x)) == pytest.approx(k, rel=1e-6)


def test_equal_rows_are_one_direction_and_broken_ones_none():
    x = rows(1, 512).expand(300, 512)
    assert 1 <= float(effective_rank(x)) < 1.001
    broken = x.clone()
    broken[3, 5] = math.nan
    assert math.isnan(effective_rank(broken))


def test_alignment_uniformity_and_gap_are_their_definitions():
    x, y = rows(9, 5).double(), rows(9, 5, seed=1).double()
    squares = [math.dist(p, q) ** 2 for p, q in zip(x.tolist(), y.tolist(), strict=True)]
    assert float(alignment(x, y)) == pytest.approx(sum(squares) / 9)
    kernel = [
        math.exp(-2 * float(((x[i] - x[j]) ** 2).sum())) for i in range(9) for j in range(i + 1, 9)
    ]
    assert float(uniformity(x)) == pytest.approx(math.log(sum(kernel) / len(kernel)))
    gap = [float(sum(x[:, d]) - sum(y[:, d])) / 9 for d in range(5)]
    assert float(modality_gap(x, y)) == pytest.approx(math.dist(gap, [0] * 5))


def test_known_ends():
    x = rows(17, 6)
    assert float(alignment(x, x)) == 0 and float(modality_gap(x, x)) == 0
    assert float(uniformity(x[:1].expand(8, 6))) == 0
    assert math.isnan(uniformity(x[:1]))

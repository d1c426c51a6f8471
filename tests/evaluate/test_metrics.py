"""Ranks and rates against counting by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.evaluate.metrics import (
    UNRANKED,
    accuracy,
    class_ranks,
    rank_candidates,
    recall_at,
    recall_chance,
)

# Small whole numbers make sums exact in float32 and ties frequent.
values = st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0, math.nan])
label_sets = st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=1, max_size=7)


def vectors(data, n, dim=3):
    rows = st.lists(st.lists(values, min_size=dim, max_size=dim), min_size=n, max_size=n)
    return torch.tensor(data.draw(rows))


def brute_rank(query, candidates, labels, candidate_labels):
    scores = [sum(a * b for a, b in zip(query, c, strict=True)) for c in candidates]
    scores = [-math.inf if math.isnan(s) else s for s in scores]
    right = [bool(labels & other) for other in candidate_labels]
    best = max((s for s, r in zip(scores, right, strict=True) if r), default=-math.inf)
    if best == -math.inf:
        return UNRANKED, sum(right)
    wrong = [s for s, r in zip(scores, right, strict=True) if not r]
    return sum(s >= best for s in wrong), sum(right)


@settings(max_examples=60, deadline=None)
@given(st.data(), label_sets, label_sets, st.integers(1, 30))
def test_ranks_equal_counting_by_hand_in_blocks_of_any_size(data, ours, theirs, block):
    queries, candidates = vectors(data, len(ours)), vectors(data, len(theirs))
    ranks = rank_candidates(queries, candidates, ours, theirs, block_scores=block)
    expected = [
        brute_rank(query, candidates.tolist(), labels, theirs)
        for query, labels in zip(queries.tolist(), ours, strict=True)
    ]
    assert list(zip(ranks.rank.tolist(), ranks.right.tolist(), strict=True)) == expected


def test_a_collapsed_model_gets_nothing_from_ties():
    same = torch.nn.functional.normalize(torch.ones(97, 5), dim=1)
    labels = [{i} for i in range(97)]
    ranks = rank_candidates(same, same, labels, labels)
    assert recall_at(ranks, 10) <= recall_chance(ranks, 97, 10)
    assert recall_at(ranks, 1) <= recall_chance(ranks, 97, 1)


@pytest.mark.parametrize("side", ["queries", "candidates", "both"])
def test_nan_features_get_zero(side):
    good, bad = torch.eye(11), torch.full((11, 11), torch.nan)
    queries = good if side == "candidates" else bad
    candidates = good if side == "queries" else bad
    labels = [{i} for i in range(11)]
    assert recall_at(rank_candidates(queries, candidates, labels, labels), 20) == 0


def test_one_nan_candidate_harms_its_own_query_only():
    features = torch.eye(5)
    broken = features.clone()
    broken[2] = torch.nan
    labels = [{i} for i in range(5)]
    assert recall_at(rank_candidates(features, broken, labels, labels), 1) == pytest.approx(0.8)


def test_equal_captions_are_equally_right():
    # Pictures 0 and 1 share a caption, and each lies on the other's place.
    images, texts = torch.eye(3), torch.eye(3)[[1, 0, 2]]
    assert recall_at(rank_candidates(texts, images, [{7}, {7}, {8}], [{7}, {7}, {8}]), 1) == 1
    assert recall_at(rank_candidates(texts, images, [{5}, {6}, {8}], [{5}, {6}, {8}]), 1) < 1


@pytest.mark.parametrize(("candidates", "right", "k"), [(7, 1, 1), (7, 2, 3), (5, 5, 1), (6, 4, 5)])
def test_chance_is_the_mean_over_all_orders(candidates, right, k):
    draws = list(itertools.combinations(range(candidates), min(k, candidates)))
    expected = sum(any(i < right for i in draw) for draw in draws) / len(draws)
    labels = [{0}] * right + [{1}] * (candidates - right)
    ranks = rank_candidates(torch.ones(1, 2), torch.ones(candidates, 2), [{0}], labels)
    assert recall_chance(ranks, candidates, k) == pytest.approx(expected)


def test_no_query_has_no_recall():
    ranks = rank_candidates(torch.empty(0, 3), torch.ones(2, 3), [], [{0}, {1}])
    assert recall_at(ranks, 1) is None
    assert recall_chance(ranks, 2, 1) is None


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 7), st.integers(1, 11))
def test_accuracy_equals_counting_by_hand(data, classes, n):
    scores = vectors(data, n, classes)
    labels = data.draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n))
    rows = scores.nan_to_num(nan=-math.inf).tolist()
    ranks = [
        classes if row[own] == -math.inf else sum(s >= row[own] for s in row) - 1
        for row, own in zip(rows, labels, strict=True)
    ]
    found = accuracy(class_ranks(scores, torch.tensor(labels)), torch.tensor(labels), classes)
    assert found["acc1"] == pytest.approx(sum(r == 0 for r in ranks) / n)
    top5 = sum(r < 5 for r in ranks) / n
    assert found["acc5"] == (pytest.approx(top5) if classes >= 5 else None)
    hits = {c: [r == 0 for r, own in zip(ranks, labels, strict=True) if own == c] for c in labels}
    recalls = [sum(h) / len(h) for h in hits.values()]
    assert found["mean_per_class_recall"] == pytest.approx(sum(recalls) / len(recalls))
    assert found["majority"] == pytest.approx(max(labels.count(c) for c in labels) / n)
    assert found["chance"] == pytest.approx(1 / classes)

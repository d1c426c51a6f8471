"""`Mask` against loops over its definition, and its refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.layers.masks import Mask


def visible_by_loops(mask: Mask, batch: int, heads: int, q_len: int, k_len: int) -> torch.Tensor:
    out = torch.zeros(batch, heads, q_len, k_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for q in range(q_len):
                for k in range(k_len):
                    sees = not mask.causal or k_len - k >= q_len - q
                    if mask.key_valid is not None:
                        sees = sees and bool(mask.key_valid[b, k])
                    if mask.allowed is not None:
                        part = mask.allowed
                        part = part[None, None] if part.ndim == 2 else part
                        at = [i % n for i, n in zip((b, h, q, k), part.shape, strict=True)]
                        sees = sees and bool(part[tuple(at)])
                    out[b, h, q, k] = sees
    return out


@st.composite
def masks(draw, batch: int, heads: int, q_len: int, k_len: int) -> Mask:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < 0.6

    four_axes = [draw(st.sampled_from([1, n])) for n in (batch, heads, q_len, k_len)]
    shape = draw(st.sampled_from([None, (q_len, k_len), four_axes]))
    return Mask(
        causal=draw(st.booleans()),
        key_valid=random(batch, k_len) if draw(st.booleans()) else None,
        allowed=None if shape is None else random(*shape),
    )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_dense_is_what_loops_over_the_definition_give(data):
    sizes = [data.draw(st.integers(1, n)) for n in (3, 2, 5, 7)]
    first, second = data.draw(masks(*sizes)), data.draw(masks(*sizes))
    for mask in (first, second, first & second):
        mask.check(*sizes)
        dense = mask.dense(*sizes[2:])
        dense = torch.ones(sizes, dtype=torch.bool) if dense is None else dense.expand(sizes)
        assert torch.equal(dense, visible_by_loops(mask, *sizes))
    both = visible_by_loops(first, *sizes) & visible_by_loops(second, *sizes)
    assert torch.equal(visible_by_loops(first & second, *sizes), both)


def test_a_mask_that_hides_nothing_has_no_tensor():
    assert Mask().dense(3, 5) is None


def test_causal_aligns_the_last_query_with_the_last_key():
    expected = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(Mask(causal=True).dense(2, 5), expected)


@pytest.mark.parametrize("part", ["key_valid", "allowed"])
def test_an_additive_mask_is_refused_naming_dtype_and_shape(part):
    additive = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    with pytest.raises(TypeError, match=rf"{part} .*torch\.float32.*\[5, 5\]"):
        Mask(**{part: additive})


def test_a_tensor_in_place_of_the_causal_flag_is_refused():
    with pytest.raises(TypeError, match="causal must be True or False"):
        Mask(causal=torch.ones(5, 5))


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"key_valid": torch.ones(7, dtype=torch.bool)}, r"key_valid has shape \[7\]"),
        ({"allowed": torch.ones(3, 5, 7, dtype=torch.bool)}, r"allowed has shape \[3, 5, 7\]"),
    ],
)
def test_a_wrong_number_of_axes_is_refused_naming_the_shape(parts, match):
    with pytest.raises(ValueError, match=match):
        Mask(**parts)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"key_valid": (3, 5)}, r"key_valid has shape \[3, 5\].*\[3, 7\]"),
        ({"key_valid": (1, 7)}, r"key_valid has shape \[1, 7\].*\[3, 7\]"),
        ({"allowed": (7, 5)}, r"allowed has shape \[7, 5\].*\[5, 7\]"),
        ({"allowed": (3, 3, 5, 7)}, r"allowed has shape \[3, 3, 5, 7\].*\[3, 2, 5, 7\]"),
    ],
)
def test_a_mask_for_other_sizes_is_refused_naming_both_shapes(parts, match):
    mask = Mask(**{name: torch.ones(shape, dtype=torch.bool) for name, shape in parts.items()})
    with pytest.raises(ValueError, match=match):
        mask.check(3, 2, 5, 7)

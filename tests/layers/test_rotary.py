"""Rotary positions: relative only, equal to timm's, and always in fp32."""

import pytest
import torch
from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat

from multimodal.layers import rotary
from multimodal.layers.attention import MultiHeadAttention


def score(q, k, at_q, at_k):
    turned = [
        rotary.rotate(x[None, None, None], rotary.table(torch.tensor([at]), len(x)))
        for x, at in ((q, at_q), (k, at_k))
    ]
    return (turned[0] * turned[1]).sum()


@pytest.mark.parametrize("shift", [1, 100, 1009])
@pytest.mark.parametrize(("at_q", "at_k"), [(5, 2), ([5, 3], [2, 7])])
def test_a_logit_depends_on_the_difference_of_positions_only(at_q, at_k, shift):
    q, k = torch.nn.functional.normalize(torch.randn(2, 12), dim=-1)
    moved = [torch.as_tensor(at) + shift for at in (at_q, at_k)]
    moved = [at.tolist() for at in moved]
    here, there = score(q, k, at_q, at_k), score(q, k, *moved)
    # Angles near 1009 have a spacing of 6e-5 in fp32; those near 100 of 8e-6.
    torch.testing.assert_close(there, here, atol=1e-5 if shift <= 100 else 1e-4, rtol=0)
    other = score(q, k, at_q, at_q)
    assert (other - here).abs() > 1e-3


def test_a_pair_turns_as_a_complex_number():
    x = torch.randn(1, 2, 5, 6)
    turned = rotary.rotate(x, rotary.table(torch.arange(5), 6, theta=100.0))
    frequency = torch.tensor([1.0, 100 ** (-1 / 3), 100 ** (-2 / 3)])
    angle = torch.arange(5)[:, None] * frequency
    expected = torch.view_as_complex(x.unflatten(-1, (3, 2))) * torch.polar(
        torch.ones_like(angle), angle
    )
    torch.testing.assert_close(turned, torch.view_as_real(expected).flatten(-2))


def test_two_axes_equal_timm():
    height, width, head_dim = 3, 5, 16
    theirs = RotaryEmbeddingCat(head_dim, in_pixels=False, feat_shape=[height, width])
    x = torch.randn(2, 3, height * width, head_dim)
    ours = rotary.rotate(x, rotary.table(rotary.grid(height, width), head_dim))
    expected = apply_rot_embed_cat(x, theirs.get_embed())
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_the_grid_counts_row_by_row():
    assert rotary.grid(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


def test_prefix_tokens_are_not_turned():
    x = torch.randn(2, 3, 7, 8)
    whole = rotary.rotate(x, rotary.table(torch.arange(3, 8), 8, prefix=2))
    assert torch.equal(whole[:, :, :2], x[:, :, :2])
    rest = rotary.rotate(x[:, :, 2:], rotary.table(torch.arange(3, 8), 8))
    assert torch.equal(whole[:, :, 2:], rest)


def test_a_bf16_model_turns_by_fp32_tables():
    coords = torch.arange(1000, 1007)
    layer = MultiHeadAttention(16, 2).bfloat16()
    table = rotary.table(coords, 8)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    assert not list(layer.buffers())
    x = torch.randn(1, 2, 7, 8).bfloat16()
    turned = rotary.rotate(x, table)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotary.rotate(x.float(), table).bfloat16())
    assert layer(torch.randn(1, 7, 16).bfloat16(), rope=table).isfinite().all()


def test_autocast_leaves_the_table_alone():
    with torch.autocast("cpu", torch.bfloat16):
        inside = rotary.table(rotary.grid(3, 5), 8)
    outside = rotary.table(rotary.grid(3, 5), 8)
    assert torch.equal(inside.cos, outside.cos) and torch.equal(inside.sin, outside.sin)


def test_an_attention_with_rope_ignores_a_common_shift_and_sees_order():
    layer = MultiHeadAttention(16, 2)
    x = torch.randn(2, 7, 16)
    out = [layer(x, rope=rotary.table(torch.arange(7) + shift, 8)) for shift in (0, 31)]
    torch.testing.assert_close(*out, atol=1e-5, rtol=0)
    assert not torch.allclose(layer(x), out[0], atol=1e-3)


def test_positions_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match=r"torch\.bfloat16"):
        rotary.table(torch.arange(7).bfloat16(), 8)


def test_a_head_that_the_axes_cannot_share_is_refused():
    with pytest.raises(ValueError, match=r"head_dim=6 .* 2 axes.*multiple of 4"):
        rotary.table(rotary.grid(3, 5), 6)


@pytest.mark.parametrize(("n", "head_dim"), [(5, 8), (7, 4)])
def test_a_table_for_other_tokens_is_refused(n, head_dim):
    with pytest.raises(ValueError, match=r"\[7, 4\]"):
        rotary.rotate(torch.randn(2, 3, 7, 8), rotary.table(torch.arange(n), head_dim))

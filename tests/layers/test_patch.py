"""Patch embedding and absolute positions."""

import math

import pytest
import torch
from torch import nn

from multimodal.layers.patch import PatchEmbed
from multimodal.layers.position import LearnedPosition, sinusoidal_1d, sinusoidal_2d

PATCH, ROWS, COLUMNS, WIDTH = 4, 3, 5, 7


def images() -> torch.Tensor:
    return torch.randn(2, 3, PATCH * ROWS, PATCH * COLUMNS)


@pytest.mark.parametrize("bias", [True, False])
def test_patches_equal_a_convolution_in_output_and_gradient(bias):
    conv = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH, bias=bias)
    ours = PatchEmbed(PATCH, WIDTH, bias=bias)
    state = {f"proj.{name}": p for name, p in conv.state_dict().items()}
    state["proj.weight"] = state["proj.weight"].flatten(1)
    ours.load_state_dict(state)
    x = images().requires_grad_()
    outputs = [ours(x), conv(x).flatten(2).transpose(1, 2)]
    torch.testing.assert_close(*outputs, atol=2e-6, rtol=0)
    gradients = [torch.autograd.grad(y.square().mean(), x)[0] for y in outputs]
    torch.testing.assert_close(*gradients, atol=2e-6, rtol=0)


def test_kept_patches_are_those_of_the_whole_picture_in_the_order_asked():
    layer = PatchEmbed(PATCH, WIDTH)
    x = images()
    keep = torch.stack([torch.randperm(ROWS * COLUMNS)[:6] for _ in range(2)])
    expected = layer(x).gather(1, keep[:, :, None].expand(-1, -1, WIDTH))
    torch.testing.assert_close(layer(x, keep), expected, atol=1e-6, rtol=0)


def test_only_kept_patches_are_multiplied():
    layer = PatchEmbed(PATCH, WIDTH)
    seen = []
    layer.proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    layer(images(), torch.zeros(2, 6, dtype=torch.long))
    assert seen == [(2, 6, 3 * PATCH * PATCH)]


def test_pictures_that_are_no_grid_of_patches_are_refused():
    with pytest.raises(ValueError, match="12 x 21 is no grid of 4 x 4"):
        PatchEmbed(PATCH, WIDTH)(torch.randn(2, 3, 12, 21))


def test_integer_pictures_are_refused():
    with pytest.raises(TypeError, match=r"torch\.uint8"):
        PatchEmbed(PATCH, WIDTH)(images().to(torch.uint8))


def test_learned_positions_are_added_to_the_first_tokens():
    layer = LearnedPosition(11, WIDTH)
    x = torch.randn(2, 5, WIDTH)
    for i in range(5):
        assert torch.equal(layer(x)[:, i], x[:, i] + layer.weight[i])


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(ValueError, match="13 tokens, but positions for 11"):
        LearnedPosition(11, WIDTH)(torch.randn(2, 13, WIDTH))


def test_sinusoids_in_one_dimension_follow_the_formula():
    table = sinusoidal_1d(11, 6)
    for p in range(11):
        for i in range(3):
            angle = p / 10_000 ** (2 * i / 6)
            assert table[p, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoids_in_two_dimensions_follow_the_formula():
    dim, m = 12, 3
    table = sinusoidal_2d(ROWS, COLUMNS, dim)
    for y in range(ROWS):
        for x in range(COLUMNS):
            angles = [[at / 10_000 ** (i / (m - 1)) for i in range(m)] for at in (x, y)]
            expected = [f(a) for axis in angles for f in (math.sin, math.cos) for a in axis]
            assert table[y * COLUMNS + x].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("make", [lambda: sinusoidal_1d(3, 7), lambda: sinusoidal_2d(3, 5, 6)])
def test_widths_that_the_sinusoids_cannot_share_are_refused(make):
    with pytest.raises(ValueError, match=r"dim=\d must be"):
        make()

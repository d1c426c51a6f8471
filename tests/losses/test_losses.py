"""Losses against a plain full-batch implementation, in one and in several processes."""

import math

import pytest
import torch
from tools import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multimodal.config import ContrastiveSection, SigmoidSection
from multimodal.losses import ContrastiveLoss, SigmoidLoss
from multimodal.losses.build import build_loss

PAIRS, WIDTH, EMBED = 20, 11, 7
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Towers(nn.Module):
    """Two linear towers and a temperature: enough to give every kind of parameter a gradient."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(2, EMBED, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.image, self.text = (nn.Parameter(weight.clone()) for weight in weights)
        self.log_scale = nn.Parameter(torch.tensor(math.log(9.0), dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(-3.0, dtype=dtype))

    def forward(self, images, texts):
        image = nn.functional.normalize(images @ self.image.T, dim=-1)
        text = nn.functional.normalize(texts @ self.text.T, dim=-1)
        return image, text, self.log_scale.exp(), self.bias


def inputs(dtype):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, PAIRS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def naive_contrastive(image, text, scale, bias):
    """Pair by pair from the definition, without softmax helpers."""
    s = scale * image @ text.T
    total = s.new_zeros(())
    for i in range(len(s)):
        total = total - (s[i, i] - s[i, :].exp().sum().log())
        total = total - (s[i, i] - s[:, i].exp().sum().log())
    return total / (2 * len(s))


def naive_sigmoid(image, text, scale, bias):
    total = scale.new_zeros(())
    for i in range(len(image)):
        for j in range(len(text)):
            p = 1 / (1 + (-(scale * (image[i] * text[j]).sum() + bias)).exp())
            total = total - (p if i == j else 1 - p).log()
    return total / len(image)


LOSSES = {
    "contrastive": (ContrastiveLoss, naive_contrastive),
    "sigmoid": (SigmoidLoss, naive_sigmoid),
}


def loss_and_gradients(model, loss, images, texts):
    value = loss(*model(images, texts))
    value.backward()
    named = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return value.detach(), {n: torch.zeros(()) if g is None else g for n, g in named.items()}


def share_of_rank(name, dtype, world_size):
    """On one rank: its share of the batch through DDP; the gradients that DDP leaves."""
    model = DistributedDataParallel(Towers(dtype)) if world_size > 1 else Towers(dtype)
    rows = PAIRS // world_size
    rank = torch.distributed.get_rank()
    images, texts = inputs(dtype)[:, rank * rows : (rank + 1) * rows]
    return loss_and_gradients(model, LOSSES[name][0](), images, texts)


def all_shares(world_size):
    torch.set_num_threads(1)
    return {
        (name, dtype): share_of_rank(name, dtype, world_size)
        for name in LOSSES
        for dtype in TOLERANCE
    }


def assert_close(actual, expected, tolerance):
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_and_every_gradient_equal_the_full_batch(world_size):
    shares = on_ranks(world_size, all_shares, world_size)
    for name, (_, naive) in LOSSES.items():
        for dtype, tolerance in TOLERANCE.items():
            expected, gradients = loss_and_gradients(
                Towers(torch.float64), naive, *inputs(torch.float64)
            )
            losses = [share[name, dtype][0] for share in shares]
            assert_close(torch.stack(losses).mean(), expected, tolerance)
            for share in shares:
                for key, gradient in share[name, dtype][1].items():
                    assert_close(gradient, gradients[key], tolerance)


def test_contrastive_gives_a_useless_bias_a_gradient_of_exactly_zero():
    _, gradients = loss_and_gradients(
        Towers(torch.float32), ContrastiveLoss(), *inputs(torch.float32)
    )
    assert gradients["bias"].item() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_and_16_bit_features_do_not_lower_the_precision(name):
    loss = LOSSES[name][0]()
    image, text, scale, bias = Towers(torch.float32)(*inputs(torch.float32))
    image, text = image.bfloat16(), text.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(image, text, scale, bias)
    assert inside.dtype == torch.float32
    assert inside.item() == loss(image.float(), text.float(), scale, bias).item()


@pytest.mark.parametrize("name", LOSSES)
def test_a_fresh_model_starts_near_chance(name):
    n = 256
    image, text = nn.functional.normalize(torch.randn(2, n, 512), dim=-1)
    if name == "contrastive":
        value = ContrastiveLoss()(image, text, torch.tensor(1.0))
        assert value.item() == pytest.approx(math.log(n), abs=0.02)
    else:
        value = SigmoidLoss()(image, text, torch.tensor(1e-6), torch.tensor(-10.0))
        assert value.item() == pytest.approx(10.0 + n * math.exp(-10), abs=0.01)


@pytest.mark.parametrize("name", LOSSES)
def test_other_shapes_are_refused(name):
    with pytest.raises(ValueError, match=r"\(3, 5\) and text features \(2, 5\)"):
        LOSSES[name][0]()(torch.ones(3, 5), torch.ones(2, 5), torch.tensor(1.0))


def test_a_section_builds_its_loss():
    assert isinstance(build_loss(ContrastiveSection(kind="contrastive")), ContrastiveLoss)
    assert isinstance(build_loss(SigmoidSection(kind="sigmoid")), SigmoidLoss)

"""A step: exact over ranks, repeatable, and safe against numbers that are not finite."""

import itertools
import math

import pytest
import torch
from accelerate import Accelerator
from tools import RANDOM, TINY, on_ranks
from torch import nn

from multimodal.config import Model, Optim
from multimodal.config_io import check, merge, parse_override
from multimodal.data.batch import Batch, hash64
from multimodal.distributed import rank, world_size
from multimodal.losses import ContrastiveLoss, SigmoidLoss
from multimodal.models.build import build_model
from multimodal.train.optim import build_optimizer
from multimodal.train.step import random_state, train_step

PAIRS = 8


def tiny_model(*overrides):
    tree = TINY
    for override in overrides:
        tree = merge(tree, parse_override(override))
    torch.manual_seed(1)
    return build_model(check(tree["model"], Model)).train()


def whole_batch(broken_key=None):
    """Floating pixels, so that one of them can be NaN."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(PAIRS, 3, 16, 16, generator=generator)
    tokens = torch.randint(0, 300, (PAIRS, 8), generator=generator)
    keys = [f"k{i}" for i in range(PAIRS)]
    ids = (hash64(keys), hash64(keys))
    if broken_key is not None:
        images[keys.index(broken_key), 1, 2, 3] = math.nan
    return Batch(images, tokens, torch.full((PAIRS,), 5), keys, torch.arange(PAIRS), keys, *ids)


def own_part(batch):
    rows = PAIRS // world_size()
    return batch.part(slice(rank() * rows, (rank() + 1) * rows))


def steps(count, *, overrides=(), loss=None, batch=None, clip=1.0, lr=1e-3, first=0):
    """Train a tiny model for some steps; the results and the weights."""
    accelerator = Accelerator(cpu=True)
    model = tiny_model(*overrides)
    optimizer = build_optimizer(model, Optim())
    prepared = accelerator.prepare_model(model)
    loss, batch = loss or ContrastiveLoss(), own_part(batch or whole_batch())
    results = [
        train_step(
            prepared,
            loss,
            optimizer,
            batch,
            accelerator=accelerator,
            step=first + step,
            seed=3,
            lr=lr,
            clip_grad_norm=clip,
        )
        for step in range(count)
    ]
    return results, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def steps_on_rank(name):
    loss = {"contrastive": ContrastiveLoss(), "sigmoid": SigmoidLoss()}[name]
    return steps(4, loss=loss, overrides=("model.logit_bias=-5.0",))


@pytest.mark.parametrize("name", ["contrastive", "sigmoid"])
def test_two_ranks_train_like_one(name):
    assert_alike(steps_on_rank(name), on_ranks(2, steps_on_rank, name))


def assert_alike(one_process, ranks):
    expected, weights = one_process
    for results, own_weights in ranks:
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
            assert ours.logit_scale == pytest.approx(theirs.logit_scale, rel=1e-6)
        for key, tensor in weights.items():
            # Adam turns a gradient's rounding into part of a step where the gradient is near 0.
            torch.testing.assert_close(own_weights[key], tensor, rtol=1e-3, atol=3e-5)


def test_a_step_can_be_repeated_with_everything_random():
    model = [override for override in RANDOM if override.startswith("model")]
    first, weights = steps(3, overrides=model)
    torch.rand(17)
    second, again = steps(3, overrides=model)
    assert first == second and all(weights[name].equal(again[name]) for name in weights)
    later, _ = steps(3, overrides=model, first=1)
    assert later[0].loss != first[0].loss


def test_each_step_rank_and_micro_batch_has_its_own_random_state():
    states = {
        random_state(seed, step, rank, part)
        for seed in range(3)
        for step in range(13)
        for rank in range(5)
        for part in range(2)
    }
    assert len(states) == 3 * 13 * 5 * 2 and all(0 <= state < 2**63 for state in states)


def untouched(error_batch=None, loss=None, micro_batch_size=None):
    """What a step that must fail says, and whether weights and optimiser are as before."""
    accelerator = Accelerator(cpu=True)
    model = tiny_model()
    optimizer = build_optimizer(model, Optim())
    prepared = accelerator.prepare_model(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train_step(
        prepared,
        loss or ContrastiveLoss(),
        optimizer,
        own_part(error_batch or whole_batch()),
        accelerator=accelerator,
        step=6,
        seed=3,
        lr=0.1,
        clip_grad_norm=1.0,
        micro_batch_size=micro_batch_size,
    )
    same = all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    return result, same and not optimizer.state and all(p.grad is None for p in model.parameters())


def nan_on_one_rank(micro_batch_size=None):
    return untouched(error_batch=whole_batch(broken_key="k6"), micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("size", [None, 3])
def test_a_nan_pixel_on_one_rank_changes_nothing_on_any(size):
    for result, same in [nan_on_one_rank(size), *on_ranks(2, nan_on_one_rank, size)]:
        assert same
        assert not result.finite and math.isnan(result.loss)
        assert result.suspects == ("k6",)


def embeddings_of_equal_rows():
    """Of a step with dropout whose rows are all the same; one row for each micro-batch."""
    batch = own_part(whole_batch())
    batch.images[:], batch.tokens[:] = 0.5, 7
    model, seen = tiny_model("model.image.dropout=0.3"), []
    model.register_forward_hook(lambda module, args, out: seen.append(out.image))
    train_step(
        model,
        ContrastiveLoss(),
        build_optimizer(model, Optim()),
        batch,
        accelerator=Accelerator(cpu=True),
        step=4,
        seed=3,
        lr=1e-3,
        clip_grad_norm=None,
        micro_batch_size=2,
    )
    return [image[0].detach() for image in seen[: len(batch.keys) // 2]]


def test_dropout_differs_between_micro_batches_and_between_ranks():
    images = [image for found in on_ranks(2, embeddings_of_equal_rows) for image in found]
    assert len(images) == 4
    assert all(not a.equal(b) for a, b in itertools.combinations(images, 2))


class NanValue(ContrastiveLoss):
    """Its gradient is sound."""

    def forward(self, *features, **ids):
        return super().forward(*features, **ids) + math.nan


def test_a_loss_that_is_no_number_is_noticed_without_its_gradient():
    result, same = untouched(loss=NanValue())
    assert same and not result.finite and math.isfinite(result.grad_norm)


class InfiniteGradient(ContrastiveLoss):
    def forward(self, image, text, scale, bias, **ids):
        return (scale - scale.detach()).sqrt() + 0 * (image.sum() + text.sum())


def test_an_infinite_gradient_with_a_finite_loss_changes_nothing():
    result, same = untouched(loss=InfiniteGradient())
    assert same
    assert not result.finite and result.loss == 0 and result.suspects == ()


def test_statistics_of_batch_normalisation_move_once_a_step_and_not_with_a_broken_one():
    def statistics(size, broken_key=None):
        torch.manual_seed(5)
        model = tiny_model()
        model.image_projection = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 12, bias=False))
        batch, accelerator = whole_batch(broken_key), Accelerator(cpu=True)
        options = {"step": 0, "seed": 3, "lr": 0.0, "clip_grad_norm": None}
        optimizer = build_optimizer(model, Optim())
        step = train_step(
            model,
            ContrastiveLoss(),
            optimizer,
            batch,
            accelerator=accelerator,
            micro_batch_size=size,
            **options,
        )
        return step.finite, model.image_projection[0]

    finite, norm = statistics(size=2)
    assert finite and norm.num_batches_tracked == 4
    finite, norm = statistics(size=2, broken_key="k3")
    assert not finite and norm.num_batches_tracked == 0 and norm.running_mean.count_nonzero() == 0


def test_the_gradient_is_clipped_after_it_is_measured():
    free, _ = steps(1, clip=None)
    clipped, _ = steps(1, clip=1e-3)
    assert free == clipped
    # With clipping far below AdamW's eps the update shrinks with the gradient.
    _, moved = steps(1, clip=1e-9)
    start = tiny_model().state_dict()
    name = "image_projection.weight"
    decayed = start[name] * (1 - 1e-3 * Optim().weight_decay)
    torch.testing.assert_close(moved[name], decayed, rtol=0, atol=1e-6)


def test_the_scale_stays_within_its_limits():
    _, weights = steps(3, lr=5.0)
    assert 0 <= weights["temperature.logit_scale"].item() <= math.log(100) + 1e-6

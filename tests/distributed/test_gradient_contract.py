"""The promise of a step: its gradient is that of one process holding the whole batch.

For every loss and each of its modes, any number of ranks, any micro-batching, dropout on or off.
The other side is plain: one process, one graph over all pairs, the loss from its definition. With
dropout it embeds the same rows under the same seeds, since the seeds are part of the promise.

A new loss is picked up from `config.Loss`; its definition goes into `naive_losses.py`.
"""

import functools
import inspect
import itertools
import typing

import pytest
import torch
from accelerate import Accelerator
from naive_losses import NAIVE
from tools import on_ranks

from multimodal import config
from multimodal.config_io import check
from multimodal.data.batch import Batch, hash64
from multimodal.distributed import rank, world_size
from multimodal.losses.build import build_loss
from multimodal.models.build import build_model
from multimodal.train.gradient import add_gradient
from multimodal.train.step import random_state

PAIRS, SIDE, TOKENS, SEED, STEP = 60, 15, 11, 3, 5
WORLDS, MICRO_BATCHES = (1, 2, 4), (1, 2, 8)
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Allowed distance as a share of the norm: some hundred roundings."""
RANDOM = {"dropout": 0.1, "drop_path": 0.3}
TOWER = {"depth": 2, "heads": 2, "kernel": "sdpa"}
IMAGE = {"kind": "vit", "image_size": SIDE, "patch_size": 5, "width": 14} | TOWER
TEXT = {"kind": "transformer", "vocab_size": 31, "context_length": 13, "width": 10} | TOWER


def sections():
    """Every loss in each of its modes."""
    union = typing.get_args(config.Loss)[0]
    for section in typing.get_args(union) or (union,):
        modes = {
            name: typing.get_args(field.annotation)
            for name, field in section.model_fields.items()
            if typing.get_origin(field.annotation) is typing.Literal
        }
        for values in itertools.product(*modes.values()):
            yield check(dict(zip(modes, values, strict=True)), section)


CASES = [
    (section, dtype, random, parts)
    for section in sections()
    for dtype in DTYPES
    for random in (False, True)
    for parts in MICRO_BATCHES
]


@functools.cache
def model(dtype, random):
    image, text = IMAGE, TEXT
    if random:
        image, text = image | RANDOM | {"patch_dropout": 0.4}, text | RANDOM
    tree = {"image": image, "text": text, "embed_dim": 7, "tokenizer": {"kind": "bpe"}}
    torch.manual_seed(1)
    made = build_model(check(tree | {"logit_scale": 9.0, "logit_bias": -3.0}, config.Model))
    return made.to(dtype).train()


def whole_batch(dtype):
    """Some pairs share a picture, some a caption."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(PAIRS, 3, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)
    tokens = torch.randint(0, 31, (PAIRS, TOKENS), generator=generator)
    lengths = torch.randint(2, TOKENS + 1, (PAIRS,), generator=generator)
    keys = [f"k{i % 53}" for i in range(PAIRS)]
    captions = [f"c{i % 47}" for i in range(PAIRS)]
    ids = (hash64(keys), hash64(captions))
    return Batch(images, tokens, lengths, keys, torch.arange(PAIRS), captions, *ids)


def gradients(module):
    """By name, and none left behind."""
    found = {n.removeprefix("module."): p.grad for n, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return {name: torch.zeros(()) if grad is None else grad for name, grad in found.items()}


def ours():
    """On a rank: its share of the loss, the gradients and how often DDP averaged, of all cases."""
    accelerator, results, rows = Accelerator(cpu=True), [], PAIRS // world_size()
    own = slice(rank() * rows, (rank() + 1) * rows)
    prepared = {
        (dtype, random): accelerator.prepare_model(model(dtype, random))
        for dtype in DTYPES
        for random in (False, True)
    }
    averaged = []
    for module in prepared.values():
        module.register_comm_hook(averaged, counted_average)
    for section, dtype, random, parts in CASES:
        averaged.clear()
        local = add_gradient(
            prepared[dtype, random],
            build_loss(section),
            whole_batch(dtype).part(own),
            accelerator=accelerator,
            micro_batch_size=-(-rows // parts),
            seed_of=lambda part: random_state(SEED, STEP, rank(), part),
        )
        results.append((local.value, gradients(prepared[dtype, random]), sum(averaged)))
    return results


def counted_average(averaged, bucket):
    averaged.append(bucket.is_last())
    future = torch.distributed.all_reduce(bucket.buffer() / world_size(), async_op=True)
    return future.get_future().then(lambda done: done.value()[0])


@functools.cache
def expected(section, dtype, random, cuts):
    """The same from one graph over all pairs, in one process."""
    batch, plain = whole_batch(dtype), model(dtype, random)
    parts = []
    for r, part, start, end in cuts:
        torch.manual_seed(random_state(SEED, STEP, r, part))
        rows = batch.part(slice(start, end))
        parts.append(plain(rows.images, rows.tokens, rows.lengths))
    image, text = (torch.cat([getattr(p, side) for p in parts]) for side in ("image", "text"))
    value = definition(section, batch)(image, text, parts[0].logit_scale, parts[0].logit_bias)
    value.backward()
    return value.detach(), gradients(plain)


def definition(section, batch):
    """The loss as `naive_losses` has it, if it knows the settings; else the loss itself."""
    settings = section.model_dump(exclude={"kind"})
    function = NAIVE.get(section.kind)
    if function is None or not settings.keys() <= inspect.signature(function).parameters.keys():
        settings, function = {}, build_loss(section).forward
    ids = {"image_ids": batch.image_ids, "text_ids": batch.text_ids}
    known = inspect.signature(function).parameters
    return functools.partial(function, **settings, **{n: v for n, v in ids.items() if n in known})


def cuts(world, parts):
    """Rank, number, first row and end of every micro-batch."""
    rows = PAIRS // world
    size = -(-rows // parts)
    for r in range(world):
        for part, start in enumerate(range(0, rows, size)):
            yield r, part, r * rows + start, r * rows + min(start + size, rows)


@pytest.mark.parametrize("world", WORLDS)
def test_loss_and_every_gradient_are_those_of_the_whole_batch_in_one_process(world):
    shares = on_ranks(world, ours)
    for number, (section, dtype, random, parts) in enumerate(CASES):
        case = f"{section!r}, {dtype}, random={random}, {world} ranks, {parts} micro-batches"
        # Without dropout any cut gives the same, so one oracle serves all.
        cut = tuple(cuts(world, parts)) if random else tuple(cuts(1, 1))
        value, whole = expected(section, dtype, random, cut)
        results = [share[number] for share in shares]
        losses = torch.stack([loss for loss, _, _ in results])
        assert_close(losses.mean(), value, DTYPES[dtype], f"loss of {case}")
        norm = torch.stack([g.norm() for g in whole.values()]).norm()
        for _, found, averaged in results:
            assert found.keys() == whole.keys()
            for name, gradient in whole.items():
                # Some gradients are zero but for rounding, such as that of a bias of keys.
                slack = DTYPES[dtype] * max(gradient.norm(), 0.01 * norm)
                distance = (found[name] - gradient).norm()
                assert distance <= slack, f"{name} of {case}: {distance} of {gradient.norm()}"
            assert averaged == 1, f"averaged {averaged} times: {case}"


def assert_close(actual, expected, tolerance, what):
    assert abs(actual - expected) <= tolerance * abs(expected), f"{what}: {actual}, {expected}"

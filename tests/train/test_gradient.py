"""The two passes over micro-batches: the same embeddings, less memory, nothing done in vain.

That the gradient is right, over ranks too, is in `distributed/test_gradient_contract.py`.
"""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from test_step import PAIRS, own_part, tiny_model, whole_batch
from tools import RANDOM, on_ranks
from torch import nn

from multimodal.config import Train
from multimodal.losses import ContrastiveLoss, SigmoidLoss
from multimodal.train import micro_batch
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.gradient import add_gradient
from multimodal.train.micro_batch import (
    check_micro_batch_size,
    choose_micro_batch_size,
    largest_that_fits,
)

DROPOUT = [override for override in RANDOM if override.startswith("model")]
MODES = ("none", "selective", "full")


def gradient(model, size, loss=None, batch=None, accelerator=None):
    add_gradient(
        model,
        loss or ContrastiveLoss(),
        batch or whole_batch(),
        accelerator=accelerator or Accelerator(cpu=True),
        micro_batch_size=size,
        seed_of=lambda part: 11 + part,
    )
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_the_second_pass_embeds_what_the_first_one_did(mode, precision):
    model = tiny_model(*DROPOUT)
    model.checkpoint_activations(mode)
    model.register_forward_hook(lambda module, args, out: seen.append((out.image, out.text)))
    if precision == "autocast":  # as Accelerate does it
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    seen = []
    found = gradient(model, 3)
    assert [len(image) for image, _ in seen] == [3, 3, 2, 3, 3]
    assert [image.requires_grad for image, _ in seen] == [False, False, True, True, True]
    for first, second in zip(seen[:2], seen[3:], strict=True):
        assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert not seen[0][0].equal(seen[1][0])
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found.values())


@pytest.mark.parametrize("mode", MODES[1:])
def test_checkpointing_changes_no_bit_of_the_gradient(mode):
    plain, other = tiny_model(*DROPOUT), tiny_model(*DROPOUT)
    other.checkpoint_activations(mode)
    expected, found = gradient(plain, 3), gradient(other, 3)
    assert all(found[name].equal(g) for name, g in expected.items())


def stored_bytes(mode):
    """What the graph of one forward pass keeps, parameters left out."""
    model = tiny_model()
    model.checkpoint_activations(mode)
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    batch = whole_batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive = model(batch.images, batch.tokens, batch.lengths)
    assert alive.image is not None
    return sum(kept.values())


def test_checkpointing_stores_less():
    none, selective, full = (stored_bytes(mode) for mode in MODES)
    assert selective < 0.65 * none and full < 0.35 * none


def frozen_gradient(side, size):
    """Of this rank's rows with one side frozen; also how often each side was embedded."""
    accelerator, model = Accelerator(cpu=True), tiny_model(*DROPOUT)
    model.freeze(model.parameter_names(side))
    calls = {"image": 0, "text": 0}
    for name in calls:
        tower = getattr(model, name)
        tower.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    found = gradient(
        accelerator.prepare_model(model),
        size,
        batch=own_part(whole_batch()),
        accelerator=accelerator,
    )
    return {name.removeprefix("module."): g for name, g in found.items()}, calls


def frozen_oracle(side, size, world):
    """One graph over the whole batch; the frozen side draws nothing."""
    model, batch, rows = tiny_model(*DROPOUT), whole_batch(), PAIRS // world
    images, texts = [], []
    for r in range(world):
        for part, start in enumerate(range(0, rows, size)):
            own = slice(r * rows + start, r * rows + min(start + size, rows))
            torch.manual_seed(11 + part)
            getattr(model, side).eval()
            images.append(model.encode_image(batch.images[own]))
            texts.append(model.encode_text(batch.tokens[own], batch.lengths[own]))
    ContrastiveLoss()(torch.cat(images), torch.cat(texts), *model.temperature()).backward()
    return {n: None if n.startswith(side) else p.grad for n, p in model.named_parameters()}


def test_a_frozen_part_keeps_its_statistics_too():
    model = tiny_model(*DROPOUT)
    projection = model.image_projection
    model.image_projection = nn.Sequential(nn.BatchNorm1d(projection.in_features), projection)
    model.freeze(model.parameter_names("image"))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    gradient(model.train(), 3)
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    assert model.text.training and not model.learns("image")


@pytest.mark.parametrize("side", ["image", "text"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_frozen_tower_is_embedded_once_and_the_other_learns_exactly(side, world):
    expected = frozen_oracle(side, 2, world)
    norm = torch.stack([g.norm() for g in expected.values() if g is not None]).norm()
    shares = on_ranks(world, frozen_gradient, side, 2) if world > 1 else [frozen_gradient(side, 2)]
    parts = PAIRS // world // 2
    for found, calls in shares:
        other = {"image": "text", "text": "image"}[side]
        assert calls == {side: parts, other: 2 * parts - 1}
        for name, whole in expected.items():
            if whole is None:
                assert found[name] is None
            else:
                assert (found[name] - whole).norm() <= 1e-5 * max(whole.norm(), 0.01 * norm)


def distance(features, batch):
    """A loss of each pair alone, which knows its rows."""
    weight = 1 + batch.lengths + batch.positions
    return (weight * (features.image - features.text).square().sum(1)).mean()


@pytest.mark.parametrize("frozen", [[], ["image"], ["text"]])
def test_a_further_loss_of_each_pair_alone_is_added_exactly(frozen):
    batch = replace(whole_batch(), lengths=torch.randint(2, 9, (PAIRS,)))
    expected, model = tiny_model(), tiny_model()
    for one in (expected, model):
        one.freeze(name for part in frozen for name in one.parameter_names(part))
    features = expected(batch.images, batch.tokens, batch.lengths)
    whole = ContrastiveLoss()(*features) + distance(features, batch)
    whole.backward()
    local = add_gradient(
        model,
        ContrastiveLoss(),
        batch,
        accelerator=Accelerator(cpu=True),
        micro_batch_size=3,
        seed_of=lambda part: part,
        per_pair=distance,
    )
    assert local.value == pytest.approx(whole.item(), rel=1e-6)
    found = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([p.grad.norm() for p in expected.parameters() if p.grad is not None]).norm()
    for name, p in expected.named_parameters():
        if p.grad is None:
            assert found[name] is None
        else:
            assert (found[name] - p.grad).norm() <= 1e-5 * max(p.grad.norm(), 0.01 * norm)


class OfDuplicates(ContrastiveLoss):
    def forward(self, *features, **ids):
        self.ids = ids
        return super().forward(*features, **ids)


def test_the_loss_gets_all_identities_of_the_batch():
    loss, batch = OfDuplicates(), replace(whole_batch(), text_ids=torch.arange(PAIRS) % 3)
    gradient(tiny_model(), 3, loss, batch)
    assert loss.ids["image_ids"].equal(batch.image_ids)
    assert loss.ids["text_ids"].equal(batch.text_ids)


def test_a_micro_batch_that_is_larger_than_the_batch_is_the_batch():
    expected, found = (gradient(tiny_model(), size, SigmoidLoss()) for size in (None, 100))
    assert all(found[name].equal(g) for name, g in expected.items() if g is not None)


def test_auto_halves_until_memory_suffices():
    tried = []

    def attempt(size):
        tried.append(size)
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert largest_that_fits(37, attempt) == 5
    assert tried == [37, 19, 10, 5]

    def hopeless(size):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits(4, hopeless)


def test_a_resumed_run_keeps_the_size_that_auto_chose(tmp_path, monkeypatch):
    """Another size would draw other numbers for dropout."""
    tried = []
    monkeypatch.setattr(micro_batch, "_attempt", lambda *args: tried.append(args[-1]))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: None)

    def choose(state):
        found = None if state is None else Checkpoint(tmp_path, state)
        return choose_micro_batch_size(
            Train(batch_size=24, micro_batch_size="auto"),
            nn.Identity(),
            None,
            accelerator=Accelerator(cpu=True),
            found=found,
        )

    before = {"config": {"train": {"micro_batch_size": "auto"}}, "micro_batch_size": 5}
    assert choose(before) == 5 and tried == []
    assert choose(None) == 24 and tried == [24]
    before["config"]["train"]["micro_batch_size"] = 5
    assert choose(before) == 24


def test_auto_needs_a_device_that_tells_when_memory_is_short():
    check_micro_batch_size(Train(micro_batch_size=7), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"train.micro_batch_size=auto.*on cpu; give a number"):
        check_micro_batch_size(Train(micro_batch_size="auto"), torch.device("cpu"))

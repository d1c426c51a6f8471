"""The gradient of a loss over the global batch, with the memory of one micro-batch.

The loss compares all pairs of all ranks, yet it reaches a tower only through each pair's own
embedding. So the chain rule can be cut there (GradCache, arXiv 2101.06983):

    1. embed each micro-batch without a graph, the last one with its graph
    2. gather, take the loss, and its gradient with respect to the embeddings
    3. embed each micro-batch again, now with a graph, and pull its rows of that gradient back

A whole batch is one micro-batch: the last one, whose graph is kept, so nothing runs twice. With k
of them the towers do (4k - 1) / 3k times the work of a whole batch: 1.17 for 2, 4/3 for many.

A further loss of each pair alone (captions, distillation) is one more root of 3. Batch
normalisation is the exception to all this: it sees a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from multimodal.data.batch import Batch
from multimodal.distributed import average_unsharded, unsynced
from multimodal.losses.metrics import LossMetrics
from multimodal.losses.pairs import PairLoss
from multimodal.models.two_tower import Features

PerPair = Callable[[Features, Batch], Tensor]
"""A mean over pairs of something that each pair has alone, from its features and rows."""


class LocalLoss(NamedTuple):
    """What one rank found."""

    value: Tensor
    """Its share of the loss; the mean over the ranks is the loss."""
    features: Features
    """Of all its rows, without a graph."""
    metrics: LossMetrics | None
    """What the loss noticed on the way; averaged over the ranks like the value."""


def add_gradient(
    model: nn.Module,
    loss: PairLoss,
    batch: Batch,
    *,
    accelerator: Accelerator,
    micro_batch_size: int | None,
    seed_of: Callable[[int], int],
    per_pair: PerPair | None = None,
) -> LocalLoss:
    """Add the gradient of the global batch's loss to the parameters, the same on all ranks.

    Args:
        model: a TwoTower as Accelerate prepared it.
        batch: this rank's rows, which may be elsewhere than on the device.
        micro_batch_size: rows embedded at once; None is all.
        seed_of: seed of a micro-batch's random numbers, by its number. Both passes start from it,
            so the second one draws what the first one drew.
        per_pair: a loss to add, which compares no pairs.
    """
    tower = accelerator.unwrap_model(model)
    image, text = tower.learns("image"), tower.learns("text")
    cuts = _cuts(len(batch.keys), micro_batch_size)
    last = len(cuts) - 1

    def embed(number: int, *, images: bool = image, texts: bool = text) -> Features:
        torch.manual_seed(seed_of(number))
        part = batch.part(cuts[number]).to(accelerator.device)
        return model(
            images=part.images if images else None,
            tokens=part.tokens if texts else None,
            lengths=part.lengths if texts else None,
        )

    frozen = None
    if not (image and text):
        with torch.no_grad(), unsynced(model):
            parts = [embed(n, images=not image, texts=not text) for n in range(len(cuts))]
        frozen = _join(parts)
    with unsynced(model) if last else nullcontext():
        with torch.no_grad():
            parts = [embed(number) for number in range(last)]
        kept = embed(last)
    value, features, gradient = _loss_gradient(loss, _join([*parts, kept], frozen), batch)

    # A replay must not move statistics that the first pass has moved already.
    buffers = copied_buffers(model)
    order = [last, *range(last)]
    for number in order:
        # DDP averages in the backward pass that follows a forward pass outside `no_sync`, FSDP in
        # the backward pass outside it.
        final = number == order[-1]
        with nullcontext() if final else unsynced(model):
            part = kept if number == last else embed(number)
            further = None
            if per_pair is not None:
                further = _share(per_pair, part, frozen, batch, cuts[number])
                value = value + further.detach()
            _pull_back(part, gradient, cuts[number], further, with_temperature=final)
    average_unsharded(model)
    restore_buffers(buffers)
    return LocalLoss(value, features, loss.metrics)


def copied_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The model's buffers, such as the statistics of batch normalisation, and what they hold."""
    return [(buffer, buffer.clone()) for buffer in model.buffers()]


@torch.no_grad()
def restore_buffers(copies: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in copies:
        buffer.copy_(before)


def _cuts(rows: int, size: int | None) -> list[slice]:
    size = min(size or rows, rows)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _join(parts: Sequence[Features], frozen: Features | None = None) -> Features:
    """The features of all micro-batches; a side that they leave out is taken from `frozen`."""

    def rows(side: str) -> Tensor | None:
        if getattr(parts[0], side) is None:
            return getattr(frozen, side, None)
        return torch.cat([getattr(part, side) for part in parts])

    return parts[-1]._replace(image=rows("image"), text=rows("text"))


def _loss_gradient(
    loss: PairLoss, features: Features, batch: Batch
) -> tuple[Tensor, Features, dict[str, Tensor]]:
    """The loss, the features without a graph, and the gradient of those that learn, by name."""
    leaves = Features(*(_leaf(x) for x in features))
    device = leaves.logit_scale.device
    value = loss(*leaves, image_ids=batch.image_ids.to(device), text_ids=batch.text_ids.to(device))
    learning = {n: x for n, x in leaves._asdict().items() if x is not None and x.requires_grad}
    found = torch.autograd.grad(value, list(learning.values()), materialize_grads=True)
    plain = Features(*(_leaf(x, learns=False) for x in features))
    return value.detach(), plain, dict(zip(learning, found, strict=True))


def _leaf(x: Any, learns: bool = True) -> Any:
    return None if x is None else x.detach().requires_grad_(learns and x.requires_grad)


def _share(
    per_pair: PerPair, part: Features, frozen: Features | None, batch: Batch, rows: slice
) -> Tensor:
    """What a micro-batch's rows add to the mean over this rank's pairs."""
    if frozen is not None:
        sides = {n: x[rows] for n in ("image", "text") if (x := getattr(frozen, n)) is not None}
        part = part._replace(**sides)
    own = batch.part(rows).to(part.logit_scale.device)
    return per_pair(part, own) * (len(own.keys) / len(batch.keys))


def _pull_back(
    part: Features,
    gradient: dict[str, Tensor],
    rows: slice,
    further: Tensor | None,
    *,
    with_temperature: bool,
) -> None:
    """Add what a micro-batch's rows give to the parameters.

    The temperature has one gradient for the whole batch, which exactly one micro-batch brings in.
    """
    places: dict[str, Any] = {"image": rows, "text": rows}
    if with_temperature:
        places |= {"logit_scale": ..., "logit_bias": ...}
    names = [name for name in places if name in gradient]
    roots = [getattr(part, name) for name in names]
    slopes: list[Tensor | None] = [gradient[name][places[name]] for name in names]
    if further is not None:
        roots.append(further)
        slopes.append(None)
    torch.autograd.backward(roots, slopes)

"""One training step: gradient, clip, update; or no update, when a number is not finite."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from multimodal.data.batch import Batch
from multimodal.distributed import all_reduce_sum, gather_objects, gradient_norm, rank, world_size
from multimodal.losses.pairs import PairLoss
from multimodal.models.two_tower import Features, TwoTower
from multimodal.train.gradient import LocalLoss, add_gradient, copied_buffers, restore_buffers
from multimodal.train.optim import set_lr
from multimodal.weights.pretrained import Pretrained

Look = Callable[[TwoTower, Features], dict[str, float]]
"""Figures of a step, of the model and this rank's features; called on all ranks."""


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on all ranks."""

    loss: float
    """Over the global batch."""
    grad_norm: float
    """Over all parameters, before clipping."""
    logit_scale: float
    """The factor that this step's loss used."""
    logit_bias: float | None
    skipped: int
    """Unreadable samples that others stood in for."""
    finite: bool = True
    """Whether loss and gradient were, on all ranks. If not, the step changed nothing."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the loss noticed, by the names of `LossMetrics`, and what `look` saw."""
    stop: bool = False
    """Whether any rank wants to stop after this step."""
    suspects: tuple[str, ...] = ()
    """Keys of the samples whose embeddings were not finite, if that is why."""


def train_step(
    model: nn.Module,
    loss: PairLoss,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    accelerator: Accelerator,
    step: int,
    seed: int,
    lr: float,
    clip_grad_norm: float | None,
    micro_batch_size: int | None = None,
    stop: bool = False,
    look: Look | None = None,
) -> StepResult:
    """Train on one batch.

    When the loss or the gradient of any rank is not finite, no rank touches the weights or the
    optimiser, and the result says so.

    Args:
        model: a TwoTower as Accelerate prepared it.
        batch: this rank's rows; a micro-batch of them goes to the device at a time.
        step: finished steps before this one.
        lr: of the schedule; the optimiser's groups have factors on it.
        clip_grad_norm: largest norm of the gradient; None leaves it.
        micro_batch_size: rows that the device holds activations of; None is all. It changes what
            dropout draws and the order of sums, and nothing else.
        stop: whether this rank wants to stop after the step; all ranks get to know.
        look: further figures for `metrics`, from the gradients before they are clipped.
    """
    buffers = copied_buffers(model)
    local = add_gradient(
        model,
        loss,
        batch,
        accelerator=accelerator,
        micro_batch_size=micro_batch_size,
        seed_of=lambda part: random_state(seed, step, rank(), part),
    )
    norm = gradient_norm(model)
    result = _agree(local, norm, skipped=len(batch.skipped), stop=stop)
    if look is not None:
        figures = look(accelerator.unwrap_model(model), local.features)
        result = replace(result, metrics=result.metrics | figures)
    if result.finite:
        if clip_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), clip_grad_norm, norm)
        set_lr(optimizer, lr)
        optimizer.step()
        accelerator.unwrap_model(model).temperature.clamp_()
    else:
        restore_buffers(buffers)
        result = replace(result, suspects=_suspects(batch, local.features))
    optimizer.zero_grad(set_to_none=True)
    return result


def rehearse(
    model: nn.Module, loss: PairLoss, pretrained: Pretrained, *, accelerator: Accelerator
) -> None:
    """One backward pass for nothing, after which gradients are summed in the same order for good.

    DDP lays its buckets out anew after its first backward pass, and with more than two ranks the
    place in a bucket decides the order of a sum, hence its last bit. Without this, the first step
    of a resumed run would differ from the same step of an uninterrupted one.
    """
    if world_size() == 1:
        return
    size = pretrained.transform.size
    tokens, lengths = pretrained.tokenizer.encode(["a", "b"])
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    batch = (x.to(accelerator.device) for x in (images, tokens, lengths))
    ids = torch.arange(2, device=accelerator.device)
    buffers = copied_buffers(model)
    accelerator.backward(loss(*model(*batch), image_ids=ids, text_ids=ids))
    model.zero_grad(set_to_none=True)
    restore_buffers(buffers)


def random_state(seed: int, step: int, rank: int, micro_batch: int = 0) -> int:
    """Seed of all random numbers of a forward pass, so that it can be repeated exactly.

    Dropout, patch dropout and drop path follow from it, hence a resumed run needs no saved state.
    """
    text = f"{seed} {step} {rank} {micro_batch}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _agree(local: LocalLoss, norm: Tensor, *, skipped: int, stop: bool) -> StepResult:
    """Bring the numbers of all ranks together with one reduction and one wait for the device."""
    loss, norm = local.value.float(), norm.detach().float()
    broken = ~(loss.isfinite() & norm.isfinite())
    metrics = local.metrics._asdict() if local.metrics is not None else {}
    counts = [torch.full_like(loss, count) for count in (skipped, stop)]
    shares = [broken.float(), *counts, loss, *metrics.values()]
    own = [norm, local.features.logit_scale]
    if local.features.logit_bias is not None:
        own.append(local.features.logit_bias)
    total = all_reduce_sum(torch.stack([share.float() for share in shares]))
    numbers = torch.cat([total, torch.stack(own)]).tolist()
    broken_ranks, all_skipped, stopping_ranks, *sums = numbers[: len(shares)]
    norm_, scale, *bias = numbers[len(shares) :]
    mean, *means = (x / world_size() for x in sums)
    return StepResult(
        loss=mean,
        grad_norm=norm_,
        logit_scale=scale,
        logit_bias=bias[0] if bias else None,
        skipped=int(all_skipped),
        finite=broken_ranks == 0,
        stop=stopping_ranks > 0,
        metrics=dict(zip(metrics, means, strict=True)),
    )


def _suspects(batch: Batch, features: Features) -> tuple[str, ...]:
    """Keys of the samples of all ranks whose embeddings are not finite."""
    assert features.image is not None and features.text is not None
    broken = ~(features.image.isfinite().all(1) & features.text.isfinite().all(1))
    own = [key for key, bad in zip(batch.keys, broken.tolist(), strict=True) if bad]
    return tuple(key for keys in gather_objects(own) for key in keys)

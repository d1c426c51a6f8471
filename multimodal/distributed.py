"""Everything that one process asks of the others. The only file with collectives.

All functions work without a process group too, as if the world had one rank. Whoever starts the
processes (Accelerate, torchrun) also makes the group; `shutdown` ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if _has_group() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if _has_group() else 1


def is_main() -> bool:
    """Whether this process is rank 0, the one that writes files."""
    return rank() == 0


def gather_with_grad(x: Tensor) -> Tensor:
    """Concatenate the rows of all ranks, in rank order, as one differentiable operation.

    Every rank's loss depends on every rank's rows, so the gradient of a row is the sum of what
    all ranks found for it.

    Args:
        x: [b, ...], the same shape on all ranks.

    Returns:
        [W * b, ...] on W ranks.
    """
    return _Gather.apply(x) if world_size() > 1 else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _all_gather(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        rows = grad.shape[0] // world_size()
        if dist.get_backend() == "nccl":
            own = grad.new_empty(rows, *grad.shape[1:])
            dist.reduce_scatter_tensor(own, grad.contiguous())
            return own
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.narrow(0, rank() * rows, rows)


@torch.no_grad()
def gather_rows(x: Tensor) -> Tensor:
    """Concatenate the rows of all ranks, in rank order, without a gradient.

    Args:
        x: [n, ...] with a rank's own n, which may be 0; the other sizes agree.

    Returns:
        [sum of n, ...] on the device of `x`.
    """
    if world_size() == 1:
        return x
    counts = _all_gather(torch.tensor([x.shape[0]], device=x.device)).tolist()
    padded = x.new_zeros(max(counts), *x.shape[1:])
    padded[: x.shape[0]] = x
    blocks = _all_gather(padded).split(max(counts)) if max(counts) else []
    return torch.cat([x[:0], *(b[:n] for b, n in zip(blocks, counts, strict=False))])


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 only and return its value on every rank.

    Raises:
        Exception: what `function` raised, on all ranks (as ValueError or RuntimeError on the
            others, with the attribute `told_by_main`), so that none waits for a rank that has left.
    """
    if world_size() == 1:
        return function()
    value: T | None = None
    error: Exception | None = None
    if is_main():
        try:
            value = function()
        except Exception as caught:
            error = caught
    of_user = isinstance(error, ValueError | FileNotFoundError)
    value, told, of_user = broadcast_object((value, None if error is None else str(error), of_user))
    if error is not None:
        raise error
    if told is not None:
        repeated = (ValueError if of_user else RuntimeError)(told)
        repeated.told_by_main = True  # pyright: ignore[reportAttributeAccessIssue]
        raise repeated
    return cast(T, value)


def main_first(function: Callable[[], T]) -> T:
    """Call `function` on rank 0, then on the others, which find what it left on the disk.

    Raises:
        Exception: what it raised on rank 0, on all ranks as `on_main` does.
    """
    own: list[T] = []
    on_main(lambda: own.append(function()))
    return own[0] if own else function()


@torch.no_grad()
def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum over the ranks, elementwise; no gradient; `x` is left as it is."""
    return _all_reduce(x, dist.ReduceOp.SUM) if world_size() > 1 else x.clone()


@torch.no_grad()
def all_reduce_max(x: Tensor) -> Tensor:
    """Largest value over the ranks, elementwise; no gradient; `x` is left as it is."""
    return _all_reduce(x, dist.ReduceOp.MAX) if world_size() > 1 else x.clone()


@contextmanager
def unsynced(model: nn.Module) -> Iterator[None]:
    """Where DDP and FSDP do not average gradients.

    `Accelerator.no_sync` does nothing for a DDP of one process, which torchrun can make.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def average_unsharded(model: nn.Module) -> None:
    """FSDP cannot shard scalars, the temperature, and leaves their gradients to each rank."""
    for parameter in model.parameters() if isinstance(model, FSDPModule) else ():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            parameter.grad = all_reduce_sum(parameter.grad) / world_size()


def gradient_norm(model: nn.Module) -> Tensor:
    """Norm over all parameters, also over those that are sharded; the same on all ranks."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    sharded = [g for g in found if isinstance(g, DTensor)]
    norms = [nn.utils.get_total_norm([g for g in found if not isinstance(g, DTensor)])]
    if sharded:
        norms.append(cast(DTensor, nn.utils.get_total_norm(sharded)).full_tensor())
    return nn.utils.get_total_norm(norms)


def barrier() -> None:
    """Wait until every rank is here."""
    if world_size() > 1:
        dist.barrier()


def shutdown() -> None:
    """End the process group; without this, a clean run can still abort on its way out."""
    if _has_group():
        dist.destroy_process_group()


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _for_backend(x: Tensor) -> Tensor:
    """NCCL moves GPU memory only."""
    return x.cuda() if dist.get_backend() == "nccl" else x


def _all_gather(x: Tensor) -> Tensor:
    sent = _for_backend(x.contiguous())
    blocks = [torch.empty_like(sent) for _ in range(world_size())]
    dist.all_gather(blocks, sent)
    return torch.cat(blocks).to(x.device)


def _all_reduce(x: Tensor, operation: Any) -> Tensor:
    total = _for_backend(x.detach().clone())
    dist.all_reduce(total, op=operation)
    return total.to(x.device)

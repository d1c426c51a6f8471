"""Everything that one process asks of the others. The only file with collectives.

All functions work without a process group too, as if the world had one rank. Whoever starts the
processes (Accelerate, torchrun) also makes the group; `shutdown` ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from multimodal.errors import StopRequested

T = TypeVar("T")
_PARENT = os.getppid()
_calls = itertools.count()
_LEFT = "multimodal/left"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Set where torchrun's own process holds what ranks post."""
_READ_SECONDS = 2.0
_LONGEST_PAUSE = 0.5
"""Seconds between two looks at what others have posted."""


class Left(NamedTuple):
    """Why a process has left the others, as it has posted."""

    reason: str
    stopped: bool
    """By request, rather than by a failure."""


class LostProcess(RuntimeError):
    """Another process has left, so that this one cannot go on."""


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
        if _uses_nccl():
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

    The others wait as long as it takes; the time limit of collectives does not count here.

    Raises:
        Exception: what `function` raised, on all ranks, so that none waits for a rank that has
            left; on the others as ValueError or RuntimeError, with the attribute `told_elsewhere`.
    """
    if world_size() == 1:
        return function()
    done = f"multimodal/on_main/{next(_calls)}"
    value: T | None = None
    error: Exception | None = None
    if is_main():
        try:
            value = function()
        except Exception as caught:
            error = caught
        _post(done)
    else:
        _wait_for(done)
    value, told = broadcast_object((value, _Told.of(error)))
    if error is not None:
        raise error
    if told is not None:
        raise told.error()
    return cast(T, value)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on all ranks what is raised in the block on one, so that none waits for the others.

    Raises:
        Exception: a rank's own, or as ValueError, RuntimeError or StopRequested that of the first
            rank that had one.
    """
    error: Exception | StopRequested | None = None
    try:
        yield
    except (Exception, StopRequested) as caught:
        error = caught
    told = [one for one in gather_objects(_Told.of(error)) if one is not None]
    if error is not None:
        raise error
    if told:
        raise told[0].error()


class _Told(NamedTuple):
    """An error as other ranks learn of it."""

    kind: type[BaseException]
    text: str

    @staticmethod
    def of(error: BaseException | None) -> _Told | None:
        if error is None:
            return None
        if isinstance(error, ValueError | FileNotFoundError):
            return _Told(ValueError, str(error))
        kind = StopRequested if isinstance(error, StopRequested) else RuntimeError
        return _Told(kind, str(error))

    def error(self) -> BaseException:
        repeated = self.kind(self.text)
        repeated.told_elsewhere = True  # pyright: ignore[reportAttributeAccessIssue]
        return repeated


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


def shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    reshard_after_forward: bool,
) -> None:
    """Cut all parameters but scalars over all ranks, in place (FSDP2).

    Args:
        units: modules whose parameters are gathered together, and one unit after the other.
        device: where the parts go, and the scalars.
        dtype: what the parameters are gathered in; None leaves theirs. Gradients are summed in
            float32.
        reshard_after_forward: whether the backward pass gathers a unit again.
    """
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    for parameter in scalars:
        parameter.data = parameter.data.to(device)
    # As under DDP, autocast decides what an operation takes; hence inputs are left alone.
    policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, None, False)
    options: Any = {
        "mesh": init_device_mesh(device.type, (world_size(),)),
        "mp_policy": policy,
        "ignored_params": scalars,
    }
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)


def whole(x: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Call it on all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def fill_(x: Tensor, values: Tensor) -> None:
    """Copy the whole tensor `values`, which every rank has, into one that may be sharded."""
    if isinstance(x, DTensor):
        own = values.to(x.device)
        values = distribute_tensor(own, x.device_mesh, x.placements, src_data_rank=None)
    x.copy_(values)


def average_unsharded(model: nn.Module) -> None:
    """FSDP cannot shard scalars, the temperature, and leaves their gradients to each rank."""
    for parameter in model.parameters() if isinstance(model, FSDPModule) else ():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            parameter.grad = all_reduce_sum(parameter.grad) / world_size()


def gradient_norm(model: nn.Module) -> Tensor:
    """Norm over all parameters, also over those that are sharded; the same on all ranks."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    sharded = [g for g in found if isinstance(g, DTensor)]
    rest = [g for g in found if not isinstance(g, DTensor)]
    norms = [nn.utils.get_total_norm(rest)] if rest or not sharded else []
    if sharded:
        norms.append(cast(DTensor, nn.utils.get_total_norm(sharded)).full_tensor())
    return nn.utils.get_total_norm(norms)


def barrier() -> None:
    """Wait until every rank is here, however long that takes."""
    if world_size() == 1:
        return
    number = next(_calls)
    store = _store()
    if store is not None:
        if store.add(f"multimodal/here/{number}", 1) == world_size():
            _post(f"multimodal/all/{number}")
        _wait_for(f"multimodal/all/{number}")
    dist.barrier()


def post_left(left: Left, *, stay: bool) -> None:
    """Let the other ranks know why this one leaves; the first one's reason stands.

    Args:
        stay: where rank 0 holds the notes itself, keep them until the others have read them.
    """
    store = _store()
    with suppress(dist.DistError):
        if store is not None and world_size() > 1:
            store.compare_set(_LEFT, "", json.dumps(left))
            if stay and is_main() and not os.environ.get(_AGENT_STORE):
                time.sleep(_READ_SECONDS)


def who_left() -> Left | None:
    """Why a rank has left, if one has and could say so."""
    store = _store()
    with suppress(dist.DistError):
        if store is not None and store.check([_LEFT]):
            return Left(*json.loads(store.get(_LEFT)))
    return None


def is_of_collectives(error: BaseException) -> bool:
    """Whether an error says no more than that the other ranks cannot be reached."""
    if isinstance(error, dist.DistError | LostProcess):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def shutdown() -> None:
    """End the process group; without this, a clean run can still abort on its way out."""
    if _has_group():
        dist.destroy_process_group()


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _store() -> Any:
    """What ranks post notes on beside their collectives, or None if there is none any more.

    torchrun's own process holds it, and every look at it after that has gone fills the log.
    """
    orphaned = os.environ.get(_AGENT_STORE) and os.getppid() != _PARENT
    if not _has_group() or orphaned:
        return None
    return dist.distributed_c10d._get_default_store()


def _post(key: str) -> None:
    store = _store()
    if store is not None:
        store.set(key, "")


def _wait_for(key: str) -> None:
    """Look for what another rank posts until it is there, or there is nowhere to look.

    Between looks, handlers of signals can run, which they cannot during a collective.

    Raises:
        LostProcess: when a rank has left.
        StopRequested: when one has left by request.
    """
    started = time.monotonic()
    while (store := _store()) is not None:
        try:
            if store.check([key]):
                return
            left = who_left()
        except dist.DistNetworkError:  # then the next collective tells
            return
        if left is not None:
            raise StopRequested(left.reason) if left.stopped else LostProcess(left.reason)
        waited = time.monotonic() - started
        time.sleep(min(_LONGEST_PAUSE, 0.001 + waited / 10))


def _for_backend(x: Tensor) -> Tensor:
    """NCCL moves GPU memory only."""
    return x.cuda() if _uses_nccl() else x


def _uses_nccl() -> bool:
    """Accelerate names `cuda:nccl,cpu:gloo` for FSDP."""
    return "nccl" in str(dist.get_backend())


def _all_gather(x: Tensor) -> Tensor:
    sent = _for_backend(x.contiguous())
    blocks = [torch.empty_like(sent) for _ in range(world_size())]
    dist.all_gather(blocks, sent)
    return torch.cat(blocks).to(x.device)


def _all_reduce(x: Tensor, operation: Any) -> Tensor:
    total = _for_backend(x.detach().clone())
    dist.all_reduce(total, op=operation)
    return total.to(x.device)

"""How many pairs a device works on at once: as set, or the most that its memory holds."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn

from multimodal.config import Train
from multimodal.distributed import all_reduce_max, unsynced, world_size
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.gradient import copied_buffers, restore_buffers
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)

_SHARE = 0.85
"""Of the device's memory, for an attempt: the loss and the embeddings need some of the rest."""


def check_micro_batch_size(train: Train, device: torch.device) -> None:
    """See at the start whether `auto` can work.

    Raises:
        ValueError: when the device does not tell that its memory is short.
    """
    if train.micro_batch_size == "auto" and device.type != "cuda":
        raise ValueError(
            f"train.micro_batch_size=auto, but memory running short can be noticed on CUDA devices "
            f"only, and this run is on {device.type}; give a number, such as 256, or null"
        )


def choose_micro_batch_size(
    train: Train,
    model: nn.Module,
    pretrained: Pretrained,
    *,
    accelerator: Accelerator,
    found: Checkpoint | None,
) -> int:
    """Pairs that each device works on at once; the same on all ranks.

    A resumed run keeps what `auto` chose, since dropout would draw other numbers with another size.
    """
    local = train.batch_size // world_size()
    if train.micro_batch_size != "auto":
        return min(train.micro_batch_size or local, local)
    if found is not None and found.state["config"]["train"].get("micro_batch_size") == "auto":
        return min(found.state["micro_batch_size"], local)

    def attempt(size: int) -> None:
        _attempt(model, pretrained, accelerator, size)

    torch.cuda.set_per_process_memory_fraction(_SHARE)
    size = largest_that_fits(local, attempt)
    torch.cuda.set_per_process_memory_fraction(1.0)
    # Each rank has tried by itself, since one that ran out would leave the others waiting.
    size = -int(all_reduce_max(torch.tensor(-size)))
    log.info("micro-batches of %d pairs fit (train.micro_batch_size=auto)", size)
    return size


def largest_that_fits(most: int, attempt: Callable[[int], None]) -> int:
    """Halve `most` until `attempt` does not run out of memory.

    Raises:
        torch.OutOfMemoryError: when not even 1 fits.
    """
    size = most
    while not _fits(size, attempt, last=size == 1):
        size = (size + 1) // 2
    return size


def _fits(size: int, attempt: Callable[[int], None], *, last: bool) -> bool:
    try:
        attempt(size)
        return True
    except torch.OutOfMemoryError:
        if last:
            raise
        return False


def _attempt(model: nn.Module, pretrained: Pretrained, accelerator: Accelerator, size: int) -> None:
    """Forward and backward pass of the longest texts, beside what AdamW will hold."""
    device = accelerator.device
    torch.cuda.empty_cache()
    pixels = pretrained.transform.size
    length = pretrained.config.text.context_length
    buffers = copied_buffers(model)
    moments = [torch.empty_like(p) for p in model.parameters() if p.requires_grad for _ in "mv"]
    try:
        with unsynced(model):
            features = model(
                images=torch.zeros(size, 3, pixels, pixels, dtype=torch.uint8, device=device),
                tokens=torch.zeros(size, length, dtype=torch.int64, device=device),
                lengths=torch.full((size,), length, device=device),
            )
            torch.stack([x.sum() for x in features if x is not None]).sum().backward()
    finally:
        del moments
        model.zero_grad(set_to_none=True)
        restore_buffers(buffers)

"""The state of a run at one step, apart from the run, which may go on while it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from multimodal.distributed import fill_, is_main, whole
from multimodal.train.optim import named_parameters
from multimodal.weights.pretrained import Pretrained

OPTIMIZER_FILE = "optimizer.safetensors"
_SLOTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Snapshot:
    """Copies of all that a checkpoint holds, on rank 0's CPU; whole, also of a sharded run."""

    state: dict[str, Any]
    """JSON values; `step` is the finished steps."""
    pretrained: Pretrained
    """What the model is made of, besides its weights."""
    weights: dict[str, Tensor]
    """The model's state dict. Empty on other ranks, like the tensors below."""
    optimizer: dict[str, Tensor]
    """AdamW's `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` of every trained parameter."""
    ema: dict[str, Tensor] | None = None
    """The state dict of the average, if the run keeps one."""


def copied(x: Tensor) -> Tensor:
    """A copy in new memory of the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()


def take_snapshot(
    state: dict[str, Any],
    pretrained: Pretrained,
    optimizer: torch.optim.Optimizer,
    ema: AveragedModel | None = None,
    *,
    copy: Callable[[Tensor], Tensor] = copied,
) -> Snapshot:
    """Copy the state of the run. Call it on all ranks, which hold parts of it when sharded.

    Args:
        state: what the checkpoint says about itself, as JSON values.
        ema: the average of the weights; `ema_updates` of the state counts what it is made of.
        copy: gives each tensor's copy on the CPU, contiguous; used on rank 0 only.
    """
    weights = _on_rank_0(pretrained.model.state_dict(), copy)
    moments = _on_rank_0(_optimizer_state(optimizer), copy)
    if ema is None:
        return Snapshot(state, pretrained, weights, moments)
    state = {**state, "ema_updates": int(ema.n_averaged)}
    return Snapshot(state, pretrained, weights, moments, _on_rank_0(ema.module.state_dict(), copy))


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore AdamW's state from a checkpoint folder.

    Raises:
        ValueError: when a tensor is missing, unexpected or of another shape, or the file is none.
    """
    path = checkpoint / OPTIMIZER_FILE
    parameters = named_parameters(optimizer)
    expected = {f"{slot}.{name}" for name in parameters for slot in _SLOTS}
    with _opened(path) as flat:
        found = set(flat.keys())
        if found != expected:
            raise ValueError(
                f"{path} does not fit the model: missing {sorted(expected - found)}, unexpected "
                f"{sorted(found - expected)}"
            )
        for name, parameter in parameters.items():
            own = _untouched(parameter)
            for slot, tensor in own.items():
                saved = flat.get_tensor(f"{slot}.{name}")
                if saved.shape != tensor.shape:
                    raise ValueError(
                        f"{path}: {slot}.{name} is {list(saved.shape)} instead of "
                        f"{list(tensor.shape)}"
                    )
                fill_(tensor, saved)
            optimizer.state[parameter] = own


def _opened(path: Path):
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); use another checkpoint") from None


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state as flat tensors; a parameter that never had a gradient counts as untouched."""
    flat = {}
    for name, parameter in named_parameters(optimizer).items():
        own = optimizer.state.get(parameter) or _untouched(parameter)
        flat |= {f"{slot}.{name}": own[slot] for slot in _SLOTS}
    return flat


def _untouched(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
    }


def _on_rank_0(tensors: dict[str, Tensor], copy: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Copies of whole tensors, which the ranks bring together one at a time."""
    copies = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if is_main():
            copies[name] = copy(full)
    return copies

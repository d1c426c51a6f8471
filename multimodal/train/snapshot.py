"""The state of a run at one step, apart from the run, which may go on while it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from multimodal.train.optim import named_parameters
from multimodal.weights.pretrained import Pretrained

OPTIMIZER_FILE = "optimizer.safetensors"
_SLOTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Snapshot:
    """Copies of all that a checkpoint holds, on the CPU."""

    state: dict[str, Any]
    """JSON values; `step` is the finished steps."""
    pretrained: Pretrained
    """What the model is made of, besides its weights."""
    weights: dict[str, Tensor]
    """The model's state dict."""
    optimizer: dict[str, Tensor]
    """AdamW's `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` of every trained parameter."""


def copied(x: Tensor) -> Tensor:
    """A copy in new memory of the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()


def take_snapshot(
    state: dict[str, Any],
    pretrained: Pretrained,
    optimizer: torch.optim.Optimizer,
    *,
    copy: Callable[[Tensor], Tensor] = copied,
) -> Snapshot:
    """Copy the state of the run.

    Args:
        state: what the checkpoint says about itself, as JSON values.
        copy: gives each tensor's copy on the CPU, contiguous.
    """
    weights = {name: copy(x) for name, x in pretrained.model.state_dict().items()}
    return Snapshot(state, pretrained, weights, _optimizer_state(optimizer, copy))


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore AdamW's state from a checkpoint folder.

    Raises:
        ValueError: when a tensor is missing, unexpected or of another shape, or the file is none.
    """
    path = checkpoint / OPTIMIZER_FILE
    try:
        flat = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); use another checkpoint") from None
    parameters = named_parameters(optimizer)
    expected = {f"{slot}.{name}" for name in parameters for slot in _SLOTS}
    if set(flat) != expected:
        raise ValueError(
            f"{path} does not fit the model: missing {sorted(expected - set(flat))}, unexpected "
            f"{sorted(set(flat) - expected)}"
        )
    for name, parameter in parameters.items():
        own = _untouched(parameter)
        for slot, tensor in own.items():
            saved = flat[f"{slot}.{name}"]
            if saved.shape != tensor.shape:
                raise ValueError(
                    f"{path}: {slot}.{name} is {list(saved.shape)} instead of {list(tensor.shape)}"
                )
            tensor.copy_(saved)
        optimizer.state[parameter] = own


def _optimizer_state(
    optimizer: torch.optim.Optimizer, copy: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """AdamW's state as flat tensors; a parameter that never had a gradient counts as untouched."""
    flat = {}
    for name, parameter in named_parameters(optimizer).items():
        own = optimizer.state.get(parameter) or _untouched(parameter)
        for slot in _SLOTS:
            flat[f"{slot}.{name}"] = copy(own[slot])
    return flat


def _untouched(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
    }

"""AdamW over groups of parameters that are treated alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from multimodal.config import Optim
from multimodal.train.parameters import treatments


def optimizer_groups(model: nn.Module, section: Optim) -> list[dict[str, Any]]:
    """The parameters that learn: `params`, `names`, `weight_decay`, `factor` for `set_lr`."""
    found = treatments(model, section)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = found[name]
        empty = {"names": [], "params": [], "weight_decay": own.weight_decay, "factor": own.lr}
        group = groups.setdefault((own.lr, own.weight_decay), empty)
        group["names"].append(name)
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, reverse=True)]


def build_optimizer(model: nn.Module, section: Optim) -> torch.optim.AdamW:
    """AdamW over `optimizer_groups` of a model whose frozen parameters are frozen already."""
    groups = optimizer_groups(model, section)
    device = groups[-1]["params"][0].device.type
    optimizer = torch.optim.AdamW(
        groups,
        lr=section.lr,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        # One kernel for all tensors: 4 times as fast as the default on CPU.
        fused=device in ("cpu", "cuda"),
    )
    set_lr(optimizer, section.lr)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, of each group times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["factor"]


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """The optimiser's parameters by the model's names."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }

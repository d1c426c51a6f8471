"""Weights, gradients and AdamW's moments cut over the ranks (FSDP2), as the launcher asks.

Accelerate 1.15 shards only what it prepares together with the optimiser, on GPUs only, and leaves
the flag aside on a CPU without a word. So torch's `fully_shard` is called here, with the launcher's
settings, and Accelerate adds the mixed precision. One block of a tower is gathered at a time.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import nn

from multimodal.config import Train
from multimodal.distributed import shard, whole, world_size
from multimodal.models.two_tower import TwoTower

log = logging.getLogger(__name__)


def is_sharded() -> bool:
    """Whether the launcher asks for sharding and there is more than one rank to share."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP") and world_size() > 1


def check_launcher() -> None:
    """See that the launcher asks for no more than is done here.

    Raises:
        ValueError: for FSDP1, and for what FSDP would do to activations or on the host.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(
            f"FSDP version {version} is not supported; shard with version 2 (`accelerate launch "
            "--use_fsdp --fsdp_version 2`)"
        )
    if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        raise ValueError(
            "FSDP_OFFLOAD_PARAMS=true is not supported; leave it out and use more processes, or "
            "train.checkpoint_activations=full"
        )
    if parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING"):
        raise ValueError(
            "FSDP_ACTIVATION_CHECKPOINTING=true is not supported; leave it out and set "
            "train.checkpoint_activations=full"
        )
    # Else transformers would load pretrained weights on one rank only.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def check_sharded(train: Train) -> None:
    """See that the settings can be had with a sharded model.

    Raises:
        ValueError: when not.
    """
    if not is_sharded():
        return
    if train.compile:
        raise ValueError(
            "train.compile=true does not work with a sharded model (FSDP); set it to false, or "
            "launch without --use_fsdp"
        )
    if train.micro_batch_size == "auto":
        raise ValueError(
            "train.micro_batch_size=auto tries sizes on each rank alone, which a sharded model "
            "(FSDP) cannot; give a number, such as 256, or null"
        )


def refuse_sharding() -> None:
    """For what looks at a whole model.

    Raises:
        ValueError: when the launcher asks for sharding.
    """
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "a check tries a whole model, not a sharded one; run it without --use_fsdp. Over N "
            "processes each holds 1/N of the parameters, gradients and optimizer that it finds"
        )


def loading_device(accelerator: Accelerator) -> torch.device:
    """Where a model is made: on the host if no device need hold all of it."""
    return torch.device("cpu") if is_sharded() else accelerator.device


def prepare_model(model: TwoTower, accelerator: Accelerator) -> nn.Module:
    """The model to train: sharded in place, or in DDP. Build the optimiser afterwards."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return accelerator.prepare_model(model)
    if is_sharded():
        count = len(list(_blocks(model)))
        shard_model(model, accelerator)
        log.info("sharded over %d processes in %d blocks (FSDP2)", world_size(), count)
    # For its autocast; nothing but a training model would be put into DDP.
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def shard_model(model: nn.Module, accelerator: Accelerator) -> None:
    """Cut a model over the ranks, block by block."""
    shard(
        model,
        _blocks(model),
        device=accelerator.device,
        dtype=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        reshard_after_forward=parse_flag_from_env("FSDP_RESHARD_AFTER_FORWARD", default=True),
    )


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of each row of equal modules, such as the blocks of a tower; outermost rows."""
    for child in module.children():
        members = list(child.children())
        is_row = isinstance(child, nn.ModuleList | nn.Sequential) and len(members) > 1
        if is_row and len({type(m) for m in members}) == 1 and any(members[0].children()):
            yield from members
        else:
            yield from _blocks(child)


class Skeleton:
    """A model without weights, from which whole copies of its sharded twins are made."""

    def __init__(self, model: TwoTower):
        empty: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False)
            for p in model.parameters()
        }
        self._model = copy.deepcopy(model, empty)

    def whole(self, sharded: nn.Module) -> TwoTower:
        """A copy that each rank can use alone. Call it on all ranks."""
        model = copy.deepcopy(self._model)
        weights = {name: whole(x.detach()) for name, x in sharded.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        return model.to(next(sharded.parameters()).device)  # what is not among the weights

"""Device, precision and processes, as `accelerate launch` or torchrun set them."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)

from multimodal.distributed import barrier
from multimodal.launcher import launcher
from multimodal.train import sharding

log = logging.getLogger(__name__)

_OTHER_FLAGS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
_OTHERS = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


_LATER = 60
"""Seconds that collectives wait longer than the watchdog, which says more about a hang."""
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def make_accelerator(*, timeout: float | None = None) -> Accelerator:
    """Join the process group and choose the device.

    Args:
        timeout: seconds without a sign of life after which a run counts as hung; None is never.

    Raises:
        ValueError: when the machine or the launcher's settings do not fit.
    """
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    _check_launcher(asked)
    on_cpu = not _has_accelerator() or parse_flag_from_env("ACCELERATE_USE_CPU")
    _check_devices(on_cpu)
    sharding.check_launcher()
    _check_flags()
    limit = timedelta(days=365) if timeout is None else timedelta(seconds=timeout + _LATER)
    # Without `cpu`, Accelerate makes each of several CPU processes a run of its own.
    accelerator = Accelerator(
        cpu=on_cpu and asked > 1,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)],
    )
    barrier()  # else a mistake found below could end one process while another is still joining
    if accelerator.num_processes != asked:
        raise ValueError(
            f"the launcher started {asked} processes, but Accelerate sees "
            f"{accelerator.num_processes}; start with `accelerate launch --multi_gpu "
            f"--num_processes {asked}` or `torchrun --nproc-per-node {asked}`"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed precision {accelerator.mixed_precision!r} is not supported, since a gradient "
            "that is not finite is an error here; use bf16 or no (`accelerate launch "
            "--mixed_precision bf16`)"
        )
    if accelerator.distributed_type in _OTHERS:
        raise _unsupported(accelerator.distributed_type.value)
    compiler = accelerator.state.dynamo_plugin
    if compiler is not None and compiler.backend != DynamoBackend.NO:
        raise ValueError(
            "compilation by the launcher would hide the model from the step; leave it out of "
            "`accelerate config` and set train.compile=true"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            "gradient accumulation would change the loss, which compares all pairs of a step; "
            "leave it at 1 in `accelerate config`"
        )
    return accelerator


def _check_flags() -> None:
    """Also what Accelerate leaves aside on a CPU without a word."""
    for name in _OTHER_FLAGS:
        if parse_flag_from_env(name):
            raise _unsupported(name)


def _unsupported(name: str) -> ValueError:
    return ValueError(
        f"{name} is not supported; use data parallelism (`accelerate launch --multi_gpu`), or, for "
        "a model that does not fit on a device, `--use_fsdp --fsdp_version 2`"
    )


def _has_accelerator() -> bool:
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


def _check_launcher(started: int) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process without a word."""
    by = launcher()
    asked = None if by is None else by.processes()
    if asked is not None and asked != started:
        raise ValueError(
            f"the launcher was asked for {asked} processes and has started {started}; start with "
            f"`accelerate launch --multi_gpu --num_processes {asked}` or `torchrun "
            f"--nproc-per-node {asked}`, without a GPU too"
        )


def _check_devices(on_cpu: bool) -> None:
    if on_cpu and _NVIDIA_DRIVER.exists() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        log.warning(
            "training on the CPU: this machine has an NVIDIA driver, but torch %s sees no GPU; see "
            "whether it was built for CUDA, and whether CUDA_VISIBLE_DEVICES hides them (it is %r)",
            *(torch.__version__, os.environ.get("CUDA_VISIBLE_DEVICES")),
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = 0 if on_cpu else torch.accelerator.device_count()
    if not on_cpu and here > devices:
        raise ValueError(
            f"{here} processes were started on a machine with {devices} GPU(s); start at most "
            "one for each, or set ACCELERATE_USE_CPU=true to train on the CPU"
        )

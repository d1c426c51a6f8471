"""What a launcher may set, and what is refused because it would change the training."""

import os

import pytest
import torch
from tools import FSDP2, on_ranks

from multimodal.train import machine
from multimodal.train.machine import make_accelerator


def attempt(settings):
    os.environ |= settings
    try:
        accelerator = make_accelerator()
    except ValueError as error:
        return str(error)
    return accelerator.num_processes, accelerator.device.type, accelerator.mixed_precision


def test_several_processes_without_a_gpu_are_one_run_on_the_cpu():
    """By itself Accelerate would make each of them a run of its own."""
    assert on_ranks(2, attempt, {"CUDA_VISIBLE_DEVICES": ""}) == [(2, "cpu", "no")] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, "compares all pairs of a step"),
        ({"ACCELERATE_DYNAMO_BACKEND": "inductor"}, "set train.compile=true"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1 is not supported"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM is not supported"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, "use more processes"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "train.checkpoint_activations=full"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}, "3 processes, but Accelerate sees 1"),
    ],
)
def test_settings_that_would_train_something_else_are_refused(settings, message):
    assert message in on_ranks(1, attempt, {"CUDA_VISIBLE_DEVICES": "", **settings})[0]


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"3 processes .* 2 GPU"):
        machine._check_devices(on_cpu=False)
    machine._check_devices(on_cpu=True)

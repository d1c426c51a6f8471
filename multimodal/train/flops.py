"""How much arithmetic a pair takes, and how fast the device multiplies matrices."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from multimodal.train.gradient import copied_buffers, restore_buffers
from multimodal.weights.pretrained import Pretrained

_SIDE = {"cuda": 4096}
_SIDE_ELSEWHERE = 768
"""Of the square matrices that are multiplied."""
_SECONDS = 0.15
_ROWS = 2
"""That are embedded to count; batch normalisation needs two."""


class PairFlops(NamedTuple):
    """Floating-point operations of a step for each pair, without what is computed twice.

    Matrix products, convolutions and attention are counted in the forward pass of two pairs, with
    patches left out as in training; the backward pass of a tower that learns counts twice that.
    """

    image: float
    text_token: float
    """For each place in the batch's token table."""
    embed_dim: int

    def of(self, batch_size: int, tokens: int) -> float:
        """With the logits, which are batch_size x batch_size products and as often as a tower."""
        return self.image + tokens * self.text_token + 6 * batch_size * self.embed_dim


def count_flops(pretrained: Pretrained) -> PairFlops:
    """Count on the plain model, before it is wrapped or sharded; it is in training mode after."""
    model, size = pretrained.model.train(), pretrained.transform.size
    device = next(model.parameters()).device
    length = pretrained.config.text.context_length
    images = torch.zeros(_ROWS, 3, size, size, dtype=torch.uint8, device=device)
    tokens = torch.zeros(_ROWS, length, dtype=torch.int64, device=device)
    lengths = torch.full((_ROWS,), length, device=device)
    buffers = copied_buffers(model)
    with _counter() as image:
        model.encode_image(images)
    with _counter() as text:
        model.encode_text(tokens, lengths)
    restore_buffers(buffers)
    factors = {side: 3 if model.learns(side) else 1 for side in ("image", "text")}
    return PairFlops(
        image=factors["image"] * image.get_total_flops() / _ROWS,
        text_token=factors["text"] * text.get_total_flops() / _ROWS / length,
        embed_dim=model.embed_dim,
    )


def _counter() -> FlopCounterMode:
    own = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention}
    return FlopCounterMode(display=False, custom_mapping=own)


def _cpu_attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


@torch.no_grad()
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product; the best of some."""
    side = _SIDE.get(device.type, _SIDE_ELSEWHERE)
    a = torch.randn(side, side, device=device).to(dtype)
    _seconds(a)  # kernels are chosen and memory is found
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < _SECONDS:
        best = min(best, _seconds(a))
    return 2 * side**3 / best


def _seconds(a: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(a, a)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - started

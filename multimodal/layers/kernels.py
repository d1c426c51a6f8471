"""The arithmetic of attention, softmax(q k^T * scale) v, with one signature for every way.

Legend: B batch, H heads, Q queries, K keys, d head size. `scale` defaults to 1/sqrt(d), so that
unit-normal q and k give logits of standard deviation 1 at any width (arXiv 1706.03762, 3.2.1).

A query that may see no key gives exact zeros and finite gradients, in every dtype. Therefore masks
stay boolean: with a large negative number instead, such a query would get the mean of all values,
hidden ones included.
"""

from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from multimodal.layers.masks import Mask

KernelName = Literal["auto", "reference", "sdpa"]


@runtime_checkable
class Kernel(Protocol):
    """q [B, H, Q, d], k and v [B, H, K, d] -> [B, H, Q, d]; `dropout` acts on the weights."""

    def __call__(
        self,
        q: Float[Tensor, "B H Q d"],
        k: Float[Tensor, "B H K d"],
        v: Float[Tensor, "B H K e"],
        *,
        mask: Mask | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> Float[Tensor, "B H Q e"]: ...


def get_kernel(name: KernelName) -> Kernel:
    """The kernel of a name.

    Raises:
        ValueError: when there is none.
    """
    kernels = {"auto": auto, "reference": reference, "sdpa": sdpa}
    if name not in kernels:
        raise ValueError(f"kernel={name!r} is not known; choose one of {', '.join(kernels)}")
    return kernels[name]


def reference(
    q: Float[Tensor, "B H Q d"],
    k: Float[Tensor, "B H K d"],
    v: Float[Tensor, "B H K e"],
    *,
    mask: Mask | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "B H Q e"]:
    """The formula as it is written; stores the weights [B, H, Q, K].

    Raises:
        TypeError: when `mask` is not a `Mask`.
        ValueError: when the mask does not fit the shapes.
    """
    visible = _visible(mask, q, k)
    # q is scaled before the product, which could overflow in fp16.
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    out = weights @ v
    if visible is None:
        return out
    return out.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def sdpa(
    q: Float[Tensor, "B H Q d"],
    k: Float[Tensor, "B H K d"],
    v: Float[Tensor, "B H K e"],
    *,
    mask: Mask | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "B H Q e"]:
    """torch's fused attention; never stores the weights.

    A mask that is only causal is passed as a flag: FlashAttention takes no mask tensor. The flag
    is aligned to the first key, so it is used for as many queries as keys only.

    Raises:
        TypeError: when `mask` is not a `Mask`.
        ValueError: when the mask does not fit the shapes.
    """
    flag = isinstance(mask, Mask) and mask.causal_only and bool(q.shape[-2] == k.shape[-2])
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if flag else _visible(mask, q, k),
        is_causal=flag,
        dropout_p=dropout,
        scale=scale,
    )


def auto(
    q: Float[Tensor, "B H Q d"],
    k: Float[Tensor, "B H K d"],
    v: Float[Tensor, "B H K e"],
    *,
    mask: Mask | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "B H Q e"]:
    """`sdpa`, but `reference` for 16-bit inputs on CPU, where torch's own is up to 1.8x slower.

    The choice depends on device and dtype only. If it depended on whether gradients are recorded,
    the two passes of a micro-batched step would differ by rounding.
    """
    slow_sdpa = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    kernel = reference if slow_sdpa else sdpa
    return kernel(q, k, v, mask=mask, dropout=dropout, scale=scale)


def _visible(mask: Mask | None, q: Tensor, k: Tensor) -> Bool[Tensor, "..."] | None:
    if mask is None:
        return None
    if not isinstance(mask, Mask):
        what = (
            f"{mask.dtype} tensor of shape {list(mask.shape)}"
            if isinstance(mask, Tensor)
            else type(mask).__name__
        )
        raise TypeError(
            f"mask is a {what}; pass Mask(causal=..., key_valid=..., allowed=...), whose tensors "
            "are boolean with True where a query may attend"
        )
    batch, heads, q_len, _ = q.shape
    mask.check(batch, heads, q_len, k.shape[-2])
    return mask.dense(q_len, k.shape[-2], q.device)

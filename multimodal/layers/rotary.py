"""Rotary positions (RoPE, arXiv 2104.09864) in one, two or more dimensions.

Neighbouring numbers of a head form pairs (the interleaved layout of timm and of PE), and each pair
is turned by position * frequency; so a logit depends on the difference of two positions only. With
several axes each axis turns an equal share of the pairs, in the order of the axes.

Tables are computed from integer coordinates in fp32 at every forward pass and are no buffers:
`.bfloat16()` on a model would round a buffer, and bf16 has no integers beyond 256.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class RotaryTable(NamedTuple):
    """Cosine and sine of the angle of each pair at each position, fp32 [N, head_dim / 2].

    Where the samples of a batch differ (patch dropout), [B, 1, N, head_dim / 2].
    """

    cos: Float[Tensor, "*B N pairs"]
    sin: Float[Tensor, "*B N pairs"]


def grid(height: int, width: int, device: torch.device | str | None = None) -> Int[Tensor, "N 2"]:
    """Row and column of each cell of a grid, row by row: [height * width, 2]."""
    rows = torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    return torch.cartesian_prod(rows, columns)


def table(
    coords: Int[Tensor, "N"] | Int[Tensor, "N axes"],
    head_dim: int,
    theta: float = 10_000.0,
    *,
    prefix: int = 0,
) -> RotaryTable:
    """Angles for tokens at `coords`: pair i of n on an axis turns by coordinate * theta^(-i/n).

    Args:
        coords: position of each token, one number or one for each axis.
        head_dim: size of a head.
        theta: base of the frequencies.
        prefix: tokens before those at `coords` which have no position (class token, registers);
            they are not turned.

    Raises:
        TypeError: when `coords` are not integers.
        ValueError: when 2 * axes does not divide `head_dim`.
    """
    if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
        raise TypeError(f"coords have dtype {coords.dtype}; rotary positions must be integers")
    coords_NA = coords[:, None] if coords.ndim == 1 else coords
    axes = coords_NA.shape[1]
    if head_dim % (2 * axes):
        raise ValueError(
            f"head_dim={head_dim} cannot be split into pairs over {axes} axes; it must be a "
            f"multiple of {2 * axes}"
        )
    pairs = head_dim // (2 * axes)
    exponent = torch.arange(pairs, device=coords.device, dtype=torch.float32) / pairs
    angles_NP = (coords_NA[:, :, None].float() * theta**-exponent).flatten(1)
    no_turn = angles_NP.new_zeros(prefix, angles_NP.shape[1])
    angles_NP = torch.cat([no_turn, angles_NP])
    return RotaryTable(angles_NP.cos(), angles_NP.sin())


def rotate(x: Float[Tensor, "B H N d"], rope: RotaryTable) -> Float[Tensor, "B H N d"]:
    """Turn queries or keys by the angles of their positions; computed in at least fp32.

    Raises:
        ValueError: when the table was made for other positions or another head size.
    """
    if (x.shape[-2], x.shape[-1] // 2) != tuple(rope.cos.shape[-2:]):
        raise ValueError(
            f"the rotary table has shape {list(rope.cos.shape)}; {x.shape[-2]} tokens with heads "
            f"of {x.shape[-1]} need [{x.shape[-2]}, {x.shape[-1] // 2}]"
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack(
        [first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin], dim=-1
    )
    return turned.flatten(-2).to(x.dtype)

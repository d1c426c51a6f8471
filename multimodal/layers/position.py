"""Absolute positions: a learned table, and sinusoids in one and two dimensions."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class LearnedPosition(nn.Module):
    """Adds a learned vector for each position; `weight` [n, dim], normal with deviation 0.02."""

    def __init__(self, n: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "B N dim"]) -> Float[Tensor, "B N dim"]:
        """Add the first N positions to the tokens.

        Raises:
            ValueError: when there are more tokens than positions.
        """
        if x.shape[1] > len(self.weight):
            raise ValueError(f"{x.shape[1]} tokens, but positions for {len(self.weight)} only")
        return x + self.weight[: x.shape[1]]


def sinusoidal_1d(n: int, dim: int, theta: float = 10_000.0) -> Float[Tensor, "n dim"]:
    """sin(p w_i) at 2i and cos(p w_i) at 2i + 1, w_i = theta^(-2i / dim) (arXiv 1706.03762, 3.5).

    Computed in fp32.

    Raises:
        ValueError: when `dim` is odd.
    """
    if dim % 2:
        raise ValueError(f"dim={dim} must be even, for a sine and a cosine of each frequency")
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(n, dtype=torch.float32), frequency)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def sinusoidal_2d(
    height: int, width: int, dim: int, theta: float = 10_000.0
) -> Float[Tensor, "N dim"]:
    """[sin(x w), cos(x w), sin(y w), cos(y w)] of each cell (x, y) of a grid, row by row.

    w_i = theta^(-i / (m - 1)) for i < m = dim / 4, as in big_vision's `posemb_sincos_2d`
    (arXiv 2205.01580). Computed in fp32; [height * width, dim].

    Raises:
        ValueError: when `dim` is not a multiple of 4, or below 8.
    """
    if dim % 4 or dim < 8:
        raise ValueError(f"dim={dim} must be a multiple of 4 and at least 8")
    frequency = theta ** -torch.linspace(0, 1, dim // 4, dtype=torch.float32)
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float32),
        torch.arange(width, dtype=torch.float32),
        indexing="ij",
    )
    x_angles, y_angles = torch.outer(x.flatten(), frequency), torch.outer(y.flatten(), frequency)
    return torch.cat([x_angles.sin(), x_angles.cos(), y_angles.sin(), y_angles.cos()], dim=1)

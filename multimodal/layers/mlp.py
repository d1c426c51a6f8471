"""The feed-forward layer: two Linears around a non-linearity, or SwiGLU."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

ActivationName = Literal["quick_gelu", "gelu", "gelu_tanh", "swiglu"]


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the approximation of GELU in OpenAI's CLIP (arXiv 1606.08415, 2)."""

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return x * torch.sigmoid(1.702 * x)


def make_activation(name: Literal["quick_gelu", "gelu", "gelu_tanh"]) -> nn.Module:
    """An element-wise non-linearity by name.

    Raises:
        ValueError: when the name is not known.
    """
    match name:
        case "quick_gelu":
            return QuickGELU()
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU(approximate="tanh")
        case _:
            raise ValueError(f"activation={name!r} is not quick_gelu, gelu or gelu_tanh")


class Mlp(nn.Module):
    """fc2(activation(fc1(x)))."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        activation: Literal["quick_gelu", "gelu", "gelu_tanh"],
        *,
        bias: bool = True,
    ):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, bias=bias)
        self.activation = make_activation(activation)
        self.fc2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*B dim"]) -> Float[Tensor, "*B dim"]:
        return self.fc2(self.activation(self.fc1(x)))


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202, equation 6)."""

    def __init__(self, dim: int, hidden: int, *, bias: bool = True):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*B dim"]) -> Float[Tensor, "*B dim"]:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def make_mlp(dim: int, ratio: float, activation: ActivationName, bias: bool = True) -> Mlp | SwiGlu:
    """An MLP whose hidden size is `ratio` times `dim`.

    SwiGLU has three matrices, so it takes 2/3 of that, rounded to a multiple of 8, to hold as
    many weights.

    Raises:
        ValueError: when the activation is not known.
    """
    if activation == "swiglu":
        return SwiGlu(dim, max(8, 8 * round(dim * ratio * 2 / 3 / 8)), bias=bias)
    return Mlp(dim, round(dim * ratio), activation, bias=bias)

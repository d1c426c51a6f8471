"""Normalisation layers by name."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

NormName = Literal["layernorm", "rmsnorm"]


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in the dtype of its weight.

    Under autocast a 16-bit input would meet an fp32 weight, for which torch has no fused way.
    """

    def forward(self, x: Float[Tensor, "*B dim"]) -> Float[Tensor, "*B dim"]:
        return super().forward(x.to(self.weight.dtype))


def make_norm(kind: NormName, dim: int, eps: float = 1e-5) -> nn.Module:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) over the last axis.

    Raises:
        ValueError: when the kind is not known.
    """
    match kind:
        case "layernorm":
            return nn.LayerNorm(dim, eps=eps)
        case "rmsnorm":
            return RMSNorm(dim, eps=eps)
        case _:
            raise ValueError(f"norm={kind!r} is not known; choose layernorm or rmsnorm")

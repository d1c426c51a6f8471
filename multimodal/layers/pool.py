"""Pooling by learned queries that attend to the tokens."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.layers.attention import MultiHeadAttention
from multimodal.layers.kernels import KernelName
from multimodal.layers.masks import Mask
from multimodal.layers.mlp import ActivationName, make_mlp
from multimodal.layers.norm import NormName, make_norm


class LatentPool(nn.Module):
    """y = attention(probe, x); y + mlp(layernorm(y)).

    With one query it is the MAP head of SigLIP (arXiv 2106.04560, 2303.15343), with the names of
    its HF weights. With many queries, `context_norm=True` and `mlp_ratio=None` it is the
    attentional pooler of CoCa (arXiv 2205.01917).

    Args:
        dim: width of the tokens and of the output.
        heads: number of attention heads.
        queries: number of learned queries.
        mlp_ratio: hidden size of the MLP as a multiple of `dim`; None leaves the MLP out.
        activation: non-linearity of the MLP.
        norm: kind of the normalisations.
        eps: epsilon of the normalisations.
        context_norm: normalise the tokens first.
        bias: whether the Linears have a bias.
        qk_norm: RMS-normalise queries and keys.
        kernel: name of the attention arithmetic.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        queries: int = 1,
        *,
        mlp_ratio: float | None = 4.0,
        activation: ActivationName = "gelu",
        norm: NormName = "layernorm",
        eps: float = 1e-6,
        context_norm: bool = False,
        bias: bool = True,
        qk_norm: bool = False,
        kernel: KernelName = "auto",
    ):
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, queries, dim))
        nn.init.normal_(self.probe, std=dim**-0.5)
        self.context_norm = make_norm(norm, dim, eps) if context_norm else None
        self.attention = MultiHeadAttention(dim, heads, bias=bias, qk_norm=qk_norm, kernel=kernel)
        has_mlp = mlp_ratio is not None
        self.layernorm = make_norm(norm, dim, eps) if has_mlp else None
        self.mlp = make_mlp(dim, mlp_ratio, activation, bias) if has_mlp else None

    def forward(
        self, x: Float[Tensor, "B N dim"], mask: Mask | None = None
    ) -> Float[Tensor, "B queries dim"]:
        """Pool the tokens that `mask` allows.

        Raises:
            TypeError: when `mask` is not a `Mask`.
            ValueError: when the mask does not fit the shapes.
        """
        if self.context_norm is not None:
            x = self.context_norm(x)
        y = self.attention(self.probe.expand(x.shape[0], -1, -1), x, mask=mask)
        if self.mlp is None or self.layernorm is None:
            return y
        return y + self.mlp(self.layernorm(y))

"""Multi-head attention (arXiv 1706.03762, 3.2). The module owns projections and nothing else:
what may be seen is a `Mask`, where tokens are is a `RotaryTable`, and the arithmetic is a kernel.

How it differs from `torch.nn.MultiheadAttention`:
- Four separate Linears, named as in HF CLIP and SigLIP, whose weights load without renaming.
- Masks are boolean, True where a query may attend.
- A query that may see nothing gives zeros (plus the output's bias) instead of NaN.
- It returns no weights.
"""

import math

from jaxtyping import Float
from torch import Tensor, nn

from multimodal.layers.kernels import KernelName, get_kernel
from multimodal.layers.masks import Mask
from multimodal.layers.norm import RMSNorm
from multimodal.layers.rotary import RotaryTable, rotate

QK_NORM_EPS = 1e-6


class MultiHeadAttention(nn.Module):
    """out_proj(concat over heads of softmax(q k^T / sqrt(head size)) v).

    Args:
        dim: width of the queries' tokens and of the output.
        heads: number of heads; must divide `dim`.
        context_dim: width of the keys' and values' tokens; `dim` when left out.
        bias: whether the Linears have a bias.
        qk_norm: RMS-normalise each query and key, which bounds the logits (arXiv 2302.05442).
        gated: multiply the heads' outputs by sigmoid(gate(x)), element-wise (arXiv 2505.06708).
        dropout: share of attention weights dropped in training.
        kernel: name of the arithmetic, see `kernels`.

    Raises:
        ValueError: when `heads` does not divide `dim`, or the kernel is not known.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        context_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        gated: bool = False,
        dropout: float = 0.0,
        kernel: KernelName = "auto",
    ):
        super().__init__()
        if dim % heads:
            raise ValueError(f"heads={heads} does not divide dim={dim}")
        context_dim = dim if context_dim is None else context_dim
        self.heads = heads
        self.dropout = dropout
        self.kernel = get_kernel(kernel)
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(context_dim, dim, bias=bias)
        self.v_proj = nn.Linear(context_dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.gate = nn.Linear(dim, dim, bias=bias) if gated else None
        head_dim = dim // heads
        self.q_norm = RMSNorm(head_dim, eps=QK_NORM_EPS) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=QK_NORM_EPS) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections as `nn.MultiheadAttention` does, biases at zero.

        It draws q, k and v as one matrix [3 dim, dim] by Xavier's rule. Three matrices, each by
        Xavier's rule, would be larger by sqrt(2); so the fan-out here is 3 dim.
        """
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            bound = math.sqrt(6 / (linear.in_features + 3 * linear.out_features))
            nn.init.uniform_(linear.weight, -bound, bound)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Float[Tensor, "B Q dim"],
        context: Float[Tensor, "B K context_dim"] | None = None,
        *,
        mask: Mask | None = None,
        rope: RotaryTable | None = None,
        context_rope: RotaryTable | None = None,
    ) -> Float[Tensor, "B Q dim"]:
        """Attend from `x` to itself, or to `context` where there is one.

        Args:
            x: the tokens that ask.
            context: the tokens that are looked at; `x` when left out.
            mask: what each query may see; everything when left out.
            rope: positions of `x`.
            context_rope: positions of `context`.

        Raises:
            TypeError: when `mask` is not a `Mask`.
            ValueError: when the mask or a rotary table does not fit the shapes.
        """
        if context is None:
            context, context_rope = x, rope
        q = self._split(self.q_proj(x))
        k = self._split(self.k_proj(context))
        v = self._split(self.v_proj(context))
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast the norms return fp32, but kernels are chosen by dtype.
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if rope is not None:
            q = rotate(q, rope)
        if context_rope is not None:
            k = rotate(k, context_rope)
        out = self.kernel(q, k, v, mask=mask, dropout=self.dropout if self.training else 0.0)
        out = out.transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.out_proj(out)

    def _split(self, x: Float[Tensor, "B N dim"]) -> Float[Tensor, "B H N d"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

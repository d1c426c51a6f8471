"""The Transformer block, put together from pre-norm residual branches."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from multimodal.layers.masks import Mask
from multimodal.layers.rotary import RotaryTable

Checkpointing = Literal["none", "selective", "full"]


class Residual(nn.Module):
    """x + drop_path(tanh(gate) * layer_scale * dropout(inner(norm(x), ...))).

    Args:
        dim: width of the tokens.
        inner: attention or MLP; gets the normalised tokens and any further arguments.
        norm: normalisation before `inner`, see `norm.make_norm`.
        layer_scale: initial value of a learned factor for each channel (arXiv 2103.17239).
        drop_path: share of samples for which training leaves the branch out (arXiv 1603.09382).
        gate: learned factor that starts at 0, so that the branch starts as the identity
            (Flamingo, arXiv 2204.14198, 2.2).
        dropout: share of the output's elements dropped in training.
    """

    def __init__(
        self,
        dim: int,
        inner: nn.Module,
        *,
        norm: nn.Module,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        gate: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.norm = norm
        self.inner = inner
        self.dropout = nn.Dropout(dropout)
        self.layer_scale = (
            None if layer_scale is None else nn.Parameter(torch.full((dim,), layer_scale))
        )
        self.gate = nn.Parameter(torch.zeros(1)) if gate else None
        self.drop_path = StochasticDepth(drop_path, mode="row")

    def forward(self, x: Float[Tensor, "B N dim"], *args, **kwargs) -> Float[Tensor, "B N dim"]:
        """Further arguments go to `inner`."""
        y = self.dropout(self.inner(self.norm(x), *args, **kwargs))
        if self.layer_scale is not None:
            y = y * self.layer_scale
        if self.gate is not None:
            y = y * self.gate.tanh()
        return x + self.drop_path(y)


class Block(nn.Module):
    """Self-attention, cross-attention where given, and an MLP, each a `Residual`.

    Attributes:
        checkpointing: What the backward pass computes again instead of storing it. `selective`:
            the MLP up to its last Linear, which holds more than half of a block's activations and
            a third of its arithmetic. `full`: all but the block's input. Random numbers repeat.
    """

    def __init__(self, attn: Residual, mlp: Residual, cross: Residual | None = None):
        super().__init__()
        self.attn = attn
        self.cross = cross
        self.mlp = mlp
        self.checkpointing: Checkpointing = "none"

    def forward(
        self,
        x: Float[Tensor, "B N dim"],
        *,
        mask: Mask | None = None,
        rope: RotaryTable | None = None,
        context: Float[Tensor, "B K context_dim"] | None = None,
        context_mask: Mask | None = None,
    ) -> Float[Tensor, "B N dim"]:
        """`mask` and `rope` are for the self-attention, `context_mask` for the cross-attention.

        Raises:
            ValueError: when there is cross-attention without a context, or the other way round.
        """
        if (self.cross is None) != (context is None):
            raise ValueError(
                "context is given, but the block has no cross-attention"
                if self.cross is None
                else "the block has cross-attention and needs a context"
            )
        mode = self.checkpointing if torch.is_grad_enabled() else "none"
        if mode == "full":
            return checkpoint(
                self._layers, x, mask, rope, context, context_mask, use_reentrant=False
            )
        return self._layers(x, mask, rope, context, context_mask, again=mode == "selective")

    def _layers(
        self,
        x: Tensor,
        mask: Mask | None,
        rope: RotaryTable | None,
        context: Tensor | None,
        context_mask: Mask | None,
        again: bool = False,
    ) -> Tensor:
        x = self.attn(x, mask=mask, rope=rope)
        if self.cross is not None:
            x = self.cross(x, context, mask=context_mask)
        return checkpoint(self.mlp, x, use_reentrant=False) if again else self.mlp(x)

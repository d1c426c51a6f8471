"""The Transformer stack that both towers use, and the parts that follow its settings."""

from jaxtyping import Float
from torch import Tensor, nn

from multimodal import config
from multimodal.layers.attention import MultiHeadAttention
from multimodal.layers.block import Block, Checkpointing, Residual
from multimodal.layers.masks import Mask
from multimodal.layers.mlp import make_mlp
from multimodal.layers.norm import make_norm
from multimodal.layers.pool import LatentPool
from multimodal.layers.rotary import RotaryTable


class EncoderStack(nn.Module):
    """Pre-norm blocks. The last normalisation belongs to the tower, which may pool before it."""

    def __init__(self, section: config.Encoder):
        super().__init__()
        last = max(section.depth - 1, 1)
        rates = [section.drop_path * i / last for i in range(section.depth)]
        self.blocks = nn.ModuleList([_block(section, rate) for rate in rates])

    def forward(
        self,
        x: Float[Tensor, "B N width"],
        *,
        mask: Mask | None = None,
        rope: RotaryTable | None = None,
    ) -> Float[Tensor, "B N width"]:
        """Run the tokens through all blocks."""
        for block in self.blocks:
            x = block(x, mask=mask, rope=rope)
        return x

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """See `Block`."""
        for block in self.blocks:
            block.checkpointing = mode


def encoder_norm(section: config.Encoder) -> nn.Module:
    """A normalisation of tokens as in the stack."""
    return make_norm(section.norm, section.width, section.norm_eps)


def map_pool(section: config.Encoder) -> LatentPool:
    """Attention pooling by one learned query, with the sizes and settings of the stack."""
    return LatentPool(
        section.width,
        section.heads,
        mlp_ratio=section.mlp_ratio,
        activation=section.activation,
        norm=section.norm,
        eps=section.norm_eps,
        bias=section.bias,
        qk_norm=section.qk_norm,
        kernel=section.kernel,
    )


def _block(section: config.Encoder, drop_path: float) -> Block:
    attention = MultiHeadAttention(
        section.width,
        section.heads,
        bias=section.bias,
        qk_norm=section.qk_norm,
        gated=section.gated_attention,
        kernel=section.kernel,
    )
    mlp = make_mlp(section.width, section.mlp_ratio, section.activation, section.bias)
    return Block(_residual(section, attention, drop_path), _residual(section, mlp, drop_path))


def _residual(section: config.Encoder, inner: nn.Module, drop_path: float) -> Residual:
    return Residual(
        section.width,
        inner,
        norm=encoder_norm(section),
        layer_scale=section.layer_scale,
        drop_path=drop_path,
        dropout=section.dropout,
    )

"""`torch.compile` takes the layers, with `Mask` and `RotaryTable` arguments, as one graph."""

import pytest
import torch

from multimodal.layers import rotary
from multimodal.layers.attention import MultiHeadAttention
from multimodal.layers.block import Block, Residual
from multimodal.layers.masks import Mask
from multimodal.layers.mlp import make_mlp
from multimodal.layers.norm import make_norm

B, N, DIM, HEADS = 2, 7, 24, 3


def block() -> Block:
    def branch(inner):
        return Residual(DIM, inner, norm=make_norm("rmsnorm", DIM), layer_scale=0.5)

    attention = MultiHeadAttention(DIM, HEADS, qk_norm=True, gated=True)
    return Block(branch(attention), branch(make_mlp(DIM, 2.0, "swiglu")))


@pytest.mark.slow
def test_a_compiled_block_equals_the_plain_one_for_every_kind_of_mask():
    valid = torch.arange(N) < torch.tensor([[3], [N]])
    pattern = torch.rand(N, N) < 0.7
    layer = block()
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(B, N, DIM)
    for mask in (
        None,
        Mask(causal=True),
        Mask(key_valid=valid),
        Mask(causal=True, key_valid=valid),
        Mask(causal=True) & Mask(allowed=pattern),
    ):
        results = []
        for run in (layer, compiled):
            layer.zero_grad()
            out = run(x, mask=mask, rope=rotary.table(torch.arange(N), DIM // HEADS))
            out.square().mean().backward()
            results.append([out, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*results, atol=2e-6, rtol=1e-5)

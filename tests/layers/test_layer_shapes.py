"""The shapes in the layers' signatures, checked at every call by jaxtyping and beartype."""

import subprocess
import sys

import pytest

SCRIPT = """
import jaxtyping
with jaxtyping.install_import_hook("multimodal.layers", "beartype.beartype"):
    from multimodal.layers import attention, block, mlp, norm, patch, pool, position, rotary
    from multimodal.layers.masks import Mask
import torch

def branch(inner):
    return block.Residual(12, inner, norm=norm.make_norm("rmsnorm", 12), layer_scale=0.1)

def attend(**kwargs):
    return branch(attention.MultiHeadAttention(12, 3, qk_norm=True, gated=True, **kwargs))

layer = block.Block(attend(), branch(mlp.make_mlp(12, 4.0, "swiglu")), attend(context_dim=5))
x = patch.PatchEmbed(4, 12)(torch.randn(2, 3, 8, 12), torch.tensor([[0, 5, 1], [2, 3, 4]]))
x = position.LearnedPosition(6, 12)(x) + position.sinusoidal_1d(3, 12)
x = layer(
    x,
    mask=Mask(causal=True) & Mask(key_valid=torch.ones(2, 3, dtype=torch.bool)),
    rope=rotary.table(rotary.grid(1, 2), 4, prefix=1),
    context=torch.randn(2, 7, 5),
    context_mask=Mask(allowed=torch.ones(3, 7, dtype=torch.bool)),
)
assert pool.LatentPool(12, 3, 2)(x).shape == (2, 2, 12)
try:
    layer.attn(x[0])
except jaxtyping.TypeCheckError:
    pass
else:
    raise AssertionError("tokens without a batch axis were taken")
"""


@pytest.mark.slow
def test_every_layer_keeps_the_shapes_of_its_signature():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

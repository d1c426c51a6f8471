"""Residual branches, blocks, MLPs and norms against their formulas."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import SwiGLU as TimmSwiGLU
from torch import nn
from transformers.activations import QuickGELUActivation

from multimodal.layers import rotary
from multimodal.layers.attention import MultiHeadAttention
from multimodal.layers.block import Block, Residual
from multimodal.layers.masks import Mask
from multimodal.layers.mlp import Mlp, SwiGlu, make_activation, make_mlp
from multimodal.layers.norm import make_norm

B, N, DIM, HEADS = 3, 7, 12, 3


def residual(inner=None, **kwargs) -> Residual:
    inner = make_mlp(DIM, 2.0, "gelu") if inner is None else inner
    return Residual(DIM, inner, norm=make_norm("layernorm", DIM), **kwargs)


def block(cross: bool = False) -> Block:
    return Block(
        residual(MultiHeadAttention(DIM, HEADS)),
        residual(),
        residual(MultiHeadAttention(DIM, HEADS, context_dim=5)) if cross else None,
    )


# --- residual ------------------------------------------------------------------------------------


def test_a_residual_is_pre_norm_with_a_scale_for_each_channel():
    branch = residual(layer_scale=0.1)
    nn.init.normal_(branch.layer_scale)
    x = torch.randn(B, N, DIM)
    expected = x + branch.layer_scale * branch.inner(F.layer_norm(x, (DIM,)))
    torch.testing.assert_close(branch(x), expected)


@pytest.mark.parametrize("how", [{"layer_scale": 0.0}, {"drop_path": 1.0}, {"gate": True}])
def test_a_branch_that_is_scaled_or_dropped_to_nothing_is_the_identity(how):
    x = torch.randn(B, N, DIM)
    assert torch.equal(residual(**how)(x), x)


def test_a_gate_at_zero_gets_a_gradient_while_its_branch_gets_none():
    branch = residual(gate=True)
    branch(torch.randn(B, N, DIM)).square().sum().backward()
    assert branch.gate.grad != 0
    assert not branch.inner.fc1.weight.grad.any()


def test_a_gate_scales_by_its_tanh():
    branch = residual(gate=True)
    x = torch.randn(B, N, DIM)
    full = branch.inner(branch.norm(x))
    nn.init.constant_(branch.gate, 0.5)
    torch.testing.assert_close(branch(x), x + torch.tensor(0.5).tanh() * full)


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    branch = residual(drop_path=0.25)
    x = torch.randn(1, N, DIM).expand(1009, -1, -1)
    added = branch(x) - x
    dropped = (added == 0).flatten(1).all(dim=1)
    assert abs(dropped.float().mean() - 0.25) < 0.05  # a standard error is 0.014
    whole = branch.eval()(x) - x
    torch.testing.assert_close(added[~dropped], whole[~dropped] / 0.75, atol=1e-5, rtol=1e-5)


def test_dropout_acts_on_the_branch_in_training_only():
    branch = residual(dropout=0.5)
    x = torch.randn(B, N, DIM)
    share = (branch(x) == x).float().mean()
    assert 0.3 < share < 0.7
    assert not (branch.eval()(x) == x).any()


# --- block ---------------------------------------------------------------------------------------


def test_a_block_adds_attention_then_cross_attention_then_mlp():
    layer = block(cross=True)
    x, context = torch.randn(B, N, DIM), torch.randn(B, 11, 5)
    mask = Mask(causal=True)
    context_mask = Mask(key_valid=torch.arange(11) < torch.tensor([[2], [11], [5]]))
    rope = rotary.table(torch.arange(N), DIM // HEADS)
    y = x + layer.attn.inner(layer.attn.norm(x), mask=mask, rope=rope)
    y = y + layer.cross.inner(layer.cross.norm(y), context, mask=context_mask)
    y = y + layer.mlp.inner(layer.mlp.norm(y))
    out = layer(x, mask=mask, rope=rope, context=context, context_mask=context_mask)
    torch.testing.assert_close(out, y)


def test_a_block_equals_torch_transformer_encoder_layer():
    ours = block()
    theirs = nn.TransformerEncoderLayer(
        DIM, HEADS, 2 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    attention = ours.attn.inner
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
    theirs.self_attn.out_proj.load_state_dict(attention.out_proj.state_dict())
    theirs.linear1.load_state_dict(ours.mlp.inner.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.mlp.inner.fc2.state_dict())
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(ours(x), theirs(x), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("cross", "context", "match"),
    [(True, None, "needs a context"), (False, torch.zeros(B, 2, 5), "no cross-attention")],
)
def test_a_context_without_cross_attention_is_refused_and_the_reverse(cross, context, match):
    with pytest.raises(ValueError, match=match):
        block(cross)(torch.randn(B, N, DIM), context=context)


# --- mlp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("quick_gelu", QuickGELUActivation()),
        ("gelu", lambda x: x * torch.distributions.Normal(0, 1).cdf(x)),
        ("gelu_tanh", lambda x: x / 2 * (1 + (0.7978845608 * (x + 0.044715 * x**3)).tanh())),
    ],
)
def test_activations_follow_their_formulas(name, formula):
    x = torch.linspace(-7, 7, 101)
    torch.testing.assert_close(make_activation(name)(x), formula(x), atol=1e-6, rtol=1e-5)


def test_the_mlp_is_two_linears_around_the_activation():
    layer = Mlp(DIM, 31, "gelu")
    x = torch.randn(B, N, DIM)
    hidden = F.gelu(x @ layer.fc1.weight.T + layer.fc1.bias)
    torch.testing.assert_close(layer(x), hidden @ layer.fc2.weight.T + layer.fc2.bias)


def test_swiglu_equals_timm():
    ours, theirs = SwiGlu(DIM, 16), TimmSwiGLU(DIM, 16)
    for mine, name in ((ours.gate, "fc1_g"), (ours.up, "fc1_x"), (ours.down, "fc2")):
        mine.load_state_dict(getattr(theirs, name).state_dict())
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("dim", "ratio", "activation", "hidden"),
    [
        (768, 4.0, "gelu", 3072),
        (1152, 3.7362, "gelu_tanh", 4304),  # SigLIP So400m
        (1408, 4.3637, "gelu", 6144),  # OpenCLIP g-14
        (768, 4.0, "swiglu", 2048),
        (64, 4.0, "swiglu", 168),  # 170.7 to a multiple of 8
    ],
)
def test_the_hidden_size_follows_from_the_ratio(dim, ratio, activation, hidden):
    layer = make_mlp(dim, ratio, activation)
    first = layer.gate if activation == "swiglu" else layer.fc1
    assert first.out_features == hidden


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_mlp_without_bias_has_matrices_only(activation):
    layer = make_mlp(DIM, 4.0, activation, bias=False)
    assert all(p.ndim == 2 for p in layer.parameters())


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation='relu'"):
        make_mlp(DIM, 4.0, "relu")


# --- norm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_norms_follow_their_formulas(eps):
    x = torch.randn(B, N, DIM)
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    square = x.square().mean(dim=-1, keepdim=True)
    layer, rms = (make_norm(kind, DIM, eps) for kind in ("layernorm", "rmsnorm"))
    torch.testing.assert_close(layer(x), centred / (variance + eps).sqrt())
    torch.testing.assert_close(rms(x), x / (square + eps).sqrt())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_take_16_bits_under_autocast(kind):
    with torch.autocast("cpu", torch.bfloat16):
        out = make_norm(kind, DIM)(torch.randn(B, N, DIM).bfloat16())
    assert out.isfinite().all()


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="norm='batchnorm'"):
        make_norm("batchnorm", DIM)

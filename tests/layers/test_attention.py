"""`MultiHeadAttention` against torch, timm and transformers, and what masks must guarantee."""

import pytest
import torch
from timm.layers import RmsNorm
from timm.layers.attention import Attention as TimmAttention
from torch import nn
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPAttention

from multimodal.layers import rotary
from multimodal.layers.attention import MultiHeadAttention
from multimodal.layers.masks import Mask

B, N, DIM, HEADS = 3, 7, 20, 5


def with_weights_of(theirs: nn.MultiheadAttention, kernel: str) -> MultiHeadAttention:
    ours = MultiHeadAttention(
        theirs.embed_dim, theirs.num_heads, context_dim=theirs.kdim, kernel=kernel
    ).to(theirs.out_proj.weight.dtype)
    if theirs.in_proj_weight is None:
        weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
    else:
        weights = theirs.in_proj_weight.chunk(3)
    names = ["q_proj", "k_proj", "v_proj"]
    state = {f"{n}.weight": w for n, w in zip(names, weights, strict=True)}
    state |= {f"{n}.bias": b for n, b in zip(names, theirs.in_proj_bias.chunk(3), strict=True)}
    state |= {f"out_proj.{n}": p for n, p in theirs.out_proj.named_parameters()}
    ours.load_state_dict(state)
    return ours


def torch_attention(dtype: torch.dtype, **kwargs) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=dtype, **kwargs)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    return theirs


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("case", ["plain", "causal", "padding", "both", "cross"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_equals_torch_multihead_attention_in_output_and_gradients(case, kernel, dtype, atol):
    cross = {"kdim": 13, "vdim": 13} if case == "cross" else {}
    theirs = torch_attention(dtype, **cross)
    ours = with_weights_of(theirs, kernel)
    x = torch.randn(B, N, DIM, dtype=dtype, requires_grad=True)
    context = torch.randn(B, 11, 13, dtype=dtype, requires_grad=True) if cross else x
    valid = torch.arange(N) < torch.tensor([[2], [7], [5]]) if case in ("padding", "both") else None
    causal = case in ("causal", "both")

    y_ours = ours(x, context if cross else None, mask=Mask(causal=causal, key_valid=valid))
    y_theirs, _ = theirs(
        x,
        context,
        context,
        key_padding_mask=None if valid is None else ~valid,
        attn_mask=torch.ones(N, N, dtype=torch.bool).triu(1) if causal else None,
        need_weights=False,
    )
    torch.testing.assert_close(y_ours, y_theirs, atol=atol, rtol=0)

    # Mean, so that gradients are of order 1 and below and one tolerance serves for both.
    seen = [x, context] if cross else [x]
    ours_g = torch.autograd.grad(y_ours.square().mean(), [*seen, *ours.q_proj.parameters()])
    theirs_g = torch.autograd.grad(
        y_theirs.square().mean(),
        [*seen, theirs.q_proj_weight if cross else theirs.in_proj_weight, theirs.in_proj_bias],
    )
    theirs_g = [g[:DIM] if i >= len(seen) else g for i, g in enumerate(theirs_g)]
    torch.testing.assert_close(list(ours_g), theirs_g, atol=atol, rtol=0)


def test_qk_norm_and_gate_equal_timm():
    theirs = TimmAttention(
        DIM, HEADS, qkv_bias=True, qk_norm=True, norm_layer=RmsNorm, gated=True
    ).eval()
    ours = MultiHeadAttention(DIM, HEADS, qk_norm=True, gated=True)
    for norm in (theirs.q_norm, theirs.k_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    state = theirs.state_dict()
    for kind in ("weight", "bias"):
        qkv = state.pop(f"qkv.{kind}").chunk(3)
        state |= {f"{n}_proj.{kind}": p for n, p in zip("qkv", qkv, strict=True)}
        state[f"out_proj.{kind}"] = state.pop(f"proj.{kind}")
    ours.load_state_dict(state)
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(ours(x), theirs(x), atol=2e-6, rtol=0)


def test_hf_clip_weights_load_without_renaming():
    config = CLIPVisionConfig(hidden_size=DIM, num_attention_heads=HEADS)
    config._attn_implementation = "sdpa"
    theirs = CLIPAttention(config).eval()
    ours = MultiHeadAttention(DIM, HEADS)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(ours(x), theirs(x)[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("width", [512, 768, 1024, 1536])
def test_logits_of_the_module_have_deviation_one(width):
    heads, n = width // 64, 31
    layer = MultiHeadAttention(width, heads, bias=False)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        nn.init.eye_(linear.weight)
    # The next head's numbers as queries: unit-normal, and independent of the keys.
    layer.q_proj.weight.data = layer.q_proj.weight.data.roll(64, dims=1)
    x = torch.randn(1, n, width)
    # A head's output is weights @ its slice of x, and has more columns than there are tokens.
    slices = x[0].unflatten(-1, (heads, 64)).transpose(0, 1)
    weights = layer(x)[0].unflatten(-1, (heads, 64)).transpose(0, 1) @ torch.linalg.pinv(slices)
    assert 0.95 <= weights.log().std(dim=-1).square().mean().sqrt() <= 1.05


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_later_tokens_never_change_earlier_outputs(kernel):
    layer = MultiHeadAttention(DIM, HEADS, qk_norm=True, gated=True, kernel=kernel)
    x = torch.randn(B, N, DIM)
    before = layer(x, mask=Mask(causal=True))
    for changed in range(N):
        other = x.clone()
        other[:, changed:] = 100 * torch.randn(B, N - changed, DIM)
        after = layer(other, mask=Mask(causal=True))
        assert torch.equal(after[:, :changed], before[:, :changed])
        assert not torch.equal(after[:, changed], before[:, changed])


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("amount", [0, 1, 13])
def test_content_and_amount_of_padding_do_not_matter(kernel, amount):
    layer = MultiHeadAttention(DIM, HEADS, kernel=kernel)
    tokens = torch.randn(B, N, DIM)
    padding = 1000 * torch.randn(B, amount, DIM)
    valid = (torch.arange(N + amount) < N).expand(B, -1)
    out = layer(torch.cat([tokens, padding], dim=1), mask=Mask(key_valid=valid))
    torch.testing.assert_close(out[:, :N], layer(tokens), atol=1e-6, rtol=0)


def test_the_last_queries_alone_get_what_they_get_among_all():
    layer = MultiHeadAttention(DIM, HEADS)
    x = torch.randn(B, N, DIM)
    table = rotary.table(torch.arange(N), DIM // HEADS)
    last = rotary.RotaryTable(table.cos[-3:], table.sin[-3:])
    whole = layer(x, mask=Mask(causal=True), rope=table)
    part = layer(x[:, -3:], x, mask=Mask(causal=True), rope=last, context_rope=table)
    torch.testing.assert_close(part, whole[:, -3:], atol=1e-6, rtol=0)


def test_an_all_padded_sample_gives_the_output_bias_and_finite_gradients():
    layer = MultiHeadAttention(DIM, HEADS)
    nn.init.normal_(layer.out_proj.bias)
    valid = torch.tensor([[True], [False], [True]]).expand(B, N)
    out = layer(torch.randn(B, N, DIM), mask=Mask(key_valid=valid))
    assert torch.equal(out[1], layer.out_proj.bias.expand(N, DIM))
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_every_weight_gets_a_gradient():
    layer = MultiHeadAttention(DIM, HEADS, context_dim=13, qk_norm=True, gated=True)
    layer(torch.randn(B, N, DIM), torch.randn(B, 11, 13)).square().sum().backward()
    silent = [n for n, p in layer.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_projections_start_as_wide_as_in_torch(name):
    ours = MultiHeadAttention(192, 3)
    theirs = nn.MultiheadAttention(192, 3)
    weight = getattr(ours, name).weight
    # Uniform on 192 * 192 draws: the deviation is known to 0.3 %. One Xavier each would be + 41 %.
    assert abs(weight.std() / theirs.in_proj_weight.std() - 1) < 0.02
    assert weight.abs().max() <= theirs.in_proj_weight.abs().max() * 1.01
    assert not getattr(ours, name).bias.any()


def test_qk_norm_bounds_the_logits_of_huge_inputs():
    layer = MultiHeadAttention(DIM, HEADS, qk_norm=True, bias=False)
    x = torch.randn(B, N, DIM)
    # Scaling the input by 1e4 scales the values only; without the norm the weights would collapse.
    torch.testing.assert_close(layer(1e4 * x), 1e4 * layer(x), atol=0.05, rtol=1e-3)


@pytest.mark.filterwarnings("error")
def test_autocast_gives_16_bits_with_every_option():
    layer = MultiHeadAttention(DIM, HEADS, qk_norm=True, gated=True)
    table = rotary.table(torch.arange(N), DIM // HEADS)
    x = torch.randn(B, N, DIM)
    plain, seen = layer.kernel, []
    layer.kernel = lambda *qkv, **kwargs: seen.extend(qkv) or plain(*qkv, **kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, mask=Mask(causal=True), rope=table)
    assert {out.dtype, *(tensor.dtype for tensor in seen)} == {torch.bfloat16}
    # bf16 keeps 8 bits; outputs are of order 1.
    torch.testing.assert_close(
        out.float(), layer(x, mask=Mask(causal=True), rope=table), atol=2e-2, rtol=0
    )


def test_dropout_acts_in_training_only():
    layer = MultiHeadAttention(DIM, HEADS, dropout=0.5)
    x = torch.randn(B, N, DIM)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="heads=3 does not divide dim=20"):
        MultiHeadAttention(20, 3)

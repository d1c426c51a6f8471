"""`LatentPool` against the pooling heads of SigLIP (transformers) and CoCa (open_clip)."""

import pytest
import torch
from open_clip.transformer import AttentionalPooler
from torch import nn
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

from multimodal.layers.masks import Mask
from multimodal.layers.pool import LatentPool

B, N, DIM, HEADS = 3, 7, 20, 5


def split_in_proj(state: dict, prefix: str) -> dict:
    """The state with torch's fused q, k, v matrix as three."""
    state = dict(state)
    for kind in ("weight", "bias"):
        parts = state.pop(f"{prefix}in_proj_{kind}").chunk(3)
        state |= {f"{prefix}{n}_proj.{kind}": p for n, p in zip("qkv", parts, strict=True)}
    return state


def test_one_query_equals_the_map_head_of_siglip():
    config = SiglipVisionConfig(
        hidden_size=DIM, num_attention_heads=HEADS, intermediate_size=4 * DIM
    )
    theirs = SiglipMultiheadAttentionPoolingHead(config).eval()
    nn.init.normal_(theirs.attention.in_proj_bias)
    ours = LatentPool(DIM, HEADS, activation="gelu_tanh", eps=config.layer_norm_eps)
    ours.load_state_dict(split_in_proj(theirs.state_dict(), "attention."))
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(ours(x)[:, 0], theirs(x), atol=2e-6, rtol=0)


def test_many_queries_equal_the_attentional_pooler_of_coca():
    theirs = AttentionalPooler(d_model=DIM, context_dim=DIM, n_head=HEADS, n_queries=11).eval()
    ours = LatentPool(DIM, HEADS, 11, mlp_ratio=None, context_norm=True, eps=1e-5)
    state = split_in_proj(theirs.state_dict(), "attn.")
    # CoCa normalises its queries; they do not depend on the input, so ours hold the result.
    ours.load_state_dict(
        {"probe": theirs.ln_q(theirs.query)[None]}
        | {f"attention.{k.removeprefix('attn.')}": v for k, v in state.items() if "attn." in k}
        | {f"context_norm.{k}": v for k, v in theirs.ln_k.state_dict().items()}
    )
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(ours(x), theirs(x), atol=2e-6, rtol=0)


@pytest.mark.parametrize("amount", [1, 13])
def test_padding_does_not_matter(amount):
    pool = LatentPool(DIM, HEADS, 2, context_norm=True)
    tokens, padding = torch.randn(B, N, DIM), 1000 * torch.randn(B, amount, DIM)
    valid = (torch.arange(N + amount) < N).expand(B, -1)
    out = pool(torch.cat([tokens, padding], dim=1), Mask(key_valid=valid))
    torch.testing.assert_close(out, pool(tokens), atol=1e-6, rtol=0)


def test_the_order_of_tokens_and_the_other_samples_do_not_matter():
    pool = LatentPool(DIM, HEADS)
    x = torch.randn(B, N, DIM)
    torch.testing.assert_close(pool(x[:, torch.randperm(N)]), pool(x), atol=1e-6, rtol=0)
    torch.testing.assert_close(pool(x[1:2]), pool(x)[1:2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_every_weight_gets_a_gradient(activation):
    pool = LatentPool(
        DIM, HEADS, 2, activation=activation, norm="rmsnorm", context_norm=True, qk_norm=True
    )
    pool(torch.randn(B, N, DIM)).square().sum().backward()
    assert [n for n, p in pool.named_parameters() if p.grad is None] == []

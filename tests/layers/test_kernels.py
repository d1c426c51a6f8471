"""The attention kernels: the formula, their agreement, and rows that see nothing."""

import math

import pytest
import torch
import torch.nn.functional as F

from multimodal.layers import kernels
from multimodal.layers.kernels import get_kernel, reference, sdpa
from multimodal.layers.masks import Mask

B, H, Q, K, D = 3, 2, 5, 7, 11
BOTH = pytest.mark.parametrize("kernel", [reference, sdpa])


def boolean(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.6


def masks(q_len: int) -> dict[str, Mask | None]:
    return {
        "none": None,
        "nothing hidden": Mask(),
        "causal": Mask(causal=True),
        "padding": Mask(key_valid=boolean(B, K)),
        "causal and padding": Mask(causal=True, key_valid=boolean(B, K)),
        "one pattern": Mask(allowed=boolean(q_len, K)),
        "pattern of each sample": Mask(allowed=boolean(B, 1, q_len, K)),
        "pattern of each head": Mask(allowed=boolean(1, H, q_len, K)),
        "all": Mask(causal=True, key_valid=boolean(B, K), allowed=boolean(B, H, q_len, K)),
    }


def inputs(dtype=torch.float32, q_len=Q, k_len=K) -> list[torch.Tensor]:
    sizes = (q_len, k_len, k_len)
    return [torch.randn(B, H, n, D).to(dtype).requires_grad_() for n in sizes]


@BOTH
def test_a_case_worked_by_hand(kernel):
    # Query i has the logits ln 2 * k[:, i], so its weights are 2^k[:, i] over their sum:
    # (1, 1, 2) / 4, (2, 1, 1) / 4 and (4, 1, 1) / 6.
    q = math.log(2) * torch.eye(3)[None, None]
    k = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])[None, None]
    v = torch.tensor([[7.0, 0.0], [0.0, 7.0], [14.0, 7.0]])[None, None]
    expected = torch.tensor([[35 / 4, 21 / 4], [7.0, 7 / 2], [7.0, 7 / 3]])
    torch.testing.assert_close(kernel(q, k, v, scale=1.0)[0, 0], expected)


@BOTH
@pytest.mark.parametrize("width", [512, 768, 1024, 1536])
def test_logits_of_unit_normal_queries_and_keys_have_deviation_one(kernel, width):
    heads, n = width // 64, 97
    q, k = torch.randn(2, 1, heads, n, 64)
    # With the identity as values the output is the weights, whose logarithm is the logits up to
    # a constant for each row.
    weights = kernel(q, k, torch.eye(n).expand(1, heads, n, n))
    assert 0.95 <= weights.log().std(dim=-1).square().mean().sqrt() <= 1.05


@pytest.mark.parametrize("name", masks(Q))
@pytest.mark.parametrize("q_len", [Q, K])
def test_sdpa_equals_reference_in_output_and_gradients(name, q_len):
    mask = masks(q_len)[name]
    qkv = inputs(q_len=q_len)
    results = []
    for kernel in (reference, sdpa):
        out = kernel(*qkv, mask=mask)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), qkv)])
    torch.testing.assert_close(*results, atol=2e-6, rtol=0)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden_by", ["key_valid", "allowed", "causal"])
def test_queries_that_see_nothing_give_zeros_and_finite_gradients(kernel, dtype, hidden_by):
    k_len = 3 if hidden_by == "causal" else K
    q, k, v = inputs(dtype, k_len=k_len)
    match hidden_by:
        case "key_valid":
            mask, rows = Mask(key_valid=torch.arange(B)[:, None].expand(B, K) != 1), (1,)
        case "allowed":
            mask, rows = (
                Mask(allowed=torch.arange(Q)[:, None].expand(Q, K) != 2),
                (..., 2, slice(D)),
            )
        case "causal":  # two more queries than keys: the first two come before every key
            mask, rows = Mask(causal=True), (..., slice(2), slice(D))
    out = kernel(q, k, v, mask=mask)
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert (out[rows] == 0).all() and (gradients[0][rows] == 0).all()
    assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)
    seen = torch.ones(B, H, Q, D, dtype=torch.bool)
    seen[rows] = False
    assert (out[seen] != 0).all()


@BOTH
def test_logits_beyond_the_range_of_fp16_are_scaled_in_time(kernel):
    # q k^T is 256 * 256 * 11 = 720,896; fp16 ends at 65,504. The scale brings it to 10.
    q = k = torch.full((1, 1, 2, D), 256.0, dtype=torch.float16)
    out = kernel(q, k, torch.ones_like(k), scale=10 / 720_896)
    assert torch.equal(out, torch.ones_like(out))


@BOTH
def test_a_tensor_as_mask_is_refused_naming_dtype_and_shape(kernel):
    with pytest.raises(TypeError, match=r"torch\.float32 tensor of shape \[5, 7\].*Mask"):
        kernel(*inputs(), mask=torch.zeros(Q, K))


@BOTH
def test_a_mask_for_other_keys_is_refused(kernel):
    with pytest.raises(ValueError, match=r"\[3, 5\].*\[3, 7\]"):
        kernel(*inputs(), mask=Mask(key_valid=boolean(B, 5)))


def test_causal_order_alone_reaches_sdpa_as_a_flag_without_a_tensor(monkeypatch):
    seen = {}
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **kw: seen.update(kw) or real(*a, **kw)
    )
    sdpa(*inputs(q_len=K), mask=Mask(causal=True))
    assert seen["is_causal"] and seen["attn_mask"] is None
    sdpa(*inputs(), mask=Mask(causal=True))
    assert not seen["is_causal"] and seen["attn_mask"].shape == (Q, K)


@BOTH
def test_dropout_keeps_the_mean_of_the_weights(kernel):
    q, k = torch.zeros(2, 1, 1, 1009, 4)
    out = kernel(q, k, torch.ones_like(k), dropout=0.5)
    assert out.std() > 0
    # Each output is the mean of 1009 zeros and twos; all 1009 have a standard error of 0.001.
    assert abs(out.mean() - 1) < 0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recording", [True, False])
def test_auto_chooses_by_dtype_and_not_by_recording(monkeypatch, dtype, recording):
    called = []
    for name in ("reference", "sdpa"):
        monkeypatch.setattr(kernels, name, lambda *a, name=name, **kw: called.append(name))
    with torch.set_grad_enabled(recording):
        get_kernel("auto")(*inputs(dtype))
    assert called == ["sdpa" if dtype == torch.float32 else "reference"]


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match=r"kernel='flash'.*auto, reference, sdpa"):
        get_kernel("flash")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 77])
@pytest.mark.parametrize("name", ["causal", "padding", "causal and padding"])
def test_sdpa_on_a_gpu_equals_reference_in_bf16_and_is_finite(length, name):
    # Length 64 with a mask gave NaN gradients of q in cuDNN's kernel (pytorch issue 196678).
    valid = torch.arange(length, device="cuda") < torch.tensor([[0], [17], [length]], device="cuda")
    mask = Mask(causal="causal" in name, key_valid=valid if "padding" in name else None)
    q, k, v = (
        torch.randn(B, H, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    results = []
    for kernel in (reference, sdpa):
        out = kernel(q, k, v, mask=mask)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    assert all(x.isfinite().all() for x in results[1])
    torch.testing.assert_close(results[0], results[1], atol=3e-2, rtol=3e-2)

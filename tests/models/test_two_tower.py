"""The two-tower model as a whole: inputs, unit vectors, temperature, initial weights."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from multimodal import config
from multimodal.models.build import build_model
from multimodal.models.two_tower import Temperature, TwoTower, normalise, unit_length

IMAGE = config.VitImage(
    kind="vit", width=24, depth=2, heads=3, image_size=20, patch_size=5, registers=2, pool="map"
)
TEXT = config.TransformerText(
    kind="transformer", width=20, depth=1, heads=5, vocab_size=97, context_length=13
)


def section(**fields) -> config.Model:
    given = {
        "image": IMAGE,
        "text": TEXT,
        "embed_dim": 7,
        "tokenizer": config.BpeTokenizer(kind="bpe"),
    }
    return config.Model(**(given | fields))


def texts(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(97, (batch, 11)), torch.tensor([11, 4, 1])[:batch]


def test_either_input_may_be_left_out_and_both_give_the_same_vectors():
    model = build_model(section()).eval()
    images, (tokens, lengths) = torch.randn(2, 3, 20, 20), texts()
    both = model(images, tokens, lengths)
    assert both.image.shape == (2, 7)
    assert both.text.shape == (3, 7)
    only_image, only_text = model(images), model(tokens=tokens, lengths=lengths)
    assert only_image.text is None
    assert only_text.image is None
    assert torch.equal(only_image.image, both.image)
    assert torch.equal(only_text.text, both.text)
    assert torch.equal(model.encode_image(images), both.image)
    assert torch.equal(model.encode_text(tokens, lengths), both.text)


def test_tokens_and_lengths_belong_together():
    model = build_model(section())
    with pytest.raises(ValueError, match="both or neither"):
        model(tokens=texts()[0])
    with pytest.raises(ValueError, match="both or neither"):
        model(lengths=texts()[1])


def test_vectors_have_unit_length_in_float32_under_autocast_too():
    model = build_model(section(logit_bias=-3.0))
    with torch.autocast("cpu", torch.bfloat16):
        features = model(torch.randn(3, 3, 20, 20), *texts())
    for vectors in (features.image, features.text):
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    assert features.logit_scale.dtype == torch.float32
    (features.image @ features.text.T).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.image.parameters())


def test_a_zero_vector_and_its_gradient_are_finite():
    x = torch.zeros(2, 5, requires_grad=True)
    y = unit_length(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 5))
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() <= 1e6


def test_bytes_are_normalised_with_the_statistics_of_the_model():
    preprocess = config.Preprocess(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    model = build_model(section(preprocess=preprocess)).eval()
    pixels = torch.randint(256, (2, 3, 20, 20), dtype=torch.uint8)
    by_hand = pixels.double() / 255
    for channel in range(3):
        by_hand[:, channel] -= [0.1, 0.2, 0.3][channel]
        by_hand[:, channel] /= [0.4, 0.5, 0.6][channel]
    torch.testing.assert_close(
        normalise(pixels, preprocess.mean, preprocess.std), by_hand.float(), atol=1e-6, rtol=0
    )
    difference = model.encode_image(pixels) - model.encode_image(by_hand.float())
    assert difference.abs().max() < 1e-6
    with pytest.raises(TypeError, match="int64"):
        model.encode_image(pixels.long())


def test_the_temperature_is_held_as_a_logarithm_and_stays_in_bounds():
    temperature = Temperature(20.0, -5.0)
    scale, bias = temperature()
    assert scale.item() == pytest.approx(20.0)
    assert bias.item() == -5.0
    assert temperature.logit_scale.shape == ()
    assert temperature.logit_scale.item() == pytest.approx(math.log(20))
    for value, clamped in ((7.0, 100.0), (-1.0, 1.0)):
        nn.init.constant_(temperature.logit_scale, value)
        temperature.clamp_()
        assert temperature()[0].item() == pytest.approx(clamped)
    assert Temperature(20.0, None)()[1] is None
    assert list(Temperature(20.0, None).state_dict()) == ["logit_scale"]


@pytest.mark.parametrize("scale", [0.9, 100.1])
def test_the_temperature_starts_in_bounds(scale):
    with pytest.raises(ValueError, match="logit_scale"):
        section(logit_scale=scale)


def test_a_projection_may_be_left_out_only_if_the_widths_agree():
    with pytest.raises(ValueError, match=r"24 wide and model.embed_dim=7.*image_projection=linear"):
        build_model(section(image_projection="none"))
    model = build_model(
        section(
            image_projection="none",
            embed_dim=24,
            text_projection="none",
            text=TEXT.model_copy(update={"width": 24, "heads": 3}),
        )
    )
    assert not [name for name in model.state_dict() if "projection" in name]
    with_bias = build_model(section(text_projection="linear_bias"))
    assert with_bias.text_projection.bias.shape == (7,)
    assert with_bias.image_projection.bias is None


def test_the_seed_decides_the_weights():
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build_model(section()).state_dict()

    first, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(
        first["text.token_embedding.weight"], other["text.token_embedding.weight"]
    )


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_initial_weights_have_the_planned_deviation(activation):
    width, depth = 96, 3
    stack = {
        "width": width, "depth": depth, "heads": 4, "activation": activation,
        "gated_attention": True,
    }  # fmt: skip
    model = build_model(
        section(
            image=IMAGE.model_copy(update=stack),
            text=TEXT.model_copy(update=stack | {"vocab_size": 499}),
            embed_dim=89,
        )
    )
    residual = (2 * depth) ** -0.5
    first, last = ("fc1", "fc2") if activation == "gelu" else ("up", "down")
    planned = {
        "image.patch.proj": 75**-0.5,
        "image.position": width**-0.5,
        "text.position": 0.01,
        "text.token_embedding": 0.02,
        "image_projection": width**-0.5,
        "text_projection": width**-0.5,
        f"image.pool.mlp.{first}": (2 * width) ** -0.5,
        f"image.pool.mlp.{last}": width**-0.5,
        "image.pool.attention.out_proj": width**-0.5,
    }
    for tower in ("image", "text"):
        for i in range(depth):
            block = f"{tower}.encoder.blocks.{i}"
            for name in ("q_proj", "k_proj", "v_proj", "gate"):
                planned[f"{block}.attn.inner.{name}"] = width**-0.5
            planned[f"{block}.attn.inner.out_proj"] = width**-0.5 * residual
            planned[f"{block}.mlp.inner.{first}"] = (2 * width) ** -0.5
            planned[f"{block}.mlp.inner.{last}"] = width**-0.5 * residual
    state = model.state_dict()
    for name, std in planned.items():
        assert state[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.1), name
    biases = [x for name, x in state.items() if name.endswith("bias")]
    assert all(torch.equal(x, torch.zeros_like(x)) for x in biases)


def test_names_of_weights_are_a_file_format():
    """Renaming a module breaks every saved model: then this test changes, and `load` converts."""
    stack = {"depth": 1, "layer_scale": 0.1, "qk_norm": True, "gated_attention": True}
    model = build_model(
        section(
            image=IMAGE.model_copy(update=stack),
            text=TEXT.model_copy(
                update=stack | {"activation": "swiglu", "pool": "map", "mask_padding": True}
            ),
            logit_bias=0.0,
        )
    )
    attention = [
        f"{n}.{p}"
        for n in ("q_proj", "k_proj", "v_proj", "out_proj", "gate")
        for p in ("weight", "bias")
    ]
    attention += ["q_norm.weight", "k_norm.weight"]
    expected = {
        "temperature.logit_scale",
        "temperature.logit_bias",
        "image.class_token",
        "image.registers",
        "image.position.weight",
        "text.position.weight",
        "text.token_embedding.weight",
        "image_projection.weight",
        "text_projection.weight",
    }
    for tower, mlp in (("image", ("fc1", "fc2")), ("text", ("gate", "up", "down"))):
        block, pool = f"{tower}.encoder.blocks.0", f"{tower}.pool"
        expected |= {f"{block}.attn.inner.{n}" for n in attention}
        expected |= {f"{pool}.attention.{n}" for n in attention if "gate" not in n}
        expected |= {f"{pool}.probe", f"{block}.attn.layer_scale", f"{block}.mlp.layer_scale"}
        modules = [f"{block}.attn.norm", f"{block}.mlp.norm", f"{tower}.norm", f"{pool}.layernorm"]
        modules += [f"{block}.mlp.inner.{n}" for n in mlp] + [f"{pool}.mlp.{n}" for n in mlp]
        modules += ["image.pre_norm", "image.patch.proj"] if tower == "image" else []
        expected |= {f"{name}.{p}" for name in modules for p in ("weight", "bias")}
    expected -= {"image.patch.proj.bias"}
    assert set(model.state_dict()) == expected


def test_parts_may_come_from_anywhere():
    class Flat(nn.Module):
        width = 12

        def forward(self, x, lengths=None):
            return x.flatten(1)[:, :12].float()

    model = TwoTower(Flat(), Flat(), section())
    assert model(torch.randn(2, 3, 4, 4), torch.ones(5, 12), torch.ones(5)).text.shape == (5, 7)


SHAPES = """
import jaxtyping
with jaxtyping.install_import_hook("multimodal.models", "beartype.beartype"):
    from multimodal.models.build import build_model
import torch
from multimodal.config import Model
from multimodal.config_io import check, read_yaml

model = build_model(check(read_yaml("configs/model/tiny.yaml")["model"], Model)).train()
tokens, lengths = torch.randint(1024, (2, 7)), torch.tensor([7, 3])
model(torch.zeros(3, 3, 32, 32, dtype=torch.uint8), tokens, lengths)
try:
    model(tokens=tokens, lengths=lengths[:1])
except jaxtyping.TypeCheckError:
    pass
else:
    raise AssertionError("one length for two texts was taken")
"""


@pytest.mark.slow
def test_models_keep_the_shapes_of_their_signatures():
    done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

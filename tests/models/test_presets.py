"""The architectures in configs/model."""

import re
from pathlib import Path

import pytest
import torch

from multimodal import config
from multimodal.config_io import check, read_yaml
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower

FOLDER = Path(__file__).parents[2] / "configs" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PUBLISHED = {"clip-b-16": 149_620_737, "clip-b-32": 151_277_313, "clip-l-14": 427_616_513,
             "siglip2-b-16": 375_187_970}  # fmt: skip
"""Parameters of the models on the hub."""


def read(name: str) -> config.Model:
    return check(read_yaml(FOLDER / f"{name}.yaml")["model"], config.Model)


def reduced(section: config.Model) -> config.Model:
    """The same architecture, small enough to train in a test."""
    image = section.image.model_copy(
        update={"width": 32, "heads": 4, "depth": 2, "image_size": 3 * section.image.patch_size}
    )
    text = section.text.model_copy(
        update={"width": 24, "heads": 3, "depth": 2, "vocab_size": 97, "context_length": 13}
    )
    small = section.model_copy(update={"image": image, "text": text, "embed_dim": 32})
    return config.Model.model_validate(small.model_dump())


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(section: config.Model) -> TwoTower:
    with torch.device("meta"):
        return build_model(section)


@pytest.mark.parametrize("name", PRESETS)
def test_the_header_states_the_size(name):
    model = on_meta(read(name))
    header = (FOLDER / f"{name}.yaml").read_text().partition("model:")[0]
    if "# Parameters:" not in header:
        pytest.skip("it states no size")
    sizes = re.findall(r"\d[\d,]*\d", header.partition("# Parameters:")[2])
    counts = [int(size.replace(",", "")) for size in sizes]
    assert counts == [parameters(m) for m in (model, model.image, model.text)]
    assert counts[0] == PUBLISHED.get(name, counts[0])


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
@pytest.mark.parametrize("name", PRESETS)
def test_preset_runs_at_its_full_size_on_the_device_of_its_inputs(name, position):
    """On the meta device, which refuses tensors of another device as a GPU does."""
    section = read(name)
    update = {"position": position, "patch_dropout": 0.5}
    image = section.image.model_copy(update=update)
    text = section.text.model_copy(update={"position": position})
    model = on_meta(section.model_copy(update={"image": image, "text": text})).train()
    pixels = torch.zeros(2, 3, *[image.image_size] * 2, dtype=torch.uint8, device="meta")
    tokens = torch.zeros(2, text.context_length, dtype=torch.long, device="meta")
    features = model(pixels, tokens, torch.ones(2, dtype=torch.long, device="meta"))
    assert features.image.shape == features.text.shape == (2, section.embed_dim)
    assert features.image.device.type == features.text.device.type == "meta"


@pytest.mark.parametrize("name", PRESETS)
def test_preset_trains_every_weight(name):
    section = reduced(read(name))
    model = build_model(section)
    pixels = torch.randint(256, (5, 3, *[section.image.image_size] * 2), dtype=torch.uint8)
    tokens, lengths = torch.randint(97, (5, 13)), torch.tensor([13, 4, 2, 7, 5])
    features = model(pixels, tokens, lengths)
    assert features.image.shape == features.text.shape == (5, 32)
    logits = features.logit_scale * features.image @ features.text.T
    if features.logit_bias is not None:
        logits = logits + features.logit_bias
    torch.nn.functional.softplus(-logits).mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), parameter_name
        # Softmax does not see what all keys share, so its gradient is rounding noise.
        assert parameter.grad.any() or "k_proj.bias" in parameter_name, parameter_name


@pytest.mark.parametrize("name", PRESETS)
def test_preset_embeds_each_sample_by_itself_in_evaluation_mode(name):
    section = reduced(read(name))
    model = build_model(section).eval()
    pixels = torch.randint(256, (5, 3, *[section.image.image_size] * 2), dtype=torch.uint8)
    tokens, lengths = torch.randint(97, (5, 13)), torch.tensor([13, 4, 2, 7, 5])
    features = model(pixels, tokens, lengths)
    for row in range(5):
        image = model.encode_image(pixels[row : row + 1])
        cut = 13 if section.text.fixed_length else int(lengths[row])
        text = model.encode_text(tokens[row : row + 1, :cut], lengths[row : row + 1])
        assert (image - features.image[row]).abs().max() < 1e-6
        assert (text - features.text[row]).abs().max() < 1e-6


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_activations_and_norms_are_those_of_the_section(activation, norm):
    update = {"activation": activation, "norm": norm, "norm_eps": 3e-4}
    section = reduced(read("tiny"))
    section = section.model_copy(
        update={
            "image": section.image.model_copy(update=update),
            "text": section.text.model_copy(update=update),
        }
    )
    model = build_model(section)
    features = model(torch.randn(2, 3, 24, 24), torch.randint(97, (2, 5)), torch.tensor([5, 3]))
    (features.image @ features.text.T).sum().backward()
    epsilons = {
        m.eps
        for n, m in model.named_modules()
        if hasattr(m, "eps") and "k_norm" not in n and "q_norm" not in n
    }
    assert epsilons == {3e-4}
    kinds = {type(m).__name__ for m in model.modules()}
    assert ("LayerNorm" in kinds) == (norm == "layernorm")
    assert {"quick_gelu": "QuickGELU", "swiglu": "SwiGlu"}.get(activation, "GELU") in kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "clip-b-32"])
def test_preset_compiles_as_one_graph(name):
    """The graph is captured but not compiled further, which would take a minute."""
    section = reduced(read(name))
    image = section.image.model_copy(update={"patch_dropout": 0.5})
    model = build_model(section.model_copy(update={"image": image})).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    pixels = torch.randint(256, (2, 3, *[image.image_size] * 2), dtype=torch.uint8)
    inputs = pixels, torch.randint(97, (2, 7)), torch.tensor([7, 3])
    torch.manual_seed(1)
    plain = model(*inputs)
    torch.manual_seed(1)
    assert torch.equal(compiled(*inputs).image, plain.image)
    assert torch.equal(compiled(*inputs).text, plain.text)

"""Our SigLIP against transformers' `SiglipModel`, with random weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import SiglipConfig, SiglipModel

from multimodal import config
from multimodal.config_io import check, read_yaml
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights.hf import features_of
from multimodal.weights.mapping import from_ours, to_ours
from multimodal.weights.siglip import (
    export_siglip,
    import_siglip,
    siglip_config,
    siglip_section,
    siglip_table,
)

TOKENIZER = config.HfTokenizer(kind="hf", name="google/siglip2-base-patch16-224")
PREPROCESS = config.Preprocess(mean=[0.5] * 3, std=[0.5] * 3, resize_mode="squash")
IDS = {"bos_id": None, "eos_id": 1, "pad_id": 0}
CONTEXT, VOCAB = 13, 97


def make(activation: str = "gelu_pytorch_tanh", eps: float = 1e-6) -> SiglipModel:
    """A small model with weights large enough for every part to matter."""
    shared = {"hidden_act": activation, "layer_norm_eps": eps}
    model = SiglipModel(
        SiglipConfig(
            text_config=shared | {
                "hidden_size": 35, "intermediate_size": 57, "num_hidden_layers": 3,
                "num_attention_heads": 5, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
                "projection_size": 33, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
            },
            vision_config=shared | {
                "hidden_size": 33, "intermediate_size": 71, "num_hidden_layers": 2,
                "num_attention_heads": 3, "image_size": 21, "patch_size": 7,
            },
        )
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if "embedding" in name:  # small, so that epsilon matters
            parameter.data.normal_(std=0.003)
        elif parameter.ndim >= 2:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def texts() -> tuple[Tensor, Tensor]:
    """Full and padded texts; the padding is seen."""
    lengths = torch.tensor([CONTEXT, 5, 2, 9])
    tokens = torch.randint(2, VOCAB, (4, CONTEXT))
    tokens[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    return tokens, lengths


def difference(ours: TwoTower, theirs: SiglipModel) -> tuple[float, float]:
    """Largest difference of the image and of the text features' elements, before unit length."""
    pixels, (tokens, lengths) = torch.randn(3, 3, 21, 21), texts()
    with torch.no_grad():
        image = ours.image_projection(ours.image(pixels))
        text = ours.text_projection(ours.text(tokens, lengths))
        their_image = features_of(theirs.get_image_features(pixels))
        their_text = features_of(theirs.get_text_features(tokens))
    return (image - their_image).abs().max().item(), (text - their_text).abs().max().item()


def imported(theirs: SiglipModel) -> tuple[config.Model, TwoTower]:
    section, model = import_siglip(theirs, tokenizer=TOKENIZER, preprocess=PREPROCESS)
    return section, model.eval()


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
def test_features_agree(activation):
    theirs = make(activation)
    _, ours = imported(theirs)
    assert max(difference(ours, theirs)) < 1e-5
    scale, bias = ours.temperature()
    assert scale.item() == pytest.approx(theirs.logit_scale.exp().item())
    assert bias.item() == theirs.logit_bias.item()


def test_logits_agree():
    theirs = make()
    ours = imported(theirs)[1]
    pixels, (tokens, lengths) = torch.randn(3, 3, 21, 21), texts()
    with torch.no_grad():
        features = ours(pixels, tokens, lengths)
        logits = features.logit_scale * features.image @ features.text.T + features.logit_bias
        expected = theirs(pixel_values=pixels, input_ids=tokens).logits_per_image
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


WRONG = {
    "activation": ("both", {"activation": "gelu"}),
    "epsilon": ("both", {"norm_eps": 1e-5}),
    "pool": ("text", {"pool": "eot"}),
    "order": ("text", {"causal": True}),
    "mask": ("text", {"mask_padding": True}),
    "image pool": ("image", {"pool": "mean"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_noticed(name):
    """Otherwise the tests above would prove little."""
    towers, update = WRONG[name]
    theirs = make()
    section, right = imported(theirs)
    parts = ("image", "text") if towers == "both" else (towers,)
    wrong = build_model(
        section.model_copy(
            update={part: getattr(section, part).model_copy(update=update) for part in parts}
        )
    ).eval()
    wrong.load_state_dict(right.state_dict(), strict=name != "image pool")
    image, text = difference(wrong, theirs)
    assert image > 1e-4 or "image" not in parts
    assert text > 1e-4 or "text" not in parts


def test_there_and_back_is_bit_equal():
    theirs = make()
    section, ours = imported(theirs)
    again = export_siglip(ours, section, **IDS)
    assert set(again.state_dict()) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    ours_again = imported(again)[1].state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(ours_again[name], tensor), name
    assert siglip_section(again.config, tokenizer=TOKENIZER, preprocess=PREPROCESS) == section


def test_an_exported_folder_is_read_by_transformers(tmp_path):
    section, ours = imported(make())
    export_siglip(ours, section, **IDS).save_pretrained(tmp_path)
    assert max(difference(ours, SiglipModel.from_pretrained(tmp_path).eval())) < 1e-5


def test_export_lists_all_settings_that_siglip_does_not_have():
    section, ours = imported(make())
    text = section.text.model_copy(update={"mask_padding": True, "norm": "rmsnorm"})
    with pytest.raises(ValueError) as error:
        export_siglip(ours, section.model_copy(update={"text": text}), **IDS)
    assert "model.text.mask_padding=True (needed False)" in str(error.value)
    assert "model.text.norm='rmsnorm'" in str(error.value)
    with pytest.raises(ValueError, match="logit_bias"):
        siglip_config(section.model_copy(update={"logit_bias": None}), **IDS)


def test_the_preset_has_exactly_the_tensors_of_transformers():
    path = Path(__file__).parents[2] / "configs" / "model" / "siglip2-b-16.yaml"
    section = check(read_yaml(path)["model"], config.Model)
    with torch.device("meta"):
        ours = build_model(section)
        theirs = SiglipModel(siglip_config(section, **IDS))
    table = siglip_table(section)
    converted = to_ours(table, theirs.state_dict(), ours.state_dict())
    assert set(converted) == set(ours.state_dict())
    assert set(from_ours(table, ours.state_dict(), theirs.state_dict())) == set(theirs.state_dict())

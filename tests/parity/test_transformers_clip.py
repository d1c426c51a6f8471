"""Our CLIP against transformers' `CLIPModel`, with random weights."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from multimodal import config
from multimodal.config_io import check, read_yaml
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights import hf
from multimodal.weights.clip import (
    clip_config,
    clip_section,
    clip_table,
    export_clip,
    import_clip,
)
from multimodal.weights.mapping import from_ours, to_ours

TOKENIZER = config.HfTokenizer(kind="hf", name="openai/clip-vit-base-patch32")
PREPROCESS = config.Preprocess()
IDS = {"bos_id": 89, "eos_id": 91, "pad_id": 0}
CONTEXT, VOCAB, EOS = 13, 97, 91


def make(activation: str = "quick_gelu", eos: int = EOS, eps: float = 1e-5) -> CLIPModel:
    """A small model with weights large enough for every part to matter."""
    shared = {"hidden_act": activation, "layer_norm_eps": eps}
    model = CLIPModel(
        CLIPConfig(
            text_config=shared | {
                "hidden_size": 35, "intermediate_size": 57, "num_hidden_layers": 3,
                "num_attention_heads": 5, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
                "bos_token_id": 89, "eos_token_id": eos, "pad_token_id": 0,
            },
            vision_config=shared | {
                "hidden_size": 33, "intermediate_size": 71, "num_hidden_layers": 2,
                "num_attention_heads": 3, "image_size": 21, "patch_size": 7,
            },
            projection_dim=19,
        )
    ).eval()  # fmt: skip
    return randomised(model)


def randomised(model):
    """Linears keep the scale of their input; embeddings are small, so that epsilon matters."""
    for name, parameter in model.named_parameters():
        if "embedding" in name or "probe" in name:
            parameter.data.normal_(std=0.02)
        elif parameter.ndim >= 2:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def texts(eos: int = EOS) -> tuple[Tensor, Tensor]:
    """Full, padded and shortest texts; padding is 0, which other texts contain too."""
    lengths = torch.tensor([CONTEXT, 5, 2, 9])
    tokens = torch.randint(EOS, (4, CONTEXT))
    for row, length in enumerate(lengths.tolist()):
        tokens[row, length - 1] = eos
        tokens[row, length:] = 0
    return tokens, lengths


def difference(ours: TwoTower, theirs: CLIPModel, tokens: Tensor, lengths: Tensor, **kwargs):
    """Largest difference of the image and of the text features' elements, before unit length."""
    pixels = torch.randn(3, 3, 21, 21)
    with torch.no_grad():
        image = ours.image_projection(ours.image(pixels))
        text = ours.text_projection(ours.text(tokens, lengths))
        their_image = hf.features_of(theirs.get_image_features(pixels))
        their_text = hf.features_of(theirs.get_text_features(tokens, **kwargs))
    return (image - their_image).abs().max().item(), (text - their_text).abs().max().item()


def imported(theirs: CLIPModel) -> tuple[config.Model, TwoTower]:
    section, model = import_clip(theirs, tokenizer=TOKENIZER, preprocess=PREPROCESS)
    return section, model.eval()


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_pytorch_tanh"])
def test_features_agree(activation):
    theirs = make(activation)
    section, ours = imported(theirs)
    assert max(difference(ours, theirs, *texts())) < 1e-5
    assert section.embed_dim == 19
    assert ours.temperature()[0].item() == pytest.approx(theirs.logit_scale.exp().item())


def test_features_agree_when_padding_is_masked_there():
    tokens, lengths = texts()
    mask = (torch.arange(CONTEXT) < lengths[:, None]).long()
    theirs = make()
    assert max(difference(imported(theirs)[1], theirs, tokens, lengths, attention_mask=mask)) < 1e-5


def test_features_agree_for_old_files_that_pool_at_the_largest_id():
    theirs = make(eos=2)
    assert theirs.text_model.eos_token_id == 2
    ours = imported(theirs)[1]
    assert max(difference(ours, theirs, *texts(eos=VOCAB - 1))) < 1e-5


def test_cutting_a_batch_to_its_longest_text_changes_nothing():
    theirs = make()
    ours = imported(theirs)[1]
    tokens, lengths = texts()
    whole = ours.encode_text(tokens, lengths)
    for rows in ([1, 2], [1, 2, 3], [2]):
        cut = int(lengths[rows].max())
        assert (
            ours.encode_text(tokens[rows, :cut], lengths[rows]) - whole[rows]
        ).abs().max() < 2e-6
        assert max(difference(ours, theirs, tokens[rows, :cut], lengths[rows])) < 1e-5


def test_one_picture_in_another_size_agrees_where_positions_need_no_resampling():
    """transformers resamples positions without antialiasing, so other sizes differ by design."""
    theirs = make()
    ours = imported(theirs)[1]
    theirs.vision_model.embeddings.position_embedding.weight.data[1:] = 0.01
    ours.image.position.weight.data[1:] = 0.01
    pixels = torch.randn(2, 3, 14, 35)
    with torch.no_grad():
        expected = theirs.get_image_features(pixels, interpolate_pos_encoding=True)
        features = ours.image_projection(ours.image(pixels))
    assert (features - hf.features_of(expected)).abs().max() < 1e-5


WRONG = {
    "activation": ("both", {"activation": "gelu"}),
    "epsilon": ("both", {"norm_eps": 1e-6}),
    "pool": ("text", {"pool": "mean", "mask_padding": True}),
    "mask": ("text", {"causal": False, "mask_padding": True}),
    "image pool": ("image", {"pool": "mean"}),
    "pre-norm": ("image", {"pre_norm": False}),
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
    wrong.load_state_dict(right.state_dict(), strict=name != "pre-norm")
    image, text = difference(wrong, theirs, *texts())
    assert image > 1e-4 or "image" not in parts
    assert text > 1e-4 or "text" not in parts


def test_import_refuses_a_model_whose_features_it_does_not_reproduce(monkeypatch):
    monkeypatch.setitem(hf.ACTIVATIONS, "gelu", "quick_gelu")
    monkeypatch.setitem(hf.ACTIVATIONS, "quick_gelu", "gelu")
    with pytest.raises(ValueError, match=r"image features .* away.*activation"):
        imported(make())


def test_there_and_back_is_bit_equal():
    theirs = make()
    section, ours = imported(theirs)
    again = export_clip(ours, section, **IDS)
    assert set(again.state_dict()) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    ours_again = imported(again)[1].state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(ours_again[name], tensor), name
    assert clip_section(again.config, tokenizer=TOKENIZER, preprocess=PREPROCESS) == section


def test_an_exported_folder_is_read_by_transformers(tmp_path):
    section, ours = imported(make("gelu"))
    export_clip(ours, section, **IDS).save_pretrained(tmp_path)
    read = CLIPModel.from_pretrained(tmp_path).eval()
    assert max(difference(ours, read, *texts())) < 1e-5
    assert read.config.text_config.eos_token_id == EOS
    assert read.config.vision_config.hidden_act == "gelu"


def test_export_lists_all_settings_that_clip_does_not_have():
    section, ours = imported(make())
    section = section.model_copy(
        update={
            "image": section.image.model_copy(update={"rope": True, "layer_scale": 0.1}),
            "logit_bias": -10.0,
        }
    )
    with pytest.raises(ValueError) as error:
        export_clip(ours, section, **IDS)
    for part in (
        "model.image.rope=True (needed False)",
        "model.image.layer_scale=0.1",
        "model.logit_bias=-10.0 (needed None)",
    ):
        assert part in str(error.value)
    assert "model.text" not in str(error.value)


def test_export_refuses_the_end_token_that_transformers_takes_for_something_else():
    section, _ = imported(make())
    with pytest.raises(ValueError, match=r"eos_id=2 .*largest id"):
        clip_config(section, bos_id=1, eos_id=2, pad_id=0)


@pytest.mark.parametrize("preset", ["clip-b-32", "clip-b-16", "clip-l-14"])
def test_presets_have_exactly_the_tensors_of_transformers(preset):
    path = Path(__file__).parents[2] / "configs" / "model" / f"{preset}.yaml"
    section = check(read_yaml(path)["model"], config.Model)
    with torch.device("meta"):
        ours = build_model(section)
        theirs = CLIPModel(clip_config(section, bos_id=49406, eos_id=49407, pad_id=0))
    table = clip_table(section)
    converted = to_ours(table, theirs.state_dict(), ours.state_dict())
    assert set(converted) == set(ours.state_dict())
    assert set(from_ours(table, ours.state_dict(), theirs.state_dict())) == set(theirs.state_dict())
    names = list(itertools.chain.from_iterable(entry.ours for entry in table))
    assert len(names) == len(set(names))

"""Architectures of OpenCLIP by name alone, against the settings that OpenCLIP has for them."""

import logging
import math

import pytest
import torch

from multimodal import config
from multimodal.models.build import build_model
from multimodal.weights.mapping import to_ours
from multimodal.weights.openclip_timm import is_timm, projection_name, timm_section, timm_table
from multimodal.weights.openclip_timm_names import _installed, timm_config

open_clip = pytest.importorskip("open_clip")

TOKENIZER = config.HfTokenizer(kind="hf", name="none")
QUICK = ("ViT-B-32-SigLIP2-256", "ViT-SO400M-14-SigLIP", "MobileCLIP-B", "PE-Core-T-16-384")
REFUSED = {
    "EVA01-g-14": "timm_pool='token', but here 'eva_giant_patch14_224' has its own, 'avg'",
    "EVA01-g-14-plus": "timm_pool='token'",
    "convnext_large_d": "timm_proj='mlp'",
    "convnext_large_d_320": "timm_proj='mlp'",
    "nllb-clip-base-siglip": "text_cfg.hf_model_name='facebook/nllb-200-distilled-600M'",
    "nllb-clip-large-siglip": "text_cfg.hf_model_name",
}


def timm_names() -> list[str]:
    logging.disable(logging.WARNING)  # of settings that cannot be read
    names = [n for n in open_clip.list_models() if is_timm(open_clip.get_model_config(n))]
    logging.disable(logging.NOTSET)
    return names


NAMES = [
    pytest.param(name, marks=[] if name in QUICK or name in REFUSED else pytest.mark.slow)
    for name in timm_names()
]


def section_of(model_cfg) -> config.Model:
    section = timm_section(model_cfg, tokenizer=TOKENIZER, preprocess=config.Preprocess())
    return section.model_copy(update={"logit_bias": None})


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_the_settings_and_weights_of_open_clip(name):
    theirs = open_clip.get_model_config(name)
    if name in REFUSED:
        with pytest.raises(ValueError) as error:
            section_of(theirs)
        assert REFUSED[name] in str(error.value)
        return
    with torch.device("meta"):
        cfg = {k: v for k, v in theirs.items() if k != "custom_text"}
        kind = open_clip.model.CustomTextCLIP if "custom_text" in theirs else open_clip.model.CLIP
        state = kind(**cfg).state_dict()
        known = timm_config(name, state)
        section = timm_section(known.model_cfg, tokenizer=TOKENIZER, preprocess=known.preprocess)
        like = build_model(section).state_dict()
    assert section_of(known.model_cfg) == section_of(theirs)
    text = known.model_cfg["text_cfg"]
    for key in ("hf_tokenizer_name", "tokenizer_kwargs"):
        assert text.get(key) == theirs["text_cfg"].get(key)
    prefix = "text." if "custom_text" in theirs else ""
    table = timm_table(section, projection=projection_name(known.model_cfg), text=prefix)
    if "init_logit_bias" not in theirs:
        state.pop("logit_bias", None)
    assert to_ours(table, state, like).keys() == like.keys()
    for tag in open_clip.list_pretrained_tags_by_model(name):
        published = open_clip.pretrained.get_pretrained_cfg(name, tag)
        found = known.preprocess
        assert math.dist(found.mean, published["mean"]) < 1e-6
        assert math.dist(found.std, published["std"]) < 1e-6
        assert found.interpolation == published["interpolation"]
        assert found.resize_mode == published["resize_mode"]


def test_a_native_or_unknown_name_is_not_timms():
    assert timm_config("ViT-B-32", {}) is None
    assert timm_config("../ViT-B-32", {}) is None
    assert timm_config("no-such-model", {}) is None


def test_the_three_families_need_no_open_clip(monkeypatch):
    monkeypatch.setattr("multimodal.weights.openclip_timm_names.find_spec", lambda name: None)
    assert _installed("convnext_base") is None
    with pytest.raises(ValueError, match=r"such a model of OpenCLIP: text.token_embedding"):
        timm_config("MobileCLIP-B", {})

"""CLIP and SigLIP models of transformers, from a local folder or the hub, ready for use."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoImageProcessor, CLIPModel, SiglipModel
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from multimodal import config
from multimodal.data.text import Tokenizer, build_tokenizer
from multimodal.models.two_tower import TwoTower
from multimodal.weights.clip import import_clip
from multimodal.weights.siglip import import_siglip
from multimodal.weights.tokenizer_files import GENERAL_TOKENIZER

_KINDS = {"clip": (CLIPModel, import_clip), "siglip": (SiglipModel, import_siglip)}
_INTERPOLATION = {2: "bilinear", 3: "bicubic"}
"""By Pillow's numbers, which transformers uses."""


def load_hf(name: str) -> tuple[config.Model, TwoTower, Tokenizer]:
    """Settings, model and tokenizer of a `CLIPModel` or `SiglipModel`.

    Args:
        name: a local folder, or a hub name (which needs a network or a cache).

    Raises:
        ValueError: when there is no such model, or it is of another kind.
    """
    try:
        kind = AutoConfig.from_pretrained(name).model_type
        if kind not in _KINDS:
            raise ValueError(f"it is a {kind!r} model")
        model_class, convert = _KINDS[kind]
        theirs = model_class.from_pretrained(name, dtype=torch.float32)
        processor = AutoImageProcessor.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model of transformers that can be used at {name!r}: {error}. Give a folder with "
            "config.json, model.safetensors, tokenizer.json and preprocessor_config.json of a "
            f"{' or '.join(_KINDS)} model, or a hub name where there is a network"
        ) from error
    tokenizer = config.HfTokenizer(kind="hf", name=name, clean=_clean(kind, name))
    section, model = convert(theirs, tokenizer=tokenizer, preprocess=_preprocess(processor))
    return section, model, _tokenizer(section)


def _clean(kind: str, name: str) -> list[config.Cleaning]:
    """What is done to texts by code of transformers, or before it, but not by tokenizer.json.

    SigLIP's own class drops punctuation. SigLIP 2 has Gemma's, and was trained on lower case. The
    general class does what its file says.
    """
    if kind != "siglip":
        return []
    described = get_tokenizer_config(name).get("tokenizer_class") or ""
    if described.startswith("SiglipTokenizer"):
        return ["punctuation", "whitespace", "lower"]
    return [] if described == GENERAL_TOKENIZER else ["lower"]


def _tokenizer(section: config.Model) -> Tokenizer:
    return build_tokenizer(
        section.tokenizer,
        context_length=section.text.context_length,
        fixed_length=section.text.fixed_length,
        vocab_size=section.text.vocab_size,
        captions=(),
    )


def _preprocess(content: dict[str, Any]) -> config.Preprocess:
    resample = content["resample"]
    if resample not in _INTERPOLATION:
        raise ValueError(f"resample={resample!r} of its image processor; known: {_INTERPOLATION}")
    return config.Preprocess(
        mean=list(content["image_mean"]),
        std=list(content["image_std"]),
        interpolation=_INTERPOLATION[resample],
        resize_mode="shortest" if content["size"].get("shortest_edge") else "squash",
    )

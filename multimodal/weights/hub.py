"""CLIP and SigLIP models of transformers, from a local folder or the hub, ready for use."""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from multimodal import config
from multimodal.data.text import Tokenizer, build_tokenizer
from multimodal.models.hf_model import refuse_incomplete
from multimodal.models.two_tower import TwoTower
from multimodal.weights.clip import import_clip
from multimodal.weights.hf import LEGACY_EOS
from multimodal.weights.hf_processor import read_preprocess
from multimodal.weights.siglip import import_siglip
from multimodal.weights.siglip2 import import_siglip2
from multimodal.weights.tokenizer_files import GENERAL_TOKENIZER

_KINDS: dict[str, tuple[str, Callable[..., tuple[config.Model, TwoTower]]]] = {
    "clip": ("CLIPModel", import_clip),
    "metaclip_2": ("MetaClip2Model", import_clip),
    "siglip": ("SiglipModel", import_siglip),
    "siglip2": ("Siglip2Model", import_siglip2),
}
"""Names of classes, since some are not in every version."""
_GENERAL_IN_5 = "TokenizersBackend"
"""What transformers 5 calls the general class of tokenizers when it saves one."""


def load_hf(name: str) -> tuple[config.Model, TwoTower, Tokenizer]:
    """Settings, model and tokenizer of a two-tower model of transformers.

    MetaCLIP is a `CLIPModel`, MetaCLIP 2 a `MetaClip2Model`. SigLIP 2 at a fixed size is a
    `SiglipModel`; NaFlex is a `Siglip2Model` and read at its square grid.

    Args:
        name: a local folder, or a hub name (which needs a network or a cache).

    Raises:
        ValueError: when there is no such model, or it is of another kind, or its weights, its
            preprocessing or its tokenizer do not fit.
    """
    try:
        kind = AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
        if kind not in _KINDS:
            raise ValueError(f"it is a {kind!r} model")
        class_name, convert = _KINDS[kind]
        theirs = _read(class_name, name)
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False).to_dict()
        preprocess = read_preprocess(processor, _image_size(theirs.config.vision_config))
    except (OSError, ValueError, UnpicklingError, SafetensorError) as error:
        raise ValueError(
            f"no model of transformers that can be used at {name!r}: {error}. Give a folder with "
            "config.json, model.safetensors, tokenizer.json and preprocessor_config.json of a "
            f"{' or '.join(_KINDS)} model, or a hub name where there is a network"
        ) from error
    tokenizer = config.HfTokenizer(kind="hf", name=name, clean=_clean(kind, name))
    section, model = convert(theirs, tokenizer=tokenizer, preprocess=preprocess)
    built = _tokenizer(section)
    _check_end(theirs.config, built)
    return section, model, built


def _read(class_name: str, name: str) -> PreTrainedModel:
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        raise ValueError(f"transformers {transformers.__version__} has no {class_name}")
    model, found = model_class.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    unexpected = found["unexpected_keys"]
    refuse_incomplete(class_name, model, found, part=model, unexpected=unexpected)
    return model


def _image_size(settings: PretrainedConfig) -> int:
    """Side of the pictures; of NaFlex, of the square that its positions are for."""
    size = getattr(settings, "image_size", None)
    return size or round(settings.num_patches**0.5) * settings.patch_size


def _check_end(theirs: PretrainedConfig, tokenizer: Tokenizer) -> None:
    """See that transformers pools where ours does: at the token that the tokenizer puts last."""
    if "siglip" in theirs.model_type:
        return  # at the last position
    eos = theirs.text_config.eos_token_id
    legacy = theirs.model_type == "clip" and eos == LEGACY_EOS
    expected = tokenizer.vocab_size - 1 if legacy else eos
    if tokenizer.eos_id != expected:
        raise ValueError(
            f"the model pools a text at the id {expected}, but its tokenizer ends texts with "
            f"{tokenizer.eos_id}; use files that were saved together"
        )


def _clean(kind: str, name: str) -> list[config.Cleaning]:
    """What is done to texts by code of transformers, or before it, but not by tokenizer.json.

    SigLIP's own class drops punctuation. SigLIP 2 has Gemma's, and was trained on lower case. The
    general class does what its file says.
    """
    if kind not in ("siglip", "siglip2"):
        return []
    described = get_tokenizer_config(name).get("tokenizer_class") or ""
    if described.startswith("SiglipTokenizer"):
        return ["punctuation", "whitespace", "lower"]
    return [] if described in (GENERAL_TOKENIZER, _GENERAL_IN_5) else ["lower"]


def _tokenizer(section: config.Model) -> Tokenizer:
    return build_tokenizer(
        section.tokenizer,
        context_length=section.text.context_length,
        fixed_length=section.text.fixed_length,
        vocab_size=section.text.vocab_size,
        captions=(),
    )

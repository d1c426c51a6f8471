"""What the two-tower models of transformers share: names of weights, settings, a parity check.

`clip` and `siglip` add what is particular to them. What is loaded ends in `check_parity`, what is
written in `convert`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from multimodal import config
from multimodal.models.two_tower import TwoTower
from multimodal.weights import parity
from multimodal.weights.mapping import Entry, affine, same
from multimodal.weights.parity import Theirs

LOADED_TOLERANCE = 1e-4
"""Largest distance of two unit vectors after a load: large weights may round to more than 1e-5."""
LEGACY_EOS = 2
ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Ours to theirs."""
PLAIN_ENCODER = {
    "activation": tuple(ACTIVATIONS),
    "norm": ("layernorm",),
    "bias": (True,),
    "qk_norm": (False,),
    "gated_attention": (False,),
    "layer_scale": (None,),
    "position": ("learned",),
    "rope": (False,),
}
"""What transformers' encoders can be: setting to allowed values."""


def text_entries(depth: int) -> list[Entry]:
    """The text tower, the same in CLIP and SigLIP."""
    return [
        same("text_model.embeddings.token_embedding.weight", "text.token_embedding.weight"),
        same("text_model.embeddings.position_embedding.weight", "text.position.weight"),
        *encoder_entries("text_model", "text", depth),
        *affine("text_model.final_layer_norm", "text.norm"),
    ]


def encoder_entries(theirs: str, ours: str, depth: int) -> list[Entry]:
    """The blocks of a tower, the same in CLIP and SigLIP."""
    entries = []
    for i in range(depth):
        layer, block = f"{theirs}.encoder.layers.{i}", f"{ours}.encoder.blocks.{i}"
        entries += affine(f"{layer}.layer_norm1", f"{block}.attn.norm")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            entries += affine(f"{layer}.self_attn.{name}", f"{block}.attn.inner.{name}")
        entries += affine(f"{layer}.layer_norm2", f"{block}.mlp.norm")
        for name in ("fc1", "fc2"):
            entries += affine(f"{layer}.mlp.{name}", f"{block}.mlp.inner.{name}")
    return entries


def encoder_settings(theirs: PretrainedConfig) -> dict[str, Any]:
    """Our `Encoder` settings for a tower of theirs.

    Raises:
        ValueError: when its activation is none of ours.
    """
    names = {value: key for key, value in ACTIVATIONS.items()}
    if theirs.hidden_act not in names:
        raise ValueError(f"hidden_act={theirs.hidden_act!r} is not one of {', '.join(names)}")
    return {
        "width": theirs.hidden_size,
        "depth": theirs.num_hidden_layers,
        "heads": theirs.num_attention_heads,
        "mlp_ratio": theirs.intermediate_size / theirs.hidden_size,
        "activation": names[theirs.hidden_act],
        "norm_eps": theirs.layer_norm_eps,
    }


def encoder_config(section: config.Encoder) -> dict[str, Any]:
    """Their settings for a tower of ours."""
    return {
        "hidden_size": section.width,
        "num_hidden_layers": section.depth,
        "num_attention_heads": section.heads,
        "intermediate_size": round(section.width * section.mlp_ratio),
        "hidden_act": ACTIVATIONS[section.activation],
        "layer_norm_eps": section.norm_eps,
    }


def check_parity(
    model: TwoTower,
    theirs: PreTrainedModel,
    section: config.Model,
    *,
    image: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Compare our model with the one that it was made from, on random pictures and tokens.

    Args:
        model: ours.
        theirs: a model of transformers.
        section: our settings.
        image: normalised pixels to their features, where `get_image_features` takes others.

    Raises:
        ValueError: when their unit vectors are further apart than `LOADED_TOLERANCE`.
    """
    text, found = section.text, theirs.config.text_config
    ids = range(text.vocab_size)
    eos, pad = found.eos_token_id, found.pad_token_id
    # SigLIP files name ids that it does not have; nothing there is pooled by them.
    legacy = theirs.config.model_type == "clip" and eos == LEGACY_EOS
    if legacy or (text.fixed_length and eos not in ids):
        eos = text.vocab_size - 1
    described = as_theirs(theirs.eval(), tolerance=LOADED_TOLERANCE)
    rows = parity.compare_towers(
        model,
        described if image is None else replace(described, image=image),
        image_size=section.image.image_size,
        context_length=text.context_length,
        fixed_length=text.fixed_length,
        vocab_size=text.vocab_size,
        eos_id=eos,
        pad_id=pad if pad in ids else eos,
    )
    parity.refuse_failed(rows, "the converted model does not give the original's features")


def as_theirs(model: PreTrainedModel, **more: Any) -> Theirs:
    """A `CLIPModel` or `SiglipModel` for a comparison; `more` is what else is known of it."""
    bias = getattr(model, "logit_bias", None)
    return Theirs(
        library=f"transformers {version('transformers')}",
        image=lambda pixels: features_of(model.get_image_features(pixel_values=pixels)),
        text=lambda tokens, lengths: features_of(model.get_text_features(input_ids=tokens)),
        logit_scale=model.logit_scale.exp().item(),
        logit_bias=None if bias is None else bias.item(),
        **more,
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def features_of(output: Any) -> Tensor:
    """The features that `get_*_features` gives: a tensor in transformers 4, a field of 5."""
    return output if isinstance(output, Tensor) else output.pooler_output

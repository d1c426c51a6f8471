"""What the two-tower models of transformers share: names of weights, settings, a parity check.

`clip` and `siglip` add what is particular to them. Conversions end in `check_parity`: with a wrong
activation or epsilon weights load without a complaint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from multimodal import config
from multimodal.models.two_tower import TwoTower, unit_length
from multimodal.weights.mapping import Entry, affine, same

PARITY_TOLERANCE = 1e-4
"""Largest distance of two unit vectors. float32 gives 1e-6; exact for tanh GELU gives 3e-4."""
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


@torch.no_grad()
def check_parity(model: TwoTower, theirs: PreTrainedModel, section: config.Model) -> None:
    """Compare both models on random pictures and texts of several lengths.

    Raises:
        ValueError: when their unit vectors are further apart than `PARITY_TOLERANCE`.
    """
    generator = torch.Generator().manual_seed(0)
    size = section.image.image_size
    pixels = torch.randn(2, 3, size, size, generator=generator)
    tokens, lengths = _random_texts(section.text, theirs.config.text_config, generator)
    training = model.training, theirs.training
    ours = model.eval()(pixels, tokens, lengths)
    image = unit_length(features_of(theirs.eval().get_image_features(pixels)))
    text = unit_length(features_of(theirs.get_text_features(tokens)))
    model.train(training[0]), theirs.train(training[1])
    for name, a, b in (("image", ours.image, image), ("text", ours.text, text)):
        distance = (a - b).norm(dim=1).max().item()
        if not distance <= PARITY_TOLERANCE:
            raise ValueError(
                f"converted {name} features are {distance:.1e} away from the original's, "
                f"allowed {PARITY_TOLERANCE}; a setting such as activation, epsilon or pooling "
                "does not fit these weights"
            )


def features_of(output: Any) -> Tensor:
    """The features that `get_*_features` gives: a tensor in transformers 4, a field of 5."""
    return output if isinstance(output, Tensor) else output.pooler_output


def _random_texts(
    section: config.TransformerText, theirs: PretrainedConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens [3, L] and lengths [3], each with one end-of-text token; the rest is padding."""
    length, vocab = section.context_length, section.vocab_size
    eos = vocab - 1 if theirs.eos_token_id == LEGACY_EOS else theirs.eos_token_id
    lengths = torch.tensor([length, max(1, length // 2), 1])
    tokens = torch.randint(vocab - 1, (3, length), generator=generator)
    tokens[tokens == eos] = vocab - 1
    if not section.fixed_length:
        if not 0 <= eos < vocab:
            raise ValueError(f"eos_token_id={eos} is outside the {vocab} tokens of the model")
        tokens[torch.arange(3), lengths - 1] = eos
    return tokens, lengths

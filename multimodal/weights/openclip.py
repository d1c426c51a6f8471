"""Weights in the layout of OpenAI's CLIP, which OpenCLIP kept: names of theirs and ours.

The text tower lies at the root (class `CLIP`) or under `text.` (class `CustomTextCLIP`); the
weights are the same. Query, key and value are one tensor, and the projections are applied as x @ W.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from multimodal import config
from multimodal.weights.mapping import Entry, Table, affine, same

_QKV = ("q_proj", "k_proj", "v_proj")


def openclip_table(section: config.Model, text: str = "") -> Table:
    """Names of a native OpenCLIP model and ours.

    Args:
        section: a native image tower, and a text Transformer.
        text: what stands before the names of the text tower, "" or "text.".
    """
    return (*temperature(section), *_image(section.image), *text_entries(section, text))


def text_prefix(state: Mapping[str, Tensor]) -> str:
    """What stands before the names of the text tower in their weights."""
    return "text." if any(name.startswith("text.") for name in state) else ""


def temperature(section: config.Model) -> list[Entry]:
    """Scale and offset of the logits: scalars, or vectors of 1."""
    names = ["logit_scale"] + ["logit_bias"] * (section.logit_bias is not None)
    return [same(name, f"temperature.{name}", reshape=True) for name in names]


def text_entries(section: config.Model, prefix: str) -> list[Entry]:
    """The text tower with its projection."""
    entries = [
        same(f"{prefix}token_embedding.weight", "text.token_embedding.weight"),
        same(f"{prefix}positional_embedding", "text.position.weight"),
        *_blocks(f"{prefix}transformer", "text", section.text),
        *affine(f"{prefix}ln_final", "text.norm"),
    ]
    match section.text_projection:
        case "linear":
            theirs = f"{prefix}text_projection"
            entries.append(same(theirs, "text_projection.weight", transpose=True))
        case "linear_bias":
            entries += affine(f"{prefix}text_projection", "text_projection")
    return entries


def _image(section: config.VitImage) -> list[Entry]:
    return [
        same("visual.class_embedding", "image.class_token"),
        same("visual.conv1.weight", "image.patch.proj.weight", reshape=True),
        same("visual.positional_embedding", "image.position.weight"),
        *(affine("visual.ln_pre", "image.pre_norm") if section.pre_norm else ()),
        *_blocks("visual.transformer", "image", section),
        *affine("visual.ln_post", "image.norm"),
        same("visual.proj", "image_projection.weight", transpose=True),
    ]


def _blocks(theirs: str, ours: str, section: config.Encoder) -> list[Entry]:
    entries = []
    for i in range(section.depth):
        layer, block = f"{theirs}.resblocks.{i}", f"{ours}.encoder.blocks.{i}"
        attention = f"{block}.attn.inner"
        entries += affine(f"{layer}.ln_1", f"{block}.attn.norm")
        entries += [
            Entry(f"{layer}.attn.in_proj_{n}", tuple(f"{attention}.{name}.{n}" for name in _QKV))
            for n in ("weight", "bias")
        ]
        entries += affine(f"{layer}.attn.out_proj", f"{attention}.out_proj")
        entries += affine(f"{layer}.ln_2", f"{block}.mlp.norm")
        entries += affine(f"{layer}.mlp.c_fc", f"{block}.mlp.inner.fc1")
        entries += affine(f"{layer}.mlp.c_proj", f"{block}.mlp.inner.fc2")
        if section.layer_scale is not None:
            entries.append(same(f"{layer}.ls_1.gamma", f"{block}.attn.layer_scale"))
            entries.append(same(f"{layer}.ls_2.gamma", f"{block}.mlp.layer_scale"))
    return entries

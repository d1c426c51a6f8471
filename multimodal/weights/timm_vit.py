"""timm's `VisionTransformer`: names of its weights, and its arguments for a tower of ours.

Its constructor can express what CLIP and SigLIP are made of. It has rotary positions, gates and
SwiGLU in other classes only, which differ from ours in more than that.
"""

from __future__ import annotations

from typing import Any

import timm

from multimodal import config
from multimodal.weights.mapping import Entry, Table, affine, same
from multimodal.weights.require import misfits

ACTIVATIONS = ("quick_gelu", "gelu", "gelu_tanh")
"""The same names there and here."""
_POOLS = {"cls": "token", "mean": "avg", "map": "map"}
_SIZES = {
    (384, 12, 6): "small",
    (768, 12, 12): "base",
    (1024, 24, 16): "large",
    (1152, 27, 16): "so400m",
    (1280, 32, 16): "huge",
}
"""Width, depth and heads to the word in timm's names."""
_BY_EPS = {
    1e-5: ("vit_base_patch32_clip_224", ("clip", "clip_quickgelu")),
    1e-6: ("vit_base_patch16_siglip_224", ("siglip", "siglip_gap")),
}
"""Epsilon, the one setting that is no argument, to an architecture with it, and its families."""
_NEEDED = {
    "image": {
        "kind": ("vit",),
        "activation": ACTIVATIONS,
        "norm": ("layernorm",),
        "norm_eps": tuple(_BY_EPS),
        "bias": (True,),
        "qk_norm": (False,),
        "gated_attention": (False,),
        "position": ("learned",),
        "rope": (False,),
    }
}


def vit_misfits(section: config.Model) -> list[str]:
    """What of an image tower of kind `vit` timm cannot express."""
    wrong = misfits(section, _NEEDED)
    image = section.image
    if not isinstance(image, config.VitImage):
        return wrong
    if image.patch_bias == image.pre_norm:
        wrong.append(
            f"model.image.patch_bias={image.patch_bias} with pre_norm={image.pre_norm} (needed: "
            "one of them)"
        )
    if image.class_token and (image.registers or image.pool == "map"):
        wrong.append(
            f"model.image.class_token=True with registers={image.registers} and "
            f"pool={image.pool!r} (needed: no class token, or neither of these)"
        )
    return wrong


def vit_name(image: config.VitImage) -> str:
    """timm's architecture for a tower: the one of its size, else one with the same epsilon.

    `vit_arguments` says all that the name leaves open, so the result is right with either.
    """
    fallback, families = _BY_EPS[image.norm_eps]
    size = _SIZES.get((image.width, image.depth, image.heads))
    quick, mean = image.activation == "quick_gelu", image.pool == "mean"
    family = families[quick if image.norm_eps == 1e-5 else mean]
    name = f"vit_{size}_patch{image.patch_size}_{family}_{image.image_size}"
    return name if timm.is_model(name) else fallback


def vit_arguments(image: config.VitImage) -> dict[str, Any]:
    """timm's arguments for a tower, as JSON values; all but the size of its classifier."""
    return {
        "img_size": image.image_size,
        "patch_size": image.patch_size,
        "embed_dim": image.width,
        "depth": image.depth,
        "num_heads": image.heads,
        "mlp_ratio": _mlp_ratio(image),
        "act_layer": image.activation,
        "init_values": image.layer_scale,
        "class_token": image.class_token,
        "reg_tokens": image.registers,
        "no_embed_class": image.registers > 0,
        "pre_norm": image.pre_norm,
        "global_pool": _POOLS[image.pool],
        "fc_norm": False,
    }


def _mlp_ratio(image: config.VitImage) -> float:
    """timm rounds the hidden size down, and ours is rounded to the nearest."""
    hidden = round(image.width * image.mlp_ratio)
    same_there = int(image.width * image.mlp_ratio) == hidden
    return image.mlp_ratio if same_there else (hidden + 0.5) / image.width


def vit_table(image: config.VitImage, *, theirs: str = "", ours: str = "image.") -> Table:
    """Names of the tower's weights, without its classifier.

    Args:
        image: the tower.
        theirs: what stands before each name there, such as `visual.trunk.`.
        ours: what stands before each name here.
    """
    entries = [
        same("patch_embed.proj.weight", "patch.proj.weight", reshape=True),
        same("pos_embed", "position.weight", reshape=True),
        *affine("norm", "norm"),
    ]
    if image.patch_bias:
        entries.append(same("patch_embed.proj.bias", "patch.proj.bias"))
    if image.class_token:
        entries.append(same("cls_token", "class_token", reshape=True))
    if image.registers:
        entries.append(same("reg_token", "registers", reshape=True))
    if image.pre_norm:
        entries += affine("norm_pre", "pre_norm")
    for number in range(image.depth):
        entries += _block_entries(number, scaled=image.layer_scale is not None)
    if image.pool == "map":
        entries += _head_entries()
    return tuple(
        Entry(f"{theirs}{e.theirs}", tuple(f"{ours}{n}" for n in e.ours), e.reshape, e.transpose)
        for e in entries
    )


def _block_entries(number: int, *, scaled: bool) -> list[Entry]:
    theirs, ours = f"blocks.{number}", f"encoder.blocks.{number}"
    entries = [
        *affine(f"{theirs}.norm1", f"{ours}.attn.norm"),
        *_joined(f"{theirs}.attn.qkv", f"{ours}.attn.inner", ("q_proj", "k_proj", "v_proj")),
        *affine(f"{theirs}.attn.proj", f"{ours}.attn.inner.out_proj"),
        *affine(f"{theirs}.norm2", f"{ours}.mlp.norm"),
        *affine(f"{theirs}.mlp.fc1", f"{ours}.mlp.inner.fc1"),
        *affine(f"{theirs}.mlp.fc2", f"{ours}.mlp.inner.fc2"),
    ]
    if scaled:
        entries.append(same(f"{theirs}.ls1.gamma", f"{ours}.attn.layer_scale"))
        entries.append(same(f"{theirs}.ls2.gamma", f"{ours}.mlp.layer_scale"))
    return entries


def _head_entries() -> list[Entry]:
    return [
        same("attn_pool.latent", "pool.probe"),
        *affine("attn_pool.q", "pool.attention.q_proj"),
        *_joined("attn_pool.kv", "pool.attention", ("k_proj", "v_proj")),
        *affine("attn_pool.proj", "pool.attention.out_proj"),
        *affine("attn_pool.norm", "pool.layernorm"),
        *affine("attn_pool.mlp.fc1", "pool.mlp.fc1"),
        *affine("attn_pool.mlp.fc2", "pool.mlp.fc2"),
    ]


def _joined(theirs: str, ours: str, names: tuple[str, ...]) -> list[Entry]:
    return [
        Entry(f"{theirs}.{kind}", tuple(f"{ours}.{name}.{kind}" for name in names))
        for kind in ("weight", "bias")
    ]

"""SigLIP and fixed-size SigLIP 2 of transformers (`SiglipModel`): settings and weights, in and out.

The text tower sees its padding, which is part of every text: pass transformers no attention mask,
or the features change by 80 %.
"""

from __future__ import annotations

from transformers import Siglip2Config, SiglipConfig, SiglipModel

from multimodal import config
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights import hf
from multimodal.weights.mapping import Entry, Table, affine, from_ours, same, to_ours
from multimodal.weights.require import misfits, refuse

_NEEDED = {
    "image": hf.PLAIN_ENCODER
    | {
        "kind": ("vit",),
        "patch_bias": (True,),
        "class_token": (False,),
        "registers": (0,),
        "pre_norm": (False,),
        "pool": ("map",),
    },
    "text": hf.PLAIN_ENCODER
    | {
        "kind": ("transformer",),
        "causal": (False,),
        "mask_padding": (False,),
        "fixed_length": (True,),
        "pool": ("last",),
    },
    "": {"image_projection": ("none",), "text_projection": ("linear_bias",)},
}


def siglip_table(section: config.Model) -> Table:
    """Names of `SiglipModel` and ours."""
    return (
        same("logit_scale", "temperature.logit_scale", reshape=True),
        same("logit_bias", "temperature.logit_bias", reshape=True),
        same(
            "vision_model.embeddings.patch_embedding.weight",
            "image.patch.proj.weight",
            reshape=True,
        ),
        same("vision_model.embeddings.patch_embedding.bias", "image.patch.proj.bias"),
        same("vision_model.embeddings.position_embedding.weight", "image.position.weight"),
        *hf.encoder_entries("vision_model", "image", section.image.depth),
        *affine("vision_model.post_layernorm", "image.norm"),
        *_head_entries("vision_model.head", "image.pool"),
        *hf.text_entries(section.text.depth),
        *affine("text_model.head", "text_projection"),
    )


def _head_entries(theirs: str, ours: str) -> list[Entry]:
    attention = f"{ours}.attention"
    qkv = [f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    return [
        same(f"{theirs}.probe", f"{ours}.probe"),
        Entry(f"{theirs}.attention.in_proj_weight", tuple(f"{name}.weight" for name in qkv)),
        Entry(f"{theirs}.attention.in_proj_bias", tuple(f"{name}.bias" for name in qkv)),
        *affine(f"{theirs}.attention.out_proj", f"{attention}.out_proj"),
        *affine(f"{theirs}.layernorm", f"{ours}.layernorm"),
        *affine(f"{theirs}.mlp.fc1", f"{ours}.mlp.fc1"),
        *affine(f"{theirs}.mlp.fc2", f"{ours}.mlp.fc2"),
    ]


def import_siglip(
    theirs: SiglipModel, *, tokenizer: config.HfTokenizer, preprocess: config.Preprocess
) -> tuple[config.Model, TwoTower]:
    """Our model with the weights of a float32 `SiglipModel`.

    Raises:
        ValueError: when it has something that ours cannot express, or the features differ.
    """
    section = siglip_section(theirs.config, tokenizer=tokenizer, preprocess=preprocess)
    model = build_model(section)
    model.load_state_dict(to_ours(siglip_table(section), theirs.state_dict(), model.state_dict()))
    hf.check_parity(model, theirs, section)
    return section, model


def export_siglip(
    model: TwoTower, section: config.Model, *, bos_id: int | None, eos_id: int, pad_id: int
) -> SiglipModel:
    """A `SiglipModel` with the weights of our model; the ids are the tokenizer's.

    Raises:
        ValueError: when `SiglipModel` cannot be such a model; all settings at fault are listed.
    """
    theirs = SiglipModel(siglip_config(section, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id))
    state = from_ours(siglip_table(section), model.state_dict(), theirs.state_dict())
    theirs.load_state_dict(state)
    return theirs.eval()


def siglip_section(
    theirs: SiglipConfig | Siglip2Config,
    *,
    tokenizer: config.HfTokenizer,
    preprocess: config.Preprocess,
    image_size: int | None = None,
) -> config.Model:
    """Our settings for a `SiglipConfig`, or for a `Siglip2Config`, which has no `image_size`."""
    image, text = theirs.vision_config, theirs.text_config
    size = image.image_size if image_size is None else image_size
    return config.Model(
        image=config.VitImage(
            kind="vit", image_size=size, patch_size=image.patch_size,
            patch_bias=True, class_token=False, pre_norm=False, pool="map",
            **hf.encoder_settings(image),
        ),
        text=config.TransformerText(
            kind="transformer", vocab_size=text.vocab_size,
            context_length=text.max_position_embeddings, fixed_length=True, causal=False,
            pool="last", **hf.encoder_settings(text),
        ),
        embed_dim=image.hidden_size,
        image_projection="none",
        text_projection="linear_bias",
        logit_scale=10.0,
        logit_bias=-10.0,
        preprocess=preprocess,
        tokenizer=tokenizer,
    )  # fmt: skip


def siglip_config(
    section: config.Model, *, bos_id: int | None, eos_id: int, pad_id: int
) -> SiglipConfig:
    """The `SiglipConfig` for our settings.

    Raises:
        ValueError: when there is none; all that is wrong is listed.
    """
    wrong = misfits(section, _NEEDED)
    if section.logit_bias is None:
        wrong.append("model.logit_bias=None (needed a number)")
    refuse(wrong, "transformers' SiglipModel")
    image, text = section.image, section.text
    return SiglipConfig(
        vision_config=hf.encoder_config(image)
        | {"image_size": image.image_size, "patch_size": image.patch_size},
        text_config=hf.encoder_config(text)
        | {
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "projection_size": section.embed_dim,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "pad_token_id": pad_id,
        },
    )

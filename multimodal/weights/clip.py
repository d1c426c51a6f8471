"""CLIP of transformers (`CLIPModel`): its settings and weights, in and out.

transformers pools a text at the first token that equals `eos_token_id`, or, where that is 2 (old
files), at the largest id. Ours pools at the last token of a text, which a tokenizer makes the
end-of-text token; both are the same place.
"""

from __future__ import annotations

from transformers import CLIPConfig, CLIPModel, PreTrainedModel

from multimodal import config
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights import hf
from multimodal.weights.mapping import Table, affine, from_ours, same, to_ours
from multimodal.weights.require import misfits, refuse

_NEEDED = {
    "image": hf.PLAIN_ENCODER
    | {
        "kind": ("vit",),
        "patch_bias": (False,),
        "class_token": (True,),
        "registers": (0,),
        "pre_norm": (True,),
        "pool": ("cls",),
    },
    "text": hf.PLAIN_ENCODER | {"kind": ("transformer",), "causal": (True,), "pool": ("eot",)},
    "": {"image_projection": ("linear",), "text_projection": ("linear",), "logit_bias": (None,)},
}


def clip_table(section: config.Model) -> Table:
    """Names of `CLIPModel` and ours."""
    return (
        same("logit_scale", "temperature.logit_scale"),
        same("visual_projection.weight", "image_projection.weight"),
        same("text_projection.weight", "text_projection.weight"),
        same("vision_model.embeddings.class_embedding", "image.class_token"),
        same(
            "vision_model.embeddings.patch_embedding.weight",
            "image.patch.proj.weight",
            reshape=True,
        ),
        same("vision_model.embeddings.position_embedding.weight", "image.position.weight"),
        *affine("vision_model.pre_layrnorm", "image.pre_norm"),
        *hf.encoder_entries("vision_model", "image", section.image.depth),
        *affine("vision_model.post_layernorm", "image.norm"),
        *hf.text_entries(section.text.depth),
    )


def import_clip(
    theirs: PreTrainedModel, *, tokenizer: config.HfTokenizer, preprocess: config.Preprocess
) -> tuple[config.Model, TwoTower]:
    """Our model with the weights of a float32 `CLIPModel`, or `MetaClip2Model`, which is its twin.

    Raises:
        ValueError: when it has something that ours cannot express, or the features differ.
    """
    section = clip_section(theirs.config, tokenizer=tokenizer, preprocess=preprocess)
    model = build_model(section)
    model.load_state_dict(to_ours(clip_table(section), theirs.state_dict(), model.state_dict()))
    hf.check_parity(model, theirs, section)
    return section, model


def export_clip(
    model: TwoTower, section: config.Model, *, bos_id: int | None, eos_id: int, pad_id: int
) -> CLIPModel:
    """A `CLIPModel` with the weights of our model; the ids are the tokenizer's.

    Raises:
        ValueError: when `CLIPModel` cannot be such a model; all settings at fault are listed.
    """
    theirs = CLIPModel(clip_config(section, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id))
    theirs.load_state_dict(from_ours(clip_table(section), model.state_dict(), theirs.state_dict()))
    return theirs.eval()


def clip_section(
    theirs: CLIPConfig, *, tokenizer: config.HfTokenizer, preprocess: config.Preprocess
) -> config.Model:
    """Our settings for a `CLIPConfig`."""
    image, text = theirs.vision_config, theirs.text_config
    return config.Model(
        image=config.VitImage(
            kind="vit", image_size=image.image_size, patch_size=image.patch_size,
            **hf.encoder_settings(image),
        ),
        text=config.TransformerText(
            kind="transformer", vocab_size=text.vocab_size,
            context_length=text.max_position_embeddings, **hf.encoder_settings(text),
        ),
        embed_dim=theirs.projection_dim,
        preprocess=preprocess,
        tokenizer=tokenizer,
    )  # fmt: skip


def clip_config(
    section: config.Model, *, bos_id: int | None, eos_id: int, pad_id: int
) -> CLIPConfig:
    """The `CLIPConfig` for our settings.

    Raises:
        ValueError: when there is none; all that is wrong is listed.
    """
    wrong = misfits(section, _NEEDED)
    if eos_id == hf.LEGACY_EOS:
        wrong.append(
            f"the tokenizer's eos_id={eos_id} (there {hf.LEGACY_EOS} means 'pool at the largest "
            "id'; needed another id)"
        )
    refuse(wrong, "transformers' CLIPModel")
    image, text = section.image, section.text
    shared = {"projection_dim": section.embed_dim}
    return CLIPConfig(
        vision_config=hf.encoder_config(image)
        | shared
        | {"image_size": image.image_size, "patch_size": image.patch_size},
        text_config=hf.encoder_config(text)
        | shared
        | {
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "pad_token_id": pad_id,
        },
        **shared,
    )

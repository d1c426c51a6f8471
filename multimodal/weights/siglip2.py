"""SigLIP 2 of transformers' `Siglip2Model` (NaFlex), at the square grid that its positions have.

That class takes patches of pictures of any shape, resamples the positions for each and hides
padding. For a square picture of its own grid it is SigLIP, with a Linear for the convolution, whose
inputs lie row, column, channel; ours lie channel, row, column. Pictures are squashed to the square.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import Siglip2Config, Siglip2Model

from multimodal import config
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights import hf
from multimodal.weights.mapping import from_ours, to_ours
from multimodal.weights.siglip import siglip_section, siglip_table

_PATCH = "vision_model.embeddings.patch_embedding.weight"


def import_siglip2(
    theirs: Siglip2Model, *, tokenizer: config.HfTokenizer, preprocess: config.Preprocess
) -> tuple[config.Model, TwoTower]:
    """Our model with the weights of a float32 `Siglip2Model`.

    Raises:
        ValueError: when it has something that ours cannot express, or the features differ.
    """
    section = siglip2_section(theirs.config, tokenizer=tokenizer, preprocess=preprocess)
    model = build_model(section)
    model.load_state_dict(siglip2_to_ours(section, theirs.state_dict(), model.state_dict()))
    hf.check_parity(
        model, theirs, section, image=lambda pixels: square_features(theirs.eval(), pixels)
    )
    return section, model


def siglip2_section(
    theirs: Siglip2Config, *, tokenizer: config.HfTokenizer, preprocess: config.Preprocess
) -> config.Model:
    """Our settings for a `Siglip2Config`.

    Raises:
        ValueError: when it has no attention pooling, or no square grid.
    """
    image = theirs.vision_config
    side = round(image.num_patches**0.5)
    if side * side != image.num_patches:
        raise ValueError(f"vision_config.num_patches={image.num_patches} is no square")
    if not getattr(image, "vision_use_head", True):
        raise ValueError("vision_config.vision_use_head=false: it has no head that pools")
    return siglip_section(
        theirs, tokenizer=tokenizer, preprocess=preprocess, image_size=side * image.patch_size
    )


def siglip2_to_ours(
    section: config.Model, state: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Their weights as ours; see `mapping.to_ours`."""
    ours = to_ours(siglip_table(section), state, like)
    name, patch = "image.patch.proj.weight", section.image.patch_size
    kernel = ours[name].unflatten(1, (patch, patch, 3))
    return ours | {name: kernel.permute(0, 3, 1, 2).flatten(1)}


def siglip2_from_ours(
    section: config.Model, state: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The way back."""
    theirs = from_ours(siglip_table(section), state, like)
    kernel = theirs[_PATCH].unflatten(1, (3, section.image.patch_size, section.image.patch_size))
    return theirs | {_PATCH: kernel.permute(0, 2, 3, 1).flatten(1)}


def square_features(model: Siglip2Model, pixels: Tensor) -> Tensor:
    """Their features [B, D] of square pictures [B, 3, S, S] of the model's own grid."""
    patch = model.config.vision_config.patch_size
    side = pixels.shape[2] // patch
    cut = pixels.unflatten(3, (side, patch)).unflatten(2, (side, patch))
    patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    return hf.features_of(
        model.get_image_features(
            pixel_values=patches,
            pixel_attention_mask=torch.ones(patches.shape[:2], dtype=torch.int64),
            spatial_shapes=torch.full((len(pixels), 2), side),
        )
    )

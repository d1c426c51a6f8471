"""Weights of an image tower for pictures of another size: its learned positions are resampled.

Each family by its own rule. Ours: bicubic with antialiasing, the class token's position kept, as
OpenCLIP and timm do it. timm: the model's own `set_input_size`, which also knows relative positions
and windows. Towers of transformers resample at every call, and keep the positions they have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multimodal import config

_OURS = "image.position.weight"
_TIMM = "image.model."


def resize_positions(
    state: dict[str, Tensor], *, old: config.Model, new: config.Model
) -> dict[str, Tensor]:
    """Make the weights of a model fit its architecture at another `image_size`.

    Args:
        state: state dict of a model with the settings `old`; not changed.
        old: what the weights belong to.
        new: what they shall fit. Only its `image.image_size` is looked at.

    Returns:
        A state dict that shares all other tensors with `state`. Equal to `state` where both sizes
        are the same.

    Raises:
        ValueError: when the image towers are of different kinds, or the size does not fit.
    """
    if old.image.kind != new.image.kind:
        raise ValueError(
            f"model.image.kind={new.image.kind}, but the weights are of kind={old.image.kind}; "
            "positions are resampled within one kind"
        )
    if old.image.image_size == new.image.image_size:
        return dict(state)
    match old.image:
        case config.VitImage():
            return state | _ours(state, old.image, new.image.image_size)
        case config.TimmImage():
            return state | _timm(state, old.image, new.image.image_size)
    return dict(state)


def _ours(state: dict[str, Tensor], old: config.VitImage, image_size: int) -> dict[str, Tensor]:
    if old.position != "learned":
        return {}
    # Imported here, as timm's models below: timm takes seconds to import.
    from timm.layers import resample_abs_pos_embed

    if image_size % old.patch_size:
        raise ValueError(
            f"model.image.image_size={image_size} is not a multiple of the weights' "
            f"patch_size={old.patch_size}"
        )
    before, after = old.image_size // old.patch_size, image_size // old.patch_size
    positions = resample_abs_pos_embed(
        state[_OURS][None], [after, after], [before, before], num_prefix_tokens=old.class_token
    )
    return {_OURS: positions[0]}


@torch.no_grad()
def _timm(state: dict[str, Tensor], old: config.TimmImage, image_size: int) -> dict[str, Tensor]:
    from multimodal.models.timm_image import TimmTower

    model = TimmTower(old.model_copy(update={"pretrained": False})).model
    if not hasattr(model, "set_input_size"):
        return {}  # convolutions take any size
    own = {k.removeprefix(_TIMM): v for k, v in state.items() if k.startswith(_TIMM)}
    model.load_state_dict(own)
    try:
        model.set_input_size(img_size=image_size)
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(
            f"timm's {old.name!r} cannot be made to take pictures of {image_size} x {image_size}: "
            f"{error}"
        ) from error
    return {f"{_TIMM}{name}": tensor for name, tensor in model.state_dict().items()}

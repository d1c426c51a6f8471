"""The image tower as a model of timm: `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    config.json         architecture, its arguments, preprocessing, as `timm.models.save_for_hf`
    model.safetensors   weights under timm's names

The projection to the embedding is the classifier, as in timm's own CLIP models, so the output is
our image feature before it is scaled to unit length, and `num_classes=0` leaves the projection out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor

from multimodal import config
from multimodal.files import write_atomically
from multimodal.weights import parity_inputs
from multimodal.weights.mapping import Table, affine, from_ours, same
from multimodal.weights.parity import Theirs
from multimodal.weights.pretrained import Pretrained, inference
from multimodal.weights.quiet import quiet
from multimodal.weights.require import misfits, refuse
from multimodal.weights.timm_vit import vit_arguments, vit_misfits, vit_name, vit_table

USAGE = 'timm.create_model("local-dir:{out}", pretrained=True)'
_KNOWN = {
    parity_inputs.UNUSUAL: "timm takes RGB pictures; transparency and turning are left to its user"
}


class _Plan(NamedTuple):
    """How timm builds the tower."""

    architecture: str
    arguments: dict[str, Any]
    table: Table
    """Names of the tower's weights, without its classifier."""


def write(pretrained: Pretrained, folder: Path) -> None:
    """Write the folder.

    Raises:
        ValueError: when timm has no such model, with all settings at fault.
    """
    section = pretrained.config
    plan = _plan(pretrained)
    has_projection = section.image_projection != "none"
    classes = section.embed_dim if has_projection else 0
    theirs = timm.create_model(plan.architecture, num_classes=classes, **plan.arguments)
    state = _state(pretrained, plan, theirs.state_dict(), _classifier(theirs))
    theirs.load_state_dict(state)
    content = {
        "architecture": plan.architecture,
        "num_classes": classes,
        "num_features": theirs.num_features,
        "model_args": plan.arguments,
        "pretrained_cfg": _preprocessing(section) | {
            "num_classes": classes,
            "fixed_input_size": theirs.pretrained_cfg["fixed_input_size"],
            "first_conv": theirs.pretrained_cfg["first_conv"],
            "classifier": theirs.pretrained_cfg["classifier"],
            "pool_size": None,
        },
    }  # fmt: skip
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(folder / "model.safetensors", lambda path: save_file(state, path))
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def reopen(folder: Path) -> Theirs:
    """The folder as timm reads it."""
    with quiet():
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))

    def pixels(images: list[Image.Image]) -> Tensor:
        return torch.stack([transform(image.convert("RGB")) for image in images])

    def image(pixels: Tensor) -> Tensor:
        with inference(model):
            return model(pixels)

    library = f"timm {timm.__version__}"
    return Theirs(library=library, image=image, pixels=pixels, known=_KNOWN)


def _plan(pretrained: Pretrained) -> _Plan:
    section = pretrained.config
    image = section.image
    match image:
        case config.VitImage():
            refuse(vit_misfits(section), "timm's VisionTransformer")
            return _Plan(vit_name(image), vit_arguments(image), vit_table(image))
        case config.TimmImage():
            return _own_plan(pretrained.model.image.model, image.image_size)
        case _:
            refuse(misfits(section, {"image": {"kind": ("vit", "timm")}}), "timm")
            raise AssertionError(f"kind={image.kind} is neither, and was not refused")


def _own_plan(tower: torch.nn.Module, size: int) -> _Plan:
    """For a tower that timm has built: from its name, or from a folder with arguments."""
    arguments = dict(getattr(tower, "pretrained_model_args", {}))
    if tower.pretrained_cfg["fixed_input_size"]:
        arguments["img_size"] = size
    table = tuple(same(name, f"image.model.{name}") for name in tower.state_dict())
    return _Plan(tower.pretrained_cfg["architecture"], arguments, table)


def _classifier(theirs: torch.nn.Module) -> str:
    """Name of the Linear that makes the output."""
    name = theirs.pretrained_cfg["classifier"]
    if not isinstance(name, str):
        raise ValueError(
            f"timm cannot be this model: {theirs.pretrained_cfg['architecture']} has several "
            f"classifiers ({', '.join(name)}), and the projection is one"
        )
    return name


def _state(
    pretrained: Pretrained, plan: _Plan, like: Mapping[str, Tensor], classifier: str
) -> dict[str, Tensor]:
    """Our weights under timm's names. Its classifiers have a bias, so ours may become one of 0."""
    model = pretrained.model
    ours = {f"image.{name}": tensor for name, tensor in model.image.state_dict().items()}
    table = plan.table
    if pretrained.config.image_projection != "none":
        table += tuple(affine(classifier, "image_projection"))
        zeros = torch.zeros(pretrained.config.embed_dim)
        ours |= {"image_projection.bias": zeros}
        own = model.image_projection.state_dict()
        ours |= {f"image_projection.{name}": tensor for name, tensor in own.items()}
    return from_ours(table, ours, like)


def _preprocessing(section: config.Model) -> dict[str, Any]:
    preprocess, size = section.preprocess, section.image.image_size
    return {
        "input_size": [3, size, size],
        "interpolation": preprocess.interpolation,
        "crop_pct": 1.0,
        "crop_mode": "center" if preprocess.resize_mode == "shortest" else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }

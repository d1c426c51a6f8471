"""Weights of a timm model from a file: none missing, none too many, positions resampled.

timm adapts what it loads to the model, such as the positions to another picture size, each family
by its own rule; so a file goes through timm as if it were timm's own weights of that model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from multimodal import config

LOCAL = "local-dir:"
"""timm's name for a model in a folder with `config.json` begins so."""
_FILES = ("model.safetensors", "pytorch_model.bin")
_SHOWN = 5


def weights_file(section: config.TimmImage) -> Path | None:
    """The local file that the weights shall come from; None for timm's own or no weights."""
    if isinstance(section.pretrained, str):
        return Path(section.pretrained)
    if not section.pretrained or not section.name.startswith(LOCAL):
        return None
    folder = Path(section.name.removeprefix(LOCAL))
    return next((folder / name for name in _FILES if (folder / name).is_file()), folder / _FILES[0])


def without_values(name: str, **options: Any) -> nn.Module:
    """A timm model to look at, for its names, shapes and settings."""
    try:
        with torch.device("meta"):
            return timm.create_model(name, **options)
    except RuntimeError as error:
        if "loading state_dict" in str(error):
            raise
    # Before 1.0.21 timm computes with some values as it builds.
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(name, **options)


def from_file(section: config.TimmImage, file: Path) -> dict[str, Any]:
    """Options that make timm load a file's weights as its own, with positions resampled.

    timm checks no name once it has left out a classifier, so heads are left out here.
    """
    state = _read(file)
    model = without_values(section.name, num_classes=0)
    classifier = without_values(section.name, num_classes=2).state_dict().keys()
    heads = tuple(classifier - model.state_dict().keys())
    if getattr(model, "attn_pool", model) is None:  # SigLIP's trunk with another pool
        heads += ("attn_pool.",)
    state = {name: tensor for name, tensor in state.items() if not name.startswith(heads)}
    if not _checks_names(section.name):
        _check_names(state, model, file)
    return {"pretrained": True, "pretrained_cfg_overlay": _overlay(state)}


def _overlay(state: dict[str, Tensor]) -> dict[str, Any]:
    return {"state_dict": state, "source": "", "num_classes": 0, "label_offset": 0}


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise ValueError(f"model.image.pretrained: there is no file {str(file)!r}")
    try:
        state = timm.models.load_state_dict(str(file), weights_only=True)
    except Exception as error:  # of pickle, zipfile, safetensors or timm, by what is wrong
        raise ValueError(f"model.image.pretrained: {file} has no weights ({error})") from error
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _checks_names(name: str) -> bool:
    """Whether timm refuses weights of another model, which for some families it does not."""
    options = {
        "num_classes": 0,
        "pretrained_cfg_overlay": _overlay({"no such tensor": torch.zeros(1)}),
    }
    try:
        without_values(name, pretrained=True, **options)
    except Exception:
        return True
    return False


def _check_names(state: dict[str, Tensor], model: nn.Module, file: Path) -> None:
    own = model.state_dict().keys()
    wrong = [f"missing {name}" for name in sorted(own - state.keys())]
    wrong += [f"unexpected {name}" for name in sorted(state.keys() - own)]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"weights of {file} do not fit: {', '.join(wrong[:_SHOWN])}{more}")

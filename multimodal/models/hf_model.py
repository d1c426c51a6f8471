"""Reading one tower from transformers: strict, and without running code of a repository.

transformers fills what a file lacks with random numbers and tells it in a log. Here that is an
error, but for parts that the tower does not use; heads of the file that stand beside the tower, as
a masked language model's, are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from multimodal.files import resolve_package
from multimodal.layers.block import Checkpointing

log = logging.getLogger(__name__)
_SHOWN = 5
_OPTIONS = {"dtype": torch.float32, "trust_remote_code": False}


class HfTower(nn.Module):
    """What the towers of transformers share; `model` is theirs."""

    model: nn.Module

    def save_architecture(self, folder: Path | str) -> None:
        """Write transformers' `config.json`, from which `pretrained: false` rebuilds the tower."""
        self.model.config.save_pretrained(folder)

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """transformers knows whole blocks only, so `selective` is `full` here.

        Raises:
            ValueError: when the model cannot.
        """
        if mode != "none":
            checkpoint_blocks(self.model)


def read_tower(
    name: str, *, side: Literal["image", "text"], pretrained: bool, pooler: bool
) -> nn.Module:
    """A model of transformers, or its part for pictures or texts.

    Args:
        name: hub name, local folder, or `package:NAME/FOLDER`.
        side: of a two-tower model this part is taken; of an encoder-decoder the encoder.
        pretrained: take the weights, not only the architecture.
        pooler: keep a head that pools. Without, it is dropped, for its weights would get no
            gradient.

    Raises:
        ValueError: when it cannot be read, or its weights are incomplete or of another shape.
    """
    name = resolve_package(name)
    try:
        if not pretrained:
            settings = AutoConfig.from_pretrained(name, trust_remote_code=False)
            return _part(AutoModel.from_config(settings, **_OPTIONS), side, pooler)
        model, found = AutoModel.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **_OPTIONS
        )
    except OSError as error:
        raise ValueError(
            f"model.{side}.name={name!r} is neither a folder with a transformers model nor in the "
            "Hugging Face cache, and it could not be fetched. Give a local folder, or run "
            f"`hf download {name}` once where there is a network, and check the spelling. "
            f"transformers says: {error}"
        ) from error
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ValueError(
            f"model.{side}.name={name!r} cannot be read by transformers: {error}"
        ) from error
    part = _part(model, side, pooler)
    unexpected = [key for key in found["unexpected_keys"] if _inside(key, model)]
    refuse_incomplete(f"model.{side}.name={name!r}", model, found, part=part, unexpected=unexpected)
    return part


def refuse_incomplete(
    what: str,
    model: PreTrainedModel,
    found: Mapping[str, Any],
    *,
    part: nn.Module,
    unexpected: Iterable[str],
) -> None:
    """Raise a ValueError when a file did not give a part of a model all its weights, naming them.

    Args:
        what: stands at the beginning of the message.
        model: what was loaded, with `ignore_mismatched_sizes`.
        found: transformers' `output_loading_info`.
        part: the model or what is used of it.
        unexpected: names that the file should not have.
    """
    tensors = model.state_dict(keep_vars=True)
    used = {id(tensor) for tensor in part.state_dict(keep_vars=True).values()}
    wrong = [
        f"missing {key}"
        for key in found["missing_keys"]
        if key in tensors and id(tensors[key]) in used
    ]
    wrong += [_other_shape(entry) for entry in found["mismatched_keys"]]
    wrong += [f"unexpected {key}" for key in unexpected]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"{what}: its weights do not fit its config.json: "
            f"{', '.join(sorted(wrong)[:_SHOWN])}{more}; use files that were saved together"
        )


def _other_shape(entry: str | tuple) -> str:
    """transformers 5 gives both shapes, 4 the name alone."""
    if isinstance(entry, str):
        return f"{entry} of another shape"
    key, there, needed = entry
    return f"{key} is {list(there)} instead of {list(needed)}"


def checkpoint_blocks(model: nn.Module) -> None:
    """Store a block's input only, and compute the rest again in the backward pass.

    Raises:
        ValueError: when the model cannot.
    """
    # The older name is deprecated in transformers 5 and the only one before; parts of two-tower
    # models of transformers 4 have neither.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if (enable := getattr(model, name, None)) is not None:
            return enable({"use_reentrant": False})
    raise ValueError(
        f"{type(model).__name__} cannot store less in this version of transformers; set "
        "train.checkpoint_activations=none"
    )


def _part(model: PreTrainedModel, side: str, pooler: bool) -> nn.Module:
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    model = getattr(model, "text_model" if side == "text" else "vision_model", model)
    if not pooler and getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def _inside(key: str, model: nn.Module) -> bool:
    """Whether a tensor of a file belongs to a part that the model has."""
    key = key.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
    inside = key.split(".")[0] in dict(model.named_children())
    if not inside:
        log.info("left out %s, of a head", key)
    return inside

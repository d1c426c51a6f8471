"""The weights that a new model takes from another: whole parts, strictly, and never none.

A part is a tower with its projection, or the temperature. What it takes must be of the same
architecture, but for settings that only shape training (dropout, attention arithmetic), the size of
pictures (positions are resampled) and shorter texts (positions are cut).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from multimodal import config
from multimodal.data.text import Tokenizer
from multimodal.models.build import build_model, build_tower
from multimodal.models.two_tower import Part, TwoTower
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.resize import resize_positions

log = logging.getLogger(__name__)

_OF_TRAINING = {"drop_path", "dropout", "patch_dropout", "kernel", "pretrained"}
_TEXT_POSITIONS = "text.position.weight"


def check_init(run: config.RunModel, theirs: config.Model) -> None:
    """See that the parts to take have the architecture of the run's.

    Args:
        run: settings of the run's model.
        theirs: settings of `run.init`.

    Raises:
        ValueError: listing all settings that differ.
    """
    problems = []
    for part in run.init_parts:
        if differing := _differences(part, run, theirs):
            problems.append(f"its {part} part has {', '.join(differing)}")
    if problems:
        raise ValueError(
            f"model.init={run.init!r} does not fit the model of this run: "
            + "; ".join(problems)
            + ". Leave these settings out, since those of model.init are the base, or leave the "
            f"part out of model.init_parts={run.init_parts}, which makes it new"
        )


def start_from(theirs: Pretrained, run: config.RunModel, section: config.Model) -> TwoTower:
    """A model with some parts of another; the others are new, drawn from torch's generator.

    Args:
        theirs: where the parts come from; its towers may become the new model's.
        run: says which parts.
        section: settings of the new model.

    Raises:
        ValueError: when a part does not fit.
    """
    check_init(run, theirs.config)
    model = build_model(
        section,
        image=_tower("image", theirs, section) if run.takes("image") else None,
        text=_tower("text", theirs, section) if run.takes("text") else None,
    )
    state = resize_positions(theirs.model.state_dict(), old=theirs.config, new=section)
    for part in ("image", "text", "temperature"):
        if run.takes(part):
            names = _take(part, model, state)
            log.info("%s: %s from %s", part, _sizes(model, names), run.init)
        else:
            log.info("%s: %s new", part, _sizes(model, _names(part, model.state_dict())))
    return model


def tokenizer_of(theirs: Pretrained, section: config.Model) -> Tokenizer:
    """The other model's own tokenizer, for the new model's length of texts."""
    return theirs.tokenizer.shortened(section.text.context_length)


# --- what differs --------------------------------------------------------------------------------


def _differences(part: Part, ours: config.Model, theirs: config.Model) -> list[str]:
    """`setting=theirs, not ours` of all that must be equal and is not."""
    new, old = _architecture(part, ours), _architecture(part, theirs)
    kind = f"model.{part}.kind"
    if new.get(kind) != old.get(kind):
        return [f"{kind}={old[kind]!r}, not {new[kind]!r}"]
    free = _free(part, ours, theirs)
    return [
        f"{name}={old.get(name)!r}, not {new.get(name)!r}"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name not in free
    ]


def _architecture(part: Part, model: config.Model) -> dict[str, Any]:
    """Settings that a part's weights, and what they have learned to read, depend on."""
    if part == "temperature":
        return {f"model.{n}": getattr(model, n) for n in ("logit_scale", "logit_bias")}
    tower = getattr(model, part).model_dump()
    found = {f"model.{part}.{n}": x for n, x in tower.items() if n not in _OF_TRAINING}
    shared = ("embed_dim", f"{part}_projection")
    found |= {f"model.{name}": getattr(model, name) for name in shared}
    if part == "image":
        read = model.preprocess
        return found | {"model.preprocess.mean": read.mean, "model.preprocess.std": read.std}
    return found | {"model.tokenizer": model.tokenizer.model_dump()}


def _free(part: Part, ours: config.Model, theirs: config.Model) -> set[str]:
    """What may differ since the weights can be made to fit."""
    free = {"model.image.image_size"}
    fixed = getattr(ours.text, "fixed_length", False)
    if not fixed and ours.text.context_length < theirs.text.context_length:
        free.add("model.text.context_length")
    if part == "temperature" and theirs.logit_bias is None:
        free.add("model.logit_bias")
    return free


# --- weights -------------------------------------------------------------------------------------


def _tower(side: str, theirs: Pretrained, section: config.Model) -> nn.Module:
    """Their tower itself, or a new one for it where settings of training differ."""
    new, old = getattr(section, side), getattr(theirs.config, side)
    if hasattr(new, "pretrained"):
        old, new = (tower.model_copy(update={"pretrained": False}) for tower in (old, new))
    # Nothing in the settings of a tower from transformers changes the module.
    return getattr(theirs.model, side) if new == old or new.kind == "hf" else build_tower(new)


def _take(part: Part, model: TwoTower, theirs: Mapping[str, Tensor]) -> list[str]:
    """Copy a part's tensors; their names.

    Raises:
        ValueError: when one is missing, not expected or of another shape, or there is none.
    """
    own = model.state_dict()
    ours, given = _names(part, own), {name: theirs[name] for name in _names(part, theirs)}
    if part == "temperature" and "temperature.logit_bias" not in given:
        ours = [name for name in ours if name != "temperature.logit_bias"]
    if part == "text" and _TEXT_POSITIONS in own and _TEXT_POSITIONS in given:
        given[_TEXT_POSITIONS] = given[_TEXT_POSITIONS][: len(own[_TEXT_POSITIONS])]
    problems = [f"missing {name}" for name in ours if name not in given]
    problems += [f"unexpected {name}" for name in given if name not in ours]
    problems += [
        f"{name} is {list(given[name].shape)} instead of {list(own[name].shape)}"
        for name in ours
        if name in given and given[name].shape != own[name].shape
    ]
    if problems or not ours:
        raise ValueError(
            f"model.init: the weights of its {part} part do not fit: "
            f"{'; '.join(problems) or 'there are none'}; leave it out of model.init_parts"
        )
    with torch.no_grad():
        for name in ours:
            own[name].copy_(given[name])
    return ours


def _names(part: Part, names: Mapping[str, Tensor]) -> list[str]:
    starts = (f"{part}.", f"{part}_projection.")
    return [name for name in names if name.startswith(starts)]


def _sizes(model: TwoTower, names: list[str]) -> str:
    state = model.state_dict()
    return f"{len(names)} tensors with {sum(state[n].numel() for n in names):,} numbers"

"""What training does with each parameter: its learning rate, its weight decay, or nothing at all.

    learning rate   optim.lr * layer_decay ** (layers above it in its tower, the projection counted)
                    * lr of the first of `optim.groups` that matches its name
    weight decay    that of the group, else optim.weight_decay; 0 for what never decays
    frozen          by `train.freeze` (parts) or by the group

Everything that follows (gradients, the optimiser's state, what acts as in evaluation) goes by the
names found here, so there is one way to freeze.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from multimodal.config import Optim
from multimodal.models.depth import parameter_layers
from multimodal.models.two_tower import Part, TwoTower

_NEVER_DECAYED = (
    "position",
    "pos_embed",
    "class_token",
    "cls_token",
    "class_embedding",
    "register",
    "reg_token",
    "probe",
    "latent",
    "temperature",
)
"""Starts of a module's or parameter's own name, ours and those of timm and transformers."""
_NEAR = 3
"""Names that are shown for a pattern that matches none."""


class Treatment(NamedTuple):
    """What training does with a parameter."""

    group: str
    """Which setting says so."""
    lr: float
    """As a multiple of the schedule's rate."""
    weight_decay: float
    frozen: bool


def treatments(model: nn.Module, optim: Optim, freeze: Sequence[Part] = ()) -> dict[str, Treatment]:
    """The treatment of every parameter by its name.

    Args:
        model: a TwoTower, where parts are frozen or the rate depends on the depth.
        freeze: parts that keep their weights, as in `train.freeze`.

    Raises:
        ValueError: when a group finds nothing that is left to it, or no tower is left to train.
    """
    exempt = _named_by_libraries(model)
    found = {
        name: Treatment(
            "default" if parameter.requires_grad else "unused by the tower",
            1.0,
            optim.weight_decay if is_decayed(name, parameter) and name not in exempt else 0.0,
            frozen=not parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    }
    if optim.layer_decay != 1.0:
        for name, (layer, factor) in _by_depth(cast(TwoTower, model), optim.layer_decay).items():
            if not found[name].frozen:
                found[name] = found[name]._replace(group=layer, lr=factor)
    claimed: set[str] = set()
    for part in freeze:
        for name in cast(TwoTower, model).parameter_names(part):
            found[name] = Treatment(f"train.freeze: {part}", 0.0, 0.0, frozen=True)
            claimed.add(name)
    _apply_groups(found, optim, claimed)
    if isinstance(model, TwoTower):
        _check_something_learns(model, found)
    return found


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter of this dotted name.

    Decay is for matrices that multiply something. Norms, biases and the temperature are recognised
    by having fewer than two axes; positions, class tokens, registers and probes by name.
    """
    return parameter.ndim >= 2 and not any(
        part.startswith(_NEVER_DECAYED) for part in name.split(".")
    )


def _named_by_libraries(model: nn.Module) -> set[str]:
    """What timm's models say of themselves in `no_weight_decay()`."""
    names = set()
    for path, module in model.named_modules():
        tell = getattr(module, "no_weight_decay", None)
        if callable(tell):
            names |= {f"{path}.{name}".lstrip(".") for name in cast(Iterable[str], tell())}
    return names


def _by_depth(model: TwoTower, decay: float) -> dict[str, tuple[str, float]]:
    """Layer and factor of each parameter of the towers; the projections have a factor of 1."""
    found = {}
    for side, tower in (("image", model.image), ("text", model.text)):
        layers = parameter_layers(tower)
        top = max(layers.values()) + 1
        for name, layer in layers.items():
            found[f"{side}.{name}"] = (f"{side} layer {layer}", decay ** (top - layer))
    return found


def _apply_groups(found: dict[str, Treatment], optim: Optim, claimed: set[str]) -> None:
    for number, group in enumerate(optim.groups):
        label = f"optim.groups.{number}: {group.match}"
        matching = [name for name in found if re.search(group.match, name)]
        left = [name for name in matching if name not in claimed]
        if not left:
            raise ValueError(_why_nothing(number, group.match, matching, found))
        for name in left:
            own = found[name]
            if own.frozen:
                continue
            if group.freeze:
                found[name] = Treatment(label, 0.0, 0.0, frozen=True)
                continue
            decay = own.weight_decay
            if decay and group.weight_decay is not None:
                decay = group.weight_decay
            found[name] = Treatment(label, own.lr * group.lr, decay, frozen=False)
        claimed |= set(left)


def _why_nothing(
    number: int, pattern: str, matching: Sequence[str], found: Mapping[str, Treatment]
) -> str:
    setting = f"optim.groups.{number}.match={pattern!r}"
    if matching:
        before = ", ".join(dict.fromkeys(found[name].group for name in matching))
        return (
            f"{setting} matches {len(matching)} parameters, which all belong to {before} already; "
            "the first that matches counts, so put it before, or remove it"
        )
    plain = re.sub(r"[^\w.]", "", pattern.replace("\\", ""))
    near = difflib.get_close_matches(plain, found, n=_NEAR, cutoff=0.3) or list(found)[:_NEAR]
    return f"{setting} matches no parameter; names are such as {', '.join(near)}"


def _check_something_learns(model: TwoTower, found: Mapping[str, Treatment]) -> None:
    names = (name for side in ("image", "text") for name in model.parameter_names(side))
    if all(found[name].frozen for name in names):
        raise ValueError(
            "optim.groups and train.freeze leave no parameter of a tower to train; freeze fewer"
        )


# --- what is shown -------------------------------------------------------------------------------


def parameter_table(model: nn.Module, found: Mapping[str, Treatment]) -> list[dict[str, Any]]:
    """Rows of equal treatment, in the order of the model: numbers, sizes and all names."""
    rows: dict[Treatment, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        treatment = found[name]
        row = rows.setdefault(
            treatment, {**treatment._asdict(), "tensors": 0, "parameters": 0, "names": []}
        )
        row["tensors"] += 1
        row["parameters"] += parameter.numel()
        row["names"].append(name)
    return list(rows.values())


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same for people; of the names the first."""
    cells = [("group", "lr", "weight decay", "tensors", "parameters", "names")]
    for row in rows:
        more = f" and {len(row['names']) - 1} more" if len(row["names"]) > 1 else ""
        rate, decay = f"x {row['lr']:.4g}", f"{row['weight_decay']:g}"
        if row["frozen"]:
            rate, decay = "frozen", ""
        numbers = (str(row["tensors"]), f"{row['parameters']:,}")
        cells.append((row["group"], rate, decay, *numbers, row["names"][0] + more))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    ]

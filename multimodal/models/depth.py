"""How deep in its tower a parameter lies, for learning rates that fall with the depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import nn


def parameter_layers(tower: nn.Module) -> dict[str, int]:
    """Layer of each parameter of a tower by its name, as timm counts.

    0 is what comes before the blocks (embeddings, class token, positions), and i the i-th block;
    what follows the blocks (the last normalisation, attention pooling) belongs to the last of them.
    The blocks are the longest row of equal modules; before and after go by the order in which the
    tower has its parts. A tower may tell by itself, in `parameter_layers()`.

    Raises:
        ValueError: when it has no such row.
    """
    tell = getattr(tower, "parameter_layers", None)
    if callable(tell):
        return cast(Callable[[], dict[str, int]], tell)()
    path, depth = _row_of_blocks(tower)
    layers, passed = {}, False
    for name, _ in tower.named_parameters():
        if name.startswith(path):
            layers[name] = int(name.removeprefix(path).partition(".")[0]) + 1
            passed = True
        else:
            layers[name] = depth if passed else 0
    return layers


def _row_of_blocks(tower: nn.Module) -> tuple[str, int]:
    """Prefix of the blocks' names, and how many they are."""
    rows = [
        (f"{name}.", len(module))
        for name, module in tower.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and _are_blocks(list(module))
    ]
    if not rows:
        raise ValueError(
            f"optim.layer_decay needs a tower with a row of blocks, and {type(tower).__name__} has "
            "none; set it to 1.0, and give optim.groups"
        )
    return max(rows, key=lambda row: row[1])


def _are_blocks(members: list[nn.Module]) -> bool:
    return len({type(m) for m in members}) == 1 and any(members[0].children())

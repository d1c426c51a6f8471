"""Weights under other libraries' names: tables that say which tensor is which, read both ways.

A table lists every tensor of both sides once. Conversion is strict: a name that is missing, one
that the table does not know, or another shape is an error that names it, so weights of the wrong
kind never load in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """One tensor of theirs, and ours."""

    theirs: str
    """Its name there."""
    ours: tuple[str, ...]
    """Our name; with several, theirs is ours joined along the first axis in this order."""
    reshape: bool = False
    """The axes after the first differ, such as a convolution's and a Linear's. Axes of 1 do not
    count, so a scalar may be a vector of 1, and a table of positions a batch of one."""
    transpose: bool = False
    """Their matrix is ours transposed: they compute `x @ W`, as JAX does and CLIP's projections."""

    def __post_init__(self):
        assert not (self.transpose and self.reshape), f"{self.theirs}: transposed or reshaped"


Table = tuple[Entry, ...]


def same(theirs: str, ours: str, *, reshape: bool = False, transpose: bool = False) -> Entry:
    """The same tensor under another name."""
    return Entry(theirs, (ours,), reshape, transpose)


def affine(theirs: str, ours: str, *, bias: bool = True) -> list[Entry]:
    """The weight and the bias of a Linear or a normalisation."""
    return [
        same(f"{theirs}.{n}", f"{ours}.{n}") for n in (["weight", "bias"] if bias else ["weight"])
    ]


def to_ours(
    table: Table, state: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert their weights to ours.

    Args:
        table: which tensor is which.
        state: their tensors by name.
        like: our tensors by name (a state dict; values are not read): what must come out.

    Returns:
        Our tensors; they may share memory with `state`.

    Raises:
        ValueError: when a tensor is missing, unknown, or does not have the shape needed.
    """
    _check_names("weights given", state, (entry.theirs for entry in table))
    _check_names("model", like, (name for entry in table for name in entry.ours))
    result, wrong = {}, []
    for entry in table:
        parts = [like[name].shape for name in entry.ours]
        tensor, needed = state[entry.theirs], _turned(_joined(parts), entry)
        if not _fits(tensor.shape, needed, entry.reshape):
            wrong.append(_wrong_shape(entry.theirs, tensor, needed))
            continue
        tensor = tensor.t().contiguous() if entry.transpose else tensor
        pieces = tensor.split([part[0] for part in parts]) if len(parts) > 1 else [tensor]
        for name, piece in zip(entry.ours, pieces, strict=True):
            result[name] = piece.reshape(like[name].shape)
    _refuse(wrong)
    return result


def from_ours(
    table: Table, state: Mapping[str, Tensor], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Convert our weights to theirs; as `to_ours`, the other way round."""
    _check_names("weights given", state, (name for entry in table for name in entry.ours))
    _check_names("model", like, (entry.theirs for entry in table))
    result, wrong = {}, []
    for entry in table:
        parts = [state[name] for name in entry.ours]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        needed = _turned(like[entry.theirs].shape, entry)
        if not _fits(tensor.shape, needed, entry.reshape):
            wrong.append(_wrong_shape(" + ".join(entry.ours), tensor, needed))
            continue
        tensor = tensor.t().contiguous() if entry.transpose else tensor
        result[entry.theirs] = tensor.reshape(like[entry.theirs].shape)
    _refuse(wrong)
    return result


def shapes_of_theirs(table: Table, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without values of the shapes that theirs have, where none is reshaped.

    For `from_ours` where the other library is not there to say.
    """
    joined = {entry: _joined([state[name].shape for name in entry.ours]) for entry in table}
    return {
        entry.theirs: torch.empty(_turned(shape, entry), device="meta")
        for entry, shape in joined.items()
    }


def _check_names(what: str, found: Mapping[str, Tensor], known: Iterable[str]) -> None:
    needed = set(known)
    if not needed & found.keys():
        raise ValueError(
            f"the {what} are of another kind: not one of {len(found)} names is known. Found "
            f"{_some(found)}; needed {_some(needed)}"
        )
    problems = []
    if missing := needed - found.keys():
        problems.append(f"missing: {_some(missing)}")
    if unknown := found.keys() - needed:
        problems.append(f"not expected: {_some(unknown)}")
    if problems:
        raise ValueError(
            f"the names of the {what} do not fit the architecture; {'; '.join(problems)}. "
            "Check the depth and the kind of the towers"
        )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "none"


def _joined(shapes: list[torch.Size]) -> torch.Size:
    if len(shapes) == 1:
        return shapes[0]
    return torch.Size([sum(shape[0] for shape in shapes), *shapes[0][1:]])


def _turned(shape: torch.Size, entry: Entry) -> torch.Size:
    """The shape on the other side of an entry."""
    return torch.Size(reversed(shape)) if entry.transpose else shape


def _fits(found: torch.Size, needed: torch.Size, reshape: bool) -> bool:
    if not reshape:
        return found == needed
    first = [next((size for size in shape if size != 1), 1) for shape in (found, needed)]
    return found.numel() == needed.numel() and first[0] == first[1]


def _wrong_shape(name: str, tensor: Tensor, needed: torch.Size) -> str:
    return f"{name} has shape {list(tensor.shape)}, needed {list(needed)}"


def _refuse(wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"weights do not fit the architecture: {'; '.join(wrong[:_SHOWN])}{more}")

"""Pairs of the global batch that share a picture or a caption, and so are no true negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multimodal.config import DuplicatesMode
from multimodal.distributed import gather_rows, rank


@dataclass(frozen=True)
class Duplicates:
    """The relation "same picture or same caption" between all B pairs, each related to itself.

    It is symmetric but not transitive, so it is held as three partitions: j is related to i when
    they are in one group of `image` or of `text`, and a sum over the related pairs is the sum over
    both groups less that over the group of `both`. Hence it takes O(B) memory, and sums O(B D).
    """

    image: Tensor
    """[B] group numbers, int32."""
    text: Tensor
    """[B]"""
    both: Tensor
    """[B]"""
    count: Tensor
    """[B] how many pairs are related to each, itself included."""
    own: slice
    """Which pairs are this rank's rows."""
    shared: Tensor
    """[b] bool on the CPU: this rank's rows that are related to others."""
    ignored: bool
    """Whether the duplicates take no part in the loss; else they count as positives."""

    def mask(self, rows: slice) -> Tensor | None:
        """[m, B]: what this rank's `rows` are related to; None when only to themselves."""
        if not self.shared[rows].any():
            return None
        image, text = self.image[self.own][rows], self.text[self.own][rows]
        return (image[:, None] == self.image).logical_or_(text[:, None] == self.text)

    def sum(self, x: Tensor) -> Tensor:
        """[b, D]: for each of this rank's rows the sum of `x` [B, D] over the related pairs."""
        total = self._group_sum(x, self.image) + self._group_sum(x, self.text)
        return total - self._group_sum(x, self.both)

    def _group_sum(self, x: Tensor, group: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, group, x).index_select(0, group[self.own])


def find_duplicates(
    mode: DuplicatesMode, image_ids: Tensor | None, text_ids: Tensor | None, *, pairs: int
) -> Duplicates | None:
    """Compare the ids of all ranks; None when duplicates are negatives like all others.

    Args:
        image_ids: [b] int64, equal for equal pictures; None takes all pictures as different.
        text_ids: [b] int64, equal for equal captions; None takes all captions as different.
        pairs: b.

    Raises:
        ValueError: when both ids are missing, or are not one for each pair.
    """
    if mode == "negative":
        return None
    if image_ids is None and text_ids is None:
        raise ValueError(
            f"duplicates={mode!r} needs image_ids or text_ids; give at least one of them, or set "
            "loss.duplicates=negative"
        )
    for name, ids in (("image_ids", image_ids), ("text_ids", text_ids)):
        if ids is not None and ids.shape != (pairs,):
            raise ValueError(f"{name} {tuple(ids.shape)} must be one id for each of {pairs} pairs")
    own = slice(rank() * pairs, (rank() + 1) * pairs)
    image, image_count = _groups(image_ids, own, like=text_ids)
    text, text_count = _groups(text_ids, own, like=image_ids)
    _, both, both_count = torch.unique(
        image * len(image) + text, return_inverse=True, return_counts=True
    )
    count = image_count[image] + text_count[text] - both_count[both]
    return Duplicates(
        image=image.int(),
        text=text.int(),
        both=both.int(),
        count=count,
        own=own,
        shared=(count[own] > 1).cpu(),
        ignored=mode == "ignore",
    )


def _groups(ids: Tensor | None, own: slice, like: Tensor | None) -> tuple[Tensor, Tensor]:
    """Group number of each of the B pairs, and the size of each group."""
    if ids is None:
        assert like is not None
        ids = torch.arange(own.start, own.stop, device=like.device)
    _, group, size = torch.unique(gather_rows(ids), return_inverse=True, return_counts=True)
    return group, size

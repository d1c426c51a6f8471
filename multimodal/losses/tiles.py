"""One rank's b x B block of logits, a few rows at a time.

Legend: B pairs in the global batch, b on this rank, m rows of a tile, D embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.losses.duplicates import Duplicates

_TILE = {"cpu": 2**21}
"""Logits in a tile: on a CPU 8 MiB of them, which stay in the cache from one use to the next."""
_TILE_ELSEWHERE = 2**25
_FEWEST_ROWS = 256
"""Fewer make the matrix products slow; so above B = 8192 a tile is 256 x B on a CPU."""


class Tile(NamedTuple):
    """Logits of some of this rank's pictures with all texts."""

    rows: slice
    """Which of this rank's pictures."""
    logits: Tensor
    """[m, B]; the memory is used again for the next tile, so changing it is free."""
    own: Tensor
    """[m] view into the logits: each picture with its own text."""


def tile_rows(pairs: int, own: int, device_type: str) -> int:
    """Rows of a tile, on a process with `own` of all pairs."""
    size = _TILE.get(device_type, _TILE_ELSEWHERE)
    return min(max(size // pairs, _FEWEST_ROWS), own)


def logit_tiles(
    image: Tensor, texts: Tensor, scale: Tensor, first: int, duplicates: Duplicates | None
) -> Iterator[Tile]:
    """Yield the logits `scale * image @ texts.T` tile by tile, those of ignored pairs as -inf.

    Args:
        image: [b, D], this rank's.
        texts: [B, D], all.
        scale: scalar.
        first: which text belongs to row 0.
    """
    m = tile_rows(len(texts), len(image), image.device.type)
    memory = image.new_empty(m, len(texts))
    for start in range(0, len(image), m):
        rows = slice(start, min(start + m, len(image)))
        logits = memory[: rows.stop - start]
        torch.mm(scale * image[rows], texts.T, out=logits)
        own = logits.diagonal(first + start)
        related = duplicates.mask(rows) if duplicates is not None and duplicates.ignored else None
        if related is not None:
            kept = own.clone()
            logits.masked_fill_(related, -torch.inf)
            own.copy_(kept)
        yield Tile(rows, logits, own)


def hardest_negatives(tile: Tile, duplicates: Duplicates | None) -> tuple[Tensor, Tensor]:
    """Largest logit of a negative for each picture [m] and each text [B]; -inf where is none."""
    related = None
    if duplicates is not None and not duplicates.ignored:
        related = duplicates.mask(tile.rows)
    if related is not None:
        negatives = tile.logits.masked_fill(related, -torch.inf)
        return negatives.amax(1), negatives.amax(0)
    own = tile.own.clone()
    tile.own.fill_(-torch.inf)
    hardest = tile.logits.amax(1), tile.logits.amax(0)
    tile.own.copy_(own)
    return hardest

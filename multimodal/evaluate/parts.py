"""How ranks share an evaluation: each takes a contiguous part, so that every sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from multimodal.distributed import (
    failing_together,
    gather_objects,
    gather_rows,
    rank,
    world_size,
)
from multimodal.weights.pretrained import Pretrained

T = TypeVar("T")
Progress = Callable[[int], None]
"""Told how many pictures or texts are done since it was last told; what it raises ends the work."""
_TEXTS = 16_384
"""Embedded between two words of progress."""


def own_part(n: int) -> range:
    """This rank's part of `range(n)`; the parts of all ranks, in order, make up the whole."""
    return range(rank() * n // world_size(), (rank() + 1) * n // world_size())


def gather_list(own: list[T]) -> list[T]:
    """The lists of all ranks, one after the other."""
    return [item for part in gather_objects(own) for item in part]


def gather_features(own: Iterable[Tensor], width: int) -> Tensor:
    """Concatenate float32 [n, width] blocks over batches and ranks to one [N, width] on the CPU."""
    return gather_rows(torch.cat([torch.empty(0, width), *own]))


def encode_texts(pretrained: Pretrained, texts: list[str], progress: Progress) -> Tensor:
    """Embed texts that all ranks have, each rank a part: float32 [N, D] on the CPU."""
    part = own_part(len(texts))
    own = []
    with failing_together():
        for start in range(part.start, part.stop, _TEXTS):
            chunk = texts[start : min(start + _TEXTS, part.stop)]
            own.append(pretrained.encode_text(chunk))
            progress(len(chunk))
    return gather_features(own, pretrained.model.embed_dim)

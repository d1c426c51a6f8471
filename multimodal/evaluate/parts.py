"""How ranks share an evaluation: each takes a contiguous part, so that every sample counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from multimodal.distributed import gather_objects, gather_rows, rank, world_size
from multimodal.weights.pretrained import Pretrained

T = TypeVar("T")


def own_part(n: int) -> range:
    """This rank's part of `range(n)`; the parts of all ranks, in order, make up the whole."""
    return range(rank() * n // world_size(), (rank() + 1) * n // world_size())


def gather_list(own: list[T]) -> list[T]:
    """The lists of all ranks, one after the other."""
    return [item for part in gather_objects(own) for item in part]


def gather_features(own: Iterable[Tensor], width: int) -> Tensor:
    """Concatenate float32 [n, width] blocks over batches and ranks to one [N, width] on the CPU."""
    return gather_rows(torch.cat([torch.empty(0, width), *own]))


def encode_texts(pretrained: Pretrained, texts: list[str]) -> Tensor:
    """Embed texts that all ranks have, each rank a part: float32 [N, D] on the CPU."""
    part = own_part(len(texts))
    own = pretrained.encode_text(texts[part.start : part.stop])
    return gather_features([own], pretrained.model.embed_dim)


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise a ValueError on all ranks when one rank has it, so that none waits for the others."""
    mistake = None
    try:
        yield
    except ValueError as error:
        mistake = str(error)
    mistakes = [text for text in gather_objects(mistake) if text is not None]
    if mistakes:
        raise ValueError(mistakes[0])

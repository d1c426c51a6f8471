"""What a loader hands over."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from multimodal.data.source import Scalar, Skip


@dataclass(frozen=True)
class Batch:
    """One process's part of one training step.

    Attributes:
        images: uint8 [B, 3, S, S], contiguous, not normalised.
        tokens: int64 [B, L].
        lengths: int64 [B], tokens of each text with its start and end.
        keys: Sample names.
        positions: int64 [B], global positions in the training order.
        captions: The texts that `tokens` encode.
        image_ids: int64 [B], equal for pictures of equal bytes.
        text_ids: int64 [B], equal for equal captions, whatever template they stand in.
        skipped: Samples of these positions that others took the place of.
    """

    images: Tensor
    tokens: Tensor
    lengths: Tensor
    keys: list[str]
    positions: Tensor
    captions: list[str]
    image_ids: Tensor
    text_ids: Tensor
    skipped: list[Skip] = field(default_factory=list)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on a device; copies from pinned memory do not wait."""
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def part(self, rows: slice) -> Batch:
        """Some of its rows, as views; the skipped samples are of the whole."""
        cut = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "skipped"}
        return replace(self, **cut)

    def pin_memory(self) -> Batch:
        """Called by the DataLoader."""
        return _map_tensors(self, torch.Tensor.pin_memory)


@dataclass(frozen=True)
class EvalBatch:
    """Some samples, each with all its captions.

    Attributes:
        images: uint8 [B, 3, S, S], contiguous, not normalised.
        keys: Sample names.
        captions: All captions of each sample; may be none.
        metas: Metadata of each sample.
        indices: Number of each sample in the source.
        skipped: Samples that could not be used; they have no row here.
    """

    images: Tensor
    keys: list[str]
    captions: list[tuple[str, ...]]
    metas: list[dict[str, Scalar]]
    indices: list[int]
    skipped: list[Skip] = field(default_factory=list)

    def to(self, device: torch.device | str) -> EvalBatch:
        """As `Batch.to`."""
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> EvalBatch:
        """Called by the DataLoader."""
        return _map_tensors(self, torch.Tensor.pin_memory)


def hash64(texts: Iterable[str]) -> Tensor:
    """The 64-bit BLAKE2b hash of each text, as int64 [n]."""
    encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
    return from_digests(hashlib.blake2b(text, digest_size=8).digest() for text in encoded)


def from_digests(digests: Iterable[bytes]) -> Tensor:
    """Digests of 8 bytes as int64 [n]."""
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64))


def _map_tensors(batch, change: Callable[[Tensor], Tensor]):
    tensors = {k: change(v) for k, v in vars(batch).items() if isinstance(v, Tensor)}
    return replace(batch, **tensors)

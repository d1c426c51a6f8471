"""Which sample stands at a position of the endless training sequence.

The sequence is a pure function of (groups, seed, window): ranks, processes and steps only choose
which positions they read, so any of them can continue where any other stopped.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

_KEPT_WINDOWS = 4
_KEPT_EPOCHS = 2


class Place(NamedTuple):
    """What stands at a position.

    Attributes:
        epoch: Which pass through its source the sample belongs to.
        index: Number of the sample in its source.
        part: Number of the source within a mixture, else 0.
    """

    epoch: int
    index: int
    part: int = 0


class Ordering(Protocol):
    """An endless sequence of samples: positions 0, 1, 2, ..."""

    def __len__(self) -> int:
        """Positions in an epoch."""
        ...

    def locate(self, position: int) -> Place:
        """The sample at a position, whatever was asked before."""
        ...

    def later(self, position: int, batches: int, batch_size: int) -> Place:
        """A sample of the same source that comes up some batches later."""
        ...


def seed_for(seed: int, epoch: int, position: int, stream: str) -> int:
    """A 63-bit number for one random choice about one sample; the same on every machine."""
    return _hash(f"{seed}/{epoch}/{position}/{stream}", 8) >> 1


def _hash(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def permutation(count: int, name: str) -> np.ndarray:
    """Seeded permutation of `range(count)`, int64.

    It sorts the raw output of Philox, which NumPy promises never to change; of
    `Generator.permutation` it does not (NEP 19), and an old run must stay resumable.
    """
    raw = np.random.Philox(key=_hash(name, 16)).random_raw(count)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class _Epoch:
    """The pieces in shuffled order and the windows they make.

    Attributes:
        pieces: Numbers of the pieces, in order.
        first_piece: Place in `pieces` where each window starts, and the end.
        first_sample: Number within the epoch of each window's first sample, and the end.
    """

    pieces: np.ndarray
    first_piece: list[int]
    first_sample: list[int]

    def window(self, number: int) -> np.ndarray:
        """The pieces of a window."""
        return self.pieces[self.first_piece[number] : self.first_piece[number + 1]]

    def size(self, number: int) -> int:
        """The samples of a window."""
        return self.first_sample[number + 1] - self.first_sample[number]


class Order:
    """A global shuffle with local reads.

    In each epoch the groups (shards) are permuted; consecutive ones form windows of at least
    `window` samples, and the samples of each window are permuted. A group larger than the window
    is first cut into pieces. Every sample comes once in each epoch. Memory is O(window).

    Args:
        groups: Sizes of the groups; sample numbers run through them in order.
        seed: Seed of the run.
        window: Samples shuffled together.

    Raises:
        ValueError: when there is no sample.
    """

    def __init__(self, groups: list[int], *, seed: int, window: int):
        self._seed = seed
        self._window = window
        sizes = np.array(groups, np.int64)
        self._count = int(sizes.sum())
        if self._count < 1:
            raise ValueError("the source has no samples; there is nothing to put in order")
        pieces = -(-sizes // window)
        of_piece = np.repeat(np.arange(len(sizes)), pieces)
        offsets = (np.arange(len(of_piece)) - (pieces.cumsum() - pieces)[of_piece]) * window
        self._starts = (sizes.cumsum() - sizes)[of_piece] + offsets
        self._sizes = np.minimum(window, sizes[of_piece] - offsets)
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._count

    def locate(self, position: int) -> Place:
        """The sample at a global position (0, 1, 2, ... without end)."""
        epoch, window, place = self._window_at(position)
        samples = remembered(
            self._windows, (epoch, window), _KEPT_WINDOWS, lambda: self._shuffled(epoch, window)
        )
        return Place(epoch, int(samples[place]))

    def later(self, position: int, batches: int, batch_size: int) -> Place:
        return self.locate(position + batches * batch_size)

    def ahead(self, position: int) -> list[int]:
        """A sample of each piece in the window at a position and then in the next window."""
        epoch, window, place = self._window_at(position)
        following = position - place + self._plan(epoch).size(window)
        return [
            start
            for epoch, window, _ in (self._window_at(position), self._window_at(following))
            for start in self._starts[self._plan(epoch).window(window)].tolist()
        ]

    def _window_at(self, position: int) -> tuple[int, int, int]:
        """Epoch, window within it, and place within the window."""
        epoch, place = divmod(position, self._count)
        first_sample = self._plan(epoch).first_sample
        window = bisect_right(first_sample, place) - 1
        return epoch, window, place - first_sample[window]

    def _plan(self, epoch: int) -> _Epoch:
        return remembered(self._epochs, epoch, _KEPT_EPOCHS, lambda: self._make_plan(epoch))

    def _make_plan(self, epoch: int) -> _Epoch:
        pieces = permutation(len(self._starts), f"{self._seed}/{epoch}/groups")
        ends = self._sizes[pieces].cumsum()
        first_piece, first_sample = [0], [0]
        while first_sample[-1] < self._count:
            full = int(np.searchsorted(ends, first_sample[-1] + self._window))
            last = min(full, len(ends) - 1)
            first_piece.append(last + 1)
            first_sample.append(int(ends[last]))
        return _Epoch(pieces, first_piece, first_sample)

    def _shuffled(self, epoch: int, window: int) -> np.ndarray:
        """Sample numbers of one window in shuffled order, int64."""
        pieces = self._plan(epoch).window(window)
        starts, sizes = self._starts[pieces].tolist(), self._sizes[pieces].tolist()
        runs = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        samples = np.concatenate(runs)
        return samples[permutation(len(samples), f"{self._seed}/{epoch}/{window}")]


def remembered(cache: OrderedDict, key, limit: int, make):
    """The cached value of `key`, made if missing; the oldest unused ones are dropped."""
    if key in cache:
        cache.move_to_end(key)
        return cache[key]
    value = cache[key] = make()
    if len(cache) > limit:
        cache.popitem(last=False)
    return value

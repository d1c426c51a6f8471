"""Several sources as one, in fixed shares.

Positions are cut into blocks of some thousand. A block holds of each source exactly the number of
samples that its share asks for; fractions are carried on, so that after any block the samples of a
source are less than one away from its share of all samples so far. Within a block the sources'
turns are shuffled. Each source runs through an endless order of its own, so each of its samples
comes once in every pass through that source.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np

from multimodal.data.order import Order, Ordering, Place, permutation, remembered, seed_for
from multimodal.data.source import BadSample, Fetching, Sample, Source
from multimodal.data.stream import TrainingSource

_BLOCK = 4096
"""Least number of positions in a block."""
_LARGEST_BLOCK = 1_000_000
"""The smallest share is at least one sample of a block; more would take too much memory."""
_KEPT_BLOCKS = 4


class MixtureSource:
    """The samples of several sources, one source after the other, under keys `NAME/KEY`.

    Args:
        sources: Sources by name.
        weights: Their shares in training, in any unit; without, shares follow the sizes, and an
            epoch of training holds every sample once. With weights it is just as long, and holds
            of some sources less than a pass and of others several.

    Raises:
        ValueError: when a share is too small for the blocks.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float] | None = None):
        self.names = sorted(sources)
        self.sources = [sources[name] for name in self.names]
        sizes = [len(source) for source in self.sources]
        self._ends = list(accumulate(sizes))
        self.weighted = weights is not None
        self.parts = sizes if weights is None else _whole([weights[name] for name in self.names])
        for name, part in zip(self.names, self.parts, strict=True):
            if part * _LARGEST_BLOCK < sum(self.parts):
                raise ValueError(
                    f"mixture: {name} has a share of {part / sum(self.parts):.2g}; the least is "
                    f"{1 / _LARGEST_BLOCK:g}: give it a larger weight, or leave it out"
                )
        named = zip(self.names, self.parts, self.sources, strict=True)
        self.description = "mixture of " + ", ".join(
            f"{part / sum(self.parts):.1%} {name} ({source.description})"
            for name, part, source in named
        )
        self.problems = {
            f"{name}: {reason}": count
            for name, source in zip(self.names, self.sources, strict=True)
            for reason, count in source.problems.items()
        }

    def __len__(self) -> int:
        return self._ends[-1]

    def groups(self) -> list[int]:
        return [size for source in self.sources for size in source.groups()]

    def start(self, part: int) -> int:
        """Number of the first sample of a source."""
        return self._ends[part - 1] if part else 0

    def read(self, index: int) -> Sample:
        part, local = self._locate(index)
        name = self.names[part]
        try:
            sample = self.sources[part].read(local)
        except BadSample as error:
            raise BadSample(error.reason, f"{name}/{error.key}", error.detail) from error
        return Sample(f"{name}/{sample.key}", sample.image, sample.captions, sample.meta)

    def place(self, index: int) -> str:
        part, local = self._locate(index)
        return f"{self.names[part]}/{self.sources[part].place(local)}"

    def fingerprint(self) -> str:
        parts = zip(self.names, self.parts, self.sources, strict=True)
        lines = [f"{name}\t{part}\t{source.fingerprint()}\n" for name, part, source in parts]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        return part, index - self.start(part)


def _whole(weights: list[float]) -> list[int]:
    """Whole numbers in the ratio of the weights, read as the decimals they are written as."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


def training_order(source: Source, *, seed: int, window: int) -> Ordering:
    """The order in which a source is trained on.

    Raises:
        ValueError: when the source has no room for what the window needs at once.
    """
    if isinstance(source, Fetching):
        source.check_window(window)
    if isinstance(source, MixtureSource):
        return MixtureOrder(source, seed=seed, window=window)
    return Order(source.groups(), seed=seed, window=window)


def fetch_ahead(source: Source, order: Ordering, position: int) -> None:
    """Tell sources that fetch their samples what comes next."""
    if isinstance(source, Fetching) and isinstance(order, Order):
        source.fetch_ahead(order.ahead(position))
    elif isinstance(source, MixtureSource) and isinstance(order, MixtureOrder):
        for part, own, turn in zip(
            source.sources, order.orders, order.turns(position), strict=True
        ):
            fetch_ahead(part, own, turn)


def samples_by_source(source: TrainingSource, seed: int, samples: int) -> dict[str, int]:
    """How many of the first `samples` positions each source of a mixture has, by `samples/NAME`."""
    if not isinstance(source, MixtureSource):
        return {}
    counts = Shares(source, seed).counts(samples)
    return {f"samples/{name}": n for name, n in zip(source.names, counts, strict=True)}


class MixtureOrder:
    """The orders of the sources, taken in turn as `Shares` says.

    Args:
        source: The mixture.
        seed: Seed of the run.
        window: Samples of a source shuffled together.
    """

    def __init__(self, source: MixtureSource, *, seed: int, window: int):
        self._source = source
        self._shares = Shares(source, seed)
        self.orders = [
            training_order(part, seed=seed_for(seed, 0, 0, name), window=window)
            for name, part in zip(source.names, source.sources, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._source)

    def locate(self, position: int) -> Place:
        return self.later(position, 0, 0)

    def later(self, position: int, batches: int, batch_size: int) -> Place:
        """Found in the source's own order: in that of the mixture a rare source is far to seek."""
        part, turn = self._shares.locate(position)
        parts = self._source.parts
        in_a_batch = max(1, -(-batch_size * parts[part] // sum(parts)))
        own = self.orders[part].locate(turn + batches * in_a_batch)
        return Place(own.epoch, self._source.start(part) + own.index, part)

    def turns(self, position: int) -> list[int]:
        """How far the order of each source has come before a position."""
        return self._shares.counts(position)


@dataclass(frozen=True)
class _Block:
    """Positions that hold fixed numbers of samples.

    Attributes:
        start: First position.
        before: Samples of each source at earlier positions.
        ends: Samples in the block of each source and all earlier sources.
        slots: Number of each place's sample, counted through the sources, int64 [positions].
    """

    start: int
    before: list[int]
    ends: list[int]
    slots: np.ndarray


class Shares:
    """Which source has a position.

    Samples of each source before a position that starts a block are its share of the position,
    rounded by largest remainders. The exact share of each source in a block is at least one
    sample, so the rounded numbers never fall from one block to the next. Without weights a block
    ends with each epoch, where the shares are whole: there every sample was taken once.
    """

    def __init__(self, source: MixtureSource, seed: int):
        self._parts = source.parts
        self._total = sum(source.parts)
        self._seed = seed
        block = max(_BLOCK, -(-self._total // min(source.parts)))
        self._round = block if source.weighted else len(source)
        self._in_round = max(1, self._round // block)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def locate(self, position: int) -> tuple[int, int]:
        """The source at a position, and how many samples of that source were taken before."""
        block = self._block(position)
        slot = int(block.slots[position - block.start])
        part = bisect_right(block.ends, slot)
        return part, block.before[part] + slot - (block.ends[part - 1] if part else 0)

    def counts(self, position: int) -> list[int]:
        """Samples of each source before a position."""
        block = self._block(position)
        parts = np.searchsorted(block.ends, block.slots[: position - block.start], side="right")
        within = np.bincount(parts, minlength=len(self._parts)).tolist()
        return [sum(pair) for pair in zip(block.before, within, strict=True)]

    def _block(self, position: int) -> _Block:
        rounds, place = divmod(position, self._round)
        number = ((place + 1) * self._in_round - 1) // self._round
        start, end = (
            rounds * self._round + i * self._round // self._in_round for i in (number, number + 1)
        )
        return remembered(self._blocks, start, _KEPT_BLOCKS, lambda: self._make(start, end))

    def _make(self, start: int, end: int) -> _Block:
        before, after = self._apportioned(start), self._apportioned(end)
        sizes = [later - earlier for earlier, later in zip(before, after, strict=True)]
        ends = list(accumulate(sizes))
        shuffled = permutation(end - start, f"{self._seed}/mixture/{start}")
        slots = np.empty_like(shuffled)
        by_source = np.argsort(np.searchsorted(ends, shuffled, side="right"), kind="stable")
        slots[by_source] = np.arange(end - start)  # a source's samples in the order of its turns
        return _Block(start, before, ends, slots)

    def _apportioned(self, count: int) -> list[int]:
        """`count` in whole numbers by the shares (Hamilton's method of largest remainders)."""
        quotas = [divmod(part * count, self._total) for part in self._parts]
        left = count - sum(whole for whole, _ in quotas)
        by_remainder = sorted(range(len(quotas)), key=lambda i: (-quotas[i][1], i))
        raised = set(by_remainder[:left])
        return [whole + (i in raised) for i, (whole, _) in enumerate(quotas)]

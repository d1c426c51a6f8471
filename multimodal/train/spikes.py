"""Steps whose loss leaves the band of the losses before it, with the samples they were of."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

_WINDOW = 100
"""Losses that make the band."""
_FEWEST = 20
"""Before which none is judged."""
_WIDTHS = 5.0
_SIGMA = 1.4826
"""A normal distribution's standard deviation in median absolute deviations."""
_SHARE = 0.2
"""Of the median that the band is wide at least, since losses may hardly differ."""


class LossBand:
    """The band of the last 100 finite losses: up to their median plus five standard deviations.

    The deviation is taken from the median absolute deviation, so that spikes do not widen the band,
    and the band is never narrower than a fifth of the median. A level that stays is accepted once
    it is the median. (MosaicML's rule, twice the rolling mean, misses most spikes of a loss that
    starts at the logarithm of the batch size.)

    Args:
        losses: of a checkpoint, oldest first.
    """

    def __init__(self, losses: Iterable[float] = ()):
        self._losses = deque(losses, maxlen=_WINDOW)

    @property
    def losses(self) -> list[float]:
        """For a checkpoint."""
        return list(self._losses)

    def median_and_limit(self) -> tuple[float, float] | None:
        """None as long as there are too few losses to tell."""
        if len(self._losses) < _FEWEST:
            return None
        median = statistics.median(self._losses)
        deviation = _SIGMA * statistics.median(abs(x - median) for x in self._losses)
        return median, median + max(_WIDTHS * deviation, _SHARE * abs(median))

    def add(self, loss: float) -> None:
        """Move on by one finite loss."""
        self._losses.append(loss)

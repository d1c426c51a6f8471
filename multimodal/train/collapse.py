"""When to say that a tower's embeddings have collapsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LOW = 0.02
"""Of the rank that the rows allow. The quickstart run goes from 42 % through 13 %."""
_FALL = 0.25
"""Of the highest rank of the run so far."""
_ROWS = 3
"""Low rows in a row that are a collapse."""
_FEWEST = 32
"""Rank that the rows must allow: a few rows always lie in few directions."""


class Collapse:
    """Warns once for each collapse of a tower's effective rank, and again after it recovered.

    A row is low when the rank is below 2 % of what rows and embedding allow (but at least 2), and
    the tower has been better: below a quarter of its highest, or the warm-up is over, when a fresh
    model's narrow cone should have opened. Three low rows in a row are a collapse. Fewer than 32
    possible directions are never judged.

    Args:
        state: of a checkpoint.
    """

    def __init__(self, state: Mapping[str, Any]):
        self._highest: dict[str, float] = dict(state.get("highest", {}))
        self._low: dict[str, int] = dict(state.get("low", {}))

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values."""
        return {"highest": dict(self._highest), "low": dict(self._low)}

    def look(self, metrics: Mapping[str, float], *, allowed: int, warmed_up: bool) -> Iterator[str]:
        """Yield a warning for each tower that has just collapsed.

        Args:
            metrics: of a step; without effective ranks it is not looked at.
            allowed: largest rank that rows and embedding could have.
        """
        for side in ("image", "text"):
            rank = metrics.get(f"{side}_effective_rank")
            if rank is None or allowed < _FEWEST:
                continue
            highest = self._highest[side] = max(rank, self._highest.get(side, 0.0))
            worse = warmed_up or rank < _FALL * highest
            is_low = worse and rank < max(_LOW * allowed, 2.0)
            self._low[side] = self._low.get(side, 0) + 1 if is_low else 0
            if self._low[side] == _ROWS:
                yield (
                    f"the {side} embeddings have collapsed: their effective rank is {rank:.1f} of "
                    f"at most {allowed} (highest so far {highest:.1f}); lower optim.lr, lengthen "
                    "optim.warmup, or look at the data"
                )

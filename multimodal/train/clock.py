"""Minutes of training, the same on all ranks."""

from __future__ import annotations

import time

from multimodal.config import Config, parse_duration
from multimodal.distributed import broadcast_object


class Clock:
    """Minutes as rank 0 counts them, asked for only if an interval of the run is in minutes."""

    def __init__(self, config: Config):
        intervals = [config.log.every, config.checkpoint.every]
        intervals += [section.every for section in config.evaluate.values() if section.every]
        self._used = any(parse_duration(every).unit == "minutes" for every in intervals)
        self._start = time.monotonic()
        self._now = 0.0

    def tick(self) -> tuple[float, float]:
        """Minutes at the last tick and now."""
        before = self._now
        if self._used:
            self._now = broadcast_object((time.monotonic() - self._start) / 60)
        return before, self._now

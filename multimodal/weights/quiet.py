"""Other libraries tell each of their steps through the loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(level: int = logging.INFO) -> Iterator[None]:
    """Without log messages up to a level."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)

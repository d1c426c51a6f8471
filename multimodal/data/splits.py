"""Which split a sample belongs to: a hash of its key decides.

So a sample stays in its split when others come or go, and on every machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

REST = "train"
"""The split of the samples that belong to none of those asked for."""


def parse_splits(text: str) -> dict[str, float]:
    """Read `val=0.01,test=0.01`.

    Raises:
        ValueError: when it is written otherwise, or the shares make no sense.
    """
    splits: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            value = float(share)
        except ValueError:
            value = 0.0
        if name in splits:
            raise ValueError(f"splits: {name!r} stands there twice")
        splits[name] = value
    check_splits(splits)
    return splits


def check_splits(splits: Mapping[str, float]) -> None:
    """Refuse names that are no folder's, and shares that leave nothing.

    Raises:
        ValueError: saying which.
    """
    for name, share in splits.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == REST or not 0 < share < 1:
            raise ValueError(
                f"splits: {name!r} with a share of {share} cannot be; give names of letters and "
                f"digits other than {REST!r}, which has the rest, and shares between 0 and 1, such "
                "as val=0.01,test=0.01"
            )
    if sum(splits.values()) >= 1:
        raise ValueError(
            f"splits: {dict(splits)} leave nothing for {REST!r}; choose smaller shares"
        )


def split_of(key: str, splits: Mapping[str, float]) -> str:
    """The split that a sample belongs to, drawn by the BLAKE2b hash of its key."""
    if not splits:
        return ""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") / 2**64
    for name, share in splits.items():
        drawn -= share
        if drawn < 0:
            return name
    return REST

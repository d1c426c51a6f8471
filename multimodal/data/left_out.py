"""What a pack has left out: a file with one JSON row for each sample, as a run keeps it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from multimodal.data.source import Skip


class LeftOut:
    """Rows of `skipped.jsonl`, which is made with the first of them.

    Args:
        folder: Where it is.
        noted: Rows that are certain; what a stopped process wrote after them is cut off.
    """

    def __init__(self, folder: Path, noted: int):
        self._path = folder / "skipped.jsonl"
        self._file = None
        if self._path.exists():
            with self._path.open("r+b") as file:
                for _ in range(noted):
                    file.readline()
                file.truncate(file.tell())

    def add(self, skip: Skip) -> None:
        """Write its row."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", errors="replace")
        row = asdict(skip)
        del row["position"]  # in an order of training, of which there is none here
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def sync(self) -> None:
        """Bring the rows to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

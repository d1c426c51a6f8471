"""Tar shards written so that a stop at any moment can be taken up and ends in the same bytes.

The open shard is `.NUMBER.tar.part`. Its length is noted at times, once it is on the disk; going on
means cutting it back to the last note. A finished shard is renamed, and indexed at once.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from multimodal.data.tar_index import load_index
from multimodal.files import to_disk


@dataclass
class Written:
    """How far a writer has come.

    Attributes:
        finished: Number of samples in each finished shard.
        samples: Number of samples in the open one.
        bytes: Its length.
    """

    finished: list[int] = field(default_factory=list)
    samples: int = 0
    bytes: int = 0

    @property
    def counts(self) -> list[int]:
        """Number of samples in each shard, the open one too."""
        return [*self.finished, self.samples] if self.samples else list(self.finished)


class ShardWriter:
    """Writes `FOLDER/{00000..}.tar`, each of `samples_per_shard` samples but the last.

    A key is five digits of shard and at least four of place, as img2dataset's.

    Args:
        written: What an earlier writer had noted; it is kept up to date here.

    Raises:
        ValueError: when the folder does not hold what was noted.
    """

    def __init__(self, folder: Path, samples_per_shard: int, written: Written):
        self._folder = folder
        self._limit = samples_per_shard
        self._digits = max(4, len(str(samples_per_shard - 1)))
        self.written = written
        self._tar: tarfile.TarFile | None = None

    def add(self, members: Mapping[str, bytes]) -> None:
        """Write one sample, given its parts by file ending."""
        if self._tar is None:
            self._open()
        assert self._tar is not None
        key = f"{len(self.written.finished):05d}{self.written.samples:0{self._digits}d}"
        for ending, content in members.items():
            header = tarfile.TarInfo(f"{key}.{ending}")
            header.size = len(content)
            self._tar.addfile(header, io.BytesIO(content))
        self.written.samples += 1
        self.written.bytes = self._tar.offset
        if self.written.samples == self._limit:
            self.finish()

    def sync(self) -> None:
        """Bring to the disk what `written` tells of."""
        if self._tar is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Close the open shard, if there is one, and write its index."""
        if self._tar is None and not self.written.samples:
            return
        if self._tar is None:
            self._open()
        assert self._tar is not None
        self._tar.close()
        self.sync()
        self._file.close()
        self._tar = None
        final, part = self._paths()
        os.replace(part, final)
        to_disk(self._folder)
        for left_by_a_stop in self._folder.glob(f".{final.name}.index.npz.*"):
            left_by_a_stop.unlink()
        load_index(final)
        self.written.finished.append(self.written.samples)
        self.written.samples = self.written.bytes = 0

    def abandon(self) -> None:
        """Let go of the open shard; what was noted of it stays."""
        if self._tar is not None:
            self._file.close()

    def _paths(self) -> tuple[Path, Path]:
        final = self._folder / f"{len(self.written.finished):05d}.tar"
        return final, final.with_name(f".{final.name}.part")

    def _open(self) -> None:
        final, part = self._paths()
        if self.written.bytes:
            if not part.exists() and final.exists():  # finished after the last note
                os.replace(final, part)
            if not part.exists() or part.stat().st_size < self.written.bytes:
                raise ValueError(
                    f"{part} does not hold the {self.written.samples} samples that were written "
                    "to it; remove the folder and pack again"
                )
            os.truncate(part, self.written.bytes)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(b"")
        self._file = part.open("r+b")
        self._file.seek(self.written.bytes)
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)

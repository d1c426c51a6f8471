"""The bytes of a file or URL from front to back, in spite of a connection that breaks."""

from __future__ import annotations

import urllib.request
from typing import IO
from urllib.error import HTTPError

from multimodal.data.remote import filesystem_of, is_remote, patiently

_PATIENCE = 60
"""Seconds to wait for a connection, or for its next bytes."""
_PASSED_OVER = 1 << 20


class Forward:
    """Reads on where it stopped: after a failure it opens anew and passes over what it has given.

    The web is read by the standard library, since fsspec gives a connection five minutes, which a
    shard may well take while its samples are trained on.

    Args:
        address: A path, or any URL that fsspec knows.
    """

    def __init__(self, address: str):
        self._address = address
        self._file: IO[bytes] | None = None
        self._given = 0

    def read(self, size: int) -> bytes:
        """Up to `size` of the next bytes; none at the end.

        Raises:
            FileNotFoundError: when there is no such file.
            OSError: when it cannot be read in three tries.
        """
        data = patiently(lambda: self._read(size))
        if data is None:
            raise FileNotFoundError(f"{self._address} is not there")
        self._given += len(data)
        return data

    def _read(self, size: int) -> bytes | None:
        try:
            if self._file is None:
                self._file = _open(self._address)
                self._pass_over(self._file)
            return _read(self._file, size)
        except FileNotFoundError:
            return None
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _pass_over(self, file: IO[bytes]) -> None:
        left = self._given
        while left:
            data = _read(file, min(left, _PASSED_OVER))
            if not data:
                raise OSError("it has become shorter")
            left -= len(data)


def _open(address: str) -> IO[bytes]:
    if not is_remote(address):
        return open(address, "rb", buffering=0)
    if address.startswith(("http://", "https://")):
        try:
            return urllib.request.urlopen(address, timeout=_PATIENCE)
        except HTTPError as error:
            if error.code in (404, 410):
                raise FileNotFoundError(f"{address}: {error}") from error
            raise
    filesystem, path = filesystem_of(address)
    return filesystem.open(path, "rb")


def _read(file: IO[bytes], size: int) -> bytes:
    """As `file.read`; but a web server that breaks off must not look like the end of the file."""
    data = file.read(size)
    if not data and getattr(file, "length", None):
        raise OSError(f"the connection ended {getattr(file, 'length', 0)} bytes early")
    return data

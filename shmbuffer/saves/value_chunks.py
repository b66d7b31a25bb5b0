"""Writes and reads the chunks of values: byte strings in a file, one after the other."""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO

from shmbuffer._native import _core

_ALIGN = 8


class Chunks:
    """A file of chunks, and the CRC32C of all data that were written or read so far."""

    def __init__(self, data: BinaryIO) -> None:
        self._data = data
        self.crc = 0

    def add(self, value: Any) -> None:
        """Adds a value of JSON to the checksum, without storing it in the file."""
        self.crc = _core.crc32c(json.dumps(value).encode(), self.crc)

    def write(self, content: Any) -> None:
        """Writes the next chunk, padded to a multiple of 8 bytes."""
        self.crc = _core.crc32c(content, self.crc)
        self._data.write(content)
        self._data.write(bytes(-self._data.tell() % _ALIGN))

    def take(self, nbytes: int) -> bytearray:
        """Reads the next chunk, which has ``nbytes`` bytes.

        Raises ValueError if the file is too short, before any memory is allocated.
        """
        left = os.fstat(self._data.fileno()).st_size - self._data.tell()
        if not 0 <= nbytes <= left:
            raise ValueError(f"expected {nbytes} more bytes, but only {left} are left")
        content = bytearray(self._data.read(nbytes))
        self._data.seek(-self._data.tell() % _ALIGN, os.SEEK_CUR)
        self.crc = _core.crc32c(content, self.crc)
        return content

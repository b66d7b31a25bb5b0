"""The chunks of values, which are written consecutively into a file with one checksum."""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO

from shmbuffer._native import _core

_ALIGN = 8


class Chunks:
    """A file of chunks, and the CRC32C of all data written or read so far."""

    def __init__(self, data: BinaryIO) -> None:
        self._data = data
        self.crc = 0

    def add(self, value: Any) -> None:
        """Adds a JSON value to the checksum."""
        self.crc = _core.crc32c(json.dumps(value).encode(), self.crc)

    def write(self, content: Any) -> None:
        """Writes the next chunk."""
        self.crc = _core.crc32c(content, self.crc)
        self._data.write(content)
        self._data.write(bytes(-self._data.tell() % _ALIGN))

    def take(self, nbytes: int) -> bytearray:
        """Reads the next chunk. Never allocates more memory than the size of the file."""
        there = os.fstat(self._data.fileno()).st_size - self._data.tell()
        if not 0 <= nbytes <= there:
            raise ValueError(f"expected {nbytes} more bytes, but only {there} are left")
        content = bytearray(self._data.read(nbytes))
        self._data.seek(-self._data.tell() % _ALIGN, os.SEEK_CUR)
        self.crc = _core.crc32c(content, self.crc)
        return content

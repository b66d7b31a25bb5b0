"""Flips bits in the two copies of a superblock, and checks what a reader makes of them."""

from __future__ import annotations

import mmap
from pathlib import Path

from shmbuffer import CorruptBufferError, FormatError, IncompatibleVersionError
from shmbuffer._native import _core
from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.control import Control, Superblock

BITS = 8 * layout.SUPERBLOCK_BYTES


class Copies:
    """A control file in memory whose superblock copies are damaged and restored.

    Attributes:
        control: the reader.
        bytes: the bytes that it reads, which may be changed.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        path.write_bytes(content)
        with path.open("r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), layout.CONTROL_BYTES)
            self.control = Control(_core.Map(file.fileno(), layout.CONTROL_BYTES), str(path))
        self.whole = [Superblock.unpack(self.page(copy)) for copy in (0, 1)]
        assert None not in self.whole

    def page(self, copy: int) -> bytes:
        at = copy * layout.SUPERBLOCK_BYTES
        return self.bytes[at : at + layout.SUPERBLOCK_BYTES]

    def flip(self, copy: int, bit: int) -> None:
        self.bytes[copy * layout.SUPERBLOCK_BYTES + bit // 8] ^= 1 << bit % 8

    def require_noticed(self, copy: int, bit: int) -> None:
        """Checks that a copy with this bit flipped is not trusted."""
        self.flip(copy, bit)
        found = Superblock.unpack(self.page(copy))
        self.flip(copy, bit)
        assert found is None, f"bit {bit} of copy {copy} flipped, and it is believed"

    def require_repaired(self, copy: int, bit: int) -> None:
        """Checks that the other copy is read, and that the damage is reported."""
        self.flip(copy, bit)
        found = self.control.superblock()
        repaired = self.control.repaired
        self.flip(copy, bit)
        assert found == self.whole[1 - copy], f"bit {bit} of copy {copy}: not the other copy"
        assert repaired, f"bit {bit} of copy {copy}: nobody knows"

    def require_refused(self, first: int, second: int) -> None:
        """Checks that no field is trusted if a bit of each copy is flipped."""
        self.flip(0, first)
        self.flip(1, second)
        try:
            found = self.control.superblock()
        except (CorruptBufferError, IncompatibleVersionError):
            found = None
        except FormatError:
            assert max(first, second) < 64, "the magic is as it was"
            found = None
        finally:
            self.flip(0, first)
            self.flip(1, second)
        assert found is None, f"bits {first} and {second} flipped, and {found} is believed"

"""Records in memory: a batch of them, as it is written and as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.mapped.extents import padded

HEADER_BYTES = layout.RECORD.itemsize


class RecordBody(bytes):
    """The body of one record. It is a type of its own because an item may be bytes."""

    __slots__ = ()


@dataclass(frozen=True)
class RecordBatch:
    """Records in memory, as they are written and as they are read."""

    data: Bytes
    """uint8, contiguous, from a multiple of 8."""
    starts: Ints
    """int64[n]: offset of each record's header in ``data``, a multiple of 8."""
    sizes: Ints
    """int64[n]: bytes of each record, header included."""

    def __len__(self) -> int:
        return len(self.starts)

    def body(self, row: int) -> memoryview:
        """Returns the bytes after the header of a record."""
        start = int(self.starts[row])
        return self.data[start + HEADER_BYTES : start + int(self.sizes[row])].data

    def bodies(self) -> list[RecordBody]:
        """Copies the body of each record, so that none of them keeps this batch in memory."""
        return [RecordBody(self.body(row)) for row in range(len(self))]


@dataclass(frozen=True)
class RecordSample:
    """Records that were read, each validated."""

    batch: RecordBatch
    index: Ints
    """int64[n]: slots."""
    tickets: Ints
    """int64[n]; -1 where the slot holds no item (`Records.read` only)."""
    weights: NDArray[np.float32] | None
    """float32[n], where they were asked for."""


def join(bodies: Sequence[bytes]) -> RecordBatch:
    """Bodies as a batch."""
    sizes = np.array([HEADER_BYTES + len(body) for body in bodies], np.int64)
    # In front of each its header, which is the ring's, and what fills the one before up.
    fronts = [bytes(HEADER_BYTES + count) for count in range(8)]
    parts: list[bytes] = []
    missing = 0
    for body in bodies:
        parts += (fronts[missing], body)
        missing = -len(body) % 8
    parts.append(bytes(missing))
    data = np.frombuffer(bytearray().join(parts), np.uint8)
    return RecordBatch(data, np.cumsum(padded(sizes)) - padded(sizes), sizes)


def gather(addresses: Ints, sizes: Ints) -> RecordBatch:
    """Copies of records, header included, that lie anywhere in memory."""
    starts = np.cumsum(padded(sizes)) - padded(sizes)
    data = np.zeros(int(padded(sizes).sum()), np.uint8)
    to = address(data) + starts
    _core.move_pieces(address(addresses), address(sizes), address(to), len(sizes))
    return RecordBatch(data, starts, sizes)


def addresses_of(batch: RecordBatch) -> tuple[int, int, int, int, int]:
    """Bytes, their number, starts, sizes and count of a batch, as the core takes them."""
    for name, array in (("starts", batch.starts), ("sizes", batch.sizes)):
        if array.dtype != np.int64 or not array.flags.c_contiguous or len(array) != len(batch):
            raise ValueError(f"{name} of a batch of records are int64[{len(batch)}], contiguous")
    if batch.data.dtype != np.uint8 or not batch.data.flags.c_contiguous:
        raise ValueError("the bytes of a batch of records are uint8, contiguous")
    return (
        address(batch.data),
        batch.data.size,
        address(batch.starts),
        address(batch.sizes),
        len(batch),
    )

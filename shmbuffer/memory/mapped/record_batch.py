"""Batches of records in memory, for writes and for reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.mapped.extents import place_records

HEADER_BYTES = layout.RECORD.itemsize


class RecordBody(bytes):
    """The body of one record. It has its own type because an item may be bytes."""

    __slots__ = ()


@dataclass(frozen=True)
class RecordBatch:
    """Records in memory, for a write or from a read."""

    data: Bytes
    """uint8, contiguous, aligned to 8 bytes."""
    starts: Ints
    """int64[n]: the offset of each record's header in ``data``, a multiple of 8."""
    sizes: Ints
    """int64[n]: the bytes of each record, including its header."""
    outside: Ints | None = None
    """int64[n, k, 3]: offset in the record, address and size of pieces that are not in ``data``.

    Large pieces of a batch to be written are not copied to ``data``, so that they are copied only
    once. In ``data``, such a piece leaves no gap.
    """
    keeps: Any = field(default=None, repr=False)
    """References that keep the memory of these pieces alive."""

    def __len__(self) -> int:
        return len(self.starts)

    def body(self, row: int) -> memoryview:
        """Returns the bytes after the header of a record."""
        if self.outside is not None:
            return self.rows(slice(row, row + 1)).consolidate().body(0)
        start = int(self.starts[row])
        return self.data[start + HEADER_BYTES : start + int(self.sizes[row])].data

    def bodies(self) -> list[RecordBody]:
        """Copies the body of each record, so that none of them keeps this batch in memory."""
        return [RecordBody(self.body(row)) for row in range(len(self))]

    def rows(self, which: Any) -> RecordBatch:
        """Selects records; the bytes are shared."""
        outside = None if self.outside is None else np.ascontiguousarray(self.outside[which])
        return RecordBatch(self.data, self.starts[which], self.sizes[which], outside, self.keeps)

    def consolidate(self) -> RecordBatch:
        """Returns records whose bytes are all in ``data``: itself, or a copy."""
        if self.outside is None:
            return self
        offsets, addresses, sizes = np.moveaxis(self.outside, 2, 0)
        none = np.zeros((len(self), 1), np.int64)
        begins = np.hstack([none, offsets + sizes])  # of what lies between them, in the record
        left_out = np.hstack([none, np.cumsum(sizes, axis=1)])
        between = np.hstack([offsets, self.sizes[:, None]]) - begins
        places, total = place_records(self.sizes)
        data = np.zeros(total, np.uint8)
        origins = address(self.data) + self.starts[:, None] + begins - left_out
        at = np.hstack([origins, addresses]).ravel()
        nbytes = np.hstack([between, sizes]).ravel()
        to = (address(data) + places[:, None] + np.hstack([begins, offsets])).ravel()
        _core.move_pieces(address(at), address(nbytes), address(to), len(to))
        return RecordBatch(data, places, self.sizes)


@dataclass(frozen=True)
class RecordSample:
    """Records that were read and validated."""

    batch: RecordBatch
    index: Ints
    """int64[n]: slots."""
    tickets: Ints
    """int64[n]; -1 if the slot contains no item (`Records.read` only)."""
    weights: NDArray[np.float32] | None
    """float32[n], if weights were requested."""


def join(bodies: Sequence[bytes]) -> RecordBatch:
    """Combines bodies into a batch."""
    sizes = np.array([HEADER_BYTES + len(body) for body in bodies], np.int64)
    # Each body is preceded by the padding of the one before, and by its header, which the ring
    # fills.
    fronts = [bytes(HEADER_BYTES + count) for count in range(8)]
    parts: list[bytes] = []
    missing = 0
    for body in bodies:
        parts += (fronts[missing], body)
        missing = -len(body) % 8
    parts.append(bytes(missing))
    data = np.frombuffer(bytearray().join(parts), np.uint8)
    return RecordBatch(data, place_records(sizes)[0], sizes)


def gather(addresses: Ints, sizes: Ints) -> RecordBatch:
    """Copies records, including their headers, from any addresses into a batch."""
    starts, total = place_records(sizes)
    data = np.zeros(total, np.uint8)
    to = address(data) + starts
    _core.move_pieces(address(addresses), address(sizes), address(to), len(sizes))
    return RecordBatch(data, starts, sizes)


def addresses_of(batch: RecordBatch) -> tuple[int, ...]:
    """Checks the arrays of a batch, and returns their addresses and sizes for the core."""
    for name, array in (("starts", batch.starts), ("sizes", batch.sizes)):
        if array.dtype != np.int64 or not array.flags.c_contiguous or len(array) != len(batch):
            raise ValueError(
                f"{name} of a batch of records must be int64[{len(batch)}], contiguous"
            )
    if batch.data.dtype != np.uint8 or not batch.data.flags.c_contiguous:
        raise ValueError("the bytes of a batch of records must be uint8, contiguous")
    outside, each = batch.outside, 0
    if outside is not None:
        each = outside.shape[1]
        if outside.dtype != np.int64 or not outside.flags.c_contiguous:
            raise ValueError("the pieces outside of a batch of records must be int64, contiguous")
        if outside.shape != (len(batch), each, 3):
            raise ValueError(
                f"the pieces outside of a batch of records must be int64[{len(batch)}, k, 3]"
            )
    return (
        address(batch.data),
        batch.data.size,
        address(batch.starts),
        address(batch.sizes),
        len(batch),
        address(outside),
        each,
    )

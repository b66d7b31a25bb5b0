"""Batches of records in the memory of this process, before a write or after a read."""

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
    """The body of one record. Its own type distinguishes it from an item of type bytes."""

    __slots__ = ()


@dataclass(frozen=True)
class RecordBatch:
    """A batch of n records in the memory of this process."""

    data: Bytes
    """Bytes of the records: a contiguous uint8 array, aligned to 8 bytes."""
    starts: Ints
    """Offset of each record's header in ``data``, a multiple of 8: int64[n]."""
    sizes: Ints
    """Size of each record in bytes, including its header: int64[n]."""
    outside: Ints | None = None
    """Pieces that are not in ``data``: int64[n, k, 3] with offset in the record, address and size.

    The large pieces of a batch that will be written are not copied to ``data``, so that they are
    copied only once. ``data`` contains no gaps for these pieces.
    """
    keeps: Any = field(default=None, repr=False)
    """Object that keeps the memory of the pieces in ``outside`` alive."""

    def __len__(self) -> int:
        return len(self.starts)

    def body(self, row: int) -> memoryview:
        """Returns the body of a record: all bytes after its header."""
        if self.outside is not None:
            return self.rows(slice(row, row + 1)).consolidate().body(0)
        start = int(self.starts[row])
        return self.data[start + HEADER_BYTES : start + int(self.sizes[row])].data

    def bodies(self) -> list[RecordBody]:
        """Copies the body of each record, so that none of them keeps this batch in memory."""
        return [RecordBody(self.body(row)) for row in range(len(self))]

    def rows(self, which: Any) -> RecordBatch:
        """Selects records by an index, slice or mask. The result shares the bytes in ``data``."""
        outside = None if self.outside is None else np.ascontiguousarray(self.outside[which])
        return RecordBatch(self.data, self.starts[which], self.sizes[which], outside, self.keeps)

    def consolidate(self) -> RecordBatch:
        """Returns a batch with all bytes in ``data``: this batch, or a copy if it has ``outside``.

        The copy contains the pieces that are at other addresses in this batch.
        """
        if self.outside is None:
            return self
        offsets, addresses, sizes = np.moveaxis(self.outside, 2, 0)
        none = np.zeros((len(self), 1), np.int64)
        # offsets in the record of the bytes between the pieces outside
        begins = np.hstack([none, offsets + sizes])
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
    """Validated copies of records from the ring."""

    batch: RecordBatch
    index: Ints
    """Slot of each record: int64[n]."""
    tickets: Ints
    """Ticket of each record, int64[n]. In `Records.read`, -1 if the slot contains no item."""
    weights: NDArray[np.float32] | None
    """Importance weight of each record, float32[n]. None if weights were not requested."""


def join(bodies: Sequence[bytes]) -> RecordBatch:
    """Combines the bodies of records into a batch."""
    sizes = np.array([HEADER_BYTES + len(body) for body in bodies], np.int64)
    # Each body is preceded by the padding of the previous body and by a header, which the ring
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
    """Copies records, including their headers, from any addresses into a new batch."""
    starts, total = place_records(sizes)
    data = np.zeros(total, np.uint8)
    to = address(data) + starts
    _core.move_pieces(address(addresses), address(sizes), address(to), len(sizes))
    return RecordBatch(data, starts, sizes)


def addresses_of(batch: RecordBatch) -> tuple[int, ...]:
    """Checks the arrays of a batch, and returns their addresses and sizes for the C core.

    Raises:
        ValueError: An array has a wrong dtype or shape, or is not contiguous.
    """
    for name, array in (("starts", batch.starts), ("sizes", batch.sizes)):
        if array.dtype != np.int64 or not array.flags.c_contiguous or len(array) != len(batch):
            raise ValueError(
                f"{name} of a batch of records must be a contiguous array int64[{len(batch)}], but"
                f" is {array.dtype}{list(array.shape)}"
            )
    if batch.data.dtype != np.uint8 or not batch.data.flags.c_contiguous:
        raise ValueError("the bytes of a batch of records must be a contiguous array of uint8")
    outside, each = batch.outside, 0
    if outside is not None:
        each = outside.shape[1]
        if outside.dtype != np.int64 or not outside.flags.c_contiguous:
            raise ValueError("'outside' of a batch of records must be a contiguous array of int64")
        if outside.shape != (len(batch), each, 3):
            raise ValueError(
                f"'outside' of a batch of records must be int64[{len(batch)}, k, 3], but is"
                f" int64{list(outside.shape)}"
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

"""Decodes records into items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.errors import CorruptBufferError
from shmbuffer.items.records.decoding import cutting
from shmbuffer.items.records.decoding.building import ItemBuilder, built
from shmbuffer.items.records.decoding.table import Column, Own, Table
from shmbuffer.items.records.decoding.transfer import Expand, Transfer, homes
from shmbuffer.memory import record_format
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.mapped.record_batch import RecordBatch
from shmbuffer.memory.record_format import Located

_SMALL_BYTES = 8192  # moving fewer bytes costs less than creating one view


class Decoder:
    """Decodes records into items.

    The items can share the memory of the batch, so the caller must not modify the batch afterwards.
    """

    def __init__(
        self,
        # Decompresses zstd (`Zstd.expand`); None if nothing is compressed with it.
        expand: Expand | None = None,
        where: str = "this buffer",  # name of the buffer in messages
    ) -> None:
        self.expand = expand
        self.where = where
        self.own: Own | None = None

    def items(self, batch: RecordBatch) -> list[Any]:
        """Decodes all records, and returns their items in order.

        The leaves can be views of one block of memory, which is freed when all items are released.
        Cost: 2 µs per item and 0.6 µs per leaf, in addition to decompression.
        """
        batch = writable(batch)
        return self.items_of(batch, record_format.locate(batch, self.where))

    def table(self, batch: RecordBatch) -> Table | None:
        """Returns all records as a table.

        Returns None if there are no records, or if two records differ in the kind of a value.
        """
        located = record_format.locate(batch, self.where)
        return Table.of(batch, located, self.own) if located else None

    def items_of(self, batch: RecordBatch, located: Sequence[Located]) -> list[Any]:
        """Decodes records that have been located, and returns their items in the batch's order."""
        items: list[Any] = [None] * len(batch)
        for one in located:
            for row, item in zip(one.rows.tolist(), self._items_of(batch, one), strict=True):
                items[row] = item
        return items

    def _items_of(self, batch: RecordBatch, located: Located) -> Sequence[Any]:
        table = Table.of(batch, [located], self.own)
        assert table is not None  # a single form always yields a table
        reading = self.reading(batch.data)
        leaves = reading.read([reading.rows(column) for column in table.columns])
        rows = self.rows(table.batch_dims, leaves)
        return built(lambda: rows.rows(table.tree), self.where)

    def reading(self, data: Bytes) -> Reading:
        """Creates a reader for columns of a batch whose bytes are ``data``."""
        return Reading(data, self.expand, self.where)

    def rows(self, batch_dims: Ints, leaves: list[Any]) -> ItemBuilder:
        """Creates a builder of items from columns of leaves."""
        return ItemBuilder(batch_dims, leaves)


class Reading:
    """Reads columns of a batch.

    `rows` and `array` request a column. They return a function for `read`, which copies the bytes
    of all requests and then calls the functions to get the results.
    """

    def __init__(self, data: Bytes, expand: Expand | None, where: str) -> None:
        self.transfer = Transfer(expand, data, where)
        self.data = data
        self.where = where

    def rows(self, column: Column) -> Callable[[], Sequence[Any]]:
        """Requests a column as a sequence of leaves, which are views of the batch if possible."""
        home = self._at_home(column)
        if home is not None:
            return lambda: self.cut(column, self.data, home)
        starts, nbytes = homes(column.nbytes)
        memory = np.empty(nbytes, np.uint8)
        self.transfer.add(column, starts + address(memory), memory)
        return lambda: self.cut(column, memory, starts)

    def array(self, column: Column) -> Callable[[], NDArray[Any]]:
        """Requests a column as one new array ``[n, ...]``.

        All rows must have the same shape and one of NumPy's dtypes.
        """
        out = np.empty((len(column.dims), *column.dims[0].tolist()), column.chunk.dtype)
        self.transfer.add(column, np.arange(len(out)) * column.nbytes + address(out), out)
        return lambda: out

    def read(self, leaves: Sequence[Callable[[], Any]]) -> list[Any]:
        """Copies the bytes of all requests, and returns the results of the given requests."""
        self.transfer.run()
        try:
            return [leaf() for leaf in leaves]
        except ValueError as error:
            raise CorruptBufferError(
                f"{self.where}: a record contains an invalid value ({error}), so it is damaged or "
                "was changed by another program; restore the buffer from a copy",
                path=self.where,
            ) from error

    def cut(self, column: Column, memory: Bytes, starts: Ints) -> Sequence[Any]:
        """Creates the leaves of a column, whose bytes begin at ``memory[starts[i]]``."""
        return cutting.values(memory, starts, column.dims, column.chunk)

    def _at_home(self, column: Column) -> Ints | None:
        """Returns the offset of each row in the batch if the rows can be views of the batch.

        Returns None if they must be copied.
        """
        starts = column.in_place()
        if starts is None:
            return None
        if len(starts) == 1:  # a single row cannot overlap with another one
            return None if int(starts[0]) % max(column.chunk.itemsize, 1) else starts
        ends = starts + column.nbytes
        apart = not (starts[1:] < ends[:-1]).any()
        # An offset is a multiple of 8, but a view of 16-byte numbers needs a multiple of 16.
        whole = not (starts % max(column.chunk.itemsize, 1)).any()
        return starts if apart and whole and self._pays(column, starts) else None

    @staticmethod
    def _pays(column: Column, starts: Ints) -> bool:
        """True if creating a view per row costs less than copying all rows to one block."""
        steps = starts[1:] - starts[:-1]
        return (
            column.chunk.kind != "tensor"
            or int(column.nbytes.sum()) >= _SMALL_BYTES * len(starts)
            or not ((steps != steps[:1]).any() or column.ragged)
        )


def writable(batch: RecordBatch) -> RecordBatch:
    """Returns the batch itself, or a copy if its memory is read-only."""
    if batch.data.flags.writeable:
        return batch
    return replace(batch, data=batch.data.copy())

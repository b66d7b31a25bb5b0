"""Items of records, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.errors import CorruptBufferError
from shmbuffer.items.records import cutting
from shmbuffer.items.records.building import ItemBuilder, built
from shmbuffer.items.records.table import Column, Own, Table
from shmbuffer.items.records.transfer import Expand, Transfer, homes
from shmbuffer.memory import record_format
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.format.record_batch import RecordBatch
from shmbuffer.memory.record_format import Located

_SMALL_BYTES = 8192  # are moved in the time that it takes to cut out what is around them


class Decoder:
    """Makes items of records.

    A batch that is given to a decoder is given away: the result may lie in its memory.
    """

    def __init__(
        self,
        # decompresses zstd (`Zstd.expand`); None where nothing is compressed with it
        expand: Expand | None = None,
        where: str = "this buffer",  # the buffer's name in messages
    ) -> None:
        self.expand = expand
        self.where = where
        self.own: Own | None = None

    def items(self, batch: RecordBatch) -> list[Any]:
        """Every record as the item that was written.

        Leaves of one batch may be views of one memory that nobody else has: an item that is kept
        keeps all of it. Cost: 2 µs an item and 0.6 µs a leaf; decompression.
        """
        batch = writable(batch)
        return self.items_of(batch, record_format.locate(batch, self.where))

    def table(self, batch: RecordBatch) -> Table | None:
        """All records as columns; None where there are none, or they differ in what they hold."""
        located = record_format.locate(batch, self.where)
        return Table.of(batch, located, self.own) if located else None

    def items_of(self, batch: RecordBatch, located: Sequence[Located]) -> list[Any]:
        """The items of all forms, in order."""
        items: list[Any] = [None] * len(batch)
        for one in located:
            for row, item in zip(one.rows.tolist(), self._items_of(batch, one), strict=True):
                items[row] = item
        return items

    def _items_of(self, batch: RecordBatch, located: Located) -> Sequence[Any]:
        table = Table.of(batch, [located], self.own)
        assert table is not None  # one form does not differ from itself
        reading = self.reading(batch.data)
        leaves = reading.read([reading.rows(column) for column in table.columns])
        rows = self.rows(table.batch_dims, leaves)
        return built(lambda: rows.rows(table.tree), self.where)

    def reading(self, data: Bytes) -> Reading:
        """A reader for the columns of a batch with these bytes."""
        return Reading(data, self.expand, self.where)

    def rows(self, batch_dims: Ints, leaves: list[Any]) -> ItemBuilder:
        """A builder that makes items of leaves."""
        return ItemBuilder(batch_dims, leaves)


class Reading:
    """Reads columns: what each of them becomes is said first, and is there after `read`."""

    def __init__(self, data: Bytes, expand: Expand | None, where: str) -> None:
        self.transfer = Transfer(expand, data, where)
        self.data = data
        self.where = where

    def rows(self, column: Column) -> Callable[[], Sequence[Any]]:
        """A leaf for each row. Raw ones stay where they are, if they can."""
        home = self._at_home(column)
        if home is not None:
            return lambda: self.cut(column, self.data, home)
        starts, nbytes = homes(column.nbytes)
        memory = np.empty(nbytes, np.uint8)
        self.transfer.add(column, starts + address(memory), memory)
        return lambda: self.cut(column, memory, starts)

    def array(self, column: Column) -> Callable[[], NDArray[Any]]:
        """A fresh array ``[n, ...]``; all rows have one shape, and numpy knows their dtype."""
        out = np.empty((len(column.dims), *column.dims[0].tolist()), column.chunk.dtype)
        self.transfer.add(column, np.arange(len(out)) * column.nbytes + address(out), out)
        return lambda: out

    def read(self, leaves: Sequence[Callable[[], Any]]) -> list[Any]:
        """Move the bytes, and return the leaves that the functions make of them."""
        self.transfer.run()
        try:
            return [leaf() for leaf in leaves]
        except ValueError as error:
            raise CorruptBufferError(
                f"{self.where}: a record holds what is no value ({error}): it was damaged or "
                "changed from outside; restore the buffer from a copy",
                path=self.where,
            ) from error

    def cut(self, column: Column, memory: Bytes, starts: Ints) -> Sequence[Any]:
        """The leaves in a memory, that of the batch or one of their own."""
        return cutting.values(memory, starts, column.dims, column.chunk)

    def _at_home(self, column: Column) -> Ints | None:
        """Where in the batch's own memory the rows are views; None if they must be moved."""
        starts = column.in_place()
        if starts is None:
            return None
        if len(starts) == 1:  # nothing is beside it
            return None if int(starts[0]) % max(column.chunk.itemsize, 1) else starts
        ends = starts + column.nbytes
        apart = not (starts[1:] < ends[:-1]).any()
        # 16 bytes may lie at a multiple of 8; a view needs a multiple of its own size.
        whole = not (starts % max(column.chunk.itemsize, 1)).any()
        return starts if apart and whole and self._pays(column, starts) else None

    @staticmethod
    def _pays(column: Column, starts: Ints) -> bool:
        """True if views of scattered leaves cost less than moving the leaves together."""
        steps = starts[1:] - starts[:-1]
        return (
            column.chunk.kind != "tensor"
            or int(column.nbytes.sum()) >= _SMALL_BYTES * len(starts)
            or not ((steps != steps[:1]).any() or column.ragged)
        )


def writable(batch: RecordBatch) -> RecordBatch:
    """The batch, or a copy if its memory is read-only."""
    if batch.data.flags.writeable:
        return batch
    return replace(batch, data=batch.data.copy())

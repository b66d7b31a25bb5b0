"""Items of records: one by one, or as one dense batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict

from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory import record_format
from shmbuffer.memory.record_batch import RecordBatch
from shmbuffer.memory.record_format import Located
from shmbuffer.replay.form.deferred import deferred
from shmbuffer.replay.records import cutting
from shmbuffer.replay.records.building import (
    OBJECTS,
    Batch,
    NotDenseError,
    RecordRows,
    built,
    chunks_at,
    chunks_under,
)
from shmbuffer.replay.records.table import Column, Own, Table, columns_of
from shmbuffer.replay.records.transfer import Expand, Transfer, empty, homes

TreePath = tuple[Any, ...]

_CPU = torch.device("cpu")
_NOTHING = np.empty(0, np.uint8)
_SMALL_BYTES = 8192  # are moved in the time that it takes to cut out what is around them
_PLAIN = frozenset(("bytes", "str", "int", "float", "bool", "none"))


class Decoder:
    """Makes items of records.

    A batch that is given to a decoder is given away: the result may lie in its memory.
    """

    def __init__(
        self,
        # decompresses zstd (`Zstd.expand`); None where nothing is compressed with it
        expand: Expand | None = None,
        device: torch.device | None = None,  # where tensors of what comes out are; None is the CPU
        # the user's ``decompression_fn``: called with a chunk (uint8) and a dict of ``"type"``
        # (``"tensor"``), ``"shape"``, ``"dtype"`` and ``"device"`` of what was compressed
        own: Own | None = None,
        where: str = "this buffer",  # the buffer's name in messages
    ) -> None:
        self.expand = expand
        self.device = device
        self.own = own
        self.where = where

    def items(self, batch: RecordBatch) -> list[Any]:
        """Every record as the item that was written.

        Tensors of one batch may be views of one memory that nobody else has: an item that is kept
        keeps all of it. Cost: 2 µs an item and 0.6 µs a leaf; decompression.
        """
        batch = writable(batch)
        return self._items(batch, record_format.locate(batch, self.where))

    def stack(self, batch: RecordBatch, dim: int = 0) -> LazyStackedTensorDict | None:
        """All records as a lazy stack, which makes its items at the first look at them.

        Damage in compressed leaves is seen at that look. None where the items cannot be stacked so
        (tensorclasses, no TensorDicts, several batch dims, no such ``dim``, no records): take
        `items`.

        Cost: 10 µs, and 0.1 to 0.5 µs a record; at the first look that of `items`.
        """
        batch = writable(batch)
        located = record_format.locate(batch, self.where)
        roots = [one.form.tree for one in located]
        if not roots or any(root[0] != "tensordict" for root in roots):
            return None
        (_, rank), device = roots[0][1:3]
        if any(root[1:3] != [["dims", rank], device] for root in roots):
            return None
        if not -rank - 1 <= dim <= rank:
            return None
        sizes = np.concatenate([one.batch_dims[:, :rank] for one in located])
        differ = (sizes != sizes[:1]).any(axis=0)
        return deferred(
            lambda: self._items(batch, located),
            len(batch),
            torch.Size(np.where(differ, -1, sizes[0]).tolist()),
            dim + (rank + 1 if dim < 0 else 0),
        )

    def dense(self, batch: RecordBatch) -> Any:
        """All records as one batch with fresh contiguous tensors ``[n, ...]``.

        TensorDicts as `torch.stack` makes it; dicts and tuples as `batches.collate` does. None
        where items differ in form or in the shape of a leaf, or hold lazy stacks: take `items`.

        Cost: a copy of the bytes, or their decompression; 25 µs a leaf, and 0.1 to 0.5 µs a record.
        """
        table = self.table(batch := writable(batch))
        if table is None or (table.batch_dims != table.batch_dims[:1]).any():
            return None
        values = chunks_under(table.tree, OBJECTS)
        reading = Reading(self, batch.data)
        leaves: list[Callable[[], Any]] = []
        for number, column in enumerate(table.columns):
            if number in values or column.chunk.kind in _PLAIN:
                leaves.append(reading.rows(column))
            elif column.dtype is None or column.ragged:  # or numbers that torch does not have
                return None
            else:
                leaves.append(reading.batch(column))
        try:
            made = Batch(table.batch_dims, reading.read(leaves), self.device)
            return built(lambda: made.of(table.tree), self.where)
        except NotDenseError:
            return None

    def entries(self, batch: RecordBatch, paths: Sequence[TreePath]) -> list[list[Any]]:
        """Some entries of every record, a list for each path; the others are not decompressed.

        Tensors, arrays, numbers; None where there is no such entry, or it is something else. Cost:
        50 µs a form, 0.1 to 0.5 µs a record, and 0.6 µs an entry; decompression.
        """
        batch = writable(batch)
        found: list[list[Any]] = [[None] * len(batch) for _ in paths]
        for one in record_format.locate(batch, self.where):
            there = chunks_at(one.form.tree)
            chunks = [there.get(path) for path in paths]
            numbers = sorted({at for at in chunks if at is not None and _is_number(one, at)})
            reading = Reading(self, batch.data)
            columns = columns_of(batch, [one], numbers, self.own)
            leaves: dict[int | None, Sequence[Any]] = dict(
                zip(numbers, reading.read([reading.rows(each) for each in columns]), strict=True)
            )
            for entries, chunk in zip(found, chunks, strict=True):
                if chunk in leaves:
                    for row, leaf in zip(one.rows.tolist(), leaves[chunk], strict=True):
                        entries[row] = leaf
        return found

    def table(self, batch: RecordBatch) -> Table | None:
        """All records as columns; None where there are none, or they differ in what they hold."""
        located = record_format.locate(batch, self.where)
        return Table.of(batch, located, self.own) if located else None

    def _items(self, batch: RecordBatch, located: Sequence[Located]) -> list[Any]:
        items: list[Any] = [None] * len(batch)
        for one in located:
            for row, item in zip(one.rows.tolist(), self._items_of(batch, one), strict=True):
                items[row] = item
        return items

    def _items_of(self, batch: RecordBatch, located: Located) -> Sequence[Any]:
        table = Table.of(batch, [located], self.own)
        assert table is not None  # one form does not differ from itself
        reading = Reading(self, batch.data)
        leaves = reading.read([reading.rows(column) for column in table.columns])
        rows = RecordRows(table.batch_dims, leaves, self.device)
        return built(lambda: rows.rows(table.tree), self.where)


class Reading:
    """Reads columns: what each of them becomes is said first, and is there after `read`."""

    def __init__(self, decoder: Decoder, data: NDArray[np.uint8] = _NOTHING) -> None:
        self.transfer = Transfer(decoder.expand, data, decoder.where)
        self.device = decoder.device
        self.where = decoder.where
        self._data = torch.from_numpy(data)
        self._sent: torch.Tensor | None = None

    def rows(self, column: Column) -> Callable[[], Sequence[Any]]:
        """A leaf for each row. Raw ones stay where they are, if they can."""
        home = self._at_home(column)
        if home is not None:
            return lambda: self._cut(column, None, home)
        starts, nbytes = homes(column.nbytes)
        memory = empty((nbytes,), torch.uint8)
        self.transfer.add(column, memory, starts)
        return lambda: self._cut(column, memory, starts)

    def batch(self, column: Column) -> Callable[[], torch.Tensor]:
        """A fresh tensor ``[n, ...]``; all rows have one shape."""
        assert column.dtype is not None  # the caller has looked
        out = empty((len(column.dims), *column.dims[0].tolist()), column.dtype)
        self.transfer.add(column, out, np.arange(len(out)) * column.nbytes)
        return self.sent(out)

    def sent(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What was moved to a tensor on the CPU, where it is to be."""
        return lambda: out if self.device is None else out.to(self.device)

    def read(self, leaves: Sequence[Callable[[], Any]]) -> list[Any]:
        """What they have become."""
        self.transfer.run()
        try:
            return [leaf() for leaf in leaves]
        except ValueError as error:
            raise CorruptBufferError(
                f"{self.where}: a record holds what is no value ({error}): it was damaged or "
                "changed from outside; restore the buffer from a copy",
                path=self.where,
            ) from error

    def _at_home(self, column: Column) -> NDArray[np.int64] | None:
        """Where in the batch's own memory the rows are views; None if they must be moved."""
        addresses = column.in_place()
        if addresses is None:
            return None
        starts = addresses - self._data.data_ptr()
        if len(starts) == 1:  # nothing is beside it
            return None if int(starts[0]) % max(column.chunk.itemsize, 1) else starts
        ends = starts + column.nbytes
        apart = not (starts[1:] < ends[:-1]).any()
        # 16 bytes may lie at a multiple of 8; a view needs a multiple of its own size.
        whole = not (starts % max(column.chunk.itemsize, 1)).any()
        return starts if apart and whole and self._pays(column, starts) else None

    @staticmethod
    def _pays(column: Column, starts: NDArray[np.int64]) -> bool:
        """Whether views of what lies scattered cost less than those of what was moved together."""
        steps = starts[1:] - starts[:-1]
        return (
            column.chunk.kind != "tensor"
            or int(column.nbytes.sum()) >= _SMALL_BYTES * len(starts)
            or not ((steps != steps[:1]).any() or column.ragged)
        )

    def _cut(
        self, column: Column, memory: torch.Tensor | None, starts: NDArray[np.int64]
    ) -> Sequence[Any]:
        """The leaves in a memory of their own, or in the batch's."""
        if column.chunk.kind != "tensor":
            where = self._data if memory is None else memory
            return cutting.values(where.numpy(), starts, column.dims, column.chunk)
        dtype = column.dtype
        assert dtype is not None
        if memory is None:
            if self._sent is None:
                self._sent = self._data.to(self.device or _CPU)
            memory = self._sent
        else:
            memory = memory.to(self.device or _CPU)
        return cutting.tensors(memory, starts, column.dims, dtype)


def _is_number(located: Located, chunk: int) -> bool:
    return located.form.chunks[chunk].kind not in ("bytes", "str", "none")


def writable(batch: RecordBatch) -> RecordBatch:
    """The same batch; a copy where torch may not write into it."""
    if batch.data.flags.writeable:
        return batch
    return replace(batch, data=batch.data.copy())

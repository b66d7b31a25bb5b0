"""Decodes records into items or into one dense batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict

from shmbuffer.items.records.decoding import decoder
from shmbuffer.items.records.decoding.building import built
from shmbuffer.items.records.decoding.decoder import writable
from shmbuffer.items.records.decoding.table import Column, Table, columns_of
from shmbuffer.items.records.decoding.transfer import Expand
from shmbuffer.items.records.forms import TreePath
from shmbuffer.memory import record_format
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.mapped.record_batch import RecordBatch
from shmbuffer.memory.record_format import Codec, Form, Located
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.deferred import deferred
from shmbuffer.tensors.form.tensor_batches import lazy_stack_of
from shmbuffer.tensors.records import tensor_cutting
from shmbuffer.tensors.records.tensor_building import (
    OBJECTS,
    Batch,
    NotDenseError,
    TensorItemBuilder,
    chunks_at,
    chunks_under,
)
from shmbuffer.tensors.records.tensor_memory import Decompress, empty, expanded, torch_dtype_of

_NOTHING = np.empty(0, np.uint8)
_PLAIN = frozenset(("bytes", "str", "int", "float", "bool", "none"))


class TensorDecoder(decoder.Decoder):
    """Decodes records into items with tensors and TensorDicts.

    The base class in `items.records.decoding.decoder` decodes items without torch.
    """

    def __init__(
        self,
        # Decompresses zstd (`Zstd.expand`). None if no chunk is compressed with zstd.
        expand: Expand | None = None,
        device: torch.device | None = None,  # device of decoded tensors. None is the CPU.
        # The user's ``decompression_fn``. It takes a chunk (uint8) and a dict with the keys
        # ``"type"`` (always ``"tensor"``), ``"shape"``, ``"dtype"`` and ``"device"``, which
        # describe the original tensor.
        own: Decompress | None = None,
        where: str = "this buffer",  # name of the buffer in messages
    ) -> None:
        super().__init__(expand, where)
        self.device = device
        self.own = None if own is None else partial(expanded, own)

    def reading(self, data: Bytes) -> TensorReading:
        """Returns a reading for records that are stored in these bytes."""
        return TensorReading(self, data)

    def rows(self, batch_dims: Ints, leaves: list[Any]) -> TensorItemBuilder:
        """Returns a builder that creates items from these batch sizes and columns of leaves."""
        return TensorItemBuilder(batch_dims, leaves, self.device)

    def stack(self, batch: RecordBatch, dim: int = 0) -> LazyStackedTensorDict | None:
        """Returns all records as a lazy stack that decodes its items on first access.

        The first access also detects damage in compressed leaves. Returns None if the items cannot
        be stacked, for example because they are tensorclasses or not TensorDicts. In this case use
        `items`.

        Cost: 10 µs, and 0.1 to 0.5 µs per record. The first access costs as much as `items`.
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
        dim += rank + 1 if dim < 0 else 0
        return deferred(
            lambda: self.items_of(batch, located),
            len(batch),
            torch.Size(np.where(differ, -1, sizes[0]).tolist()),
            dim,
            lambda key: None if dim else self._column(batch, located, key),
        )

    def _column(
        self, batch: RecordBatch, located: Sequence[Located], key: str
    ) -> torch.Tensor | None:
        """Returns the entries of all records under a key as one tensor.

        Returns None unless all records have the same form and the entries are uncompressed tensors
        of one shape.
        """
        form = located[0].form
        number = _chunks_of(form).get((key,)) if len(located) == 1 else None
        if number is None or form.chunks[number].codec is not Codec.RAW:
            return None
        (column,) = columns_of(batch, located, [number], self.own)
        if column.chunk.kind != "tensor" or column.ragged:
            return None
        reading = TensorReading(self, batch.data)
        found: torch.Tensor = reading.read([reading.batch(column)])[0]
        return found

    def dense(self, batch: RecordBatch) -> Any:
        """Returns all records as one batch with new contiguous tensors ``[n, ...]``.

        TensorDicts are stacked as by `torch.stack`, and dicts and tuples are collated as by
        `tensor_batches.collate`. Returns None if the items differ in form or in the shape of a
        leaf, or contain lazy stacks. In this case use `items`.

        Cost: a copy of the bytes or their decompression, 25 µs per leaf, and 0.1 to 0.5 µs per
            record.
        """
        located = record_format.locate(batch := writable(batch), self.where)
        reading = TensorReading(self, batch.data)
        if located and located[0].alike and (dtypes := _dtypes_of(located[0].form)) is not None:
            dims, tree = located[0].batch_dims, located[0].form.tree
            read = reading.alike(located[0], dtypes)
        else:
            table = Table.of(batch, located, self.own) if located else None
            if table is None or (table.batch_dims != table.batch_dims[:1]).any():
                return None
            values = _objects_of(located[0].form)
            leaves: list[Callable[[], Any]] = []
            for number, column in enumerate(table.columns):
                if number in values or column.chunk.kind in _PLAIN:
                    leaves.append(reading.rows(column))
                elif column.ragged or torch_dtype_of(column.chunk) is None:
                    return None  # torch may lack the dtype
                else:
                    leaves.append(reading.batch(column))
            dims, tree, read = table.batch_dims, table.tree, reading.read(leaves)
        try:
            builder = Batch(dims, read, self.device)
            return built(lambda: builder.build(tree), self.where)
        except NotDenseError:
            return None

    def entries(
        self, batch: RecordBatch, paths: Sequence[TreePath]
    ) -> list[Sequence[Any] | NDArray[Any]]:
        """Returns the entries of all records at each path, without decompressing other entries.

        An entry is a tensor, array or number, or None if it is missing or an object. If all entries
        at a path are tensors of one shape and NumPy has their dtype, they are returned as one array
        ``[n, ...]``.

        Cost: 30 µs, 20 µs per form, the decompression, and 0.6 µs per entry that is not part of an
            array.
        """
        batch = writable(batch)
        found: list[Any] = [[None] * len(batch) for _ in paths]
        located = record_format.locate(batch, self.where)
        for one in located:
            there = _chunks_of(one.form)
            chunks = [there.get(path) for path in paths]
            numbers = sorted({at for at in chunks if at is not None and _is_number(one, at)})
            reading = TensorReading(self, batch.data)
            leaves: dict[int | None, Any] = dict(
                zip(
                    numbers,
                    reading.read(
                        [
                            reading.array(each)
                            if len(located) == 1 and _is_array(each)
                            else reading.rows(each)
                            for each in columns_of(batch, [one], numbers, self.own)
                        ]
                    ),
                    strict=True,
                )
            )
            for at, chunk in enumerate(chunks):
                if len(located) == 1:
                    found[at] = leaves.get(chunk, found[at])
                elif chunk in leaves:
                    for row, leaf in zip(one.rows.tolist(), leaves[chunk], strict=True):
                        found[at][row] = leaf
        return found


class RawBatch:
    """Validated bytes of several records from a byte ring.

    Decoded items may be views of these bytes.
    """

    def __init__(self, batch: RecordBatch, decoder: TensorDecoder) -> None:
        self.batch = batch
        self.decoder = decoder

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self.batch)

    def items(self) -> list[Any]:
        """Returns the items as a list."""
        return self.decoder.items(self.batch)

    def stacked(self, dim: int) -> Any:
        """Returns a lazy stack that decodes its items on first access.

        Returns a list of the items if they cannot be stacked.
        """
        stack = self.decoder.stack(self.batch, dim)
        if stack is None:
            items = self.items()
            stack = lazy_stack_of(items, dim, fresh=True)
            return items if stack is None else stack
        return stack

    def dense(self) -> Any:
        """Returns one batch, or None if the items differ in form or in the shape of a leaf."""
        return self.decoder.dense(self.batch)


@lru_cache(256)
def _chunks_of(form: Form) -> dict[TreePath, int]:
    return chunks_at(form.tree)


@lru_cache(256)
def _objects_of(form: Form) -> set[int]:
    return chunks_under(form.tree, OBJECTS)


@lru_cache(256)
def _dtypes_of(form: Form) -> list[Any] | None:
    """Returns the torch dtype of each leaf of a form.

    Returns None if the leaves cannot all be read directly into tensors, because one is not a
    tensor, is part of a NonTensorData, or is compressed by the user's function.
    """
    refused = [one.codec is Codec.OWN for one in form.chunks]
    found = list(map(torch_dtype_of, form.chunks))
    return None if any(refused) or None in found or _objects_of(form) else found


class TensorReading(decoder.Reading):
    """Reads columns of records into tensors.

    Each request returns a function that returns the result. It can be called after `read`.
    """

    def __init__(self, owner: TensorDecoder, data: Bytes = _NOTHING) -> None:
        super().__init__(data, owner.expand, owner.where)
        self.device = owner.device
        self._sent: torch.Tensor | None = None

    def batch(self, column: Column) -> Callable[[], torch.Tensor]:
        """Requests a new tensor ``[n, ...]`` with the rows of a column, which have one shape."""
        dtype = torch_dtype_of(column.chunk)
        assert dtype is not None  # checked by the caller
        count = len(column.dims)
        out = empty((count, *column.dims[0].tolist()), dtype)
        at, step = out.data_ptr(), out.nbytes // count
        self.transfer.add(column, at + step * np.arange(count), out)
        return self.to_device(out)

    def alike(self, located: Located, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Reads each leaf of records whose sizes are all equal into a new tensor ``[n, ...]``."""
        count, sizes = len(located.numbers), located.numbers[0].tolist()
        dims = located.form.columns.dims
        out = [empty((count, *sizes[at]), one) for at, one in zip(dims, dtypes, strict=True)]
        self.transfer.add_alike(located, [one.data_ptr() for one in out], out)
        self.read([])
        return [self.to_device(one)() for one in out]

    def to_device(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns a function that returns a CPU tensor, moved to the decoder's device."""
        return lambda: out if self.device is None else out.to(self.device)

    def cut(self, column: Column, memory: Bytes, starts: Ints) -> Sequence[Any]:
        """Cuts memory into the values of a column. ``starts`` are their offsets in bytes."""
        if column.chunk.kind != "tensor":
            return super().cut(column, memory, starts)
        dtype = torch_dtype_of(column.chunk)
        assert dtype is not None
        if memory is self.data and self._sent is not None:
            return tensor_cutting.tensors(self._sent, starts, column.dims, dtype)
        bytes_ = torch.from_numpy(memory) if memory.size else cpu.empty(0, dtype=torch.uint8)
        sent = bytes_.to(self.device or cpu.DEVICE)
        if memory is self.data:
            self._sent = sent
        return tensor_cutting.tensors(sent, starts, column.dims, dtype)


def _is_array(column: Column) -> bool:
    chunk = column.chunk
    return chunk.kind == "tensor" and DTYPES[chunk.dtype].in_numpy and not column.ragged


def _is_number(located: Located, chunk: int) -> bool:
    return located.form.chunks[chunk].kind not in ("bytes", "str", "none")

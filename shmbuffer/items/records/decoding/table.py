"""Records as a table with one column per leaf.

    records ──locate──▶ Located, one per form ──Table.of──▶ columns ──Transfer──▶ new memory

Records of several forms can be in one table if the forms differ only in how bytes are compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.mapped.record_batch import RecordBatch
from shmbuffer.memory.record_format import Chunk, Codec, Located, volumes

_ALL = slice(None)

Rows = Ints | slice
"""Row numbers int64 ``[m]``, or a slice of all rows in order."""


class Stored(NamedTuple):
    """Location of a column in the records of one form."""

    rows: Rows
    located: Located
    number: int
    """Number of the column's chunk in the form."""

    @property
    def chunk(self) -> Chunk:
        """Chunk of the column in this form."""
        return self.located.form.chunks[self.number]


class Raw(NamedTuple):
    """Results of the user's ``decompression_fn`` for the m rows of a column that have one form."""

    rows: Rows
    addresses: Ints
    """Address of each result, int64 ``[m]``."""
    sizes: Ints
    """Size of each result in bytes, int64 ``[m]``."""
    kept: Any
    """Objects that own the memory of the results."""


Own = Callable[[Bytes, Chunk, list[int]], Any]
"""A function that decompresses a leaf with the user's ``decompression_fn``.

Its arguments are the stored bytes, the chunk, and the shape of the leaf.
"""


class Column:
    """A leaf of n items, as the column of a table.

    Args:
        chunk: kind, dtype and rank of the leaf. Its codec is not used.
        dims: shape of each row, int64 ``[n, rank]``.
        parts: locations of the rows. Each row is in exactly one part.
    """

    def __init__(self, chunk: Chunk, dims: Ints, parts: Sequence[Stored | Raw]) -> None:
        self.chunk = chunk
        self.dims = dims
        self.parts = parts

    @cached_property
    def nbytes(self) -> Ints:
        """Size of each row in bytes, int64 ``[n]``."""
        return volumes(self.chunk, self.dims)

    @property
    def ragged(self) -> list[int]:
        """Dimensions of the leaf in which the rows differ in size."""
        return differing(self.dims)

    def in_place(self) -> Ints | None:
        """Returns the offset of each row in the batch, int64 ``[n]``.

        Returns None unless all rows have the same form and are stored raw.
        """
        if len(self.parts) != 1:
            return None
        found = self.parts[0]
        if isinstance(found, Raw):
            return None
        if found.chunk.codec is not Codec.RAW:
            return None
        return found.located.offsets[:, found.number]


class Table(NamedTuple):
    """Records with the same tree, as columns."""

    tree: Any
    """Tree of the records' forms."""
    batch_dims: Ints
    """Batch sizes of the containers in each record, int64 ``[n, ...]``."""
    columns: list[Column]

    @classmethod
    def of(cls, batch: RecordBatch, located: Sequence[Located], own: Own | None) -> Table | None:
        """Returns a table of located records, or None if two records differ in kind."""
        first = located[0].form
        for other in located[1:]:
            if other.form.tree != first.tree or not all(
                map(_alike, other.form.chunks, first.chunks)
            ):
                return None
        every = range(len(first.chunks))
        rows = _rows_of(located)
        batch_dims = _gathered([one.batch_dims for one in located], rows)
        return cls(first.tree, batch_dims, columns_of(batch, located, every, own))


def columns_of(
    batch: RecordBatch, located: Sequence[Located], numbers: Collection[int], own: Own | None
) -> list[Column]:
    """Returns the columns for the chunks with the given numbers.

    The forms of the records must differ only in how bytes are stored.
    """
    rows = _rows_of(located)
    columns = []
    for number in sorted(numbers):
        parts: list[Stored | Raw] = []
        for at, one in zip(rows, located, strict=True):
            part = Stored(at, one, number)
            is_own = part.chunk.codec is Codec.OWN
            parts.append(_by_own(batch, part, own) if is_own else part)
        dims = _gathered([one.dims[number] for one in located], rows)
        columns.append(Column(located[0].form.chunks[number], dims, parts))
    return columns


def _by_own(batch: RecordBatch, part: Stored, own: Own | None) -> Raw:
    if own is None:
        raise RuntimeError(
            "these records were compressed with a compression_fn; open the storage with the "
            "matching decompression_fn"
        )
    located, number = part.located, part.number
    offsets, sizes = located.offsets[:, number], located.sizes[:, number]
    nbytes, shapes = located.expanded[:, number], located.dims[number].tolist()
    kept = []
    addresses = np.zeros(len(offsets), np.int64)
    for row in np.flatnonzero(nbytes).tolist():
        stored = batch.data[offsets[row] :][: sizes[row]]
        kept.append(made := own(stored, part.chunk, shapes[row]))
        addresses[row] = address(made)
    return Raw(part.rows, addresses, nbytes, kept)


def differing(dims: Ints) -> list[int]:
    """Returns the numbers of the columns of ``dims`` in which two rows differ."""
    if not dims.shape[1] or (dims == dims[:1]).all():
        return []
    return [at for at, differs in enumerate((dims != dims[0]).any(axis=0).tolist()) if differs]


def _alike(one: Chunk, other: Chunk) -> bool:
    """True if two chunks have the same kind, dtype and rank. Their codecs can differ."""
    return (one.kind, one.dtype, one.rank) == (other.kind, other.dtype, other.rank)


def _rows_of(located: Sequence[Located]) -> list[Rows]:
    """Returns the row numbers in the table for the records of each form."""
    if len(located) == 1:
        return [_ALL]
    return [one.rows for one in located]


def _gathered(parts: Sequence[Ints], rows: Sequence[Rows]) -> Ints:
    """Merges one array per form into one array, in which part i has the rows ``rows[i]``."""
    if len(parts) == 1:
        return parts[0]
    found = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.int64)
    for part, at in zip(parts, rows, strict=True):
        found[at] = part
    return found

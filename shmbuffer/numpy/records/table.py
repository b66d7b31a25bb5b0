"""Records as a table: a column for each leaf.

    records ──locate──▶ Located, one a form ──Table.of──▶ columns ──Transfer──▶ memory of ours

Records of several forms make one table where their forms differ only in how bytes are stored: in
codecs, places and frames.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.record_batch import RecordBatch
from shmbuffer.memory.record_format import Chunk, Codec, Located, volumes
from shmbuffer.numpy.arrays import address_of

_ALL = slice(None)


class TablePieces(NamedTuple):
    """Where the bytes of a column are, for those of its rows that have one form."""

    rows: NDArray[np.int64] | slice
    """int64[m], or all of them in order."""
    codec: Codec
    placed: bool
    """Several of them may be the same bytes."""
    addresses: NDArray[np.int64]
    """int64[m, pieces]."""
    sizes: NDArray[np.int64]
    """int64[m, pieces]: stored bytes."""
    kept: Any
    """What owns these bytes."""
    frame: Frame | None = None
    """Of zstd, where it has bytes of other columns, too."""
    planar: bool = False
    """The bytes lie plane by plane."""


Own = Callable[
    [RecordBatch, Chunk, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], TablePieces
]
"""What the user's ``decompression_fn`` makes of a chunk, raw: called with the batch, the chunk, its
dims, and offsets and sizes of its pieces."""


class Frame(NamedTuple):
    """What frames of zstd expand to, of which a column is a part."""

    before: NDArray[np.int64]
    """int64[m]: bytes in front of those of the column."""
    nbytes: NDArray[np.int64]
    """int64[m]: all of them."""


class Column:
    """One leaf of n items.

    Args:
        chunk: what it is; how it is stored, ``pieces`` tell.
        dims: int64[n, rank].
        pieces: where its bytes are; each row is in one of them.
    """

    def __init__(
        self, chunk: Chunk, dims: NDArray[np.int64], pieces: Sequence[TablePieces]
    ) -> None:
        self.chunk = chunk
        self.dims = dims
        self.pieces = pieces
        self.nbytes = volumes(chunk, dims)  # int64[n]: size of each row, in bytes

    @cached_property
    def ragged(self) -> list[int]:
        """The dims that differ between rows."""
        return differing(self.dims)

    def in_place(self) -> NDArray[np.int64] | None:
        """int64[n]: addresses of rows that can be used where they are; None if they cannot."""
        if len(self.pieces) != 1:
            return None
        found = self.pieces[0]
        if found.codec is not Codec.RAW or found.placed or found.planar:
            return None
        return found.addresses[:, 0] if found.addresses.shape[1] == 1 else None


class Table(NamedTuple):
    """Records of one tree."""

    tree: Any
    """Of the form."""
    batch_dims: NDArray[np.int64]
    """int64[n, ...]."""
    columns: list[Column]

    @classmethod
    def of(cls, batch: RecordBatch, located: Sequence[Located], own: Own | None) -> Table | None:
        """The records of these forms; None where the forms differ in what they hold."""
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
    """Some chunks of records whose forms differ only in how bytes are stored."""
    rows, base = _rows_of(located), address_of(batch.data)
    columns = []
    at = [0] * len(located)
    frames = [_frames_of(one) for one in located]
    for number, chunk in enumerate(located[0].form.chunks):
        pieces = []
        for part, one in enumerate(located):
            stored = one.form.chunks[number]
            start = at[part]
            end = at[part] = start + stored.pieces
            if number not in numbers:
                continue
            offsets, sizes = one.offsets[:, start:end], one.sizes[:, start:end]
            if stored.codec is Codec.OWN:
                if own is None:
                    raise RuntimeError(
                        "these records were compressed by a compression_fn: open the storage with "
                        "the decompression_fn that belongs to it"
                    )
                found = own(batch, stored, one.dims[number], offsets, sizes)
                pieces.append(found._replace(rows=rows[part]))
                continue
            frame = None
            if number in frames[part]:
                head, frame = frames[part][number]
                offsets, sizes = one.offsets[:, head : head + 1], one.sizes[:, head : head + 1]
            where = offsets + base
            pieces.append(
                TablePieces(
                    rows[part],
                    stored.codec,
                    stored.placed,
                    where,
                    sizes,
                    batch.data,
                    frame,
                    stored.planar,
                )
            )
        if pieces:
            columns.append(
                Column(chunk, _gathered([one.dims[number] for one in located], rows), pieces)
            )
    return columns


def _frames_of(located: Located) -> dict[int, tuple[int, Frame]]:
    """For each chunk that lies in a frame with others the piece which is that frame."""
    found: dict[int, tuple[int, Frame]] = {}
    columns, chunks = located.form.columns, located.form.chunks
    members: dict[int, list[int]] = {}
    for piece, head in columns.joined:
        members.setdefault(head, [head]).append(piece)
    for head, pieces in members.items():
        end = np.zeros(len(located.rows), np.int64)
        starts = []
        for piece in pieces:
            number = int(columns.chunk_of[piece])
            starts.append((number, end))
            end = end + volumes(chunks[number], located.dims[number])
        found.update((number, (head, Frame(before, end))) for number, before in starts)
    return found


def differing(dims: NDArray[np.int64]) -> list[int]:
    """The columns in which rows differ."""
    if not dims.shape[1] or (dims == dims[:1]).all():
        return []
    return [at for at, differs in enumerate((dims != dims[0]).any(axis=0).tolist()) if differs]


def _alike(one: Chunk, other: Chunk) -> bool:
    """Whether two chunks hold the same kind of thing, however it is stored."""
    return (one.kind, one.dtype, one.rank) == (other.kind, other.dtype, other.rank)


def _rows_of(located: Sequence[Located]) -> list[NDArray[np.int64] | slice]:
    """Where in a table the records of each form are."""
    if len(located) == 1:
        return [_ALL]
    return [one.rows for one in located]


def _gathered(
    parts: Sequence[NDArray[np.int64]], rows: Sequence[NDArray[np.int64] | slice]
) -> NDArray[np.int64]:
    """Rows of several forms, each at its number."""
    if len(parts) == 1:
        return parts[0]
    found = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.int64)
    for part, at in zip(parts, rows, strict=True):
        found[at] = part
    return found

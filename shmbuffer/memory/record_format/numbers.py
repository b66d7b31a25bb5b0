"""Tables that describe the numbers and pieces of all records of a form.

The numbers of n records are an int64 array [n, numbers]. Each of its columns is one size, such as a
dim of a leaf.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.record_format.chunks import Chunk, Codec

Place = tuple[str, int, int]
"""Location of a size: ("batch", column, 0), ("dim", chunk, dim) or ("value", constant, 0)."""


_STORAGE_KINDS = {Codec.ZSTD: 1, Codec.JOINED: 2}
"""Values of ``enum shmb_piece_kind`` in frames.h, by codec.

The core treats all other pieces as raw bytes. Python decodes those of a user's function.
"""


class NumberColumns(NamedTuple):
    """The columns of a form's numbers, and the storage of its pieces.

    Columns with constants are appended to the numbers of each record. A single comparison of
    columns then checks all sizes that must be equal, and products of columns are the sizes of the
    chunks in bytes.
    """

    numbers: int
    """Number of columns, without the constants."""
    constants: Ints
    """The constants, in the order of their columns."""
    dims: tuple[slice, ...]
    """The columns of each chunk's dims."""
    factors: Ints
    """The columns whose product is the size of a chunk: its itemsize and its dims, by chunk."""
    first: Ints
    """Index of each chunk's first column in ``factors``."""
    equal: tuple[Ints, Ints]
    """Pairs of columns that must be equal: the expected ones, and those to compare with them."""
    stored: Ints
    """The chunks whose compressed size is one of the numbers."""
    sizes: Ints
    """The columns of these compressed sizes."""
    raw: Flags
    """Mask of the raw chunks, bool[chunks]."""
    zstd: Ints
    """The chunks that are compressed with zstd and have their own frame."""
    joined: tuple[tuple[int, int], ...]
    """The joined chunks, each with the number of the chunk whose frame contains its bytes."""
    alignments: tuple[int, ...]
    """Alignment of each chunk's piece in bytes."""
    storage: Ints
    """int64[chunks, 3], an argument of `_core.distribute_pieces` (`shmb_piece_storage`)."""
    steps: Ints
    """int64 array, an argument of `_core.locate_pieces`, which locating.h describes."""


def compute_columns(
    batch_dims: int, chunks: tuple[Chunk, ...], equal: list[tuple[Place, Place]]
) -> NumberColumns:
    """Computes the columns of a form.

    Args:
        batch_dims: Number of batch sizes, which are the first columns.
        chunks: The chunks of the form.
        equal: Pairs of sizes that must be equal.
    """
    at = batch_dims
    dims = []
    size_of: dict[int, int] = {}  # column of the compressed size, by chunk
    storage: list[list[int]] = []
    last: dict[int, int] = {}  # the last chunk in a frame, by the first chunk in the frame
    for number, chunk in enumerate(chunks):
        dims.append(slice(at, at + chunk.rank))
        at += chunk.rank
        if chunk.codec in (Codec.ZSTD, Codec.OWN):
            size_of[number] = at
            at += 1
        if chunk.joined is not None:
            storage[last[chunk.joined]][1] = number
        last[number if chunk.joined is None else chunk.joined] = number
        planes = dims[-1].stop - 1 if chunk.planar else -1
        storage.append([_STORAGE_KINDS.get(chunk.codec, 0), -1, planes])
    constants: dict[int, int] = {}  # the column of each constant, by value

    def column(value: int) -> int:
        """Returns the column of a constant, which is added if it is new."""
        return constants.setdefault(value, at + len(constants))

    first = []
    factors: list[int] = []
    for chunk, own_dims in zip(chunks, dims, strict=True):
        first.append(len(factors))
        factors += [column(chunk.itemsize), *range(own_dims.start, own_dims.stop)]

    def column_of(place: Place) -> int:
        """Returns the column of a size."""
        match place:
            case ("dim", number, dim):
                return dims[number].start + dim
            case ("value", value, _):
                return column(value)
        return place[1]

    left, right = ([column_of(pair[side]) for pair in equal] for side in (0, 1))
    steps = [at, len(constants), len(left), len(chunks), *constants]
    steps += [column for pair in zip(left, right, strict=True) for column in pair]
    for number, chunk in enumerate(chunks):
        columns = factors[first[number] : first[number] + 1 + chunk.rank]
        head = -1 if chunk.joined is None else chunk.joined
        steps += [chunk.alignment, chunk.codec, size_of.get(number, -1), head]
        steps += [len(columns), *columns]
    return NumberColumns(
        numbers=at,
        constants=_ints(list(constants)),
        dims=tuple(dims),
        factors=_ints(factors),
        first=_ints(first),
        equal=(_ints(left), _ints(right)),
        stored=_ints(list(size_of)),
        sizes=_ints(list(size_of.values())),
        raw=np.array([chunk.codec is Codec.RAW for chunk in chunks], np.bool_),
        zstd=_ints([at for at, chunk in enumerate(chunks) if chunk.codec is Codec.ZSTD]),
        joined=tuple(
            (at, chunk.joined) for at, chunk in enumerate(chunks) if chunk.joined is not None
        ),
        alignments=tuple(chunk.alignment for chunk in chunks),
        storage=np.array(storage, np.int64).reshape(len(chunks), 3),
        steps=_ints(steps),
    )


def _ints(values: list[int]) -> Ints:
    """Converts a list of integers to an int64 array."""
    return np.array(values, np.int64)

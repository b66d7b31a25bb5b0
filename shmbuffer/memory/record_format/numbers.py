"""The places of the numbers of a form, and the storage of its pieces."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.record_format.chunks import Chunk, Codec

Place = tuple[str, int, int]
"""The place of a size: ("batch", column, 0), ("dim", chunk, dim) or ("value", itself, 0)."""


_HELD = {Codec.ZSTD: 1, Codec.JOINED: 2}
"""``enum shmb_piece_kind`` of frames.h by codec. Python decodes chunks of a user's function."""


class NumberColumns(NamedTuple):
    """Where the numbers of a form are, and how its pieces are stored, by chunk.

    A row of numbers is extended by constants. One comparison then checks all sizes that must be
    equal, and one product gives the bytes of every chunk.
    """

    numbers: int
    constants: Ints
    dims: tuple[slice, ...]
    """The columns of each chunk's dims."""
    factors: Ints
    """Columns: for each chunk, its itemsize and its dims."""
    first: Ints
    """The start of each chunk in ``factors``."""
    equal: tuple[Ints, Ints]
    """Columns that must be equal: the expected ones, and those to compare."""
    stored: Ints
    """Pieces whose size is one of the numbers."""
    sizes: Ints
    """The columns of these sizes."""
    raw: Flags
    """Flags of raw chunks: bool[chunks]."""
    zstd: Ints
    """Pieces that are compressed with zstd."""
    joined: tuple[tuple[int, int], ...]
    """Pieces in the frames of others, each with the piece that has the frame."""
    alignments: tuple[int, ...]
    """The alignment of each chunk."""
    held: Ints
    """int64[chunks, 3] for `_core.distribute_pieces`: see `shmb_piece_storage` in frames.h."""
    steps: Ints
    """int64 array of steps for `_core.locate_pieces`, as locating.h describes."""


def columns_of(
    batch_dims: int, chunks: tuple[Chunk, ...], equal: list[tuple[Place, Place]]
) -> NumberColumns:
    """Computes the columns of a form with these chunks, in which these sizes must be equal."""
    at = batch_dims
    dims = []
    size_of: dict[int, int] = {}  # column of the size, by the number of the chunk
    held: list[list[int]] = []
    last: dict[int, int] = {}  # last piece in each frame, by the piece that has the frame
    for number, chunk in enumerate(chunks):
        dims.append(slice(at, at + chunk.rank))
        at += chunk.rank
        if chunk.codec in (Codec.ZSTD, Codec.OWN):
            size_of[number] = at
            at += 1
        if chunk.joined is not None:
            held[last[chunk.joined]][1] = number
        last[number if chunk.joined is None else chunk.joined] = number
        planes = dims[-1].stop - 1 if chunk.planar else -1
        held.append([_HELD.get(chunk.codec, 0), -1, planes])
    constants: dict[int, int] = {}  # column by value

    def column(value: int) -> int:
        return constants.setdefault(value, at + len(constants))

    first = []
    factors: list[int] = []
    for chunk, mine in zip(chunks, dims, strict=True):
        first.append(len(factors))
        factors += [column(chunk.itemsize), *range(mine.start, mine.stop)]

    def found_in(place: Place) -> int:
        match place:
            case ("dim", number, dim):
                return dims[number].start + dim
            case ("value", value, _):
                return column(value)
        return place[1]

    left, right = ([found_in(pair[side]) for pair in equal] for side in (0, 1))
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
        held=np.array(held, np.int64).reshape(len(chunks), 3),
        steps=_ints(steps),
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)

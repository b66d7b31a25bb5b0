"""The places of the numbers and pieces of a form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.record_format.chunks import Chunk, Codec

Place = tuple[str, int, int]
"""A size: ("batch", column, 0), ("dim", chunk, dim) or ("value", itself, 0)."""


class NumberColumns(NamedTuple):
    """Where the numbers and the pieces of a form are; pieces are counted chunk after chunk.

    A row of numbers is made longer by constants, so that one comparison says all that must be equal
    and one product gives the bytes of every chunk.
    """

    numbers: int
    pieces: int
    constants: Ints
    dims: tuple[slice, ...]
    """Of each chunk."""
    factors: Ints
    """Columns: for each chunk its itemsize and its dims."""
    first: Ints
    """The start of each chunk in ``factors``."""
    chunk_of: Ints
    """int64[pieces]."""
    parts: Ints
    """int64[pieces]: into how many pieces the chunk is divided."""
    equal: tuple[Ints, Ints]
    """Columns: what is expected, and where."""
    stored: Ints
    """Pieces whose size is among the numbers."""
    sizes: Ints
    """Columns of these."""
    placed: Ints
    """Pieces that have places."""
    offsets: Ints
    """Columns of these."""
    raw: Flags
    """bool[pieces]."""
    zstd: Ints
    """Pieces."""
    joined: tuple[tuple[int, int], ...]
    """Pieces in the frames of others, each with the piece whose frame it is."""
    inline: tuple[tuple[int, int], ...]
    """The other pieces, in order, and what each is aligned to."""
    front: int
    """The alignment of placed pieces."""
    gapped: Ints
    """Pieces before which there may be a gap."""
    held: Ints
    """int64[pieces, 3], for `_core.take_apart`: whether it is compressed with zstd; the piece in
    whose frame it is, or itself; the column of its planes, or -1."""
    steps: Ints | None
    """The same for `_core.locate_pieces`; None where pieces are placed."""


def columns_of(
    batch_dims: int, chunks: tuple[Chunk, ...], equal: list[tuple[Place, Place]]
) -> NumberColumns:
    """Of a form with these chunks, in which these sizes have to be equal."""
    at = batch_dims
    dims, sizes, offsets = [], [], []
    stored, placed, zstd, joined, inline, parts = [], [], [], [], [], []
    chunk_of: list[int] = []
    raw: list[bool] = []
    ways: list[tuple[bool, int, int]] = []
    for number, chunk in enumerate(chunks):
        dims.append(slice(at, at + chunk.rank))
        at += chunk.rank
        for piece in range(len(raw), len(raw) + chunk.pieces):
            head = piece if chunk.joined is None else chunk_of.index(chunk.joined)
            if chunk.placed:
                placed.append(piece)
                offsets.append(at)
                at += 1
            else:
                inline.append((piece, chunk.alignment))
            if chunk.placed or chunk.codec in (Codec.ZSTD, Codec.OWN):
                stored.append(piece)
                sizes.append(at)
                at += 1
            if chunk.codec is Codec.ZSTD:
                zstd.append(piece)
            if chunk.joined is not None:
                joined.append((piece, head))
            packed = chunk.codec in (Codec.ZSTD, Codec.JOINED)
            planes = dims[-1].stop - 1 if chunk.planar and not chunk.frames else -1
            ways.append((packed, head, planes))
            raw.append(chunk.codec is Codec.RAW)
            chunk_of.append(number)
            parts.append(chunk.pieces)
    constants: dict[int, int] = {}  # value: column

    def column(value: int) -> int:
        return constants.setdefault(value, at + len(constants))

    first = []
    factors: list[int] = []
    for chunk, held in zip(chunks, dims, strict=True):
        first.append(len(factors))
        factors += [column(chunk.itemsize), *range(held.start, held.stop)]

    def found_in(place: Place) -> int:
        match place:
            case ("dim", number, dim):
                return dims[number].start + dim
            case ("value", value, _):
                return column(value)
        return place[1]

    left, right = ([found_in(pair[side]) for pair in equal] for side in (0, 1))
    steps = [at, len(constants), len(left), len(raw), *constants]
    steps += [column for pair in zip(left, right, strict=True) for column in pair]
    of_size, head_of = dict(zip(stored, sizes, strict=True)), dict(joined)
    for number, chunk in enumerate(chunks):
        mine = factors[first[number] : first[number] + 1 + chunk.rank]
        steps += [chunk.alignment, chunk.codec, of_size.get(number, -1), head_of.get(number, -1)]
        steps += [len(mine), *mine]
    front = max((chunk.alignment for chunk in chunks if chunk.placed), default=1)
    gapped = [piece for piece, alignment in inline if alignment > 1]
    return NumberColumns(
        numbers=at,
        pieces=len(raw),
        constants=np.array(list(constants), np.int64),
        dims=tuple(dims),
        factors=_ints(factors),
        first=_ints(first),
        chunk_of=_ints(chunk_of),
        parts=_ints(parts),
        equal=(_ints(left), _ints(right)),
        stored=_ints(stored),
        sizes=_ints(sizes),
        placed=_ints(placed),
        offsets=_ints(offsets),
        raw=np.array(raw, np.bool_),
        zstd=_ints(zstd),
        joined=tuple(joined),
        inline=tuple(inline),
        front=front,
        gapped=_ints(gapped + placed if front > 1 else gapped),
        held=np.array(ways, np.int64).reshape(len(raw), 3),
        steps=None if placed else _ints(steps),
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)

"""The pieces of records, one for each chunk: their sizes and places."""

from __future__ import annotations

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.record_format.bounds import (
    MAX_RAW_BYTES,
    MAX_U32,
    MAX_VOLUME,
    plausible,
    refuse,
)
from shmbuffer.memory.record_format.chunks import Chunk
from shmbuffer.memory.record_format.record_forms import Form


def measure(form: Form, numbers: Ints) -> tuple[Ints, Ints]:
    """Returns the stored bytes of each piece and the bytes of its leaf, int64[m, chunks] each.

    ``numbers`` is int64[m, numbers]. Products that are too large, and sizes that contradict the
    dims, are refused.
    """
    columns, count = form.columns, len(numbers)
    wide = np.empty((count, columns.numbers + len(columns.constants)), np.int64)
    wide[:, : columns.numbers] = numbers
    wide[:, columns.numbers :] = columns.constants
    left, right = columns.equal
    if len(left):
        one, other = wide[:, left], wide[:, right]
        refuse(
            one != other,
            lambda row, at: (
                f"a batch size is {other[row, at]}, but its shapes need {one[row, at]}: the shapes "
                "in a tensordict begin with its batch size"
            ),
        )
    if not len(columns.first):
        return np.empty((count, 0), np.int64), np.empty((count, 0), np.int64)
    factors = wide[:, columns.factors]
    with np.errstate(over="ignore"):  # inf is too large, too
        volume = np.multiply.reduceat(np.maximum(factors, 1).astype(float), columns.first, axis=1)
    refuse(
        volume > MAX_VOLUME,
        lambda row, chunk: f"{_with_dims(form, numbers[row], chunk)} is larger than is possible",
    )
    held = np.multiply.reduceat(factors, columns.first, axis=1)
    total = held.sum(axis=1)
    refuse(
        total > MAX_RAW_BYTES,
        lambda row: (
            f"it contains {total[row]} bytes, but {MAX_RAW_BYTES} are the limit: "
            f"{_with_dims(form, numbers[row], int(held[row].argmax()))} is the largest part"
        ),
    )
    sizes = held.copy()
    if len(columns.stored):
        expanded = held.copy()
        sizes[:, columns.stored] = numbers[:, columns.sizes]
        require_raw(form, sizes, expanded)
        for piece, head in columns.joined:
            sizes[:, piece] = 0
            expanded[:, head] += expanded[:, piece]
        raw, packed = expanded[:, columns.zstd], sizes[:, columns.zstd]
        refuse(
            ~plausible(raw, packed),
            lambda row, at: (
                f"{_name(form, int(columns.zstd[at]))} claims that {raw[row, at]} bytes are "
                f"compressed to {packed[row, at]}, which is impossible"
            ),
        )
    return sizes, held


def require_raw(form: Form, sizes: Ints, expanded: Ints) -> None:
    """Refuses raw pieces whose size contradicts their dims."""
    refuse(
        (sizes != expanded) & form.columns.raw,
        lambda row, piece: (
            f"{_name(form, piece)} has {sizes[row, piece]} bytes, but its dims need "
            f"{expanded[row, piece]}"
        ),
    )


def require_joined(form: Form, sizes: Ints) -> None:
    """Refuses pieces with bytes of their own that are joined to others."""
    for piece, _ in form.columns.joined:
        refuse(
            sizes[:, piece] != 0,
            lambda row, piece=piece: (
                f"{_name(form, piece)} is joined to another, but has {sizes[row, piece]} bytes"
            ),
        )


def place_pieces(form: Form, sizes: Ints, at: Ints, offsets: Ints) -> Ints:
    """Sets the offsets of pieces, the first at or after ``at``; returns the end of the last."""
    for piece, alignment in enumerate(form.columns.alignments):
        if alignment > 1:
            at = aligned(at, alignment)
        offsets[:, piece] = at
        at = at + sizes[:, piece]
    return at


def require_short(ends: Ints) -> None:
    """Refuses records that end beyond 32 bits."""
    refuse(ends > MAX_U32, lambda row: f"it takes {ends[row]} bytes, but {MAX_U32} are the limit")


def _with_dims(form: Form, numbers: Ints, chunk: int) -> str:
    return _name(form, chunk, numbers[form.columns.dims[chunk]].tolist())


def _name(form: Form, chunk: int, dims: object = "") -> str:
    """Returns the name of a chunk and its piece for messages."""
    found = form.chunks[chunk]
    return f"chunk {chunk} ({found.dtype or found.kind}{dims})"


def aligned(at: Ints, alignment: int) -> Ints:
    """Rounds up to multiples of a power of two."""
    return (at + (alignment - 1)) & -alignment


def move(addresses: Ints, sizes: Ints, to: Ints) -> None:
    """Copies bytes between addresses in one native call. ``to`` must be contiguous."""
    addresses, sizes = np.ascontiguousarray(addresses), np.ascontiguousarray(sizes)
    _core.move_pieces(address(addresses), address(sizes), address(to), to.size)


def volumes(chunk: Chunk, dims: Ints) -> Ints:
    """Returns the bytes of a leaf after decompression, int64[n], from its dims, int64[n, rank]."""
    if chunk.rank == 0:
        return np.full(len(dims), chunk.itemsize, np.int64)
    sizes = dims[:, 0] if chunk.rank == 1 else np.multiply.reduce(dims, axis=1)
    found: Ints = sizes * chunk.itemsize
    return found

"""Computes and checks the sizes and offsets of pieces, the stored bytes of chunks."""

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
    """Computes the sizes of all chunks of m records.

    Args:
        form: The form of the records.
        numbers: The numbers of the records, int64[m, numbers].

    Returns:
        The size of each piece as it is stored, and the size of each chunk after decompression, both
        in bytes and int64[m, chunks].

    Raises:
        ImpossibleError: A size is too large, or contradicts another number of the record.
    """
    columns, count = form.columns, len(numbers)
    wide = np.empty((count, columns.numbers + len(columns.constants)), np.int64)
    wide[:, : columns.numbers] = numbers
    wide[:, columns.numbers :] = columns.constants
    left, right = columns.equal
    if len(left):
        expected, actual = wide[:, left], wide[:, right]
        refuse(
            expected != actual,
            lambda row, at: (
                f"a batch size is {actual[row, at]}, but its shapes need {expected[row, at]}:"
                " the shapes in a tensordict begin with its batch size"
            ),
        )
    if not len(columns.first):
        return np.empty((count, 0), np.int64), np.empty((count, 0), np.int64)
    factors = wide[:, columns.factors]
    with np.errstate(over="ignore"):  # an overflow to inf is reported as too large, too
        volume = np.multiply.reduceat(np.maximum(factors, 1).astype(float), columns.first, axis=1)
    refuse(
        volume > MAX_VOLUME,
        lambda row, chunk: f"{_with_dims(form, numbers[row], chunk)} is impossibly large",
    )
    leaf_bytes = np.multiply.reduceat(factors, columns.first, axis=1)
    total = leaf_bytes.sum(axis=1)
    refuse(
        total > MAX_RAW_BYTES,
        lambda row: (
            f"it contains {total[row]} bytes, but the limit is {MAX_RAW_BYTES}: "
            f"{_with_dims(form, numbers[row], int(leaf_bytes[row].argmax()))} is the largest leaf"
        ),
    )
    sizes = leaf_bytes.copy()
    if len(columns.stored):
        expanded = leaf_bytes.copy()
        sizes[:, columns.stored] = numbers[:, columns.sizes]
        require_raw(form, sizes, expanded)
        for piece, head in columns.joined:
            sizes[:, piece] = 0
            expanded[:, head] += expanded[:, piece]
        raw, packed = expanded[:, columns.zstd], sizes[:, columns.zstd]
        refuse(
            ~plausible(raw, packed),
            lambda row, at: (
                f"in {_name(form, int(columns.zstd[at]))}, {raw[row, at]} bytes are compressed to"
                f" {packed[row, at]}, which is impossible"
            ),
        )
    return sizes, leaf_bytes


def require_raw(form: Form, sizes: Ints, expanded: Ints) -> None:
    """Raises ImpossibleError if the size of a raw piece contradicts its dims."""
    refuse(
        (sizes != expanded) & form.columns.raw,
        lambda row, piece: (
            f"{_name(form, piece)} has {sizes[row, piece]} bytes, but its dims need "
            f"{expanded[row, piece]}"
        ),
    )


def require_joined(form: Form, sizes: Ints) -> None:
    """Raises ImpossibleError if a joined chunk has a piece of its own."""
    for piece, _ in form.columns.joined:
        refuse(
            sizes[:, piece] != 0,
            lambda row, piece=piece: (
                f"{_name(form, piece)} is joined to another chunk, but has a piece of"
                f" {sizes[row, piece]} bytes"
            ),
        )


def place_pieces(form: Form, sizes: Ints, at: Ints, offsets: Ints) -> Ints:
    """Computes the offsets of all pieces of m records, which follow each other.

    Args:
        form: The form of the records.
        sizes: Sizes of the pieces in bytes, int64[m, chunks].
        at: Offset of the end of each record's form, int64[m].
        offsets: Output array for the offsets, int64[m, chunks].

    Returns:
        The offset of the end of each record's last piece, int64[m].
    """
    for piece, alignment in enumerate(form.columns.alignments):
        if alignment > 1:
            at = aligned(at, alignment)
        offsets[:, piece] = at
        at = at + sizes[:, piece]
    return at


def require_short(ends: Ints) -> None:
    """Raises ImpossibleError if the size of a record does not fit into 32 bits."""
    refuse(ends > MAX_U32, lambda row: f"it takes {ends[row]} bytes, but the limit is {MAX_U32}")


def _with_dims(form: Form, numbers: Ints, chunk: int) -> str:
    """Returns the name of a chunk with its dims in a record, for messages."""
    return _name(form, chunk, numbers[form.columns.dims[chunk]].tolist())


def _name(form: Form, chunk: int, dims: object = "") -> str:
    """Returns the name of a chunk, such as "chunk 0 (float32)", for messages."""
    found = form.chunks[chunk]
    return f"chunk {chunk} ({found.dtype or found.kind}{dims})"


def aligned(at: Ints, alignment: int) -> Ints:
    """Rounds offsets up to multiples of ``alignment``, a power of two."""
    return (at + (alignment - 1)) & -alignment


def move(addresses: Ints, sizes: Ints, to: Ints) -> None:
    """Copies pieces of memory from ``addresses`` to the addresses ``to``, in one native call.

    ``sizes`` are the numbers of bytes to copy. ``to`` must be contiguous.
    """
    addresses, sizes = np.ascontiguousarray(addresses), np.ascontiguousarray(sizes)
    _core.move_pieces(address(addresses), address(sizes), address(to), to.size)


def volumes(chunk: Chunk, dims: Ints) -> Ints:
    """Returns the size of a chunk after decompression in n records, in bytes: int64[n].

    ``dims`` are its dims in these records, int64[n, rank].
    """
    if chunk.rank == 0:
        return np.full(len(dims), chunk.itemsize, np.int64)
    sizes = dims[:, 0] if chunk.rank == 1 else np.multiply.reduce(dims, axis=1)
    found: Ints = sizes * chunk.itemsize
    return found

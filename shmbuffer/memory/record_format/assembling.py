"""Lays out records: from pieces that lie anywhere to bytes as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.record_batch import HEADER_BYTES, RecordBatch
from shmbuffer.memory.record_format.bounds import MAX_U32, ImpossibleError, refuse
from shmbuffer.memory.record_format.forms import Form
from shmbuffer.memory.record_format.headers import FRONT_AT, FRONT_WORD, head_of
from shmbuffer.memory.record_format.pieces import (
    aligned,
    measure,
    move,
    name_of,
    place_inline,
    require_joined,
    require_raw,
    require_short,
)


def assemble(
    form: Form,
    batch_dims: Ints,
    dims: Sequence[Ints],
    addresses: Ints,
    sizes: Ints,
    holders: Ints | None = None,
) -> RecordBatch:
    """Lays out n records of one form; one native call moves the bytes.

    ``holders`` names for each piece the one whose bytes it has, by its number in the batch: itself,
    or where it is placed another one of its row or a later row.
    """
    count, columns = len(addresses), form.columns
    shape = (count, columns.pieces)
    _require_shape("addresses", addresses, shape)
    _require_shape("sizes", sizes, shape)
    try:
        if holders is not None:
            _require_shape("holders", holders, shape)
            _require_holders(form, holders)
            sizes = sizes.ravel()[holders]
        numbers = _numbers(form, count, batch_dims, dims, sizes)
        if (found := _laid_out_by_core(form, numbers, addresses, sizes)) is not None:
            return found
        require_raw(form, sizes, measure(form, numbers)[0])
        require_joined(form, sizes)
        return _laid_out(form, numbers, addresses, sizes, holders)
    except ImpossibleError as error:
        raise ValueError(f"record {error.row} cannot be written: {error}") from None


def assemble_one(form: Form, dims: list[int], pieces: list[Any]) -> RecordBatch | None:
    """The record of one item, the same bytes as `assemble` returns; None if that refuses it.

    ``dims`` has the sizes of its batches, and of its chunks; ``pieces`` are buffers, or tensors
    that are as their dims say. None, too, where pieces are placed. Cost: 2 µs, 0.2 µs a piece, and
    a copy of the bytes.
    """
    steps = form.columns.steps
    found = None if steps is None else _core.record(address(steps), form.code, dims, pieces)
    if found is None:
        return None
    data, end = found
    return RecordBatch(np.frombuffer(data, np.uint8), np.zeros(1, np.int64), np.array([end]))


def _numbers(form: Form, count: int, batch_dims: Ints, dims: Sequence[Ints], sizes: Ints) -> Ints:
    columns = form.columns
    numbers = np.zeros((count, columns.numbers), np.int64)
    _require_shape("batch_dims", batch_dims, (count, form.batch_dims))
    numbers[:, : form.batch_dims] = batch_dims
    if len(dims) != len(form.chunks):
        raise ValueError(f"dims of {len(dims)} chunks were given, the form has {len(form.chunks)}")
    for number, (chunk, held, given) in enumerate(
        zip(form.chunks, columns.dims, dims, strict=True)
    ):
        _require_shape(f"dims[{number}]", given, (count, chunk.rank))
        numbers[:, held] = given
    numbers[:, columns.sizes] = sizes[:, columns.stored]
    refuse(
        (numbers < 0) | (numbers > MAX_U32),
        lambda row, column: f"{numbers[row, column]} does not fit into 32 bits",
    )
    return numbers


def _laid_out_by_core(
    form: Form, numbers: Ints, addresses: Ints, sizes: Ints
) -> RecordBatch | None:
    """Records without a front. None where they have one, or cannot be written: see `_laid_out`."""
    steps, count = form.columns.steps, len(addresses)
    if steps is None:
        return None
    code = np.frombuffer(form.code, np.uint8)
    sizes, addresses = np.ascontiguousarray(sizes), np.ascontiguousarray(addresses)
    offsets = np.empty_like(sizes)
    starts, ends = np.empty((2, count), np.int64)
    written = (address(steps), address(code), len(code), address(numbers), address(sizes), count)
    placed = (address(offsets), address(starts), address(ends))
    nbytes = _core.measure_records(*written, *placed)
    if nbytes < 0:
        return None
    data = np.empty(nbytes, np.uint8)
    _core.lay_out_records(*written, *placed, address(addresses), address(data))
    return RecordBatch(data, starts, ends)


def _laid_out(
    form: Form, numbers: Ints, addresses: Ints, sizes: Ints, holders: Ints | None
) -> RecordBatch:
    """Records that differ in what they hold; ``numbers`` gets the places."""
    columns, count = form.columns, len(addresses)
    placed = columns.placed
    offsets = np.empty((count, columns.pieces), np.int64)
    moved = np.empty((count, columns.pieces + 1), np.int64)  # bytes; the form is the last piece
    itself = _numbered(sizes)
    holders = itself if holders is None else holders
    moved[:, :-1] = sizes * (holders == itself)
    moved[:, -1] = len(form.code)
    at = np.full(count, FRONT_AT, np.int64)
    for piece in placed.tolist():
        offsets[:, piece] = place = aligned(at, columns.front)
        at = np.where(moved[:, piece] > 0, place + moved[:, piece], at)
    numbers_at = aligned(at, 4)
    form_at = numbers_at + 4 * columns.numbers
    end = place_inline(form, sizes, form_at + len(form.code), offsets)
    taken = aligned(end, 8)
    stops = np.cumsum(taken)
    starts = stops - taken
    to = np.empty_like(moved)
    to[:, :-1] = offsets
    to[:, -1] = form_at
    to += starts[:, None]
    gaps = np.empty((count, len(columns.gapped) + 2), np.int64)
    gaps[:, :-2] = to[:, columns.gapped]
    gaps[:, -2] = starts + numbers_at
    gaps[:, -1] = stops
    if len(placed):
        row, piece = np.divmod(holders[:, placed], columns.pieces)
        offsets[:, placed] = to[row, piece] - starts[:, None]
        numbers[:, columns.offsets] = offsets[:, placed]
        reach = offsets[:, placed] + sizes[:, placed]
        end = np.maximum(end, reach.max(axis=1))
    require_short(end)
    data = np.empty(int(stops[-1]) if count else 0, np.uint8)
    data.view(np.uint64)[gaps - 1 >> 3] = 0
    words = data.view(np.uint32)
    head = np.zeros((count, FRONT_AT // 4), np.uint32)
    head[:, HEADER_BYTES // 4 :] = np.frombuffer(head_of(form), np.uint32)
    head[:, FRONT_WORD] = at - FRONT_AT
    words[(starts >> 2)[:, None] + np.arange(FRONT_AT // 4)] = head
    words[(starts + numbers_at >> 2)[:, None] + np.arange(columns.numbers)] = numbers
    code = np.frombuffer(form.code, np.uint8)
    source = np.empty_like(moved)
    source[:, :-1] = addresses
    source[:, -1] = address(code)
    to += address(data)
    move(source, moved, to)
    return RecordBatch(data, starts, end)


def _numbered(pieces: Ints) -> Ints:
    """The number of each piece in its batch."""
    return np.arange(pieces.size).reshape(pieces.shape)


def _require_holders(form: Form, holders: Ints) -> None:
    """Refuses holders that are not in this row or a later one, or hold no bytes of their own."""
    itself = _numbered(holders)
    refuse(
        (holders < itself[:, :1]) | (holders >= itself.size),
        lambda row, piece: (
            f"row {holders[row, piece] // form.columns.pieces} cannot hold {name_of(form, piece)}: "
            f"it is not between {row} and {len(holders) - 1}"
        ),
    )
    elsewhere = holders != itself
    inline = np.ones(form.columns.pieces, np.bool_)
    inline[form.columns.placed] = False
    refuse(
        elsewhere & ((elsewhere | inline).ravel()[holders] | inline),
        lambda row, piece: (
            f"{name_of(form, piece)} is said to lie in piece {holders[row, piece]}, which holds no "
            "bytes that others may have, or it has no place of its own"
        ),
    )


def _require_shape(name: str, array: Ints, shape: tuple[int, ...]) -> None:
    if array.dtype != np.int64 or array.shape != shape:
        raise ValueError(f"{name} must be int64{list(shape)}, got {array.dtype}{list(array.shape)}")

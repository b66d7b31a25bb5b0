"""Finds the pieces of records that were read, without trusting their values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.mapped.record_batch import HEADER_BYTES, RecordBatch
from shmbuffer.memory.record_format.bounds import ImpossibleError, refuse
from shmbuffer.memory.record_format.headers import (
    HEAD,
    NUMBERS_AT,
    Headers,
    heads_of,
    words_of,
)
from shmbuffer.memory.record_format.pieces import measure, place_pieces, require_short
from shmbuffer.memory.record_format.record_forms import Form, form_of, parse_form


class Located(NamedTuple):
    """Records of the same form in a batch, with everything that is needed to read them, checked.

    The arrays of numbers and pieces are contiguous.
    """

    form: Form
    rows: Ints
    """int64[m]: positions of the records in the batch."""
    numbers: Ints
    """int64[m, numbers]: the numbers of each record."""
    offsets: Ints
    """int64[m, chunks]: where the piece of each chunk starts in ``batch.data``."""
    sizes: Ints
    """int64[m, chunks]: stored bytes."""
    expanded: Ints
    """int64[m, chunks]: bytes of the leaf after decompression."""
    alike: bool = False
    """True if the dims of each leaf are known to be the same in all records."""

    @property
    def batch_dims(self) -> Ints:
        """The batch sizes: int64[m, form.batch_dims]."""
        return self.numbers[:, : self.form.batch_dims]

    @property
    def dims(self) -> list[Ints]:
        """The dims of each chunk: int64[m, rank]."""
        return [self.numbers[:, held] for held in self.form.columns.dims]


def locate(batch: RecordBatch, where: str) -> list[Located]:
    """Finds and checks all pieces of all records; one result a form, in order of first rows."""
    if not len(batch):
        return []
    try:
        if (of_one_form := _locate_by_core(batch)) is not None:
            return [of_one_form]
        heads = heads_of(batch)
        return [_locate(batch, heads, rows) for rows in _group_by_form(batch, heads)]
    except ImpossibleError as error:
        raise CorruptBufferError(
            f"{where}: record {error.row}: {error}, because the buffer was damaged or changed by "
            "another program; restore the buffer from a copy",
            path=where,
            row=error.row,
        ) from None


def _locate_by_core(batch: RecordBatch) -> Located | None:
    """Locates records that all have the same form; None if `_locate` must examine them."""
    data, first = batch.data, int(batch.starts[0])
    if not 0 <= first <= len(data) - NUMBERS_AT:
        return None
    _, _, numbers, form_bytes = HEAD.unpack_from(data.data, first + HEADER_BYTES)
    code = first + NUMBERS_AT + 4 * numbers
    try:
        form = parse_form(data[code : code + form_bytes].tobytes())
    except ValueError:
        return None
    columns, count = form.columns, len(batch)
    if columns.numbers != numbers or len(form.code) != form_bytes:
        return None
    values = np.empty((count, numbers), np.int64)
    offsets, stored, expanded = np.empty((3, count, len(form.chunks)), np.int64)
    starts, sizes = np.ascontiguousarray(batch.starts), np.ascontiguousarray(batch.sizes)
    at = address(data)
    read = (at, len(data), address(starts), address(sizes), count)
    found = (address(values), address(offsets), address(stored), address(expanded))
    alike = _core.locate_pieces(*read, address(columns.steps), at + code, form_bytes, *found)
    if alike is None:
        return None
    return Located(form, np.arange(count), values, offsets, stored, expanded, alike)


def _group_by_form(batch: RecordBatch, heads: Headers) -> list[Ints]:
    """Groups rows by form: one call compares all rows with the first, and others are looked up."""
    nbytes = int(heads.form_bytes[0])
    alike = heads.form_bytes == nbytes
    rows = np.flatnonzero(alike)
    alike[rows] = _compare_with_first(batch, batch.starts[rows] + heads.form_at[rows], nbytes)
    groups = [np.flatnonzero(alike)]
    if len(groups[0]) < len(batch):
        others: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(~alike).tolist():
            others.setdefault(_code(batch, heads, row), []).append(row)
        groups += [np.array(rows, np.int64) for rows in others.values()]
    return groups


def _compare_with_first(batch: RecordBatch, at: Ints, nbytes: int) -> Flags:
    """Returns at which places the bytes equal those at the first place."""
    one = at + address(batch.data)
    other = np.full(len(one), one[0])
    found = np.empty(len(one), np.bool_)
    _core.compare_pieces(address(one), address(other), nbytes, len(one), address(found))
    return found


def _code(batch: RecordBatch, heads: Headers, row: int) -> bytes:
    at = int(batch.starts[row] + heads.form_at[row])
    return batch.data[at : at + int(heads.form_bytes[row])].tobytes()


def _locate(batch: RecordBatch, heads: Headers, rows: Ints) -> Located:
    """Locates the records of one form in Python."""
    starts, limits = batch.starts[rows], batch.sizes[rows]
    try:
        form = form_of(_code(batch, heads, int(rows[0])), heads.numbers[rows])
        columns = form.columns
        at = (starts + NUMBERS_AT) >> 2
        numbers = words_of(batch)[at[:, None] + np.arange(columns.numbers)].astype(np.int64)
        sizes, expanded = map(np.ascontiguousarray, measure(form, numbers))
        offsets = np.empty((len(rows), len(form.chunks)), np.int64)
        end = place_pieces(form, sizes, heads.form_at[rows] + len(form.code), offsets)
        require_short(end)
        refuse(
            end != limits,
            lambda row: f"it has {limits[row]} bytes, but its pieces end at {end[row]}",
        )
    except ImpossibleError as error:
        raise ImpossibleError(int(rows[error.row]), str(error)) from None
    offsets += starts[:, None]
    return Located(form, rows, numbers, offsets, sizes, expanded)

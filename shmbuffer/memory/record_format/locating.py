"""Finds the pieces in records that were read, without trusting the values in the records."""

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
    parse_headers,
    words_of,
)
from shmbuffer.memory.record_format.pieces import measure, place_pieces, require_short
from shmbuffer.memory.record_format.record_forms import Form, parse_checked_form, parse_form


class Located(NamedTuple):
    """The records of a batch that have the same form, with the checked locations of their pieces.

    All arrays with two dimensions are contiguous.
    """

    form: Form
    rows: Ints
    """Positions of the m records in the batch, int64[m]."""
    numbers: Ints
    """The numbers of each record, int64[m, numbers]."""
    offsets: Ints
    """Offset of each piece in ``batch.data``, int64[m, chunks]."""
    sizes: Ints
    """Size in bytes of each piece as it is stored, int64[m, chunks]."""
    expanded: Ints
    """Size in bytes of each chunk after decompression, int64[m, chunks]."""
    alike: bool = False
    """True if it is known that each chunk has the same dims in all records."""

    @property
    def batch_dims(self) -> Ints:
        """The batch sizes of the records, int64[m, form.batch_dims]."""
        return self.numbers[:, : self.form.batch_dims]

    @property
    def dims(self) -> list[Ints]:
        """The dims of each chunk in all records, int64[m, rank]."""
        return [self.numbers[:, columns] for columns in self.form.columns.dims]


def locate(batch: RecordBatch, where: str) -> list[Located]:
    """Finds and checks all pieces of all records in a batch.

    Args:
        batch: The records.
        where: Path of the buffer, for the message.

    Returns:
        One result per form, in the order in which the forms first occur in the batch.

    Raises:
        CorruptBufferError: A record is not valid. Names the first such record.
    """
    if not len(batch):
        return []
    try:
        if (located := _locate_by_core(batch)) is not None:
            return [located]
        headers = parse_headers(batch)
        return [_locate(batch, headers, rows) for rows in _group_by_form(batch, headers)]
    except ImpossibleError as error:
        raise CorruptBufferError(
            f"{where}: record {error.row}: {error}, because the buffer was damaged or changed by "
            "another program; restore the buffer from a copy",
            path=where,
            row=error.row,
        ) from None


def _locate_by_core(batch: RecordBatch) -> Located | None:
    """Locates the pieces of records that all have the same form, in one call into the C core.

    Returns None if the records do not have the same form, or if one of them is invalid. `_locate`
    must then examine the records.
    """
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


def _group_by_form(batch: RecordBatch, headers: Headers) -> list[Ints]:
    """Groups the positions of records in the batch by their form.

    One native call compares all forms with the first one. Only the forms that differ from it are
    looked up in a dict.
    """
    nbytes = int(headers.form_bytes[0])
    alike = headers.form_bytes == nbytes
    rows = np.flatnonzero(alike)
    alike[rows] = _compare_with_first(batch, batch.starts[rows] + headers.form_at[rows], nbytes)
    groups = [np.flatnonzero(alike)]
    if len(groups[0]) < len(batch):
        others: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(~alike).tolist():
            others.setdefault(_form_code(batch, headers, row), []).append(row)
        groups += [np.array(rows, np.int64) for rows in others.values()]
    return groups


def _compare_with_first(batch: RecordBatch, at: Ints, nbytes: int) -> Flags:
    """Returns a mask of the offsets at which ``nbytes`` bytes are equal to those at the first."""
    addresses = at + address(batch.data)
    first = np.full(len(addresses), addresses[0])
    found = np.empty(len(addresses), np.bool_)
    _core.compare_pieces(address(addresses), address(first), nbytes, len(addresses), address(found))
    return found


def _form_code(batch: RecordBatch, headers: Headers, row: int) -> bytes:
    """Returns the code of a record's form."""
    at = int(batch.starts[row] + headers.form_at[row])
    return batch.data[at : at + int(headers.form_bytes[row])].tobytes()


def _locate(batch: RecordBatch, headers: Headers, rows: Ints) -> Located:
    """Locates the pieces of the records at the positions ``rows``, which have the same form."""
    starts, limits = batch.starts[rows], batch.sizes[rows]
    try:
        form = parse_checked_form(_form_code(batch, headers, int(rows[0])), headers.numbers[rows])
        columns = form.columns
        at = (starts + NUMBERS_AT) >> 2
        numbers = words_of(batch)[at[:, None] + np.arange(columns.numbers)].astype(np.int64)
        sizes, expanded = map(np.ascontiguousarray, measure(form, numbers))
        offsets = np.empty((len(rows), len(form.chunks)), np.int64)
        end = place_pieces(form, sizes, headers.form_at[rows] + len(form.code), offsets)
        require_short(end)
        refuse(
            end != limits,
            lambda row: f"it has {limits[row]} bytes, but its pieces end at {end[row]}",
        )
    except ImpossibleError as error:
        raise ImpossibleError(int(rows[error.row]), str(error)) from None
    offsets += starts[:, None]
    return Located(form, rows, numbers, offsets, sizes, expanded)

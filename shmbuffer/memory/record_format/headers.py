"""The first 8 bytes of a record's body: the version, and the sizes of the following sections."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.mapped.record_batch import HEADER_BYTES, RecordBatch
from shmbuffer.memory.record_format.bounds import refuse

VERSION = 1
HEAD = struct.Struct("<BBHI")
NUMBERS_AT = HEADER_BYTES + HEAD.size
_HEAD_WORDS = np.arange(HEADER_BYTES // 4, NUMBERS_AT // 4)


class Headers(NamedTuple):
    """Values from the start of n bodies, as arrays int64[n].

    The sections that they describe are within the bytes of each record.
    """

    numbers: Ints
    """Number of values in the section of numbers."""
    form_bytes: Ints
    """Size of the form in bytes."""
    form_at: Ints
    """Offset of the form from the start of the record."""


def parse_headers(batch: RecordBatch) -> Headers:
    """Parses and checks the first bytes of all bodies in a batch.

    Raises:
        ImpossibleError: A record is outside of the bytes of the batch, or its body is invalid.
    """
    data, starts, sizes = batch.data, batch.starts, batch.sizes
    refuse(
        (starts < 0) | (starts & 7 != 0) | (starts > len(data)) | (sizes > len(data) - starts),
        lambda row: (
            f"{sizes[row]} bytes from {starts[row]} are not within the {len(data)} bytes that were"
            " read"
        ),
    )
    refuse(
        sizes < NUMBERS_AT,
        lambda row: f"it has {sizes[row]} bytes, but needs at least {NUMBERS_AT}",
    )
    head = words_of(batch)[(starts >> 2)[:, None] + _HEAD_WORDS].astype(np.int64)
    refuse(
        head[:, 0] & 0xFFFF != VERSION,
        lambda row: (
            f"its body is of version {head[row, 0] & 0xFF}, or does not start with the bytes of "
            f"version {VERSION}"
        ),
    )
    numbers, form_bytes = head[:, 0] >> 16, head[:, 1]
    form_at = NUMBERS_AT + 4 * numbers
    refuse(
        form_at + form_bytes > sizes,
        lambda row: (
            f"{numbers[row]} numbers and a form of {form_bytes[row]} bytes do not fit into its "
            f"{sizes[row]} bytes"
        ),
    )
    return Headers(numbers, form_bytes, form_at)


def words_of(batch: RecordBatch) -> NDArray[np.uint32]:
    """Returns a view of a batch's bytes as uint32. Records start at a multiple of 8 bytes."""
    return batch.data[: len(batch.data) & -4].view(np.uint32)

"""Records that repeat one number in all their bytes and have sizes that follow from it."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from shmbuffer.memory import RecordBatch
from shmbuffer.memory.mapped.record_batch import join


def records(numbers: Iterable[int]) -> RecordBatch:
    """Makes records by number; each has the number, its complement and a pattern."""
    return join([struct.pack("<qq", number, ~number) + _pattern(number) for number in numbers])


def _pattern(number: int) -> bytes:
    return bytes([number * 37 % 251]) * (200 + number * 53 % 500)


def number_of(body: memoryview) -> int:
    """Returns the number of a record; fails if the record is torn or mixed with other bytes."""
    number, complement = struct.unpack_from("<qq", body)
    assert complement == ~number, f"record {number} is torn"
    assert body[16:] == _pattern(number), f"record {number} is torn"
    return int(number)

"""Records that carry one number in all their bytes, of sizes that follow from it.

Written in one batch, each reaches over the next one as far as its number, so that a record of which
a part is another's shows in the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from shmbuffer.memory import RecordBatch
from shmbuffer.memory.format.record_batch import HEADER_BYTES, join


def records(numbers: Iterable[int], *, apart: bool = False) -> RecordBatch:
    """Items by number as records: number, that of the next one if it is in here too, a pattern.

    Each reaches as far as the number of the next one, unless they are ``apart``.
    """
    numbers = list(numbers)
    reached = [-1] * len(numbers) if apart else [*numbers[1:], -1][: len(numbers)]
    bodies = [
        struct.pack("<qq", number, following) + _pattern(number)
        for number, following in zip(numbers, reached, strict=True)
    ]
    batch = join(bodies)
    sizes = batch.sizes.copy()
    if not apart:
        sizes[:-1] = np.diff(batch.starts) + HEADER_BYTES + 8
    return RecordBatch(batch.data, batch.starts, sizes)


def _pattern(number: int) -> bytes:
    return bytes([number * 37 % 251]) * (200 + number * 53 % 500)


def number_of(body: memoryview) -> int:
    """The number of a record; fails on one that is torn, or that anything else is part of."""
    number, following = struct.unpack_from("<qq", body)
    pattern = _pattern(number)
    assert body[16 : 16 + len(pattern)] == pattern, f"record {number} is torn"
    if following >= 0:
        at = -(-(16 + len(pattern)) // 8) * 8 + HEADER_BYTES
        assert struct.unpack_from("<q", body, at) == (following,), f"record {number} is torn"
        assert len(body) == at + 8
    else:
        assert len(body) == 16 + len(pattern)
    return int(number)

"""Limits of the numbers in a body, and the error that names the row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer.memory.format.array_types import Flags

MAX_U32 = 2**32 - 1
MAX_RAW_BYTES = 2**32
"""The largest size of a record after its chunks are decompressed."""
MAX_VOLUME = 2**40
"""The largest product of the other sizes of a shape with a zero; strides must fit an int64."""
MAX_NUMBERS = 2**16 - 1
MAX_CHUNKS = 4096
MAX_RANK = 32
MAX_DEPTH = 64
MAX_PARTS = 2**14
"""The largest number of nodes, keys and names of a form."""
MAX_FORM_BYTES = 2**20
MAX_INT_KEY_BITS = 2**13
SMALL_BYTES = 4096
"""The size of forms that are cached in large numbers. It also limits the size of a parsed form."""


def plausible(raw_bytes: Any, stored_bytes: Any) -> Any:
    """Returns whether zstd can have compressed ``raw_bytes`` to ``stored_bytes``.

    The densest block of zstd represents 128 KiB by 4 bytes.
    """
    return (raw_bytes <= MAX_RAW_BYTES) & (raw_bytes <= 2**17 + 2**15 * stored_bytes)


class ImpossibleError(Exception):
    """Raised if a row of a batch is not a valid record, or cannot become one."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def refuse(bad: Flags, reason: Callable[..., str]) -> None:
    """Raises ImpossibleError if anything in ``bad`` is true; ``reason`` gets its place."""
    if bad.any():
        place = [int(at[0]) for at in np.nonzero(bad)]
        raise ImpossibleError(place[0], reason(*place))

"""Limits of the numbers in a body, and errors that name the row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer.memory.format.array_types import Flags

MAX_U32 = 2**32 - 1
MAX_RAW_BYTES = 2**32
"""The largest size of a record whose chunks are expanded."""
MAX_VOLUME = 2**40
"""The largest product of the other sizes of a shape with a zero; strides must fit an int64."""
MAX_NUMBERS = 2**16 - 1
MAX_CHUNKS = 4096
MAX_RANK = 32
MAX_DEPTH = 64
MAX_PARTS = 2**14
"""Nodes, keys and names of a form."""
MAX_FORM_BYTES = 2**20
MAX_INT_KEY_BITS = 2**13
SMALL_BYTES = 4096
"""Of a form that is kept with many others once it was read: its bytes say how large what was read
may become."""


def plausible(raw_bytes: Any, stored_bytes: Any) -> Any:
    """True where zstd can have stored ``raw_bytes`` in ``stored_bytes``.

    Its densest block says 128 KiB in 4 bytes.
    """
    return (raw_bytes <= MAX_RAW_BYTES) & (raw_bytes <= 2**17 + 2**15 * stored_bytes)


class ImpossibleError(Exception):
    """A row of a batch that is no record, or cannot become one."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def refuse(bad: Flags, reason: Callable[..., str]) -> None:
    """Raises if anything in ``bad`` is true; ``reason`` is told where the first is."""
    if bad.any():
        place = [int(at[0]) for at in np.nonzero(bad)]
        raise ImpossibleError(place[0], reason(*place))

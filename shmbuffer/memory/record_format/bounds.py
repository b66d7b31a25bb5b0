"""Limits of the values in a record's body, and the error for an invalid record of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer.memory.format.array_types import Flags

MAX_U32 = 2**32 - 1
MAX_RAW_BYTES = 2**32
"""Maximum total size of all chunks of a record after decompression, in bytes."""
MAX_VOLUME = 2**40
"""Maximum volume of a shape, where sizes of 0 count as 1, so that strides fit into an int64."""
MAX_NUMBERS = 2**16 - 1
MAX_CHUNKS = 4096
MAX_RANK = 32
MAX_DEPTH = 64
MAX_PARTS = 2**14
"""Maximum number of nodes, keys and names in a form."""
MAX_FORM_BYTES = 2**20
MAX_INT_KEY_BITS = 2**13
SMALL_BYTES = 4096
"""Maximum size in bytes of a form's code for the larger of the two caches of parsed forms."""


def plausible(raw_bytes: Any, stored_bytes: Any) -> Any:
    """Returns True if zstd can have compressed ``raw_bytes`` bytes to ``stored_bytes`` bytes.

    A block of zstd represents at most 128 KiB by 4 bytes. The arguments can be arrays.
    """
    return (raw_bytes <= MAX_RAW_BYTES) & (raw_bytes <= 2**17 + 2**15 * stored_bytes)


class ImpossibleError(Exception):
    """Raised if a record of a batch is invalid, or if an item cannot be stored as a record.

    Attributes:
        row: Position of the record in the batch.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def refuse(bad: Flags, reason: Callable[..., str]) -> None:
    """Raises ImpossibleError if an element of ``bad`` is True.

    Args:
        bad: Mask whose first dimension is that of the batch.
        reason: Function that returns the message. Its arguments are the indices of the first True
            element.
    """
    if bad.any():
        place = [int(at[0]) for at in np.nonzero(bad)]
        raise ImpossibleError(place[0], reason(*place))

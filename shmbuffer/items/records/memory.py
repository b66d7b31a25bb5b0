"""A pool of large memory for batches: the memory of a released batch is used again.

To have fresh pages from the system may take as long as to decompress into them. And the system has
memory back at each end of a batch, or at none, as it happens to lie.
"""

from __future__ import annotations

import weakref

import numpy as np

from shmbuffer.memory.format.array_types import Bytes

_LARGE_BYTES = 2**18  # of less, the allocator keeps enough itself
_IDLE_BYTES = 2**26

_idle: dict[int, list[Bytes]] = {}  # by size; each step on it is one of Python's


def is_lent(nbytes: int) -> bool:
    """True if a piece of memory of this size is kept for reuse."""
    return _LARGE_BYTES <= nbytes <= _IDLE_BYTES


def lent(nbytes: int) -> Bytes:
    """Pooled memory; it returns to the pool when its last view or tensor is released."""
    if not is_lent(nbytes):
        return np.empty(nbytes, np.uint8)
    try:
        memory = _idle[nbytes].pop()
    except (KeyError, IndexError):
        memory = np.empty(nbytes, np.uint8)
    # Views of an array that is over a buffer keep the array; others would keep its base alone.
    array = np.frombuffer(memory.data, np.uint8)
    weakref.finalize(array, _take_back, memory).atexit = False
    return array


def _take_back(memory: Bytes) -> None:
    _idle.setdefault(memory.size, []).append(memory)
    if sum([size * len(found) for size, found in [*_idle.items()]]) > _IDLE_BYTES:
        _idle.clear()

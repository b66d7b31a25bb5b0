"""A pool of large memory blocks for batches. Blocks of released batches are reused.

Getting new pages from the system can take as long as decompressing into them. The position of a
batch in memory determines whether the allocator returns its memory to the system.
"""

from __future__ import annotations

import weakref

import numpy as np

from shmbuffer.memory.format.array_types import Bytes

_LARGE_BYTES = 2**18  # the allocator itself reuses smaller blocks
_IDLE_BYTES = 2**26

_idle: dict[int, list[Bytes]] = {}  # by size; the operations on it are atomic in Python


def is_lent(nbytes: int) -> bool:
    """True if a block of memory of this size is kept for reuse."""
    return _LARGE_BYTES <= nbytes <= _IDLE_BYTES


def lent(nbytes: int) -> Bytes:
    """Returns pooled memory, which returns to the pool when its last view is released."""
    if not is_lent(nbytes):
        return np.empty(nbytes, np.uint8)
    try:
        memory = _idle[nbytes].pop()
    except (KeyError, IndexError):
        memory = np.empty(nbytes, np.uint8)
    # Views of an array over a buffer refer to the array. Other views refer only to its base.
    array = np.frombuffer(memory.data, np.uint8)
    weakref.finalize(array, _take_back, memory).atexit = False
    return array


def _take_back(memory: Bytes) -> None:
    _idle.setdefault(memory.size, []).append(memory)
    if sum([size * len(found) for size, found in [*_idle.items()]]) > _IDLE_BYTES:
        _idle.clear()

"""A pool of large memory blocks. The blocks of released batches are reused for new ones.

Without the pool, the allocator may return the memory of a released batch to the system. Getting new
pages from the system can take as long as decompressing a batch into them.
"""

from __future__ import annotations

import weakref

import numpy as np

from shmbuffer.memory.format.array_types import Bytes

_LARGE_BYTES = 2**18  # smaller blocks are reused by the allocator
_IDLE_BYTES = 2**26  # largest total size of the idle blocks

# Idle blocks by size. No lock is needed, because each operation on the dict and lists is atomic.
_idle: dict[int, list[Bytes]] = {}


def is_lent(nbytes: int) -> bool:
    """True if the pool keeps blocks of this size."""
    return _LARGE_BYTES <= nbytes <= _IDLE_BYTES


def lent(nbytes: int) -> Bytes:
    """Returns a block of ``nbytes`` bytes.

    A block from the pool returns to the pool when its last view is released.
    """
    if not is_lent(nbytes):
        return np.empty(nbytes, np.uint8)
    try:
        memory = _idle[nbytes].pop()
    except (KeyError, IndexError):
        memory = np.empty(nbytes, np.uint8)
    # A view of this array refers to the array itself, because its base is not an array. A view of
    # ``memory[:]`` would refer to ``memory``, and the finalizer would run too early.
    array = np.frombuffer(memory.data, np.uint8)
    weakref.finalize(array, _take_back, memory).atexit = False
    return array


def _take_back(memory: Bytes) -> None:
    _idle.setdefault(memory.size, []).append(memory)
    if sum([size * len(found) for size, found in [*_idle.items()]]) > _IDLE_BYTES:
        _idle.clear()

"""How many threads of this process work on a large batch.

The C core has them, for the whole process: see `pool.c`, and docs/design/concurrency.md.
"""

from __future__ import annotations

from shmbuffer._native import _core

MOST = 16


def set_threads(threads: int | None) -> None:
    """Sets how many threads work on a large batch: the caller, and others that it wakes.

    They copy rows out and in, and compute checksums and powers of priorities; what comes out is the
    same, bit for bit. Of small batches, up to two megabytes or some ten thousand small items, the
    caller does all. The setting is this process's, for all its buffers. The first batch that is
    large enough starts the threads; the child of a fork starts its own.

    Args:
        threads: 1: nobody but the caller. None: as many as there are processors that this process
            may run on, up to 4, which is how it begins. At most 16.

    Raises:
        ValueError: ``threads`` is not from 1 to 16.

    Example:
        ```python
        shmbuffer.set_threads(1)
        ```
    """
    if threads is not None and not 1 <= threads <= MOST:
        raise ValueError(
            f"set_threads: {threads} threads cannot work on a batch;"
            f" give a number from 1 to {MOST}, or None for as many as this process may use"
        )
    _core.set_threads(threads or 0)

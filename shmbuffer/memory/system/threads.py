"""Sets the number of threads that copy large batches in this process.

The C core owns these threads (``pool.c``). docs/design/concurrency.md describes them.
"""

from __future__ import annotations

from shmbuffer._native import _core

MOST = 16


def set_threads(threads: int | None) -> None:
    """Sets how many threads work on a large batch, including the calling thread.

    The threads copy rows, compute checksums and raise priorities to a power. Results are identical
    bit for bit, whatever the number of threads. The calling thread alone processes batches of up to
    two megabytes or about ten thousand small items. The setting applies to all buffers of this
    process. The first large batch starts the threads. The child of a fork starts its own threads.

    Args:
        threads: Number of threads, from 1 (the calling thread alone) to 16. If None, restores the
            default: the number of processors that this process may use, but at most 4.

    Raises:
        ValueError: ``threads`` is less than 1 or greater than 16.

    Example:
        ```python
        shmbuffer.set_threads(1)
        ```
    """
    if threads is not None and not 1 <= threads <= MOST:
        raise ValueError(
            f"threads must be a number from 1 to {MOST}, or None to use the processors that this"
            f" process can run on, but is {threads}"
        )
    _core.set_threads(threads or 0)

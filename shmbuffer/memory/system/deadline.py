"""Limits how long a call waits for other processes before it raises an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

# Time limit for taking the mutex. Living processes hold it for microseconds.
LOCK_TIMEOUT_NS = 5_000_000_000
# Default time limit for a write that waits for a slot or bytes that another living writer is
# filling.
WRITE_TIMEOUT_S = 5.0


def limit_waits(seconds: float | None) -> AbstractContextManager[None]:
    """Limits the total time that this thread can spend waiting in the ``with`` block.

    If ``seconds`` is None, the limit of an enclosing block stays in effect.
    """
    return _NO_NEW_LIMIT if seconds is None else _limit_waits(seconds)


_NO_NEW_LIMIT = nullcontext()


@contextmanager
def _limit_waits(seconds: float) -> Iterator[None]:
    """Sets this thread's deadline to ``seconds`` from now for the ``with`` block."""
    require_time("timeout", seconds)
    before = _thread.limit
    _thread.limit = Deadline(seconds, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.limit = before


class Deadline(NamedTuple):
    """The time limit of a wait."""

    seconds: float
    """Duration of the limit in seconds."""
    deadline: float
    """Point in time at which the wait ends, in seconds of `time.monotonic`."""


def start(usual: float | None) -> Deadline | None:
    """Returns the deadline of a wait that begins now.

    A limit that was set with `limit_waits` takes precedence over ``usual``, the default number of
    seconds. The result is None if there is no limit.
    """
    if _thread.limit is not None or usual is None:
        return _thread.limit
    return Deadline(usual, time.monotonic() + usual)


class _ThreadLocal(threading.local):
    # The deadline is thread-local because the functions that wait are called by components of the
    # user, whose methods follow TorchRL and have no such argument.
    limit: Deadline | None = None


_thread = _ThreadLocal()


def require_time(name: str, seconds: Any) -> None:
    """Checks a time limit that the user passed as the argument ``name``.

    Raises:
        TypeError: ``seconds`` cannot be compared with a number.
        ValueError: ``seconds`` is negative or NaN.
    """
    problem = f"{name} must be a number of seconds of at least 0, or None, but is {seconds!r}"
    try:
        is_time = seconds >= 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)


def nanoseconds(lease_s: float) -> int:
    """Converts the duration of a lease from seconds to nanoseconds.

    Durations of 2**34 seconds or more, including infinity, become 2**64 - 1.

    Raises:
        TypeError: ``lease_s`` cannot be compared with a number.
        ValueError: ``lease_s`` is not greater than 0.
    """
    problem = f"a lease must be a number of seconds above 0, or math.inf, but is {lease_s!r}"
    try:
        is_time = lease_s > 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)
    return min(int(lease_s * 1e9), 2**64 - 1) if lease_s < 2**34 else 2**64 - 1

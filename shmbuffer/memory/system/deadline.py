"""Limits how long a call waits for other processes before it raises an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

# For the mutex, which living processes hold for microseconds.
LOCK_TIMEOUT_NS = 5_000_000_000
# For a write that waits for a slot or bytes that another living writer is filling.
WRITE_TIMEOUT_S = 5.0


def limit_waits(seconds: float | None) -> AbstractContextManager[None]:
    """Limits the time that all waits of this thread may take together; None changes nothing."""
    return _NO_NEW_LIMIT if seconds is None else _limit_waits(seconds)


_NO_NEW_LIMIT = nullcontext()


@contextmanager
def _limit_waits(seconds: float) -> Iterator[None]:
    """Sets the deadline of this thread."""
    require_time("timeout", seconds)
    before = _thread.limit
    _thread.limit = Deadline(seconds, time.monotonic() + seconds)
    try:
        yield
    finally:
        _thread.limit = before


class Deadline(NamedTuple):
    """The end of the time that a wait may take."""

    seconds: float
    deadline: float
    """In seconds of `time.monotonic`."""


def start(usual: float | None) -> Deadline | None:
    """Returns the deadline of a wait that begins now, or None if it may take forever."""
    if _thread.limit is not None or usual is None:
        return _thread.limit
    return Deadline(usual, time.monotonic() + usual)


class _ThreadLocal(threading.local):
    limit: Deadline | None = None


_thread = _ThreadLocal()


def require_time(name: str, seconds: Any) -> None:
    """Raises TypeError or ValueError unless an argument is a number of seconds of at least 0."""
    problem = f"{name} must be a number of seconds of at least 0, or None, but is {seconds!r}"
    try:
        is_time = seconds >= 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)


def nanoseconds(lease_s: float) -> int:
    """Converts the duration of a lease; raises TypeError or ValueError if it is not a time."""
    problem = f"a lease must be a number of seconds above 0, or math.inf, but is {lease_s!r}"
    try:
        is_time = lease_s > 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)
    return min(int(lease_s * 1e9), 2**64 - 1) if lease_s < 2**34 else 2**64 - 1

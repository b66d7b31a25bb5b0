"""How long a call waits for others before it says who is in its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

#: For the mutex, which living processes hold for microseconds.
LOCK_TIMEOUT_NS = 5_000_000_000
#: Of a write, for a slot or for bytes that a living writer is filling.
WRITE_TIMEOUT_S = 5.0


def within(seconds: float | None) -> AbstractContextManager[None]:
    """Limits the time that the calls of this thread together wait for others; None: nothing new."""
    return _AS_BEFORE if seconds is None else _within(seconds)


_AS_BEFORE = nullcontext()


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    require_time("timeout", seconds)
    before = _own.limit
    _own.limit = Deadline(seconds, time.monotonic() + seconds)
    try:
        yield
    finally:
        _own.limit = before


class Deadline(NamedTuple):
    """The time that a wait may take."""

    seconds: float
    deadline: float
    """In seconds of `time.monotonic`."""


def ends(usual: float | None) -> Deadline | None:
    """Returns the deadline of a wait that begins now; None if it may take for ever."""
    if _own.limit is not None or usual is None:
        return _own.limit
    return Deadline(usual, time.monotonic() + usual)


class _Own(threading.local):
    limit: Deadline | None = None


_own = _Own()


def require_time(name: str, seconds: Any) -> None:
    """TypeError or ValueError where an argument is no number of seconds from 0 on."""
    problem = f"{name} is a number of seconds from 0 on, or None; got {seconds!r}"
    try:
        is_time = seconds >= 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)


def nanoseconds(lease_s: float) -> int:
    """Returns the duration of a lease; TypeError or ValueError if it is not a time."""
    problem = f"a lease is a number of seconds above 0, or math.inf, not {lease_s!r}"
    try:
        is_time = lease_s > 0
    except TypeError:
        raise TypeError(problem) from None
    if not is_time:
        raise ValueError(problem)
    return min(int(lease_s * 1e9), 2**64 - 1) if lease_s < 2**34 else 2**64 - 1

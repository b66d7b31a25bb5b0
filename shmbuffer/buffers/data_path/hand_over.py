"""Decides where the next batch of a prefetcher is made, from measured times.

    at once     the caller's thread makes the batch that it orders
    by threads  a thread makes it, which costs the caller a hand-over and perhaps a wait

Both are measured as the caller sees them: the time of a call, for each batch that it ordered. A
measurement is the median of a few calls. Calls that still deliver batches of the other way do not
count. Threads come first, because the first call orders several batches, which may be large.

Threads also hold up the caller's own code, which is not measured. They are therefore used only if
they save a quarter of the time. The other way is measured again when the buffer has changed, when
the way in use has become slower than the other one was, and at intervals. The first interval is
`_SOONEST` batches, and it doubles each time that the other way loses, up to `_LATEST`. The calls
that measure it may be many times slower, so the next measurement waits until they are `_SHARE` of
all time. A wrong choice on a busy machine is thus corrected soon, and a right one costs next to
nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_CALLS = 5  # of a measurement
_CLEAR = 3  # calls that end a measurement if each of them is slower than the other way
_SAVED = 0.75  # of the time at once, which threads have to fall below
_SOONEST, _LATEST = 50, 1600  # batches until the other way is measured again
_SHARE = 0.01  # of the time, which measurements of the other way may take
_LATEST_OF_ALL = 64 * _LATEST  # however slow that measurement was: the machine may have been busy


class HandOver:
    """Chooses between making batches at once and handing them over to threads."""

    at_once: bool  # how the next batch is made

    def __init__(self, depth: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock  # nanoseconds
        self._settling = depth + 1  # calls that deliver batches of the other way, or fill the queue
        self.restart()

    def restart(self) -> None:
        """Measures both ways again: the buffer has changed. Another thread may be in `took`."""
        self._measured: dict[bool, float] = {}
        self._interval = _SOONEST
        self._in_use: bool | None = None  # the way that was chosen
        self._go(at_once=False)

    def took(self, nanoseconds: int, orders: int) -> None:
        """Counts a call that has ordered so many batches."""
        self._calls += 1
        self._spent += nanoseconds
        if self._calls <= self._settling:
            return
        times, measured = self._times, self._measured
        if orders:
            times.append(nanoseconds / orders)
        if self._in_use is not self.at_once:
            if len(times) == _CALLS or self._has_lost(times, measured):
                measured[self.at_once] = median(times)
                self._choose(measured)
        elif self._calls >= self._interval or not self._calls % _SOONEST:
            if times:
                measured[self.at_once] = median(times)
            if self._calls >= self._interval or _best(measured) is not self._in_use:
                self._go(at_once=not self.at_once)

    def _choose(self, measured: dict[bool, float]) -> None:
        """Uses the faster way, once both are measured."""
        if len(measured) < 2:
            self._go(at_once=not self.at_once)
            return
        best = _best(measured)
        if best is self._in_use:
            lost = self._spent - self._calls * measured[best]
            wanted = max(min(_LATEST, 2 * self._interval), lost / (_SHARE * measured[best] + 1))
            self._interval = min(_LATEST_OF_ALL, int(wanted))
        else:
            self._interval = _SOONEST
        self._in_use = best
        self._go(at_once=best)

    def _has_lost(self, times: deque[float], measured: dict[bool, float]) -> bool:
        """True if each call so far was slower than the other way."""
        if len(times) < _CLEAR or (other := measured.get(not self.at_once)) is None:
            return False
        return min(times) * (_SAVED if self.at_once else 1.0) > other

    def _go(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self._calls = 0
        self._spent = 0  # nanoseconds of these calls
        self._times: deque[float] = deque(maxlen=_CALLS)  # of the last calls in this way

    def __str__(self) -> str:
        measured = self._measured
        if len(measured) < 2:
            return "by threads, until both ways are measured"
        at_once, handed_over = (_time(measured[way]) for way in (True, False))
        way = "at once" if self._in_use else "by threads"
        return f"{way}: {at_once} a batch at once, hand-over {handed_over}"


def _best(measured: dict[bool, float]) -> bool:
    """True if making batches at once is the faster way."""
    return len(measured) < 2 or measured[False] > _SAVED * measured[True]


def _time(nanoseconds: float) -> str:
    if nanoseconds < 999_500:
        return f"{nanoseconds / 1e3:.3g} µs"
    return f"{nanoseconds / 1e6:.3g} ms"

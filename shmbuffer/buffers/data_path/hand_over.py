"""Decides from measured times whether threads prepare the prefetched batches.

    at once     the caller's thread makes the batch that it orders
    by threads  a thread makes the batch; the caller hands it over, and sometimes has to wait

Both modes are measured from the caller's point of view: the duration of a call per batch that the
call ordered, and the time between two calls. A measurement is the median of a few calls. Calls that
still deliver batches from the other mode are ignored. Threads are measured first, because the first
call orders several batches, which may be large.

Threads can slow down the caller's own code, because they compete for processors and for the GIL.
They are therefore used only if they save a quarter of a call's time, and shorten the time between
two calls. The other mode is measured again in three cases: the buffer has changed, the current mode
has become slower than the other mode was, or an interval has passed. The first interval is
`_SOONEST` batches long. The interval doubles each time the other mode is slower, up to `_LATEST`.
Measuring a slow mode can take long. The next measurement therefore waits until these calls are only
`_SHARE` of the total time. So a wrong choice on a busy machine is corrected soon, and a right
choice costs almost nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_CALLS = 5  # number of calls in a measurement
_CLEAR = 3  # a measurement ends early if all of this many calls are slower than the other mode
_SAVED = 0.75  # threads are used if they take at most this fraction of the caller's own time
_SOONEST, _LATEST = 50, 1600  # minimum and maximum number of batches between measurements
_SHARE = 0.01  # maximum fraction of the time that measurements of the other mode take
# Maximum interval after a slow measurement. The machine may have been busy, so it is not unlimited.
_LATEST_OF_ALL = 64 * _LATEST


class HandOver:
    """Chooses whether the caller's thread or other threads make batches.

    Args:
        depth: number of batches that wait in the queue.
        clock: function that returns the time in nanoseconds.
    """

    at_once: bool  # True if the next batch is made in the caller's thread

    def __init__(self, depth: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        # The first calls in a mode fill the queue, or deliver batches from the other mode.
        self._settling = depth + 1
        self.restart()

    def restart(self) -> None:
        """Starts to measure both modes again, because the buffer has changed.

        Another thread can be executing `took` at the same time.
        """
        # Nanoseconds per batch, and between two calls, by `at_once`.
        self._measured: dict[bool, tuple[float, float]] = {}
        self._interval = _SOONEST
        self._in_use: bool | None = None  # the chosen value of `at_once`
        self._go(at_once=False)

    def took(self, nanoseconds: int, orders: int, period: int) -> None:
        """Records a call.

        Args:
            nanoseconds: duration of the call.
            orders: number of batches that the call ordered.
            period: nanoseconds since the previous call began.
        """
        self._calls += 1
        self._spent += nanoseconds
        if self._calls <= self._settling:
            return
        times, measured = self._times, self._measured
        self._periods.append(period)
        if orders:
            times.append(nanoseconds / orders)
        if self._in_use is not self.at_once:
            if len(times) == _CALLS or self._has_lost(times, measured):
                measured[self.at_once] = median(times), median(self._periods)
                self._choose(measured)
        elif self._calls >= self._interval or not self._calls % _SOONEST:
            if times:
                measured[self.at_once] = median(times), median(self._periods)
            if self._calls >= self._interval or _best(measured) is not self._in_use:
                self._go(at_once=not self.at_once)

    def _choose(self, measured: dict[bool, tuple[float, float]]) -> None:
        """Switches to the faster mode if both are measured, and to the other mode otherwise."""
        if len(measured) < 2:
            self._go(at_once=not self.at_once)
            return
        best = _best(measured)
        if best is self._in_use:
            fast = measured[best][0]
            lost = self._spent - self._calls * fast
            wanted = max(min(_LATEST, 2 * self._interval), lost / (_SHARE * fast + 1))
            self._interval = min(_LATEST_OF_ALL, int(wanted))
        else:
            self._interval = _SOONEST
        self._in_use = best
        self._go(at_once=best)

    def _has_lost(self, times: deque[float], measured: dict[bool, tuple[float, float]]) -> bool:
        """True if every call in this measurement was slower than the other mode."""
        if len(times) < _CLEAR or (other := measured.get(not self.at_once)) is None:
            return False
        return min(times) * (_SAVED if self.at_once else 1.0) > other[0]

    def _go(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self._calls = 0
        self._spent = 0  # duration of these calls in nanoseconds
        self._times: deque[float] = deque(maxlen=_CALLS)  # nanoseconds per batch of the last calls
        self._periods: deque[int] = deque(maxlen=_CALLS)  # nanoseconds between these calls

    def __str__(self) -> str:
        measured = self._measured
        if len(measured) < 2:
            return "by threads, until both modes are measured"
        at_once, handed_over = (_time(measured[way][0]) for way in (True, False))
        way = "at once" if self._in_use else "by threads"
        return f"{way}: {at_once} per batch at once, {handed_over} per hand-over to a thread"


def _best(measured: dict[bool, tuple[float, float]]) -> bool:
    """Returns True if the caller's thread should make batches, according to ``measured``."""
    if len(measured) < 2:
        return True
    (at_once, period), (by_threads, period_with_threads) = measured[True], measured[False]
    return by_threads > _SAVED * at_once or period_with_threads >= period


def _time(nanoseconds: float) -> str:
    if nanoseconds < 999_500:
        return f"{nanoseconds / 1e3:.3g} µs"
    return f"{nanoseconds / 1e6:.3g} ms"

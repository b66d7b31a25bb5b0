"""Waiting for the other side: one ring's flow control, as one handle sees it.

    a call is limited ──▶ is anybody on the other side? ──no──▶ pass, wait or error (when_alone)
                                      │ yes
                                      ▼
                          asleep on the futex, 5 ms at most ──▶ tried again
                          (the dead reaped, the deadline and signals looked at)

What is allowed decides the core, under the mutex; see ``_native/flow.c``.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_native_id
from typing import TYPE_CHECKING

import numpy as np

from shmbuffer._native import _core
from shmbuffer.errors import RateLimitError, RateLimitTimeout
from shmbuffer.memory import limiter, patience
from shmbuffer.memory.knots import knot
from shmbuffer.memory.layout import Alone, Limit, Side, Why
from shmbuffer.memory.limiter import RateLimiter
from shmbuffer.memory.patience import LOCK_TIMEOUT_NS
from shmbuffer.memory.standing import Standing, explain, others, standing, wanted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory.engine import Engine
    from shmbuffer.memory.ring import Ring

_log = logging.getLogger("shmbuffer.flow")

_NO_QUEUE = 1  # of a call to take
_SLICE_NS = 5_000_000  # asleep, at most: who dies before waking us costs no more
_LOOK_S = 0.1  # between two looks for the dead, and for a knot that nobody can undo
_SAY_S = 30.0  # between two warnings
_FORGET_S = 30.0  # without a wait, until it is not known any more since when a side is left
_ALONE_S = 1.0  # that nobody is on a side, before it counts as left: a client that is started anew


class Flow:
    """Flow control of one handle's ring. Use `Ring.flow`.

    Attributes:
        version: ``[0]`` is 0 as long as nothing was ever limited, which a hot call asks first.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.version = ring._engine.control.limiter_version
        self._samplers: set[int] = set()
        self._left: set[Side] = set()  # sides that nobody is on, as the last wait has found
        self._alone: dict[Side, tuple[float, float]] = {}  # first and last time that nobody was

    @property
    def limits(self) -> int:
        """What there is to wait for; 0: nothing."""
        return int(self._ring._native.limits)

    @property
    def is_queue(self) -> bool:
        """Whether items are handed out first in, first out, each a limited number of times."""
        return bool(self.limits & Limit.QUEUE)

    @property
    def limiter(self) -> RateLimiter | None:
        """What is set."""
        return limiter.read(self._ring._engine.control.runtime[0])

    def standing(self) -> Standing:
        """How the sides stand now."""
        ring = self._ring
        runtime = ring._engine.control.runtime[0]
        return standing(runtime, width=ring.width, capacity=ring.capacity)

    def admit_now(self, count: int) -> bool:
        """Admits a sampler's draw of ``count`` elements, if that is so without waiting.

        Cost: 0.3 µs.
        """
        me = get_native_id()
        if me not in self._samplers:
            self._samplers.add(me)
        found: int = self._ring._native.admit_sample(count, 0, True, LOCK_TIMEOUT_NS)
        return found >= 0

    def admit(self, count: int, min_size: int = 0) -> int:
        """Waits until ``count`` elements may be drawn.

        Args:
            count: elements.
            min_size: how many have to be there, if that is more than the limiter says.

        Returns:
            How many count as drawn now; 0 where nothing counts them.

        Raises:
            RateLimitTimeout: the deadline of `patience.within` has passed.
            RateLimitError: it can never be, or nobody inserts and ``when_alone`` is "error".
        """
        ring = self._ring  # whose native one is another after a fork
        self._samplers.add(get_native_id())

        def call() -> int:
            return int(ring._native.admit_sample(count, min_size, False, LOCK_TIMEOUT_NS))

        return self._run(call, count, min_size)

    def take_back(self, counted: int, version: int = 0) -> None:
        """What was admitted was not drawn.

        Args:
            counted: as many elements as `admit` says.
            version: of the limiter then; 0: it was this thread's last draw, which the core knows.
        """
        if counted:
            native = self._ring._native
            self._run(lambda: native.take_back(counted, version, LOCK_TIMEOUT_NS), counted)

    def take(self, index: NDArray[np.int64], tickets: NDArray[np.int64]) -> bool:
        """Takes the oldest elements out of a queue; their slots stay as they are until `release`.

        Args:
            index: int64[n], filled with elements.
            tickets: int64[n], filled.

        Returns:
            False if there is no queue, or none any more: then nothing is to be released.

        Raises as `admit`.
        """
        ring, count = self._ring, len(index)
        self._samplers.add(get_native_id())
        at, whose = index.ctypes.data, tickets.ctypes.data

        def call() -> int:
            result = int(ring._native.take(count, at, whose, LOCK_TIMEOUT_NS))
            return _NO_QUEUE if result == -_core.NOTHING else result

        return self._run(call, count) != _NO_QUEUE

    def release(self) -> None:
        """What this thread took is read."""
        self._run(lambda: self._ring._native.release(LOCK_TIMEOUT_NS), 0)

    def in_queue(self, entry: int, side: Side) -> Why | None:
        """What a queue has a client wait for that says in the registry what it wants, or None."""
        native = self._ring._native
        found = self._run(lambda: native.waits_in_queue(entry, side, LOCK_TIMEOUT_NS), 0)
        return Why(found) if found else None

    def _run(self, call: Callable[[], int], count: int, min_size: int = 0) -> int:
        result = int(call())
        if result >= 0:
            return result
        waiting = Waiting(self, "sample", count, min_size)
        return self._ring._again(result, call, "sample", waiting=waiting)

    def has_thread(self, side: Side) -> bool:
        """Whether another thread of this process is on that side, through this handle."""
        me = get_native_id()
        theirs = self._samplers if side == Side.SAMPLES else {self._ring._native.last_writer}
        return any(
            thread and thread != me and os.path.exists(f"/proc/self/task/{thread}")
            for thread in theirs
        )


def first_ring(engine: Engine, min_size: int) -> Ring:
    """The ring; waited for while nobody has written anything, for a sample of ``min_size`` items.

    Raises:
        RateLimitTimeout: the deadline of `patience.within` has passed.
        RateLimitError: nobody is there to write, and ``when_alone`` is "error".
        BufferClosedError: the handle was closed meanwhile.
    """
    ring = engine.ring
    if ring is not None:
        return ring
    limit, said = patience.limit(None), -math.inf
    began = looked = accompanied = time.monotonic()
    with _shown(engine, min_size):
        while ring is None:
            now, found = time.monotonic(), engine.limiter
            if now - looked >= _LOOK_S:
                looked = now
                engine.require_linked()
                engine.reap_dead()
            there = others(engine.control.entries, Side.INSERTS, besides=engine.entry)
            accompanied = now if there else accompanied
            left = now - accompanied >= _ALONE_S
            text = f"{engine.where}: sample waits: {_why_nothing(engine, min_size)}"
            if left and found is not None and found.alone == Alone.ERROR:
                raise RateLimitError(
                    f"{text}, and when_alone is 'error'; nothing was changed", pids=[]
                )
            if limit is not None and now >= limit.deadline:
                pids = sorted({int(engine.control.entries["pid"][entry]) for entry in there})
                raise RateLimitTimeout(
                    f"{text}; after {limit.seconds:g} s nothing was changed", pids=pids
                )
            if now - said >= _SAY_S and (left or now - began >= _SAY_S):
                said = now
                _log.warning("%s", text)
            time.sleep(_SLICE_NS / 1e9)  # who writes first wakes nobody: there was no ring
            ring = engine.ring
    return ring


@contextmanager
def _shown(engine: Engine, min_size: int) -> Iterator[None]:
    """Has the registry say that we wait for somebody to write. There is no ring yet to say it."""
    mine = engine.control.entries[engine.entry : engine.entry + 1]
    fields = {
        "waits_since_ns": time.monotonic_ns(),
        "samples_wanted": min(min_size, 2**32 - 1),
        "waits_why": Why.FEW,
        "waits_for": Side.INSERTS,
    }
    try:
        for name, value in fields.items():
            mine[name] = value
            _core.reached("flow.shown")
        yield
    finally:
        if not engine.closed:
            mine["waits_for"] = 0
            _core.reached("flow.shown")


def _why_nothing(engine: Engine, min_size: int) -> str:
    control, capacity = engine.control, engine.settings.capacity
    now = standing(control.runtime[0], width=1, capacity=capacity)
    at = time.monotonic_ns()
    return explain(now, control.entries, Side.INSERTS, min_size, Why.FEW, at, engine.entry)


class Waiting:
    """One call that is limited.

    Args:
        flow: of whose ring.
        what: the call, for messages.
        count: elements that it writes or draws; 0: as many as the registry says.
        min_size: that it asks for itself.
    """

    def __init__(self, flow: Flow, what: str, count: int = 0, min_size: int = 0) -> None:
        self._flow = flow
        self._ring = flow._ring
        self._what = what
        self._count = count
        self._min_size = min_size
        self._began = time.monotonic()
        self._looked = -1.0
        self._said = -1.0
        self._knot: tuple[int, ...] | None = None
        self._full: tuple[int, int] | None = None
        self.side = Side.INSERTS if what == "sample" else Side.SAMPLES

    def wait(self, limit: patience.Limit | None) -> None:
        """Once: until something has changed, or a few milliseconds have passed.

        Raises:
            RateLimitTimeout: the limit has passed.
            RateLimitError: waiting is of no use.
        """
        native = self._ring._native
        why = Why(native.why)
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._require_possible(why)
            self._ring._engine.reap_dead()
            if self._is_left(now) and self._passes(why, now):
                native.let_pass(True)
                return
            self._require_no_knot(why)
            if now - self._began >= _SAY_S and now - self._said >= _SAY_S:
                self._say(f"{self._text(why)} (for {now - self._began:.0f} s)", now)
        if limit is not None and now >= limit.deadline:
            raise RateLimitTimeout(
                f"{self._ring._engine.where}: {self._text(why)}; after {limit.seconds:g} s nothing "
                "was changed",
                pids=self._pids(),
            )
        left = _SLICE_NS if limit is None else int((limit.deadline - now) * 1e9) + 1
        native.wait(min(_SLICE_NS, left))

    def over(self) -> None:
        """The call has gone on, or was given up."""
        native = self._ring._native
        native.let_pass(False)
        if native.waits_for & self.side:
            native.give_up_waiting(int(self.side), LOCK_TIMEOUT_NS)

    def _is_left(self, now: float) -> bool:
        """Whether nobody is on the other side, and has not been for a while."""
        entries = self._ring._engine.control.entries
        there = others(entries, self.side, besides=self._ring.entry)
        flow = self._flow
        if there or flow.has_thread(self.side):
            flow._alone.pop(self.side, None)
            flow._left.discard(self.side)
            return False
        since, last = flow._alone.get(self.side, (now, now))
        since = since if now - last < _FORGET_S else now  # of calls with short timeouts, too
        flow._alone.update({self.side: (since, now)})
        return self.side in flow._left or now - since >= _ALONE_S

    def _passes(self, why: Why, now: float) -> bool:
        """What to do while nobody is on the other side."""
        found = self._flow.limiter
        alone = Alone.WAIT if found is None else found.alone
        if alone == Alone.ERROR:
            raise RateLimitError(
                f"{self._ring._engine.where}: {self._text(why)}, and when_alone is 'error'; "
                "nothing was changed",
                pids=[],
            )
        if alone == Alone.PASS and why in (Why.AHEAD, Why.BEHIND):
            if self.side not in self._flow._left:
                self._flow._left.add(self.side)
                self._say(f"{self._text(why)}; it goes on, uncounted (when_alone='pass')", now)
            return True
        if now - self._said >= _SAY_S or self._said < 0:
            self._say(self._text(why), now)
        return False

    def _say(self, text: str, now: float) -> None:
        self._said = now
        _log.warning("%s: %s", self._ring._engine.where, text)

    def _require_possible(self, why: Why) -> None:
        """What could never be, however long the other side goes on."""
        found, count, ring = self._flow.limiter, self._wanted(why), self._ring
        where = ring._engine.where
        if why == Why.FEW and count > ring.elements:
            raise ValueError(
                f"{where}: min_size is {count:,}, and the buffer has room for "
                f"{ring.elements:,} items"
            )
        if found is None:
            return
        if why == Why.FULL and count > ring.elements:
            raise RateLimitError(
                f"{where}: a batch of {count:,} items cannot go through a queue of "
                f"{ring.elements:,}; write fewer at once",
                pids=self._pids(),
            )
        if why == Why.SHORT and count > ring.elements * (found.max_times_sampled or 1):
            raise RateLimitError(
                f"{where}: {count:,} items cannot come out of a queue of {ring.elements:,}; draw "
                "fewer at once",
                pids=self._pids(),
            )
        if why == Why.SHORT and self._is_stuck():
            raise RateLimitError(
                f"{where}: {count:,} items cannot come out of this queue of {ring.elements:,}, "
                "which is full: some of its slots are of writers that died; draw fewer at once, or "
                "make the queue larger than what is drawn at once and what dies in it",
                pids=self._pids(),
            )
        share = count * (found.samples_per_insert or 0.0) if why == Why.AHEAD else count
        if why in (Why.AHEAD, Why.BEHIND) and share > 2 * found.tolerance:
            verb = "write" if why == Why.AHEAD else "draw"
            raise RateLimitError(
                f"{where}: to {verb} {count:,} items at once the error buffer, "
                f"{found.tolerance:g}, has to be at least {share / 2:g}",
                pids=self._pids(),
            )

    def _is_stuck(self) -> bool:
        """Whether a queue is full, and still too short for the sample that waits."""
        runtime, ring = self._ring._engine.control.runtime[0], self._ring
        if ring._native.queued < ring.elements or int(runtime["pending"]):
            self._full = None
            return False
        state = int(runtime["head"]), self._flow.standing().left
        before, self._full = self._full, state  # looked at twice: what is taken is gone at once
        return before == state

    def _require_no_knot(self, why: Why) -> None:
        """Both sides wait, each for the other: what they may differ by is too small for them."""
        runtime = self._ring._engine.control.runtime[0]
        found = knot(self._flow, why)
        state = tuple(int(runtime[name]) for name in ("write_count", "drawn", "pending", "head"))
        state += (self._flow.standing().left,)
        if found is None:
            self._knot = None
        elif self._knot != state:
            self._knot = state  # looked at once more: one of them may just be going on
        else:
            text = f"{self._ring._engine.where}: {found.text(self._flow)}"
            raise RateLimitError(text, pids=self._pids())

    def _text(self, why: Why) -> str:
        ring = self._ring
        text = explain(
            self._flow.standing(),
            ring._engine.control.entries,
            self.side,
            self._wanted(why),
            why,
            time.monotonic_ns(),
            ring.entry,
        )
        return f"{self._what} waits: {text}"

    def _wanted(self, why: Why) -> int:
        if self._count and why != Why.FEW:
            return self._count
        return wanted(self._ring._engine.control.entries[self._ring.entry], self.side)

    def _pids(self) -> list[int]:
        entries = self._ring._engine.control.entries
        there = others(entries, self.side, besides=self._ring.entry)
        return sorted({int(entries["pid"][entry]) for entry in there})

"""Waiting for the other side: one ring's flow control, as one handle sees it.

    a call is limited ──▶ is anybody on the other side? ──no──▶ pass, wait or error (when_alone)
                                      │ yes
                                      ▼
                          asleep on the futex, 5 ms at most ──▶ tried again
                          (the dead reaped, the deadline and signals looked at)

What is allowed decides the core, under the mutex; see ``_native/limiter.c``.
"""

from __future__ import annotations

import logging
import os
import time
from threading import get_native_id
from typing import TYPE_CHECKING, Any

import numpy as np

from shmbuffer.errors import RateLimitError, RateLimitTimeout
from shmbuffer.memory import limiter, patience
from shmbuffer.memory.layout import Alone, EntryState, Limit, Side, Why
from shmbuffer.memory.limiter import RateLimiter
from shmbuffer.memory.patience import LOCK_TIMEOUT_NS
from shmbuffer.memory.standing import Standing, explain, others, standing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory.ring import Ring

_log = logging.getLogger("shmbuffer.flow")

_SLICE_NS = 5_000_000  # asleep, at most: who dies before waking us costs no more
_LOOK_S = 0.1  # between two looks for the dead, and for a knot that nobody can undo
_SAY_S = 30.0  # between two warnings
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
        return found == 0

    def admit(self, count: int, min_size: int = 0) -> None:
        """Waits until ``count`` elements may be drawn; they count as drawn then.

        Args:
            count: elements.
            min_size: how many have to be there, if that is more than the limiter says.

        Raises:
            RateLimitTimeout: the deadline of `patience.within` has passed.
            RateLimitError: it can never be, or nobody inserts and ``when_alone`` is "error".
        """
        native = self._ring._native
        self._samplers.add(get_native_id())

        def call() -> int:
            return int(native.admit_sample(count, min_size, False, LOCK_TIMEOUT_NS))

        self._run(call, count, min_size)

    def take_back(self, count: int) -> None:
        """``count`` elements that were admitted were not drawn."""
        native = self._ring._native
        self._run(lambda: native.take_back(count, LOCK_TIMEOUT_NS), count)

    def take(self, index: NDArray[np.int64], tickets: NDArray[np.int64]) -> None:
        """Takes the oldest elements out of a queue; their slots stay as they are until `release`.

        Args:
            index: int64[n], filled with elements.
            tickets: int64[n], filled.

        Raises as `admit`.
        """
        native, count = self._ring._native, len(index)
        self._samplers.add(get_native_id())
        at, whose = index.ctypes.data, tickets.ctypes.data
        self._run(lambda: native.take(count, at, whose, LOCK_TIMEOUT_NS), count)

    def release(self) -> None:
        """What this thread took is read."""
        native = self._ring._native
        self._run(lambda: native.release(LOCK_TIMEOUT_NS), 0)

    def _run(self, call: Any, count: int, min_size: int = 0) -> None:
        result = call()
        if result < 0:
            self._ring._again(
                result, call, "sample", waiting=Waiting(self, "sample", count, min_size)
            )

    def has_thread(self, side: Side) -> bool:
        """Whether another thread of this process is on that side, through this handle."""
        me = get_native_id()
        theirs = self._samplers if side == Side.SAMPLES else {self._ring._native.last_writer}
        return any(
            thread and thread != me and os.path.exists(f"/proc/self/task/{thread}")
            for thread in theirs
        )


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
        self._alone_since: float | None = None
        self._knot: tuple[int, ...] | None = None
        self.side = Side(0)

    def wait(self, limit: patience.Limit | None) -> None:
        """Once: until something has changed, or a few milliseconds have passed.

        Raises:
            RateLimitTimeout: the limit has passed.
            RateLimitError: waiting is of no use.
        """
        native = self._ring._native
        why = Why(native.why)
        self.side = Side.SAMPLES if why in (Why.AHEAD, Why.FULL) else Side.INSERTS
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
        if self.side:
            self._ring._native.let_pass(False)
            self._ring._native.give_up_waiting(int(self.side), LOCK_TIMEOUT_NS)

    def _is_left(self, now: float) -> bool:
        """Whether nobody is on the other side, and has not been for a while."""
        entries = self._ring._engine.control.entries
        there = others(entries, self.side, besides=self._ring.entry)
        if there or self._flow.has_thread(self.side):
            self._alone_since = None
            self._flow._left.discard(self.side)
            return False
        if self._alone_since is None:
            self._alone_since = now
        return self.side in self._flow._left or now - self._alone_since >= _ALONE_S

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
        found, count, ring = self._flow.limiter, self._wanted(), self._ring
        where = ring._engine.where
        if why == Why.FEW and max(self._min_size, 1) > ring.elements:
            raise ValueError(
                f"{where}: min_size is {self._min_size:,}, and the buffer has room for "
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
        share = count * (found.samples_per_insert or 0.0) if why == Why.AHEAD else count
        if why in (Why.AHEAD, Why.BEHIND) and share > 2 * found.tolerance:
            verb = "write" if why == Why.AHEAD else "draw"
            raise RateLimitError(
                f"{where}: to {verb} {count:,} items at once the error buffer, "
                f"{found.tolerance:g}, has to be at least {share / 2:g}",
                pids=self._pids(),
            )

    def _require_no_knot(self, why: Why) -> None:
        """Both sides wait, each for the other: the error buffer is too small for their batches."""
        runtime = self._ring._engine.control.runtime[0]
        entries = self._ring._engine.control.entries
        live = entries["state"] == EntryState.LIVE
        busy = live & (
            (entries["last_insert_ns"] > 0)
            | (entries["last_sample_ns"] > 0)
            | (entries["waits_for"] > 0)
        )
        sides = entries["waits_for"][busy]
        both = bool((sides & Side.SAMPLES).any()) and bool((sides & Side.INSERTS).any())
        state = tuple(int(runtime[name]) for name in ("write_count", "drawn", "pending"))
        if why not in (Why.AHEAD, Why.BEHIND) or not both or not (sides > 0).all():
            self._knot = None
        elif self._knot != state:
            self._knot = state  # looked at once more: one of them may just be waking up
        else:
            found = self._flow.limiter
            ratio = (found.samples_per_insert if found else None) or 0.0
            writes = entries["wanted"][busy & (entries["waits_for"] & Side.SAMPLES > 0)].max()
            draws = entries["wanted"][busy & (entries["waits_for"] & Side.INSERTS > 0)].max()
            raise RateLimitError(
                f"{self._ring._engine.where}: writes of {int(writes):,} items and samples of "
                f"{int(draws):,} wait for each other: with {ratio:g} samples per insert the error "
                f"buffer has to be at least {(float(writes) * ratio + float(draws)) / 2:g}; it is "
                f"{found.tolerance if found else 0:g}",
                pids=self._pids(),
            )

    def _text(self, why: Why) -> str:
        ring = self._ring
        now = self._flow.standing()
        if self._min_size > now.min_size:
            now = Standing(**{**now.__dict__, "min_size": self._min_size})
        text = explain(
            now,
            ring._engine.control.entries,
            self.side,
            self._wanted(),
            why,
            time.monotonic_ns(),
            ring.entry,
        )
        return f"{self._what} waits: {text}"

    def _wanted(self) -> int:
        if self._count:
            return self._count
        return int(self._ring._engine.control.entries["wanted"][self._ring.entry])

    def _pids(self) -> list[int]:
        entries = self._ring._engine.control.entries
        there = others(entries, self.side, besides=self._ring.entry)
        return sorted({int(entries["pid"][entry]) for entry in there})

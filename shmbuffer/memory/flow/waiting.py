"""Runs native calls; if a call does not succeed, waits and retries it or raises an error.

    BLOCKED       another writer fills the slots: wait in the queue, and reap dead clients
    LIMITED       the other side must come first: see `Waiting`
    FORKED        the handle was inherited through fork: take a new seat
    UNALLOCATED   slots have no space in the files yet: allocate it, see `growth`
    otherwise     raise an error: see `status`

    a call is limited ──▶ is a client on the other side? ──no──▶ pass, wait or error (when_no_peer)
                                      │ yes
                                      ▼
                          sleep on the futex, at most 5 ms ──▶ try again
                          (reap dead clients, check the deadline and signals)

A sample also fails if all collectors that a coordinator spawned have died, no other client could
write, and ``when_no_peer`` is not "wait". The CollectorsDiedError lists these collectors.

The C core checks the limits under the mutex; see ``_native/core/flow.c``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shmbuffer._native import _core
from shmbuffer.errors import (
    CollectorsDiedError,
    RateLimitError,
    RateLimitTimeout,
    RingOverrunError,
)
from shmbuffer.memory.directory import growth
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow import consumer_status
from shmbuffer.memory.flow.consumer_status import ConsumerStatus
from shmbuffer.memory.flow.deadlock import find_deadlock
from shmbuffer.memory.flow.holders import describe_holders, holders, table_of
from shmbuffer.memory.flow.rate_status import (
    RateStatus,
    clients_on,
    explain,
    rate_status,
)
from shmbuffer.memory.flow.sides import Sides
from shmbuffer.memory.flow.status import raise_for_status, require_linked
from shmbuffer.memory.format.layout import Alone, Side, Why
from shmbuffer.memory.format.limiter import RateLimiter
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.slots_file import SlotsFile
from shmbuffer.memory.system import deadline
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, WRITE_TIMEOUT_S
from shmbuffer.memory.system.identity import process_state

_log = logging.getLogger("shmbuffer.flow")

COUNTS, PASSES_ONCE, PASSES = range(3)
"""Treatment of a thread's calls by the ratio (``shmb_bypass`` in ``_native/core/flow.h``).

The calls are counted, or the next call is admitted unconditionally, or all calls are.
"""
SLICE_NS = 5_000_000
"""The longest sleep.

A death is detected within this time, even the death of the process that would end the sleep.
"""
LOOK_S = 0.1
"""Seconds between two checks for dead clients and deadlocks."""
SAY_S = 30.0
"""Seconds between two warnings."""

# seconds between checks of a ring that is empty because all of it is being written
FILLING_S = 0.0002
_PATIENCE_S = 0.1  # a queue position that is not used for this long moves to the end of the queue


class Calls:
    """The native calls of one handle's ring."""

    def __init__(self, seat: Seat, schema: Schema, live: SlotsFile) -> None:
        self.seat = seat
        self.schema = schema
        self._live = live
        self.sides = Sides(seat)

    def run(
        self,
        call: Callable[[], int],
        what: str,
        timeout: float | None = WRITE_TIMEOUT_S,
        priorities: object = None,
        index: object = None,
    ) -> int:
        """Repeats a call until it succeeds, and returns its result, which is at least 0."""
        try:
            result = call()
            if result < 0:
                result = self.again(result, call, what, timeout, priorities, index)
        except BaseException:
            self.seat.native.stop_waiting(LOCK_TIMEOUT_NS)
            raise
        return result

    def ask(
        self,
        name: str,
        *given: Any,
        what: str = "",
        priorities: object = None,
        index: object = None,
    ) -> int:
        """Runs a method of the native ring; error messages call it ``what``."""
        call = lambda: int(getattr(self.seat.native, name)(*given, LOCK_TIMEOUT_NS))  # noqa: E731
        return self.run(call, what or name, WRITE_TIMEOUT_S, priorities, index)

    def answer(self, call: Callable[[], Any], what: str) -> Any:
        """Returns the result of a call, and repeats it while the result is a status (an int)."""
        while isinstance(found := call(), int):
            self.again(found, lambda: 0, what)
        return found

    def again(
        self,
        result: int,
        call: Callable[[], int],
        what: str,
        timeout: float | None = WRITE_TIMEOUT_S,
        priorities: object = None,
        index: object = None,
    ) -> int:
        """Waits, reaps or rejoins, depending on the status, until the call succeeds.

        If the call fails, the caller withdraws its registered wait with a call of the core, in an
        ``except`` block that encloses both calls (see `run`).
        """
        seat = self.seat
        limit = deadline.start(timeout)
        blocked: _Blocked | None = None
        waiting: Waiting | None = None
        while result < 0:
            if result == -_core.BLOCKED:
                blocked = self._wait_for_blocker(what, limit, blocked)
            elif result == -_core.LIMITED:
                waiting = waiting or Waiting(seat, self.schema, self.sides, what)
                native = seat.native
                waiting.wait(Why(native.why), native.needed, deadline.start(None))
                limit = deadline.start(timeout)  # the timeout of waits for a slot starts here
            elif result == -_core.FORKED:
                seat.rejoin()
            elif result == -_core.UNALLOCATED:
                growth.grow(seat, int(seat.native.needed))
            elif result == -_core.NOTHING and self._is_being_filled(limit):
                time.sleep(FILLING_S)
            else:
                raise_for_status(seat, -result, what, priorities, index)
            require_linked(seat)
            result = call()
        if waiting is not None:  # the core clears the wait only for limited buffers
            seat.native.stop_waiting(LOCK_TIMEOUT_NS)
        return int(result)

    def _is_being_filled(self, limit: deadline.Deadline | None) -> bool:
        """True if writers hold slots, or held slots recently, so that an empty ring fills soon."""
        self.seat.reap_dead()
        if limit is not None and time.monotonic() >= limit.deadline:
            return False
        used = slice(self._live.used())
        return int(self.seat.native.length) > 0 or bool(self._live.writing(used).any())

    def _wait_for_blocker(
        self, what: str, limit: deadline.Deadline | None, before: _Blocked | None
    ) -> _Blocked | None:
        """Waits for a client, because most clients block only briefly; reaps a dead client."""
        seat = self.seat
        entry, incarnation, turn, by_turn = seat.native.blocker
        now = time.monotonic()
        late = limit is not None and now >= limit.deadline
        who = (entry, incarnation, turn if by_turn else 0)
        blocked = before if before is not None and before.who == who else _Blocked(who, now, now)
        if (late or now - blocked.looked >= SLICE_NS / 1e9) and seat.reap_if_dead(
            entry, incarnation
        ):
            return None
        if limit is not None and late:
            pid = seat.registry.identity(entry).pid
            state = process_state(pid)
            doing = (
                "is ahead in the queue for slots" if by_turn else "is still writing the next slot"
            )
            raise RingOverrunError(
                f"{seat.where}: {what} waited {limit.seconds:g} s: process {pid} ({state}) "
                f"{doing}; continue or end that process, or make the buffer larger",
                pid=pid,
                state=state,
                timeout=limit.seconds,
            )
        seat.native.wait(
            SLICE_NS if limit is None else min(SLICE_NS, int((limit.deadline - now) * 1e9) + 1)
        )
        if by_turn and now - blocked.since > _PATIENCE_S:
            seat.native.forfeit(entry, turn, LOCK_TIMEOUT_NS)
            return None
        looked = now if now - blocked.looked >= SLICE_NS / 1e9 else blocked.looked
        return _Blocked(who, blocked.since, looked)


class _Blocked(NamedTuple):
    """A write that waits for another client."""

    who: tuple[int, int, int]
    """Entry, incarnation and queue position of the blocking client; position 0: it fills a slot."""
    since: float
    looked: float
    """Time of the last check of the client, or of the start of the wait."""


class Waiting:
    """The wait of one limited call."""

    def __init__(self, seat: Seat, schema: Schema, sides: Sides, what: str) -> None:
        self._seat = seat
        self._schema = schema
        self._sides = sides
        self._what = "extend" if what in ("write", "place") else what
        self._began = time.monotonic()
        self._looked = -1.0
        self._said = -1.0
        self._last_state: tuple[int, ...] | None = None
        self._full: tuple[int, int] | None = None
        self._side = Side.INSERTS if what == "sample" else Side.SAMPLES

    def wait(self, why: Why, count: int, limit: deadline.Deadline | None) -> None:
        """Waits once, until the state of the buffer changes or a few milliseconds have passed."""
        native = self._seat.native
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._seat.reap_dead()
            if why != Why.QUOTA:  # otherwise the other side is not visible in this ring
                self._require_possible(why, count)
                if self._sides.are_left(self._side, now) and self._passes(why, count, now):
                    native.bypass(PASSES_ONCE)
                    return
                self._require_no_deadlock(why)
            if now - self._began >= SAY_S and now - self._said >= SAY_S:
                self._warn(f"{self._text(why, count)} (for {now - self._began:.0f} s)", now)
        if limit is not None and now >= limit.deadline:
            raise RateLimitTimeout(
                f"{self._seat.where}: {self._text(why, count)}; after {limit.seconds:g} s nothing "
                "was changed",
                pids=self._pids(),
            )
        left = SLICE_NS if limit is None else int((limit.deadline - now) * 1e9) + 1
        if native is None:  # no client could end a sleep
            time.sleep(min(SLICE_NS, left) / 1e9)
        else:
            native.wait(min(SLICE_NS, left))

    def _passes(self, why: Why, count: int, now: float) -> bool:
        """Decides what a call does while the other side has no client; True if it continues."""
        found = self._seat.control.limits()
        alone = Alone.WAIT if found is None else found.alone
        seat = self._seat
        no_peer = why == Why.HELD and seat.is_alone() and not self._sides.has_thread(self._side)
        if no_peer and found is None:
            raise RateLimitError(
                f"{seat.where}: {self._text(why, count)}, and no other client is attached; nothing "
                "was changed",
                pids=[],
            )
        passes = alone == Alone.PASS and why in (Why.AHEAD, Why.BEHIND)
        if not passes and (found is None or alone != Alone.WAIT):
            self._require_collectors(why, count)
        if alone == Alone.ERROR:
            raise RateLimitError(
                f"{self._seat.where}: {self._text(why, count)}, and when_no_peer is 'error'; "
                "nothing was changed",
                pids=[],
            )
        if passes:
            if self._sides.note_left(self._side):
                text = self._text(why, count)
                self._warn(f"{text}; the call continues uncounted (when_no_peer='pass')", now)
            return True
        if now - self._said >= SAY_S or self._said < 0:
            self._warn(self._text(why, count), now)
        return False

    def _require_collectors(self, why: Why, count: int) -> None:
        """Raises CollectorsDiedError if no client could write the items that a sample waits for."""
        lent = why == Why.SCARCE and any(one.leases for one in self._consumers())
        if self._side != Side.INSERTS or lent or not (dead := self._sides.lost_collectors()):
            return
        raise CollectorsDiedError(
            f"{self._seat.where}: {self._text(why, count)}, and no dead collector is restarted: "
            f"{', '.join(map(str, dead))}; nothing was changed. Start collectors again, or use "
            "RateLimiter(when_no_peer='wait') to wait for new ones",
            pids=[],
            collectors=[(one.name, one.exitcode, one.error) for one in dead],
        )

    def _warn(self, text: str, now: float) -> None:
        self._said = now
        _log.warning("%s: %s", self._seat.where, text)

    def _require_possible(self, why: Why, count: int) -> None:
        """Raises ValueError or RateLimitError if the call can never be admitted."""
        found, room, where = self._seat.control.limits(), self._schema.elements, self._seat.where
        if why == Why.FEW and count > room:
            raise ValueError(
                f"{where}: min_size is {count:,}, but the buffer has room for only {room:,} items; "
                "use a smaller min_size"
            )
        if why in (Why.HELD, Why.SCARCE) and count > room:
            verb = "write" if why == Why.HELD else "draw"
            raise ValueError(
                f"{where}: a batch of {count:,} items cannot be consumed through a buffer of "
                f"{room:,}; {verb} fewer at once"
            )
        if found is None:
            return
        share = count * (found.samples_per_insert or 0.0) if why == Why.AHEAD else count
        if why == Why.FULL and count > room:
            problem = (
                f"a batch of {count:,} items cannot go through a queue of {room:,}; write fewer "
                "at once"
            )
        elif why == Why.SHORT and count > room * (found.max_times_sampled or 1):
            problem = f"{count:,} items cannot come out of a queue of {room:,}; draw fewer at once"
        elif why == Why.SHORT and self._is_stuck():
            problem = (
                f"{count:,} items cannot come out of this queue of {room:,}, which is full, and "
                "some of its slots belong to writers that died; draw fewer at once, or make the "
                "queue larger than a batch plus the items that dead writers may leave"
            )
        elif why in (Why.AHEAD, Why.BEHIND) and share > 2 * found.tolerance:
            verb = "write" if why == Why.AHEAD else "draw"
            problem = (
                f"to {verb} {count:,} items at once, the error buffer must be at least "
                f"{share / 2:g}, but is {found.tolerance:g}"
            )
        else:
            return
        raise RateLimitError(f"{where}: {problem}", pids=self._pids())

    def _is_stuck(self) -> bool:
        """True if a queue is full, but still too short for the waiting sample."""
        runtime = self._seat.control.runtime[0]
        if self._seat.native.queued < self._schema.elements or int(runtime["pending"]):
            self._full = None
            return False
        state = int(runtime["head"]), self._rate_status().left
        # checked twice, because taken items are freed slightly later
        before, self._full = self._full, state
        return before == state

    def _require_no_deadlock(self, why: Why) -> None:
        """Raises RateLimitError if both sides wait for each other, because of tight limits."""
        control = self._seat.control
        runtime = control.runtime[0]
        found = find_deadlock(control, self._rate_status(), why, self._in_queue)
        state = tuple(int(runtime[name]) for name in ("write_count", "drawn", "pending", "head"))
        state += (self._rate_status().left,)
        if found is None:
            self._last_state = None
        elif self._last_state != state:
            self._last_state = (
                state  # check once more, because one of them may be continuing right now
            )
        else:
            limits = control.limits() or RateLimiter()
            text = found.text(control, self._schema, limits, self._rate_status())
            raise RateLimitError(f"{self._seat.where}: {text}", pids=self._pids())

    def _in_queue(self, entry: int, side: Side) -> Why | None:
        """Returns the reason why a queue makes a client wait, by its entry, or None."""
        if self._seat.native is None:
            return None
        found = self._seat.native.find_queue_reason(entry, side, LOCK_TIMEOUT_NS)
        if found < 0:
            raise_for_status(self._seat, -found, self._what)
        return Why(found) if found else None

    def _rate_status(self) -> RateStatus:
        schema = self._schema
        runtime = self._seat.control.runtime[0]
        return rate_status(runtime, width=schema.width, capacity=schema.capacity)

    def _text(self, why: Why, count: int) -> str:
        """Describes the wait in a sentence."""
        entries, now_ns = self._seat.control.entries, time.monotonic_ns()
        held = describe_holders(holders(table_of(self._seat), entries, self._schema.width))
        entry = self._seat.entry
        absent = self._sides.absent() if self._side == Side.INSERTS else ""
        asked = self._rate_status(), entries, self._side, count, why, now_ns, entry
        text = explain(*asked, held, self._consumers(), absent)
        return f"{self._what} waits: {text}"

    def _consumers(self) -> list[ConsumerStatus]:
        mapped = self._seat.mapped
        return [] if mapped is None else consumer_status.read_consumers(mapped, self._seat.control)

    def _pids(self) -> list[int]:
        """Returns the pids on the side for which the call waits."""
        entries = self._seat.control.entries
        there = clients_on(entries, self._side, excluding=self._seat.entry)
        return sorted({int(entries["pid"][entry]) for entry in there})

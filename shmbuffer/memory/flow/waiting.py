"""Runs calls into the C core. If a call does not succeed, waits and repeats it, or raises an error.

The status of the call decides:

    BLOCKED       another writer fills the slots: wait in the queue, and reap dead clients
    LIMITED       the other side must first sample or insert: see `Waiting`
    FORKED        the handle was inherited through fork: take a new seat
    UNALLOCATED   slots have no space in the files yet: allocate the space, see `growth`
    otherwise     raise an error: see `status`

    a call is limited ──▶ is a client on the other side? ──no──▶ pass, wait or error (when_no_peer)
                                      │ yes
                                      ▼
                          sleep on the futex, at most 5 ms ──▶ try again
                          (reap dead clients, check the deadline and signals)

A sample raises CollectorsDiedError if all collectors that a coordinator spawned have died, no other
client could write, and ``when_no_peer`` is not "wait". The error lists these collectors.

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
"""How the limits treat this thread's calls (``shmb_bypass`` in ``_native/core/flow.h``).

COUNTS: all calls are checked and counted. PASSES_ONCE: the next call is admitted unconditionally.
PASSES: all calls are admitted unconditionally.
"""
SLICE_NS = 5_000_000
"""Maximum duration of a sleep in nanoseconds.

The death of a process is detected within this time, even if that process would have ended the
sleep.
"""
CHECK_INTERVAL_S = 0.1
"""Seconds between two checks for dead clients and deadlocks."""
WARNING_INTERVAL_S = 30.0
"""Seconds between two warnings about the same wait."""
FILLING_S = 0.0002
"""Seconds between two checks of an empty ring whose slots are all being written."""

_PATIENCE_S = 0.1
"""Seconds after which a writer that does not use its queue position loses the position."""


class Calls:
    """Runs the calls of one handle's ring in the C core."""

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
        """Repeats a call until it succeeds, and returns its result.

        Args:
            call: Function that calls the C core. A negative result is a status.
            what: Name of the operation for error messages.
            timeout: Seconds to wait for slots; None for no limit.
            priorities: Array of priorities for error messages.
            index: Array of indices for error messages.
        """
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
        *arguments: Any,
        what: str = "",
        priorities: object = None,
        index: object = None,
    ) -> int:
        """Runs a method of the native ring until it succeeds, and returns its result.

        Error messages name the operation ``what``, or the method.
        """

        def call() -> int:
            return int(getattr(self.seat.native, name)(*arguments, LOCK_TIMEOUT_NS))

        return self.run(call, what or name, WRITE_TIMEOUT_S, priorities, index)

    def answer(self, call: Callable[[], Any], what: str) -> Any:
        """Repeats a call while its result is a status (an int). Returns the first other result."""
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
        """Handles the status ``result`` of a call, and repeats the call until it succeeds.

        Depending on the status, it waits, reaps a dead client, allocates space or takes a new seat.
        If an exception is raised, the caller must call ``stop_waiting`` of the core, because the
        wait may be registered (see `run`).
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
                limit = deadline.start(timeout)  # this timeout is only for waits for a slot
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
        if waiting is not None:  # the core clears the registered wait only in limited buffers
            seat.native.stop_waiting(LOCK_TIMEOUT_NS)
        return int(result)

    def _is_being_filled(self, limit: deadline.Deadline | None) -> bool:
        """True if a ring without items soon has items, because writers are filling slots."""
        self.seat.reap_dead()
        if limit is not None and time.monotonic() >= limit.deadline:
            return False
        used = slice(self._live.used())
        return int(self.seat.native.length) > 0 or bool(self._live.writing(used).any())

    def _wait_for_blocker(
        self, what: str, limit: deadline.Deadline | None, before: _Blocked | None
    ) -> _Blocked | None:
        """Waits once for the client that blocks a write. Reaps the client if it is dead.

        Args:
            what: Name of the operation for error messages.
            limit: The deadline of the wait. If None, waits indefinitely.
            before: The result of the previous call, if the write is still blocked.

        Returns:
            The blocking client and the times of the wait, or None if the client no longer blocks.
        """
        seat = self.seat
        entry, incarnation, position, is_in_queue = seat.native.blocker
        now = time.monotonic()
        late = limit is not None and now >= limit.deadline
        client = (entry, incarnation, position if is_in_queue else 0)
        is_same = before is not None and before.client == client
        blocked = before if before is not None and is_same else _Blocked(client, now, now)
        if (late or now - blocked.checked >= SLICE_NS / 1e9) and seat.reap_if_dead(
            entry, incarnation
        ):
            return None
        if limit is not None and late:
            pid = seat.registry.identity(entry).pid
            state = process_state(pid)
            doing = (
                "is earlier in the queue for slots"
                if is_in_queue
                else "is still writing the next slot"
            )
            raise RingOverrunError(
                f"{seat.where}: {what} waited {limit.seconds:g} s, because process {pid} ({state}) "
                f"{doing}; continue or end that process, or make the buffer larger",
                pid=pid,
                state=state,
                timeout=limit.seconds,
            )
        seat.native.wait(
            SLICE_NS if limit is None else min(SLICE_NS, int((limit.deadline - now) * 1e9) + 1)
        )
        if is_in_queue and now - blocked.since > _PATIENCE_S:
            seat.native.forfeit(entry, position, LOCK_TIMEOUT_NS)
            return None
        checked = now if now - blocked.checked >= SLICE_NS / 1e9 else blocked.checked
        return _Blocked(client, blocked.since, checked)


class _Blocked(NamedTuple):
    """A client that blocks a write, and the times of the wait in seconds."""

    client: tuple[int, int, int]
    """Entry, incarnation and queue position of the client; position 0 if it fills a slot."""
    since: float
    """Time at which the wait started."""
    checked: float
    """Time of the last check whether the client is alive, or of the start of the wait."""


class Waiting:
    """The wait of one limited call for the other side."""

    def __init__(self, seat: Seat, schema: Schema, sides: Sides, what: str) -> None:
        self._seat = seat
        self._schema = schema
        self._sides = sides
        self._what = "extend" if what in ("write", "place") else what
        self._began = time.monotonic()
        self._checked = -1.0
        self._warned = -1.0
        self._last_state: tuple[int, ...] | None = None
        self._full: tuple[int, int] | None = None
        self._side = Side.INSERTS if what == "sample" else Side.SAMPLES

    def wait(self, why: Why, count: int, limit: deadline.Deadline | None) -> None:
        """Waits until the state of the buffer changes, but for at most `SLICE_NS` nanoseconds.

        Args:
            why: The limit that blocks the call.
            count: The number of items that the call needs.
            limit: The deadline of the wait. If None, waits indefinitely.

        Raises:
            RateLimitTimeout: The deadline has passed.
            RateLimitError, ValueError: The limit can never be met.
        """
        native = self._seat.native
        now = time.monotonic()
        if now - self._checked >= CHECK_INTERVAL_S:
            self._checked = now
            self._seat.reap_dead()
            if why != Why.QUOTA:  # with a quota, the learners are clients of other rings
                self._require_possible(why, count)
                if self._sides.is_empty(self._side, now) and self._passes(why, count, now):
                    native.bypass(PASSES_ONCE)
                    return
                self._require_no_deadlock(why)
            if now - self._began >= WARNING_INTERVAL_S and now - self._warned >= WARNING_INTERVAL_S:
                self._warn(f"{self._text(why, count)} (for {now - self._began:.0f} s)", now)
        if limit is not None and now >= limit.deadline:
            raise RateLimitTimeout(
                f"{self._seat.where}: {self._text(why, count)}; timed out after "
                f"{limit.seconds:g} s, and nothing was changed",
                pids=self._pids(),
            )
        left = SLICE_NS if limit is None else int((limit.deadline - now) * 1e9) + 1
        if native is None:  # before the first write, there is no futex that could end a sleep
            time.sleep(min(SLICE_NS, left) / 1e9)
        else:
            native.wait(min(SLICE_NS, left))

    def _passes(self, why: Why, count: int, now: float) -> bool:
        """Applies ``when_no_peer`` while the other side has no client.

        Returns True if the call continues without the other side, and False if it waits.

        Raises:
            RateLimitError: ``when_no_peer`` is "error", or the only client waits for itself.
            CollectorsDiedError: All collectors are dead, and no other client could write.
        """
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
            if self._sides.note_empty(self._side):
                text = self._text(why, count)
                self._warn(f"{text}; the call continues uncounted (when_no_peer='pass')", now)
            return True
        if now - self._warned >= WARNING_INTERVAL_S or self._warned < 0:
            self._warn(self._text(why, count), now)
        return False

    def _require_collectors(self, why: Why, count: int) -> None:
        """Raises CollectorsDiedError if no client could write the items that a sample waits for."""
        are_leased = why == Why.SCARCE and any(one.leases for one in self._consumers())
        if self._side != Side.INSERTS or are_leased or not (dead := self._sides.dead_collectors()):
            return
        raise CollectorsDiedError(
            f"{self._seat.where}: {self._text(why, count)}, and no dead collector is restarted: "
            f"{', '.join(map(str, dead))}; nothing was changed. Start collectors again, or use "
            "RateLimiter(when_no_peer='wait') to wait for new ones",
            pids=[],
            collectors=[(one.name, one.exitcode, one.error) for one in dead],
        )

    def _warn(self, text: str, now: float) -> None:
        self._warned = now
        _log.warning("%s: %s", self._seat.where, text)

    def _require_possible(self, why: Why, count: int) -> None:
        """Raises ValueError or RateLimitError if the call can never be admitted."""
        found, where = self._seat.control.limits(), self._seat.where
        capacity = self._schema.elements
        if why == Why.FEW and count > capacity:
            raise ValueError(
                f"{where}: min_size is {count:,}, but the buffer has room for only {capacity:,} "
                "items; use a smaller min_size"
            )
        if why in (Why.HELD, Why.SCARCE) and count > capacity:
            verb = "write" if why == Why.HELD else "sample"
            raise ValueError(
                f"{where}: a consumer cannot receive a batch of {count:,} items through a buffer "
                f"of {capacity:,} items; {verb} fewer items at once"
            )
        if found is None:
            return
        share = count * (found.samples_per_insert or 0.0) if why == Why.AHEAD else count
        if why == Why.FULL and count > capacity:
            problem = (
                f"a batch of {count:,} items does not fit into a queue of {capacity:,} items; "
                "write fewer items at once"
            )
        elif why == Why.SHORT and count > capacity * (found.max_times_sampled or 1):
            problem = (
                f"a queue of {capacity:,} items can never return {count:,} items at once; sample "
                "fewer items at once"
            )
        elif why == Why.SHORT and self._is_stuck():
            problem = (
                f"this queue of {capacity:,} items cannot return {count:,} items, because it is "
                "full and some of its slots belong to writers that died; sample fewer items at "
                "once, or make the queue larger than a batch plus the items that dead writers may "
                "leave"
            )
        elif why in (Why.AHEAD, Why.BEHIND) and share > 2 * found.tolerance:
            verb = "write" if why == Why.AHEAD else "sample"
            problem = (
                f"to {verb} {count:,} items at once, the error buffer must be at least "
                f"{share / 2:g}, but is {found.tolerance:g}"
            )
        else:
            return
        raise RateLimitError(f"{where}: {problem}", pids=self._pids())

    def _is_stuck(self) -> bool:
        """True if a queue is full and no writer can add the items that the waiting sample needs."""
        runtime = self._seat.control.runtime[0]
        if self._seat.native.queued < self._schema.elements or int(runtime["pending"]):
            self._full = None
            return False
        state = int(runtime["head"]), self._rate_status().left
        # the state must be the same in two checks, because taken items are freed slightly later
        before, self._full = self._full, state
        return before == state

    def _require_no_deadlock(self, why: Why) -> None:
        """Raises RateLimitError if both sides wait for each other, because the limits are tight."""
        control = self._seat.control
        runtime = control.runtime[0]
        found = find_deadlock(control, self._rate_status(), why, self._queue_reason)
        state = tuple(int(runtime[name]) for name in ("write_count", "drawn", "pending", "head"))
        state += (self._rate_status().left,)
        if found is None:
            self._last_state = None
        elif self._last_state != state:
            # check once more, because one of the clients may be continuing right now
            self._last_state = state
        else:
            limits = control.limits() or RateLimiter()
            text = found.text(control, self._schema, limits, self._rate_status())
            raise RateLimitError(f"{self._seat.where}: {text}", pids=self._pids())

    def _queue_reason(self, entry: int, side: Side) -> Why | None:
        """Returns why a queue blocks the client with a registry entry; None if it does not."""
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
        """Describes the reason for the wait in a sentence."""
        entries, now_ns = self._seat.control.entries, time.monotonic_ns()
        held = describe_holders(holders(table_of(self._seat), entries, self._schema.width))
        entry = self._seat.entry
        absent = self._sides.describe_absent() if self._side == Side.INSERTS else ""
        call = self._rate_status(), entries, self._side, count, why, now_ns, entry
        text = explain(*call, held, self._consumers(), absent)
        return f"{self._what} waits: {text}"

    def _consumers(self) -> list[ConsumerStatus]:
        mapped = self._seat.mapped
        return [] if mapped is None else consumer_status.read_consumers(mapped, self._seat.control)

    def _pids(self) -> list[int]:
        """Returns the pids of the clients on the side for which the call waits."""
        entries = self._seat.control.entries
        clients = clients_on(entries, self._side, excluding=self._seat.entry)
        return sorted({int(entries["pid"][entry]) for entry in clients})

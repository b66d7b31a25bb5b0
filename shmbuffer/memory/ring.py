"""The calls that move items: one native call each, and what to do where it says that it could not.

     write:   claim ── fill ── commit      (the mutex is held for claim and commit, not while bytes
         are copied)
     sample:  draw ── copy ── look again, draw what changed anew
     update:  priorities, by element and ticket

Elements and slots: a slot is one index of the first storage dimension and holds ``width`` elements
(1 unless the storage has several dimensions); element = slot * width + lane. Tickets are int64.

Payload comes and goes by address, in the order of ``schema.leaves``: the caller keeps the memory
alive and contiguous and has compared dtypes and shapes with the schema. Index, ticket and weight
outputs too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.errors import (
    BufferClosedError,
    RingOverrunError,
)
from shmbuffer.memory import patience, slots
from shmbuffer.memory.flow import Flow, Waiting
from shmbuffer.memory.identity import process_state
from shmbuffer.memory.layout import Phase, SlotState
from shmbuffer.memory.limiter import NO_LIMIT, RateLimiter
from shmbuffer.memory.moment import Moment
from shmbuffer.memory.patience import LOCK_TIMEOUT_NS, WRITE_TIMEOUT_S
from shmbuffer.memory.progress import Progress
from shmbuffer.memory.records import Records
from shmbuffer.memory.refusals import refuse

if TYPE_CHECKING:
    from shmbuffer.memory.engine import Engine
    from shmbuffer.memory.schema import Schema

#: Between two looks at whoever blocks a write: a death is noticed within this time.
_SLICE_NS = 5_000_000
#: Between two looks at a ring that is empty because all of it is being written.
_FILLING_S = 0.0002
#: A turn that is not used for this long goes to the end of the queue.
_PATIENCE_S = 0.1


#: Of a consistent copy: how often what has changed is copied without a lock, how many slots before
#: signals are looked at, and how few changed ones may be left for the mutex.
_COPY_ROUNDS = 8
_COPY_SLOTS = 65536
_COPY_LOCKED = 256


class Ring:
    """The ring of one buffer, as one handle sees it.

    Attributes:
        schema: what an item is made of.
        capacity: slots.
        width: elements of a slot.
        elements: capacity * width.
        records: the byte ring, where items are records; None where they are rows of leaves.
        flow: what limits writes and samples, and the waiting for it.
    """

    def __init__(self, engine: Engine, native: Any, schema: Schema, maps: tuple[Any, ...]) -> None:
        self._engine = engine
        #: Ways into the native ring that there is now, made by those who know what items look like.
        self.intakes: dict[int | str | None, _core.Intake] = {}
        #: The way out, once somebody who knows what items look like has made it.
        self.outtake: _core.Outtake | None = None
        self._native = native
        self._claimed: Any = None
        self._claimed_elements = 0
        self._claimed_in_place = False
        self.flow = Flow(self)
        self.schema = schema
        self.capacity = schema.capacity
        self.width = schema.width
        self.elements = schema.elements
        self._slots_map, *self._leaf_maps = maps
        self.records: Records | None = None
        if schema.record_bytes:
            self.records = Records(self, self._slots_map, self._leaf_maps.pop())
        where = schema.sections
        data = np.frombuffer(self._slots_map, np.uint8)
        self.words: NDArray[np.uint64] = _part(data, where["words"], self.capacity, np.uint64)
        self.sources: NDArray[np.uint64] = _part(data, where["sources"], self.capacity, np.uint64)
        self._raw: NDArray[np.float64] = _part(data, where["raw"], self.elements, np.float64)
        self._mass: NDArray[np.float64] = _part(data, where["mass"], self.elements, np.float64)
        #: Asked for the priority of new items that come without one, with the slots that they take
        #: (None: they are taken already). None: it is the largest ever given.
        self.initial: Callable[[NDArray[np.int64] | None], float] | None = None

    def use(self, native: Any) -> None:
        """Goes on with another native ring: that of the child of a fork, or that of nobody."""
        self._native = native
        self.outtake = None
        self.intakes.clear()

    def intake(self, priority: int | str | None, **form: Any) -> _core.Intake | None:
        """The way in for batches that lie as they have to; None once the handle is closed.

        Args:
            priority: what becomes the priorities: number of a leaf, or the key of an entry that is
                no leaf. The way is kept under it.
            **form: see ``_core.Intake``.
        """
        native = self._native
        if isinstance(native, ClosedRing):
            return None
        made = _core.Intake(ring=native, priority=priority, **form)
        self.intakes[priority] = made
        if native is not self._native:  # closed meanwhile: what is kept keeps the maps, too
            self.intakes.clear()
        return made

    def take_out(self, examples: tuple[Any, ...], tensors: type) -> _core.Outtake | None:
        """Makes the way out for batches, `outtake`; None once the handle is closed.

        Args:
            examples: an item's tensor for each leaf.
            tensors: their class.

        Raises:
            ValueError: there is no such way for these.
        """
        native = self._native
        if isinstance(native, ClosedRing):
            return None
        made = self.outtake = _core.Outtake(ring=native, examples=examples, tensors=tensors)
        if native is not self._native:  # closed meanwhile: what is kept keeps the maps, too
            self.outtake = None
        return made

    # What there is. One load each; no lock.

    @property
    def lanes(self) -> int:
        """Elements of a slot."""
        return self.width

    @property
    def length(self) -> int:
        """Elements that hold an item."""
        return int(self._native.length)

    @property
    def head(self) -> int:
        """The next ticket."""
        return int(self._native.head)

    @property
    def cursor(self) -> int:
        """The element that the next write starts at."""
        return int(self._native.head) % self.capacity * self.width

    @property
    def write_count(self) -> int:
        """Elements written so far, by everybody."""
        return int(self._native.write_count)

    @property
    def prioritized(self) -> bool:
        """Whether the priority tree is kept."""
        return bool(self._native.prioritized)

    @property
    def alpha(self) -> float:
        """Priority exponent."""
        return float(self._native.alpha)

    @property
    def eps(self) -> float:
        """What is added to a raw priority."""
        return float(self._native.eps)

    @property
    def max_priority(self) -> float | None:
        """The largest raw priority ever given; None before the first."""
        greatest = float(self._native.max_priority)
        return greatest if greatest >= 0 else None

    @property
    def default_priority(self) -> float:
        """What a new item gets: the largest ever given, and at least 1, which the first one had."""
        return max(1.0, float(self._native.max_priority))

    @property
    def p_sum(self) -> float:
        """Sum of all masses."""
        return float(self._native.total)

    @property
    def p_min(self) -> float:
        """Smallest positive mass; 0 if there is none."""
        return float(self._native.least)

    @property
    def incarnation(self) -> int:
        """Our own; the source of what this handle writes."""
        return int(self._native.incarnation)

    @property
    def entry(self) -> int:
        """Our place in the registry."""
        return self._engine.entry

    @property
    def is_alone(self) -> bool:
        """Whether no other handle is there, and none has come since this one did."""
        last = int(self._engine.control.runtime["next_incarnation"][0])
        return last == self.incarnation and len(self._engine.registry.live()) == 1

    @property
    def updates(self) -> int:
        """Grows with every priority that anybody sets, and with every death.

        Who has died may not have counted what he set.
        """
        control = self._engine.control
        deaths = control.runtime["reaped"][0] + control.runtime["repairs"][0]
        return int(control.entries["updates_applied"].sum() + deaths)

    @property
    def settled(self) -> int:
        """A ticket below which nobody is writing any more."""
        head = self.head  # before the claims: one that has moved it is among them, or over
        entries = self._engine.control.entries
        claims = entries["first"][entries["phase"] != Phase.IDLE]
        return min([head, *map(int, claims)])

    def committed(self) -> NDArray[np.int64]:
        """Elements that hold an item, in storage order. O(capacity)."""
        found = slots.committed(self.words).nonzero()[0]
        if self.width == 1:
            return found
        lanes: NDArray[np.int64] = (found[:, None] * self.width + np.arange(self.width)).ravel()
        return lanes

    def tickets(self) -> NDArray[np.int64]:
        """Ticket of the item in each slot, -1 where there is none. O(capacity)."""
        words = self.words.copy()
        return np.where(slots.committed(words), slots.tickets(words), -1)

    def priorities(self, elements: NDArray[np.int64] | slice | None = None) -> NDArray[np.float64]:
        """Raw priorities of all elements or of some, a copy; NaN where none is known.

        Of a slice they are the ring's own, to be looked at.
        """
        return self._raw.copy() if elements is None else self._raw[elements]

    def mass(self, elements: NDArray[np.int64] | slice | None = None) -> NDArray[np.float64]:
        """The tree's leaves, or some of them, a copy; of a slice the ring's own."""
        return self._mass.copy() if elements is None else self._mass[elements]

    def leaf(self, i: int) -> memoryview:
        """The bytes of leaf ``i`` for all elements, live; the map stays while the view does."""
        return memoryview(self._leaf_maps[i])

    # The hot calls.

    def write(
        self,
        addresses: Sequence[int],
        count: int,
        priorities: NDArray[np.float64] | int | None = None,
        *,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> int:
        """Writes ``count`` slots at the head of the ring: claim, fill, commit.

        Args:
            addresses: of ``[count, *lanes, *shape]``, C order, one a leaf.
            count: slots. Of more than the capacity the last ones stay.
            priorities: raw, float64, ``count * width``, as an array or an address; without, the
                largest ever given, at least 1.
            timeout: seconds to wait for a slot that a living writer is filling; None: for ever.

        Returns:
            The ticket of the first: item k, lane l is element ``(ticket + k) % capacity * width +
                l``.

        Raises:
            RingOverrunError: a living writer did not finish in time; nothing was written.
            ValueError: a priority is NaN, infinite, negative or too large; nothing was written.
            BufferClosedError, LockTimeout, BufferNeedsRestart: as they say; nothing was written.
        """
        if count == 0:
            return self.head
        if priorities is None and self.initial is not None:
            taken = (self.head + np.arange(min(count, self.capacity))) % self.capacity
            priorities = np.full(count * self.width, self.initial(taken))
        given, addresses = _priorities(priorities, count * self.width), tuple(addresses)
        result = self._native.write(addresses, count, given, LOCK_TIMEOUT_NS)
        if result >= 0:
            return int(result)
        return self._again(
            result,
            lambda: self._native.write(addresses, count, given, LOCK_TIMEOUT_NS),
            "write",
            timeout,
            priorities,
        )

    def refused(self, status: int) -> None:
        """Puts an end to a write that the core refused, before the same is tried with `write`.

        Args:
            status: below 0, what the native call answered.

        Raises:
            LockTimeout: that it has waited for once is enough.
        """
        if status == -_core.BLOCKED:
            self._native.give_up_turn(LOCK_TIMEOUT_NS)
        elif status == -_core.LOCK_TIMEOUT:
            refuse(self, -status, "write", None, None, LOCK_TIMEOUT_NS)

    def require_linked(self) -> None:
        """Raises BufferUnlinkedError if the directory was removed; looks once a second.

        Calls that move items do so by themselves, but for `read`. Cost: 0.1 µs.
        """
        if (status := self._native.look()) < 0:
            refuse(self, -status, "look", None, None, LOCK_TIMEOUT_NS)

    def place(
        self,
        where: NDArray[np.int64],
        addresses: Sequence[int],
        priorities: NDArray[np.float64] | int | None = None,
        *,
        in_place: bool,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> None:
        """Writes named slots: row i of the payload goes to slot ``where[i]``.

        The position of the ring stays. A slot that is named twice holds the last row.

        Args:
            where: int64, slots.
            addresses: of ``[len(where), *lanes, *shape]``, one a leaf.
            priorities: raw, float64, ``len(where) * width``.
            in_place: an item that is there keeps its raw priority, and `write_count` stays.
            timeout: as for `write`.

        Raises:
            IndexError: no such slot; and as `write`.
        """
        if len(where) == 0:
            return
        where = np.ascontiguousarray(where, np.int64)
        if priorities is None and self.initial is not None and not in_place:
            priorities = np.full(len(where) * self.width, self.initial(where))
        given = _priorities(priorities, len(where) * self.width)
        at, addresses = where.ctypes.data, tuple(addresses)
        self._run(
            lambda: self._native.place(at, len(where), addresses, given, in_place, LOCK_TIMEOUT_NS),
            "place",
            timeout,
            priorities,
            where,
        )

    def sample(
        self,
        count: int,
        key: int,
        out: Sequence[int],
        index: int,
        tickets: int,
        weights: int = 0,
        *,
        beta: float = 0.0,
        prioritized: bool,
    ) -> int:
        """Draws ``count`` elements and copies them out, each validated.

        Args:
            count: elements.
            key: 64 bits; the same key on the same buffer draws the same elements.
            out: addresses of ``[count, *shape]``, one a leaf.
            index: address of int64[count]: elements.
            tickets: address of int64[count].
            weights: address of float32[count], or 0: (mass / smallest mass) ** -beta (Schaul et al.
                2016, section 3.4, normalised by the largest weight in the buffer).
            beta: importance-sampling exponent.
            prioritized: by mass; else uniformly over what is committed. Masses that are all zero:
                uniformly.

        Returns:
            Rows that had to be drawn again because they were overwritten while being copied.

        Waits while nothing is committed because the whole ring is being written, up to 5 s.

        Raises:
            EmptyBufferError: nothing is committed.
        """
        out = tuple(out)
        result = self._native.sample(
            count, key, out, index, tickets, weights, beta, prioritized, LOCK_TIMEOUT_NS
        )
        if result >= 0:
            return int(result)
        return self._again(
            result,
            lambda: self._native.sample(
                count, key, out, index, tickets, weights, beta, prioritized, LOCK_TIMEOUT_NS
            ),
            "sample",
        )

    def draw(
        self,
        count: int,
        key: int,
        index: int,
        tickets: int,
        weights: int = 0,
        *,
        beta: float = 0.0,
        prioritized: bool,
    ) -> None:
        """`sample` without the payload."""
        self._run(
            lambda: self._native.sample(
                count, key, None, index, tickets, weights, beta, prioritized, LOCK_TIMEOUT_NS
            ),
            "sample",
        )

    def read(self, index: int, count: int, out: Sequence[int], tickets: int) -> int:
        """Copies elements by index, each validated.

        Args:
            index: address of int64[count].
            count: elements.
            out: addresses of ``[count, *shape]``, one a leaf.
            tickets: address of int64[count]; -1 where the slot holds no item.

        Returns:
            How many hold none.

        Raises:
            IndexError: no such element.
        """
        if count == 0:
            return 0
        out = tuple(out)
        return self._run(
            lambda: self._native.read(index, count, out, tickets, LOCK_TIMEOUT_NS), "read"
        )

    def update(
        self,
        index: NDArray[np.int64],
        priorities: NDArray[np.float64],
        tickets: NDArray[np.int64] | None = None,
    ) -> tuple[int, int]:
        """Sets raw priorities; an element named twice keeps the last.

        Args:
            index: int64[n], elements.
            priorities: float64[n], raw.
            tickets: int64[n]; an element whose slot has been written since is left as it is.

        Returns:
            How many were applied, and how many were stale or hold no item.

        Raises:
            ValueError: a priority is NaN, infinite, negative or too large; nothing was changed.
            IndexError: no such element; nothing was changed.
            LockTimeout: a living process holds the mutex. It is taken for 128 priorities at a time,
                so that the first of more may have been set.
        """
        count = len(index)
        if count == 0:
            return 0, 0
        index = np.ascontiguousarray(index, np.int64)
        priorities = np.ascontiguousarray(priorities, np.float64)
        if tickets is not None:
            tickets = np.ascontiguousarray(tickets, np.int64)
        if len(priorities) != count or (tickets is not None and len(tickets) != count):
            raise ValueError(f"update: {count} indices, {len(priorities)} priorities")
        return self.update_at(
            _address(index),
            _address(priorities),
            count,
            _address(tickets),
            single=False,
            shown=lambda: (priorities, index),
        )

    def update_at(
        self,
        index: int,
        priorities: int,
        count: int,
        tickets: int = 0,
        *,
        single: bool,
        shown: Callable[[], tuple[NDArray[np.float64], NDArray[np.int64]]],
    ) -> tuple[int, int]:
        """`update` by address.

        Args:
            index: address of int64[count].
            priorities: address of float32[count] where ``single``, else of float64[count].
            count: elements.
            tickets: address of int64[count], or 0.
            single: see there.
            shown: priorities and index, asked for where one of them has to be named in an error.
        """

        def call() -> int:
            update = self._native.update_singles if single else self._native.update
            return int(update(index, tickets, priorities, count, LOCK_TIMEOUT_NS))

        result = call()
        if result < 0:
            result = self._again(result, call, "update", None, *shown())
        return result, count - result

    def empty(self, *, keep_write_count: bool = False) -> None:
        """Forgets every item, and the largest priority. O(capacity).

        Slots that a writer is filling stay his.
        """
        self._run(lambda: self._native.empty(keep_write_count, LOCK_TIMEOUT_NS), "empty")

    def snapshot(self) -> bytes:
        """Runtime page and registry, of one moment; see `counters.of_snapshot`."""
        return bytes(self._answer(lambda: self._native.snapshot(LOCK_TIMEOUT_NS), "snapshot"))

    def restore(self, slot: int, write_count: int, max_priority: float | None) -> None:
        """Sets where the next item goes, what was counted, and the largest priority seen.

        For a buffer whose items were loaded. The items stay as they are.

        Args:
            slot: of the next item.
            write_count: elements.
            max_priority: raw; None: none was given yet.
        """
        greatest = -1.0 if max_priority is None else float(max_priority)
        self._run(
            lambda: self._native.restore(slot, write_count, greatest, LOCK_TIMEOUT_NS), "restore"
        )

    def copy_out(self, out: Sequence[int]) -> Moment:
        """Copies every item, all of one moment, while others go on writing.

        What has changed since the last round is copied again, without a lock; when little is left
        it is copied under the mutex, together with the counters: that moment is the copy's.

        Args:
            out: addresses of ``[capacity, *lanes, *shape]``, one a leaf. Slots without an item are
                left as they are, or hold bytes without meaning.

        Cost: the bytes once, and what is written meanwhile. The mutex is held for a scan of the
            words and raw priorities, some milliseconds for a million elements, and for what was
            written during the last round.
        """
        out = tuple(out)
        tickets = np.full(self.capacity, -1, np.int64)
        raw = np.empty(self.elements, np.float64)
        sources = np.empty(self.capacity, np.int64)
        at, whose = tickets.ctypes.data, sources.ctypes.data
        slot_bytes = sum(self.schema.leaf_bytes) // self.capacity if out else 0
        with Progress("copy", self.length // self.width * slot_bytes) as progress:
            for _ in range(_COPY_ROUNDS):
                changed = 0
                for first, count in progress.cut(self.capacity, slot_bytes, _COPY_SLOTS):
                    copied = self._native.copy_slots(first, count, out, at)
                    progress.advance(copied * slot_bytes)
                    changed += copied
                if changed <= _COPY_LOCKED:
                    break
        head, write_count, greatest = self._answer(
            lambda: self._native.copy_moment(out, at, whose, raw.ctypes.data, LOCK_TIMEOUT_NS),
            "copy_out",
        )
        sources[tickets < 0] = -1
        raw[np.repeat(tickets < 0, self.width)] = np.nan
        return Moment(tickets, sources, raw, head, write_count, greatest if greatest >= 0 else None)

    def bind_priorities(self, alpha: float, eps: float) -> None:
        """Switches the tree on; what is committed gets its mass. O(capacity), once.

        Raises:
            ValueError: it is on with another alpha or eps; or as `set_alpha`.
        """
        self._run(
            lambda: self._native.set_alpha(alpha, eps, True, LOCK_TIMEOUT_NS),
            f"bind_priorities({alpha}, {eps})",
        )

    def set_alpha(self, alpha: float | None, eps: float | None = None) -> None:
        """Changes the exponent exactly: masses are recomputed from raw priorities. O(capacity).

        None: that one stays as it is, whoever changes it meanwhile.

        Raises:
            ValueError: negative, no number, or too large for the priorities that are there;
                nothing was changed.
        """
        self._run(
            lambda: self._native.set_alpha(alpha, eps, False, LOCK_TIMEOUT_NS),
            f"set_alpha({alpha}, {eps})",
        )

    def limit(self, wanted: RateLimiter | None) -> None:
        """Sets what limits writes and samples; see `Engine.set_limiter`."""
        numbers = NO_LIMIT if wanted is None else wanted.to_numbers()
        self._run(lambda: self._native.limit(*numbers, LOCK_TIMEOUT_NS), "limit")

    # The split form, for payloads that Python moves. One claim a handle: other threads wait. What a
    # thread claimed and neither committed nor aborted is rolled back when it claims again.

    def claim(self, count: int, *, timeout: float | None = WRITE_TIMEOUT_S) -> int:
        """Takes slots at the head; then `commit` or `abort`, in the same thread.

        Raises as `write`.
        """

        def call() -> int:
            native = self._native
            result = native.claim(count, LOCK_TIMEOUT_NS)
            if result >= 0:
                self._claimed = native
                self._claimed_elements = min(count, self.capacity) * self.width
                self._claimed_in_place = False
            return int(result)

        return self._run(call, "write", timeout)

    def claim_slots(
        self,
        where: NDArray[np.int64],
        *,
        in_place: bool,
        tickets: NDArray[np.int64] | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> NDArray[np.bool_]:
        """Takes named slots; then `commit` or `abort`, in the same thread.

        Args:
            where: int64[n], slots.
            in_place: an item that is there keeps its raw priority and its source.
            tickets: int64[n]; a slot that does not hold the item of its ticket is left alone.
            timeout: as for `write`.

        Returns:
            bool[n]: what was taken. If that is nothing, no claim is open.

        Raises as `place`.
        """
        where = np.ascontiguousarray(where, np.int64)
        kept = np.ones(len(where), np.bool_)
        at, held = where.ctypes.data, kept.ctypes.data
        if tickets is not None:
            tickets = np.ascontiguousarray(tickets, np.int64)
            if len(tickets) != len(where):
                raise ValueError(f"claim_slots: {len(where)} slots, {len(tickets)} tickets")
        generation = _address(tickets)

        def call() -> int:
            native = self._native
            result = native.claim_slots(at, len(where), in_place, generation, held, LOCK_TIMEOUT_NS)
            if result > 0 or (result == 0 and tickets is None):
                self._claimed = native
                self._claimed_elements = result * self.width
                self._claimed_in_place = in_place
            return int(result)

        self._run(call, "place", timeout, None, where)
        return kept

    def commit(self, priorities: NDArray[np.float64] | int | None = None) -> None:
        """Publishes what was claimed; if it raises, that was given back.

        Args:
            priorities: raw, float64, one for each element that was claimed: of more slots than
                there are, those that stay.

        Raises:
            ValueError: a priority is NaN, infinite, negative or too large.
            ShmBufferError: this thread has claimed nothing.
        """
        try:
            if priorities is None and self.initial is not None and not self._claimed_in_place:
                priorities = np.full(self._claimed_elements, self.initial(None))
            given = _priorities(priorities, self._claimed_elements)
        except BaseException:
            self.abort()
            raise
        self._run(
            lambda: self._holder().commit(given, 0, LOCK_TIMEOUT_NS), "commit", None, priorities
        )

    def abort(self) -> None:
        """Gives the claimed slots back, empty."""
        self._run(lambda: self._holder().abort(LOCK_TIMEOUT_NS), "abort")

    def _holder(self) -> Any:
        """What the claim was made with: `close` waits for it, and has put a stand-in there."""
        if self._claimed is not None and isinstance(self._native, ClosedRing):
            return self._claimed
        return self._native

    # What happens where a call could not do its work.

    def _run(
        self,
        call: Callable[[], int],
        what: str,
        timeout: float | None = WRITE_TIMEOUT_S,
        priorities: object = None,
        index: object = None,
    ) -> int:
        result = call()
        if result >= 0:
            return result
        return self._again(result, call, what, timeout, priorities, index)

    def _answer(self, call: Callable[[], Any], what: str) -> Any:
        """What a call gives that answers with a status, an int, where it could not do its work."""
        answer = call()
        while isinstance(answer, int):
            self._again(answer, lambda: 0, what)
            answer = call()
        return answer

    def _again(
        self,
        result: int,
        call: Callable[[], int],
        what: str,
        timeout: float | None = WRITE_TIMEOUT_S,
        priorities: object = None,
        index: object = None,
        *,
        waiting: Waiting | None = None,
    ) -> int:
        """Waits, reaps or attaches again, whatever the status says, until the call succeeds."""
        limit = patience.limit(timeout)
        behind: tuple[int, float] | None = None
        in_the_queue = False
        try:
            while result < 0:
                if result == -_core.BLOCKED:
                    in_the_queue = True
                    behind = self._wait_for_blocker(what, limit, behind)
                elif result == -_core.LIMITED:
                    if waiting is None:
                        waiting = Waiting(
                            self.flow, "extend" if what in ("write", "place") else what
                        )
                    waiting.wait(patience.limit(None))
                    limit = patience.limit(timeout)  # of waits for a slot: from here on
                elif result == -_core.FORKED:
                    self._engine.attach_again()
                elif result == -_core.NOTHING and self._is_being_filled(limit):
                    time.sleep(_FILLING_S)
                else:
                    refuse(self, -result, what, priorities, index, LOCK_TIMEOUT_NS)
                self.require_linked()
                result = call()
        except BaseException:
            if in_the_queue:
                self._native.give_up_turn(LOCK_TIMEOUT_NS)
            raise
        finally:
            if waiting is not None:
                waiting.over()
        return int(result)

    def _is_being_filled(self, limit: patience.Limit | None) -> bool:
        """Whether writers hold slots now, or did a moment ago: an empty ring does not stay so."""
        self._engine.reap_dead()
        if limit is not None and time.monotonic() >= limit.deadline:
            return False
        return self.length > 0 or bool((slots.states(self.words) == SlotState.WRITING).any())

    def _wait_for_blocker(
        self,
        what: str,
        limit: patience.Limit | None,
        behind: tuple[int, float] | None,
    ) -> tuple[int, float] | None:
        """One look at whoever is in the way: reaped if dead, else waited for.

        Returns:
            The turn that we wait behind and since when, to lose patience with it.
        """
        entry, incarnation, turn, by_turn = self._native.blocker
        if self._engine.reap_if_dead(entry, incarnation):
            return behind
        now = time.monotonic()
        if limit is not None and now >= limit.deadline:
            pid = self._engine.registry.identity(entry).pid
            state = process_state(pid)
            doing = (
                "waits for a slot in front of us" if by_turn else "is still writing a slot of ours"
            )
            raise RingOverrunError(
                f"{self._engine.where}: {what} waited {limit.seconds:g} s: process {pid} ({state}) "
                f"{doing}; continue or end that process, or make the buffer larger",
                pid=pid,
                state=state,
                timeout=limit.seconds,
            )
        self._native.wait(
            _SLICE_NS if limit is None else min(_SLICE_NS, int((limit.deadline - now) * 1e9) + 1)
        )
        if not by_turn:
            return None
        if behind is None or behind[0] != turn:
            return turn, now
        if now - behind[1] > _PATIENCE_S:
            self._native.forfeit(entry, turn, LOCK_TIMEOUT_NS)
            return None
        return behind


class ClosedRing:
    """Stands in for the native ring of a closed handle: every use of it says so."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> NoReturn:
        raise BufferClosedError(f"{self._where}: this handle was closed; attach again")


def _address(array: NDArray[Any] | int | None) -> int:
    if array is None:
        return 0
    if isinstance(array, int):
        return array
    return int(array.__array_interface__["data"][0])


def _priorities(array: NDArray[np.float64] | int | None, count: int) -> int:
    if array is None or isinstance(array, int):
        return _address(array)
    if array.dtype != np.float64 or not array.flags.c_contiguous:
        raise ValueError(
            f"priorities are {array.dtype}{list(array.shape)}; they have to be float64 and "
            "contiguous"
        )
    if array.size != count:
        raise ValueError(f"{array.size} priorities were given for {count} elements")
    return _address(array)


def _part(data: NDArray[np.uint8], offset: int, count: int, dtype: Any) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    return data[offset : offset + size * count].view(dtype)

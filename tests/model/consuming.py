"""An exhaustive small model of consumers: which learner holds which item, and which are done.

    Consuming ──explore──▶ all states that can be reached ──▶ broken rules, states without a way on

Writers claim and commit, and wait for the slowest consumer. Learners take items of their consumer
under a lease, acknowledge them (also late, or twice), or return them. A lease may run out at any
time. The model follows a locked section store by store, in the order of `_native/core/ledger.c` and
with the names of its crash points. Other processes cannot see the states between two stores, so a
section runs to its end, or it ends with a death after one of its stores. The next process then
repairs the ledger, and may die during the repair.

A ghost is a value that an observer of all steps would remember. The ghosts are how often each item
was acknowledged, under which lease it was last delivered, and which items were committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.state import ABORTED, COMMITTED, EMPTY, WRITING, fail

#: States of a client. ASKS: before its claim or take; SLEEPS: a writer that was refused; WRITES:
#: its claim is open; HOLDS: a learner has items; TWICE: it may acknowledge them a second time;
#: WAKES: it has acknowledged, and has not woken the writers yet; DEAD: its entry is in the
#: registry; GONE: its entry has been freed.
ASKS, SLEEPS, WRITES, HOLDS, TWICE, WAKES, DEAD, GONE = range(8)
WRITER = -1
LEASES = 4  # per consumer

#: Crash points of `consume` that are no stores of this model, in which no consumer is opened or
#: removed.
OPENING = ("consume.cleared", "consume.opened", "consume.begun", "consume.counted")
NOT_MODELLED = (*OPENING, "consume.removed")


class Client(NamedTuple):
    """A client and its local variables."""

    consumer: int  # or WRITER
    count: int = 1
    at: int = ASKS
    woken: bool = False
    ticket: int = -1  # ticket of its open claim
    lease: int = 0
    items: tuple[int, ...] = ()  # tickets of the items that it holds
    then: int = ASKS  # next state after WAKES


@dataclass
class Lease:
    id: int = 0
    holder: int = 0
    ended: bool = False  # its time is over
    first: int = 0
    end: int = 0
    left: int = 0


@dataclass
class Note:
    """The note of a consumer on one slot."""

    ticket: int = -1
    leased: bool = False
    acks: int = 0
    id: int = 0


@dataclass
class Ghost:
    acks: int = 0
    lease: int = 0


@dataclass
class Book:
    """The part of the ledger that belongs to one consumer."""

    next: int = 0
    floor: int = 0
    open: int = 0
    leases: list[Lease] = field(default_factory=lambda: [Lease() for _ in range(LEASES)])
    notes: list[Note] = field(default_factory=list)
    ghosts: list[Ghost] = field(default_factory=list)

    def noted(self, slot: int, ticket: int) -> Note:
        """Returns the note on this item, or an empty one if the slot's note is on another item."""
        note = self.notes[slot]
        return note if note.ticket == ticket else Note()

    def lease_at(self, number: int) -> Lease | None:
        lease = self.leases[number % LEASES]
        return lease if number and lease.id == number else None


@dataclass
class Memory:
    """The shared memory. Between two steps the mutex is free, or its owner has died."""

    words: list[tuple[int, int]]  # ticket and state of each slot
    books: list[Book]
    head: int = 0
    left: bool = False  # a dead owner has left the mutex
    next_lease: int = 1
    committed: tuple[int, ...] = ()  # ghost


class State(NamedTuple):
    shared: str
    clients: tuple[Client, ...]
    deaths: int
    ends: int  # leases that may still run out or be returned


class Consuming(NamedTuple):
    """The parameters of a search.

    Attributes:
        capacity: number of slots.
        items: number of items that all writers together write.
        writers: number of writers.
        learners: for each learner, its consumer and the largest number of items that it takes.
        times: how often each item has to be acknowledged.
        deaths: how many clients may be killed.
        ends: how many leases may run out.
        gives_back: whether learners may return items. Each return counts as a lease that runs out.
        broken: names of rules that are switched off.
    """

    capacity: int
    items: int
    writers: int
    learners: tuple[tuple[int, int], ...]
    times: int = 1
    deaths: int = 0
    ends: int = 0
    gives_back: bool = False
    broken: frozenset[str] = frozenset()


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        states: number of states.
        wedged: states from which some item of a consumer with a living learner is never done, or a
            living writer never continues.
        points: the crash points that were passed.
    """

    states: int
    wedged: int
    points: frozenset[str]


class _Search:
    """The steps of a scenario. Each section works on a mutable copy of the frozen memory."""

    def __init__(self, scenario: Consuming) -> None:
        self.of = scenario
        self.points: set[str] = set()
        self.frozen: dict[str, Memory] = {}

    def breaks(self, rule: str) -> bool:
        return rule in self.of.broken

    def freeze(self, memory: Memory) -> str:
        name = repr(memory)
        if name not in self.frozen:
            self.frozen[name] = deepcopy(memory)
        return name

    def first(self) -> State:
        of = self.of
        consumers = 1 + max(consumer for consumer, _ in of.learners)
        books = [
            Book(
                notes=[Note() for _ in range(of.capacity)],
                ghosts=[Ghost() for _ in range(of.items)],
            )
            for _ in range(consumers)
        ]
        clients = [Client(WRITER)] * of.writers + [Client(*one) for one in of.learners]
        memory = Memory([(-1, EMPTY)] * of.capacity, books)
        return State(self.freeze(memory), tuple(clients), of.deaths, of.ends)

    # Steps of a client

    def steps(self, state: State) -> Iterator[State]:
        for number, me in enumerate(state.clients):
            if me.at in (DEAD, GONE):
                continue
            yield from self._steps_of(state, number, me)
            if any(other.at == DEAD for other in state.clients):
                yield from self._section(state, number, me, self._reap)
            if state.deaths:
                yield _with(state, number, me._replace(at=DEAD))._replace(deaths=state.deaths - 1)
        if state.ends:
            yield from self._runs_out(state)

    def _steps_of(self, state: State, number: int, me: Client) -> Iterator[State]:
        if me.at == SLEEPS:
            if me.woken or any(other.at in (DEAD, GONE) for other in state.clients):
                yield _with(state, number, me._replace(at=ASKS, woken=False))
        elif me.at == WAKES:
            told = _with(state, number, me._replace(at=me.then, then=ASKS))
            yield told if self.breaks("an ack wakes nobody") else _woken(told)
        elif me.consumer == WRITER:
            if me.at == WRITES:
                yield from self._section(state, number, me, self._commit)
            elif self.frozen[state.shared].head < self.of.items:
                yield from self._section(state, number, me, self._claim)
        elif me.at == ASKS:
            yield from self._section(state, number, me, self._take)
        else:
            yield from self._section(state, number, me, self._ack)
            if me.at == TWICE:
                yield _with(state, number, me._replace(at=ASKS, lease=0, items=()))
            elif self.of.gives_back and state.ends:
                yield from self._section(state, number, me, self._give_back)

    def _section(
        self,
        state: State,
        number: int,
        me: Client,
        does: Callable[[State, Memory, int, Client], Iterator[str | Client | State]],
    ) -> Iterator[State]:
        """Runs a section under the mutex, to its end or to a death after one of its stores."""
        memory = deepcopy(self.frozen[state.shared])
        dead = me._replace(at=DEAD)
        stores: Iterator[str | Client | State]
        stores = self._repair(state, memory) if memory.left else iter(())
        after = state
        for repairs, section in ((True, stores), (False, does(state, memory, number, me))):
            for store in section:
                if isinstance(store, Client):
                    after = _with(after, number, store)
                    continue
                if isinstance(store, State):
                    after = store
                    continue
                self.points.add(store)
                if state.deaths:
                    left = Memory(**{**memory.__dict__, "left": True})
                    died = _with(state, number, dead)._replace(deaths=state.deaths - 1)
                    yield died._replace(shared=self.freeze(left))
            if repairs:
                memory.left = False
        yield after._replace(shared=self.freeze(memory))

    def _runs_out(self, state: State) -> Iterator[State]:
        for which, book in enumerate(self.frozen[state.shared].books):
            for at, lease in enumerate(book.leases):
                if lease.id and not lease.ended:
                    memory = deepcopy(self.frozen[state.shared])
                    memory.books[which].leases[at].ended = True
                    yield state._replace(shared=self.freeze(memory), ends=state.ends - 1)

    # Writers

    def _claim(
        self, state: State, memory: Memory, number: int, me: Client
    ) -> Iterator[str | Client]:
        slot, end = memory.head % self.of.capacity, memory.head + 1
        ticket, word = memory.words[slot]
        if word == WRITING:
            return
        for book in memory.books:
            if end > book.floor + self.of.capacity and not self.breaks("writers do not ask"):
                yield from self._move_floor(state, memory, book)
                if end > book.floor + self.of.capacity:
                    yield me._replace(at=SLEEPS, woken=False)
                    return
        if word == COMMITTED and any(b.ghosts[ticket].acks < self.of.times for b in memory.books):
            fail("an item that is not acknowledged is written over")
        memory.words[slot] = (memory.head, WRITING)
        yield me._replace(at=WRITES, ticket=memory.head)
        memory.head += 1

    def _commit(
        self, state: State, memory: Memory, number: int, me: Client
    ) -> Iterator[str | Client]:
        self._end_claim(memory, me.ticket, COMMITTED)
        memory.committed += (me.ticket,)
        yield me._replace(at=ASKS, ticket=-1)

    def _end_claim(self, memory: Memory, ticket: int, word: int) -> None:
        slot = ticket % self.of.capacity
        if memory.words[slot] == (ticket, WRITING):
            memory.words[slot] = (ticket, word)

    def _reap(self, state: State, memory: Memory, number: int, me: Client) -> Iterator[str | State]:
        for other, dead in enumerate(state.clients):
            if dead.at == DEAD:
                if dead.consumer == WRITER and dead.ticket >= 0:
                    self._end_claim(memory, dead.ticket, ABORTED)
                gone = Client(dead.consumer, at=GONE)
                state = _with(state, other, gone)
        yield _woken(state)

    # Learners

    def _is_there(self, memory: Memory, place: int) -> int:
        """Returns the state of the item at a place, or EMPTY if the item is gone."""
        ticket, word = memory.words[place % self.of.capacity]
        return word if ticket == place and word in (WRITING, COMMITTED) else EMPTY

    def _is_done(self, note: Note) -> bool:
        return not note.leased and note.acks >= self.of.times

    def _ended(self, state: State, lease: Lease) -> bool:
        return lease.ended or state.clients[lease.holder].at == GONE

    def _choose(
        self, state: State, memory: Memory, book: Book, count: int
    ) -> tuple[list[int], int]:
        ended, left = [], book.open
        for lease in book.leases:
            if lease.id and left > 0:
                left -= 1
                if self._ended(state, lease):
                    ended.append(lease)
        chosen = [
            place
            for lease in sorted(ended, key=lambda lease: lease.first)
            for place in range(max(lease.first, book.floor), min(lease.end, memory.head))
            if self._is_there(memory, place) == COMMITTED
            and (note := book.noted(place % self.of.capacity, place)).leased
            and note.id == lease.id
        ][:count]
        if self.breaks("what the dead held stays theirs"):
            chosen = []
        place = book.next
        while len(chosen) < count and place < memory.head:
            there = self._is_there(memory, place)
            if there == WRITING:
                break
            note = book.noted(place % self.of.capacity, place)
            if there == COMMITTED and not note.leased and not self._is_done(note):
                chosen.append(place)
            place += 1
        return chosen, place

    def _take(
        self, state: State, memory: Memory, number: int, me: Client
    ) -> Iterator[str | Client]:
        book = memory.books[me.consumer]
        chosen, following = self._choose(state, memory, book, me.count)
        if not chosen:
            return
        for ticket in chosen:
            self._may_be_given(state, book, ticket)
        if self.breaks("next before the items"):
            yield from self._move_next(book, following)
        lease = None
        for _ in range(LEASES):
            if book.leases[memory.next_lease % LEASES].id == 0:
                lease = book.leases[memory.next_lease % LEASES]
                break
            memory.next_lease += 1
        if lease is None:
            return
        identity = memory.next_lease
        memory.next_lease += 1
        yield "consume.numbered"
        lease.holder, lease.ended = number, False
        yield "consume.noted"
        lease.first, lease.end = min(chosen), max(chosen) + 1
        yield "consume.noted"
        lease.left = 0
        yield "consume.noted"
        lease.id = identity
        yield "consume.lent"
        book.open += 1
        yield "consume.lent"
        for ticket in chosen:
            yield from self._give(book, ticket, lease)
        if book.next < following:
            yield from self._move_next(book, following)
        yield me._replace(at=HOLDS, lease=identity, items=tuple(chosen))

    def _may_be_given(self, state: State, book: Book, ticket: int) -> None:
        ghost = book.ghosts[ticket]
        if ghost.acks >= self.of.times:
            fail("what was acknowledged is given again")
        lease = book.lease_at(ghost.lease)
        before = book.noted(ticket % self.of.capacity, ticket)
        if before.leased and lease and not self._ended(state, lease):
            fail("what somebody holds is given to another")

    def _give(self, book: Book, ticket: int, lease: Lease) -> Iterator[str]:
        slot = ticket % self.of.capacity
        before, note = book.noted(slot, ticket), book.notes[slot]
        before = Note(before.ticket, before.leased, before.acks, before.id)
        if self.breaks("the ticket before what is noted"):
            note.ticket = ticket
            yield "consume.ticket"
        note.leased, note.acks, note.id = True, before.acks, lease.id
        if note.ticket == ticket:
            book.ghosts[ticket].lease = lease.id
        yield "consume.given"
        note.ticket, book.ghosts[ticket].lease = ticket, lease.id
        yield "consume.ticket"
        lease.left += 1
        yield "consume.left"
        if before.leased:
            yield from self._release_one(book, before.id)

    def _ack(self, state: State, memory: Memory, number: int, me: Client) -> Iterator[str | Client]:
        book = memory.books[me.consumer]
        for ticket in me.items:
            note = book.noted(ticket % self.of.capacity, ticket)
            there = self._is_there(memory, ticket) == COMMITTED
            late = note.id != me.lease and not self.breaks("a late ack is taken")
            if late or not note.leased or not there:
                continue
            note.leased, note.acks = False, note.acks + 1
            ghost = book.ghosts[ticket]
            ghost.acks += 1
            if ghost.acks > self.of.times:
                fail("an item is acknowledged once too often")
            if ghost.lease != me.lease:
                fail("an item is acknowledged by one who has lost it")
            yield "consume.acked"
            yield from self._release_one(book, me.lease)
            if not self._is_done(note) and ticket < book.next:
                yield from self._move_next(book, ticket)
        yield from self._move_floor(state, memory, book)
        after = Client(me.consumer, me.count) if me.at == TWICE else me
        yield after._replace(at=WAKES, then=ASKS if me.at == TWICE else TWICE)

    def _give_back(
        self, state: State, memory: Memory, number: int, me: Client
    ) -> Iterator[str | Client | State]:
        yield state._replace(ends=state.ends - 1)
        lease = memory.books[me.consumer].lease_at(me.lease)
        if lease:
            lease.ended = True
        yield "consume.ended"
        yield me._replace(at=ASKS, lease=0, items=())

    # The ledger

    def _move_next(self, book: Book, place: int) -> Iterator[str]:
        book.next = place
        yield "consume.next"

    def _move_floor(self, state: State, memory: Memory, book: Book) -> Iterator[str]:
        floor = book.floor
        while floor < memory.head:
            there = self._is_there(memory, floor)
            note = book.noted(floor % self.of.capacity, floor)
            if there == WRITING or (there == COMMITTED and not self._is_done(note)):
                break
            floor += 1
        book.floor = floor
        yield "consume.floor"
        if book.next < floor:
            yield from self._move_next(book, floor)

    def _release_one(self, book: Book, number: int) -> Iterator[str]:
        lease = book.lease_at(number)
        if lease is None:
            return
        lease.left = max(lease.left - 1, 0)
        yield "consume.left"
        if lease.left == 0:
            lease.id = 0
            yield "consume.freed"
            book.open -= 1
            yield "consume.freed"

    def _repair(self, state: State, memory: Memory) -> Iterator[str]:
        """Repairs the ledger like `shmb_repair_ledger`."""
        for book in memory.books:
            if not self.breaks("leases are not counted again"):
                yield from self._count_leases(memory, book)
            yield from self._move_floor(state, memory, book)

    def _count_leases(self, memory: Memory, book: Book) -> Iterator[str]:
        for lease in book.leases:
            lease.left = 0
            yield "consume.repaired"
        for slot, (ticket, word) in enumerate(memory.words):
            note = book.noted(slot, ticket)
            if word != COMMITTED or not note.leased:
                continue
            under = book.lease_at(note.id)
            if under:
                first, under.left = under.left == 0, under.left + 1
                yield "consume.repaired"
                under.first = ticket if first else min(under.first, ticket)
                yield "consume.repaired"
                under.end = ticket + 1 if first else max(under.end, ticket + 1)
                yield "consume.repaired"
                continue
            if ticket < book.next:
                yield from self._move_next(book, ticket)
            note.leased, note.id = False, 0
            yield "consume.repaired"
        for lease in book.leases:
            if lease.left == 0:
                lease.id = 0
                yield "consume.repaired"
        book.open = sum(lease.id != 0 for lease in book.leases)
        yield "consume.repaired"

    # Final states

    def is_settled(self, state: State) -> bool:
        """True if the clients that are alive have nothing left to do."""
        memory = self.frozen[state.shared]
        lives = {client.consumer for client in state.clients if client.at not in (DEAD, GONE)}
        theirs = [book for which, book in enumerate(memory.books) if which in lives]
        done = all(b.ghosts[t].acks >= self.of.times for b in theirs for t in memory.committed)
        all_live = len(theirs) == len(memory.books)
        return done and not (WRITER in lives and all_live and memory.head < self.of.items)


def explore(scenario: Consuming, limit: int = 10**6) -> Found:
    """Visits every state that can be reached; raises ViolationError if a rule is broken."""
    search = _Search(scenario)
    preceding: dict[State, list[State]] = {search.first(): []}
    trace = deque(preceding)
    while trace:
        state = trace.popleft()
        for following in search.steps(state):
            if following not in preceding:
                preceding[following] = []
                trace.append(following)
            preceding[following].append(state)
        assert len(preceding) <= limit, "the scenario is too large"
    reached = set(filter(search.is_settled, preceding))
    left = deque(reached)
    while left:
        for state in preceding[left.popleft()]:
            if state not in reached:
                reached.add(state)
                left.append(state)
    wedged = len(preceding) - len(reached)
    return Found(len(preceding), wedged, frozenset(search.points))


def _with(state: State, number: int, client: Client) -> State:
    return state._replace(clients=(*state.clients[:number], client, *state.clients[number + 1 :]))


def _woken(state: State) -> State:
    return state._replace(
        clients=tuple(
            client._replace(woken=True) if client.at == SLEEPS else client
            for client in state.clients
        )
    )

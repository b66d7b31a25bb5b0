"""An exhaustive small model of buffers that allocate their space in steps.

    Growing ──explore──▶ all states that can be reached ──▶ a broken rule, or how many states

Writers claim slots at the head. A claim beyond `allocated` is refused. Its writer then takes the
growth lock, allocates the space in one file after the other, stores `allocated` and claims again.
The disk has space for a limited number of slots of both files together. A process may die after any
step, and the kernel releases its lock. When all processes are dead, the machine may have been
restarted. Any file may then have lost the space of slots without items, and the page with
`allocated` may be older. The next process that opens the buffer allocates the space again before
any process writes.

The rule is that no process writes to a slot without space. The steps are those of
`memory/directory/growth.py`, with the names of its crash points.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from tests.model.state import fail

FILES = 2
NOBODY = -1

#: States of a writer. ASKS: before its claim; WAITS: it was refused and waits for the lock; TAKES:
#: it has the lock; DONE: it has written everything, or its write has raised SpaceError.
ASKS, WAITS, TAKES, DONE, DEAD = "asks", "waits", "takes", "done", "dead"


class Writer(NamedTuple):
    """A writer, with its local variables during a growth."""

    left: int  # batches that it still has to write
    at: str = ASKS
    start: int = 0  # `allocated`, as it was read under the lock
    stop: int = 0  # the new value of `allocated`
    file: int = 0  # the next file in which it allocates space


class State(NamedTuple):
    """The shared memory and the files."""

    head: int  # number of slots that have been written
    allocated: int
    space: tuple[int, ...]  # number of slots in each file that have space
    lock: int  # the holder of the growth lock
    writers: tuple[Writer, ...]
    deaths: int
    restarts: int


class Growing(NamedTuple):
    """The parameters of a search.

    Attributes:
        capacity: number of slots.
        room: number of slots that the disk has space for, counted in each file.
        step: number of slots in a growth step.
        count: number of slots in a batch.
        writers: number of batches of each writer.
        deaths: how many writers may be killed.
        restarts: how often the machine may be restarted once all processes are dead.
        broken: names of rules that are switched off.
    """

    capacity: int
    room: int
    step: int
    count: int
    writers: tuple[int, ...]
    deaths: int = 0
    restarts: int = 0
    broken: frozenset[str] = frozenset()


class Found(NamedTuple):
    """The result of a search."""

    states: int
    full: int  # states in which a write was refused for lack of space
    points: frozenset[str]


class _Search:
    def __init__(self, scenario: Growing) -> None:
        self.of = scenario
        self.points: set[str] = set()
        self.full = 0

    def breaks(self, rule: str) -> bool:
        return rule in self.of.broken

    def first(self) -> State:
        of = self.of
        writers = tuple(map(Writer, of.writers))
        return State(0, of.step, (of.step,) * FILES, NOBODY, writers, of.deaths, of.restarts)

    def steps(self, state: State) -> Iterator[State]:
        for number, me in enumerate(state.writers):
            if me.at in (DONE, DEAD):
                continue
            for point, after in self._steps_of(state, number, me):
                if point:
                    self.points.add(point)
                yield after
            if state.deaths:
                lock = NOBODY if state.lock == number else state.lock
                dead = _with(state, number, me._replace(at=DEAD))
                yield dead._replace(deaths=state.deaths - 1, lock=lock)
        if state.restarts and all(me.at in (DEAD, DONE) for me in state.writers):
            yield from self._restarted(state)

    def _steps_of(self, state: State, number: int, me: Writer) -> Iterator[tuple[str, State]]:
        of, end = self.of, state.head + self.of.count
        if me.at == ASKS:
            if me.left == 0 or end > of.capacity:
                yield "", _with(state, number, me._replace(at=DONE))
            elif end <= state.allocated or self.breaks("a claim does not ask"):
                written = state._replace(head=end)
                yield "", _with(written, number, me._replace(left=me.left - 1))
            else:
                yield "", _with(state, number, me._replace(at=WAITS))
        elif me.at == WAITS:
            if state.lock == NOBODY or self.breaks("two may take space at once"):
                yield "grow.locked", self._locked(state, number, me)
        elif me.file < FILES:
            yield from self._take(state, number, me)
        else:
            yield "grow.raised", self._raised(state, number, me)

    def _locked(self, state: State, number: int, me: Writer) -> State:
        needed = state.head + self.of.count
        if state.allocated >= needed:
            return _with(state, number, me._replace(at=ASKS))
        stop = min(self.of.capacity, max(needed, state.allocated + self.of.step))
        takes = me._replace(at=TAKES, start=state.allocated, stop=stop, file=0)
        early = state
        if self.breaks("allocated comes last"):
            early = state._replace(allocated=stop)
        return _with(early._replace(lock=number), number, takes)

    def _take(self, state: State, number: int, me: Writer) -> Iterator[tuple[str, State]]:
        space = list(state.space)
        others = sum(space) - space[me.file]
        if others + max(space[me.file], me.stop) <= self.of.room:
            space[me.file] = max(space[me.file], me.stop)
            taken = state._replace(space=tuple(space))
            yield "space.taken", _with(taken, number, me._replace(file=me.file + 1))
            return
        kept = me.start if not self.breaks("what is written is kept") else 0
        given = state._replace(space=tuple(min(one, max(kept, 0)) for one in space))
        needed = state.head + self.of.count
        if me.stop > needed > me.start:  # only the slots that are needed
            less = me._replace(stop=needed, file=0)
            yield "space.released", _with(given, number, less)
        else:
            self.full += 1
            ended = given._replace(lock=NOBODY)
            yield "space.released", _with(ended, number, me._replace(at=DONE))

    def _raised(self, state: State, number: int, me: Writer) -> State:
        lock = NOBODY if state.lock == number else state.lock
        raised = state._replace(allocated=me.stop, lock=lock)
        return _with(raised, number, me._replace(at=ASKS))

    def _restarted(self, state: State) -> Iterator[State]:
        """Yields the states after a restart, in which only written slots are sure to have space."""
        for space in ((state.head, state.head), (state.head, state.space[1]), state.space):
            for allocated in {min(self.of.step, state.allocated), state.allocated}:
                again = max(allocated, state.head)
                kept = space
                if not self.breaks("space is taken again"):
                    if again * FILES > self.of.room:
                        continue  # opening raises SpaceError
                    kept = tuple(max(one, again) for one in space)
                writers = tuple(map(Writer, self.of.writers))
                left = state.restarts - 1
                yield State(state.head, again, kept, NOBODY, writers, state.deaths, left)

    def check(self, before: State, state: State) -> None:
        if state.head > min(state.space):
            fail("a slot was written that has no space in a file")
        if state.allocated > min(state.space):
            fail("slots count as allocated that have no space in a file")
        if state.restarts == before.restarts and state.allocated < before.allocated:
            fail("allocated has fallen")
        if sum(state.space) > self.of.room:
            fail("more space is taken than there is")


def _with(state: State, number: int, me: Writer) -> State:
    writers = list(state.writers)
    writers[number] = me
    return state._replace(writers=tuple(writers))


def explore(scenario: Growing) -> Found:
    """Visits every state; raises ViolationError if a rule is broken or a process is stuck."""
    search = _Search(scenario)
    first = search.first()
    seen, queue = {first}, deque([first])
    while queue:
        state = queue.popleft()
        following = list(search.steps(state))
        alive = any(me.at not in (DONE, DEAD) for me in state.writers)
        if alive and not any(after.deaths == state.deaths for after in following):
            fail("a living writer has no way on")
        for after in following:
            search.check(state, after)
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return Found(len(seen), search.full, frozenset(search.points))

"""An exhaustive small model of the staleness limit.

    Ages ──explore──▶ all states that can be reached ──▶ the largest staleness, runs that end early

Collectors reserve, roll out, claim and commit one item at a time. Learners take batches in order,
train, acknowledge, and publish one version per batch, up to the last version. Any process may die
between two locked sections, and another one takes its place. A section is one step, because the
process holds the mutex. `tests/crash` tries the deaths within a section.

The search finds runs in which learners use items that are too old, runs that end before the last
version, and runs that need not end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

#: States of a collector. ASKS: it asks for space; ROLLS: it rolls out; WRITES: its claim is open.
ASKS, ROLLS, WRITES = range(3)
#: States of a learner. AWAY: it is dead or has not joined yet. COMES: it has taken nothing yet.
#: WAITS: it has taken something before. LEARNS: it holds a batch. ACKED: it has acknowledged the
#: batch and has not published.
AWAY, COMES, WAITS, LEARNS, ACKED = range(5)
WRITTEN = -1
AGAIN = 99
"""Version of an item that is delivered again after other learners have published."""


class Collector(NamedTuple):
    at: int = ASKS
    version: int = 0  # of the policy with which it rolls out
    place: int = 0  # place in the queue of its claim


class Learner(NamedTuple):
    at: int = AWAY
    holds: tuple[int, ...] = ()  # versions of the items


class Item(NamedTuple):
    """An item of the queue, in the order of tickets, with its writer or WRITTEN."""

    writer: int
    version: int


class State(NamedTuple):
    version: int  # published by the learners
    written: int  # like write_count
    first: int  # like inserts_base
    began: int  # like version_base
    queue: tuple[Item, ...]  # items that no learner holds; those that dead learners held come first
    collectors: tuple[Collector, ...]
    learners: tuple[Learner, ...]
    deaths: int  # deaths that may still happen
    staleness: int = 0  # ghost: the largest staleness so far


class Ages(NamedTuple):
    """The parameters of a search.

    Attributes:
        staleness, batch: max_staleness and items_per_version of the limiter.
        collectors, learners: number of processes of each kind.
        last: the version at which a run is over.
        deaths: how many processes of both kinds may be killed.
        publishes_first: whether a learner publishes before it first takes items.
        broken: names of rules that are switched off.
    """

    staleness: int
    batch: int
    collectors: int
    learners: int = 1
    last: int = 4
    deaths: int = 0
    publishes_first: bool = False
    broken: frozenset[str] = frozenset()

    def start(self) -> State:
        collectors, learners = (Collector(),) * self.collectors, (Learner(),) * self.learners
        return State(0, 0, 0, 0, (), collectors, learners, self.deaths)

    def steps(self, state: State) -> Iterator[State]:
        if state.version == self.last:
            return
        for number, collector in enumerate(state.collectors):
            yield from self._collects(state, number, collector)
        for number, learner in enumerate(state.learners):
            yield from self._learns(state, number, learner)

    # Collectors

    def _collects(self, state: State, number: int, me: Collector) -> Iterator[State]:
        if state.deaths and me.at != ASKS:
            left = tuple(item for item in state.queue if item.writer != number)
            died = state._replace(deaths=state.deaths - 1, queue=left)
            yield _collector(died, number, Collector())
        if me.at == ASKS:
            begun = self._begun(state)
            if self._open(begun) + 1 - begun.first <= self._allowed(begun):
                yield _collector(begun, number, Collector(ROLLS, state.version))
        elif me.at == ROLLS:
            place = state.written + sum(item.writer != WRITTEN for item in state.queue)
            if self._is_too_old(state, me.version, place):
                yield _collector(state, number, Collector())
                return
            claimed = state._replace(queue=(*state.queue, Item(number, me.version)))
            yield _collector(claimed, number, Collector(WRITES, me.version, place))
        elif self._is_too_old(state, me.version, me.place):
            left = tuple(item for item in state.queue if item.writer != number)
            yield _collector(state._replace(queue=left), number, Collector())
        else:
            queue = tuple(
                item._replace(writer=WRITTEN) if item.writer == number else item
                for item in state.queue
            )
            committed = state._replace(queue=queue, written=state.written + 1)
            yield _collector(committed, number, Collector())

    def _begun(self, state: State) -> State:
        """Sets the version base if there are no items, so that earlier versions do not count."""
        return state._replace(began=state.version) if self._open(state) == state.first else state

    def _open(self, state: State) -> int:
        """Counts the items that are written, in flight or reserved."""
        return state.written + sum(one.at != ASKS for one in state.collectors)

    def _allowed(self, state: State) -> int:
        return (max(0, state.version - state.began) + self.staleness + 1) * self.batch

    def _is_too_old(self, state: State, version: int, place: int) -> bool:
        then = state.version
        if "the turn is not looked at" not in self.broken:
            then = max(then, self._turn(state, place))
        return then - version > self.staleness

    def _turn(self, state: State, place: int) -> int:
        return state.began + max(0, place - state.first) // self.batch

    # Learners

    def _learns(self, state: State, number: int, me: Learner) -> Iterator[State]:
        if state.deaths and me.at != AWAY:
            version = None if self.learners == 1 else AGAIN
            back = tuple(Item(WRITTEN, version or of) for of in me.holds)
            died = state._replace(deaths=state.deaths - 1, queue=back + state.queue)
            yield _learner(died, number, Learner())
        if me.at == AWAY:
            version = state.version + self.publishes_first
            yield _learner(state._replace(version=version), number, Learner(COMES))
        elif me.at in (COMES, WAITS):
            told = self._told(state, number)
            batch = told.queue[: self.batch]
            if len(batch) < self.batch or any(item.writer != WRITTEN for item in batch):
                if told != state:
                    yield told
                return
            versions = tuple(item.version for item in batch)
            worst = max(state.staleness, state.version - min(versions))
            taken = told._replace(queue=told.queue[self.batch :], staleness=worst)
            yield _learner(taken, number, Learner(LEARNS, versions))
        elif me.at == LEARNS:
            yield _learner(state, number, Learner(ACKED))
        else:
            published = state._replace(version=state.version + 1)
            yield _learner(published, number, Learner(WAITS))

    def _told(self, state: State, number: int) -> State:
        """Counts versions from a learner's next item, as shmb_move_version_base does."""
        next_one = state.written - sum(item.writer == WRITTEN for item in state.queue)
        others = any(one.at not in (AWAY, COMES) for one in state.learners)
        turn = self._turn(state, next_one)
        if others and turn >= state.version:
            return state
        if not others and "what the dead acknowledged is waited for" in self.broken:
            return state
        first = next_one - (state.version - state.began) * self.batch
        return state._replace(first=first)


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        states: number of states.
        staleness: the largest staleness of an item that was learned from.
        early: number of runs that end before the last version.
        circles: number of steps that lead back to an earlier state of the same run.
    """

    states: int
    staleness: int
    early: int
    circles: int


def explore(ages: Ages) -> Found:
    """Visits every state depth first; a state that leads to itself is counted as a circle."""
    start = ages.start()
    done: set[State] = set()
    under_way = {start}
    trail = [(start, ages.steps(start), [0])]
    early = circles = 0
    while trail:
        state, steps, taken = trail[-1]
        following = next(steps, None)
        if following is None:
            early += not taken[0] and state.version < ages.last
            under_way.discard(state)
            done.add(state)
            trail.pop()
            continue
        taken[0] += 1
        circles += following in under_way
        if following not in done and following not in under_way:
            under_way.add(following)
            trail.append((following, ages.steps(following), [0]))
    return Found(len(done), max(state.staleness for state in done), early, circles)


def _collector(state: State, number: int, me: Collector) -> State:
    there = state.collectors
    return state._replace(collectors=(*there[:number], me, *there[number + 1 :]))


def _learner(state: State, number: int, me: Learner) -> State:
    there = state.learners
    return state._replace(learners=(*there[:number], me, *there[number + 1 :]))

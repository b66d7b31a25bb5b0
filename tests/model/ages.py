"""The gate by age as an exhaustive small model: is what is learned from young, and enough?

    Ages ──explore──▶ all states that can be reached ──▶ the largest staleness, runs that end early

Collectors reserve, roll out, claim and commit an item each; learners take batches in order, train,
acknowledge, and publish a version of each batch, up to the last version. All may die between two
locked sections, and are followed by others. A section is one step, because the mutex is held; the
deaths within one are those of `tests/crash`.

Nothing in it goes round in a circle unless somebody refuses for ever, so a run that goes wrong is
one that ends before the last version, or does not end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

#: Where a collector is: it asks for room; it rolls out; its claim is open.
ASKS, ROLLS, WRITES = range(3)
#: Where a learner is. AWAY: dead, or not there yet; COMES: it has taken nothing yet; WAITS: it has;
#: LEARNS: it holds a batch; ACKED: it has acknowledged that, and not published.
AWAY, COMES, WAITS, LEARNS, ACKED = range(5)
WRITTEN = -1
AGAIN = 99
"""For the version of an item that comes again, when other learners have gone on meanwhile."""


class Collector(NamedTuple):
    at: int = ASKS
    version: int = 0  # of the policy that it rolls out with
    place: int = 0  # of its claim


class Learner(NamedTuple):
    at: int = AWAY
    holds: tuple[int, ...] = ()  # versions of the items


class Item(NamedTuple):
    """In the order of tickets: who writes it, or WRITTEN."""

    writer: int
    version: int


class State(NamedTuple):
    version: int  # of the learners
    written: int  # as write_count
    first: int  # as inserts_base
    began: int  # as version_base
    queue: tuple[Item, ...]  # that nobody holds; what the dead held comes first
    collectors: tuple[Collector, ...]
    learners: tuple[Learner, ...]
    deaths: int  # that may still happen
    staleness: int = 0  # ghost: the largest so far


class Ages(NamedTuple):
    """A scenario.

    Attributes:
        staleness, batch: of the limiter: max_staleness, items_per_version.
        collectors, learners: how many.
        last: the version at which a run is over.
        deaths: how many may be killed, of both sides.
        publishes_first: whether a learner that comes publishes before it takes anything.
        broken: rules that are switched off.
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
        """What is published before anything is written does not count."""
        return state._replace(began=state.version) if self._open(state) == state.first else state

    def _open(self, state: State) -> int:
        """Written, in flight and reserved."""
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
    """What a search has found.

    Attributes:
        states: how many there are.
        staleness: the largest that was learned from.
        early: runs that end before the last version.
        circles: runs that need not end.
    """

    states: int
    staleness: int
    early: int
    circles: int


def explore(ages: Ages) -> Found:
    """Every state that can be reached, depth first: a state that leads to itself is a circle."""
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

"""Flow control as an exhaustive small model: who waits for the other side, and who wakes them.

    Flow ──explore──▶ all states that can be reached ──▶ lost wake-ups, deadlocks, who never goes on

A writer claims, fills and commits; a sampler draws; each for ever. What the limiter decides and
what a claim or a commit changes is one step, because the mutex is held; between unlocking and
waking, and between registering and sleeping, all others may take steps. Counts are kept as far as
the limiter looks: how far the inserts are ahead, and how many of the first `min_size` elements are
there, so that endless programs have a finite number of states.

The steps inside of a locked section, and the deaths in them, are what `tests/crash/test_flow.py`
goes through; here a death is one between the sections, and leaves what is in the registry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

WRITER, SAMPLER = 0, 1
#: Where a client is. ASKS: before the locked section; SLEEPS: registered, on the futex; FILLS: its
#: claim is open; WAKES: it has changed something, and has not told it yet.
#: HOLDS: it has reserved, and its claim comes later.
ASKS, SLEEPS, FILLS, WAKES, DEAD, REGISTERS, HOLDS = range(7)


class Client(NamedTuple):
    """One client, and what the registry says of it."""

    side: int
    batch: int
    at: int = ASKS
    waits: bool = False  # registered as waiting
    woken: bool = False  # the futex has changed since it looked
    open: bool = False  # a claim in the registry
    held: bool = False  # a reservation in the ledger


class State(NamedTuple):
    ahead: int  # inserts * ratio - draws, without open claims
    there: int  # elements, up to min_size
    deaths: int  # that may still happen
    clients: tuple[Client, ...]


class Flow(NamedTuple):
    """A scenario.

    Attributes:
        ratio: samples per insert.
        buffer: how far both sides may be apart, in half samples, so that it can be one.
        min_size: elements that have to be there.
        writes, draws: batches of the writers and of the samplers.
        deaths: how many clients may be killed.
        broken: rules that are switched off.
        reserving: writers reserve before they claim, and may give back.
    """

    ratio: int
    buffer: int
    min_size: int
    writes: tuple[int, ...]
    draws: tuple[int, ...]
    deaths: int = 0
    broken: frozenset[str] = frozenset()
    reserving: bool = False

    @property
    def enough(self) -> int:
        """The error buffer that is said to be enough, in half samples."""
        return max(self.writes) * self.ratio + max(self.draws)

    def first(self) -> State:
        clients = [Client(WRITER, n) for n in self.writes] + [
            Client(SAMPLER, n) for n in self.draws
        ]
        return State(-self.min_size * self.ratio, 0, self.deaths, tuple(clients))

    def admits(self, state: State, client: Client) -> bool:
        """As limiter.c decides."""
        if client.side == SAMPLER:
            enough = state.there >= self.min_size
            return enough and 2 * (state.ahead - client.batch) >= -self.buffer
        counted = [other for other in state.clients if other.open or other.held]
        if "what is reserved is not counted" in self.broken:
            counted = [other for other in counted if other.open]
        is_open = sum(other.batch for other in counted if other is not client)
        share = client.batch * self.ratio
        free = state.there + is_open < self.min_size and share <= self.buffer
        if free and "inserts wait though there are too few" not in self.broken:
            return True
        return 2 * (state.ahead + is_open * self.ratio + share) <= self.buffer

    def steps(self, state: State) -> Iterator[State]:
        for number, client in enumerate(state.clients):
            if client.at != DEAD:
                yield from self._steps_of(state, number, client)
                if state.deaths:
                    dead = client._replace(at=DEAD)
                    yield _with(state, number, dead)._replace(deaths=state.deaths - 1)

    def _steps_of(self, state: State, number: int, me: Client) -> Iterator[State]:
        if me.at == ASKS:
            if self.admits(state, me):
                yield self._goes_on(state, number, me._replace(waits=False))
            elif "registered without the mutex" in self.broken:
                yield _with(state, number, me._replace(at=REGISTERS))
            else:
                yield _with(state, number, me._replace(at=SLEEPS, waits=True, woken=False))
        elif me.at == REGISTERS:
            yield _with(state, number, me._replace(at=SLEEPS, waits=True, woken=False))
        elif me.at == SLEEPS:
            if me.woken:
                yield _with(state, number, me._replace(at=ASKS))
            dead = [n for n, other in enumerate(state.clients) if _is_left(other)]
            if dead and "the dead are not reaped" not in self.broken:  # its slice has ended
                for other in dead:
                    buried = state.clients[other]._replace(waits=False, open=False, held=False)
                    reaped = _woken(_with(state, other, buried))
                    yield _with(reaped, number, reaped.clients[number]._replace(at=ASKS))
            if any(other.at == DEAD for other in state.clients):  # the dead one had not woken it
                yield _with(state, number, me._replace(at=ASKS))
        elif me.at == HOLDS:
            gives_back = me._replace(at=WAKES, held=False)
            if "give back wakes nobody" in self.broken:
                gives_back = gives_back._replace(at=ASKS)
            yield _with(state, number, gives_back)
            yield _with(state, number, me._replace(at=FILLS, open=True, held=False))
        elif me.at == FILLS:
            there = min(self.min_size, state.there + me.batch)
            now = state._replace(ahead=state.ahead + me.batch * self.ratio, there=there)
            yield _with(now, number, me._replace(at=WAKES, open=False))
            yield _with(state, number, me._replace(at=WAKES, open=False))  # it is given up
        elif me.at == WAKES:
            wakes = any(other.waits for other in state.clients)
            if me.side == SAMPLER and "draws wake nobody" in self.broken:
                wakes = False
            told = _woken(state) if wakes else state
            yield _with(told, number, told.clients[number]._replace(at=ASKS))

    def _goes_on(self, state: State, number: int, me: Client) -> State:
        if me.side == WRITER and self.reserving:
            return _with(state, number, me._replace(at=HOLDS, held=True))
        if me.side == WRITER:
            return _with(state, number, me._replace(at=FILLS, open=True))
        drawn = state._replace(ahead=state.ahead - me.batch)
        return _with(drawn, number, me._replace(at=WAKES))

    def has_lost_a_wake_up(self, state: State) -> bool:
        """Somebody sleeps who could go on, and nobody is about to tell it."""
        if any(client.at == WAKES for client in state.clients):
            return False
        return any(
            client.at == SLEEPS and not client.woken and self.admits(state, client)
            for client in state.clients
        )

    def is_over(self, state: State) -> bool:
        """More is written, being written and held than inserts may be ahead."""
        share = sum(one.batch for one in state.clients if one.open or one.held) * self.ratio
        return state.there >= self.min_size and 2 * (state.ahead + share) > self.buffer

    def is_told_as_a_knot(self, state: State) -> bool:
        """As `Waiting._require_no_deadlock` asks: both sides wait, and none of them could go on."""
        living = [client for client in state.clients if client.at != DEAD]
        return (
            {client.side for client in living} == {WRITER, SAMPLER}
            and all(client.waits for client in living)
            and not any(client.open or client.held for client in state.clients)
            and not any(self.admits(state, client) for client in living)
        )


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        states: how many there are.
        lost: states with a lost wake-up.
        deadlocks: states that are told as deadlocks.
        stuck: states from which some living client never goes on.
        over: states in which more is written and held than the error buffer allows, though enough
            is there to sample.
    """

    states: int
    lost: int
    deadlocks: frozenset[State]
    stuck: frozenset[State]
    over: int


def explore(flow: Flow) -> Found:
    """Every state that can be reached."""
    first = flow.first()
    following: dict[State, list[State]] = {}
    left = deque([first])
    while left:
        state = left.popleft()
        if state in following:
            continue
        following[state] = list(flow.steps(state))
        left.extend(following[state])
    preceding: dict[State, list[State]] = {state: [] for state in following}
    for state, ways in following.items():
        for way in ways:
            preceding[way].append(state)
    stuck: set[State] = set()
    for number in range(len(first.clients)):
        stuck |= following.keys() - _can_go_on(number, following, preceding)
    return Found(
        len(following),
        sum(map(flow.has_lost_a_wake_up, following)),
        frozenset(filter(flow.is_told_as_a_knot, following)),
        frozenset(stuck),
        sum(map(flow.is_over, following)),
    )


def _can_go_on(
    number: int, following: dict[State, list[State]], preceding: dict[State, list[State]]
) -> set[State]:
    """States from which that client may come to its next draw or claim, or be dead."""
    reached = {
        state for state in following if state.clients[number].at in (FILLS, WAKES, DEAD, HOLDS)
    }
    left = deque(reached)
    while left:
        for state in preceding[left.popleft()]:
            if state not in reached:
                reached.add(state)
                left.append(state)
    return reached


def _with(state: State, number: int, client: Client) -> State:
    clients = (*state.clients[:number], client, *state.clients[number + 1 :])
    return state._replace(clients=clients)


def _woken(state: State) -> State:
    clients = tuple(
        client._replace(woken=True) if client.at == SLEEPS else client for client in state.clients
    )
    return state._replace(clients=clients)


def _is_left(client: Client) -> bool:
    """Of somebody dead, something in the registry."""
    return client.at == DEAD and (client.waits or client.open or client.held)

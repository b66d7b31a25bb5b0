"""An exhaustive small model of flow control: which side waits for the other, and who wakes it.

    Flow ──explore──▶ all states that can be reached ──▶ lost wake-ups, deadlocks, stuck clients

Writers claim, fill and commit, and samplers draw, without end. A decision of the limiter together
with the changes of a claim or a commit is one step, because the process holds the mutex. Other
processes may take steps between unlocking and waking, and between registering and sleeping. The
model keeps only the counts that the limiter reads: how far inserts are ahead, and how many of the
first `min_size` elements are present. Endless programs therefore have a finite number of states.

Here a death happens between two sections and leaves what is in the registry.
`tests/crash/test_flow.py` tries the steps and the deaths inside of a locked section.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

WRITER, SAMPLER = 0, 1
#: States of a client. ASKS: before the locked section. REGISTERS: about to register. SLEEPS:
#: registered, on the futex. FILLS: its claim is open. WAKES: it has changed the counts and has not
#: woken the others yet. HOLDS: it has reserved space, and its claim comes later.
ASKS, SLEEPS, FILLS, WAKES, DEAD, REGISTERS, HOLDS = range(7)


class Client(NamedTuple):
    """A client, with its part of the registry."""

    side: int
    batch: int
    at: int = ASKS
    waits: bool = False  # registered as waiting
    woken: bool = False  # the futex has changed since it was read
    open: bool = False  # a claim in the registry
    held: bool = False  # a reservation in the ledger


class State(NamedTuple):
    ahead: int  # inserts * ratio - draws, without open claims
    there: int  # number of elements, up to min_size
    deaths: int  # deaths that may still happen
    clients: tuple[Client, ...]


class Flow(NamedTuple):
    """The parameters of a search.

    Attributes:
        ratio: samples per insert.
        buffer: the error buffer, which is how far one side may be ahead, in half samples.
        min_size: number of elements that must be present.
        writes, draws: batch sizes of the writers and of the samplers.
        deaths: how many clients may be killed.
        broken: names of rules that are switched off.
        reserving: whether writers reserve before they claim, and may give the reservation back.
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
        """The error buffer that is documented as sufficient, in half samples."""
        return max(self.writes) * self.ratio + max(self.draws)

    def first(self) -> State:
        clients = [Client(WRITER, n) for n in self.writes] + [
            Client(SAMPLER, n) for n in self.draws
        ]
        return State(-self.min_size * self.ratio, 0, self.deaths, tuple(clients))

    def admits(self, state: State, client: Client) -> bool:
        """Decides like limiter.c whether the client may go on."""
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
            if dead and "the dead are not reaped" not in self.broken:  # its time slice has ended
                for other in dead:
                    buried = state.clients[other]._replace(waits=False, open=False, held=False)
                    reaped = _woken(_with(state, other, buried))
                    yield _with(reaped, number, reaped.clients[number]._replace(at=ASKS))
            if any(other.at == DEAD for other in state.clients):  # the dead client had not woken it
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
            yield _with(state, number, me._replace(at=WAKES, open=False))  # its claim is aborted
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
        """True if a sleeping client could go on, but no client is about to wake it."""
        if any(client.at == WAKES for client in state.clients):
            return False
        return any(
            client.at == SLEEPS and not client.woken and self.admits(state, client)
            for client in state.clients
        )

    def is_over(self, state: State) -> bool:
        """True if more is written, claimed and reserved than inserts may be ahead."""
        share = sum(one.batch for one in state.clients if one.open or one.held) * self.ratio
        return state.there >= self.min_size and 2 * (state.ahead + share) > self.buffer

    def is_told_as_a_knot(self, state: State) -> bool:
        """True if both sides wait and none could go on, as `Waiting._require_no_deadlock` asks."""
        living = [client for client in state.clients if client.at != DEAD]
        return (
            {client.side for client in living} == {WRITER, SAMPLER}
            and all(client.waits for client in living)
            and not any(client.open or client.held for client in state.clients)
            and not any(self.admits(state, client) for client in living)
        )


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        states: number of states.
        lost: number of states with a lost wake-up.
        deadlocks: states that are reported as deadlocks.
        stuck: states from which some living client never goes on.
        over: number of states in which more is written and reserved than the error buffer allows,
            although there are enough items to sample.
    """

    states: int
    lost: int
    deadlocks: frozenset[State]
    stuck: frozenset[State]
    over: int


def explore(flow: Flow) -> Found:
    """Visits every state that can be reached."""
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
    """Returns the states from which a client can reach its next draw or claim, or its death."""
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
    """True if a dead client has left something in the registry."""
    return client.at == DEAD and (client.waits or client.open or client.held)

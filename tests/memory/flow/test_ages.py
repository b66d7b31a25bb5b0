"""The staleness gate: no writer writes items that will be too old when a learner reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter, RateLimitTimeout
from shmbuffer.memory import Engine, Ring, Settings, consumer_version
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.status import TooOld
from shmbuffer.memory.system import deadline
from tests.kit.rings import path_of, ring_of
from tests.memory.rows import schema
from tests.memory.rows import write as write_rows

GATE = RateLimiter(max_staleness=2, items_per_version=4)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine.open(tmp_path / "buffer", Settings(capacity=64)) as made:
        made.define(schema(64))
        yield made


def write(ring: Ring, count: int) -> int:
    return write_rows(ring, range(count))


def goes(ring: Ring, count: int) -> bool:
    """Writes ``count`` items if the gate admits them now; returns whether it did."""
    try:
        with deadline.limit_waits(0):
            write(ring, count)
    except RateLimitTimeout:
        return False
    return True


def test_without_items_per_version_nobody_waits_for_a_version(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(RateLimiter(max_staleness=0))
    assert all(goes(ring, 16) for _ in range(8))


def test_a_claim_counts_from_its_beginning_and_no_more_once_it_is_given_back(
    engine: Engine,
) -> None:
    ring = ring_of(engine)
    engine.set_limiter(GATE)
    with Engine.open(path_of(engine), None) as other:
        ring.claims.claim(10)
        assert not goes(ring_of(other), 3)
        assert goes(ring_of(other), 2)
        ring.claims.abort()
        assert not goes(ring_of(other), 11)
        assert goes(ring_of(other), 10)
        assert not goes(ring_of(other), 1)


@pytest.mark.parametrize("since", ["the gate is set", "the buffer is emptied", "a load"])
def test_versions_and_items_count_from_where_they_last_began(engine: Engine, since: str) -> None:
    """A version that decreases has no effect, and later versions count as before."""
    ring, gate = ring_of(engine), replace(GATE, samples_per_insert=1.0, min_size=8, error_buffer=50)
    if since == "the gate is set":
        assert goes(ring, 30)
        consumer_version.store(engine.seat, 100)
        engine.set_limiter(gate)
    else:
        engine.set_limiter(gate)
        assert goes(ring, 12)
        assert not goes(ring, 1)
        consumer_version.store(engine.seat, 100)
        with ring.admission.uncounted():
            assert goes(ring, 8)
        if since == "a load":
            ring.restore(ring.head, 3, None)
        else:
            ring.empty()
    assert goes(ring, 12)
    assert not goes(ring, 1)
    consumer_version.store(engine.seat, 90)
    assert not goes(ring, 1)
    consumer_version.store(engine.seat, 101)
    assert goes(ring, 4)
    assert not goes(ring, 1)


def test_the_ratio_that_passes_without_a_learner_does_not_open_the_gate(engine: Engine) -> None:
    ring = ring_of(engine)
    engine.set_limiter(replace(GATE, samples_per_insert=1.0, error_buffer=4, when_no_peer="pass"))
    for _ in range(3):
        write(ring, 4)
    too_early = pytest.raises(RateLimitTimeout, match="while learners have version 0")
    with too_early, deadline.limit_waits(1.0):
        write(ring, 4)
    consumer_version.increment(engine.seat)
    write(ring, 4)


class Rollout:
    """A reservation, with the version at its beginning."""

    def __init__(self, line: Line, count: int) -> None:
        self.line, self.version = line, line.version
        with deadline.limit_waits(0):
            self.name = line.ring.reservations.reserve(count)

    def commit(self, *versions: int) -> list[bool]:
        """Returns which items will be young enough when they are read; writes them if all are."""
        ages = np.array(versions or [self.version])
        young = np.ones(len(ages), np.bool_)
        with self.line.ring.reservations.hold(self.name, ages, young), suppress(TooOld):
            self.line.versions[write(self.line.ring, len(ages))] = int(ages[0])
        return young.tolist()

    def give_back(self) -> None:
        assert self.line.ring.reservations.give_back(self.name)


class Line:
    """A buffer with a gate, and the versions of its items by their tickets."""

    def __init__(self, engine: Engine, limiter: RateLimiter = GATE) -> None:
        self.engine, self.ring = engine, ring_of(engine)
        self.versions: dict[int, int] = {}
        self.ring.consumers.open("learner")
        engine.set_limiter(limiter)

    @property
    def version(self) -> int:
        return consumer_version.read(self.engine.seat)

    def begin(self, count: int = 1) -> Rollout:
        return Rollout(self, count)

    def fill(self) -> int:
        """Begins as many rollouts as the gate admits."""
        for count in itertools.count():
            try:
                rollout = self.begin()
            except RateLimitTimeout:
                return count
            assert rollout.commit() == [True]
        raise AssertionError

    @contextmanager
    def learner(self) -> Iterator[Consumer]:
        with Engine.open(path_of(self.engine), None) as engine:
            yield ring_of(engine).consumers.open("learner")

    def learn(self, consumer: Consumer, *, publish: bool = True) -> int:
        """Learns from a batch; returns how many versions behind its oldest item was."""
        taken = consumer.take(4)
        behind = self.version - min(self.versions[ticket] for ticket in taken.tickets.tolist())
        assert consumer.ack(taken.lease, taken.slots, taken.tickets).refused == 0
        if publish:
            consumer_version.increment(self.engine.seat)
        return behind


def test_a_rollout_that_others_overtake_is_refused_at_the_first_turn_that_is_too_late(
    engine: Engine,
) -> None:
    line = Line(engine)
    slow = [line.begin() for _ in range(2)]
    assert line.fill() == 10
    consumer_version.increment(engine.seat)
    assert line.begin().commit() == [True]
    assert slow[0].commit() == [True]  # the last item of version 0
    assert slow[1].commit() == [False]
    assert line.ring.write_count == 12
    slow[1].give_back()
    assert line.fill() == 4


def test_a_write_that_waits_counts_no_batch_for_a_version_that_was_made_from_nothing(
    engine: Engine,
) -> None:
    line = Line(engine)
    assert line.fill() == 12
    for _ in range(2):
        consumer_version.increment(engine.seat)
    with line.learner() as consumer:
        line.learn(consumer, publish=False)
    assert goes(line.ring, 3) is False
    with pytest.raises(RateLimitTimeout, match="version 2 "), deadline.limit_waits(0.05):
        write(line.ring, 3)


def test_a_claim_that_is_open_is_in_line_and_one_that_is_given_up_is_not(engine: Engine) -> None:
    line = Line(engine)
    with Engine.open(path_of(engine), None) as other:
        late = line.begin()
        assert line.fill() == 11
        consumer_version.increment(engine.seat)
        ring_of(other).claims.claim(1)
        assert late.commit() == [False]
        ring_of(other).claims.abort()
        assert late.commit() == [True]


def test_a_version_that_comes_behind_the_claim_counts_at_the_commit(engine: Engine) -> None:
    line = Line(engine, RateLimiter(max_staleness=0))
    rollout, young = line.begin(), np.ones(1, np.bool_)
    with line.ring.reservations.hold(rollout.name, np.zeros(1, np.int64), young):
        line.ring.claims.claim(1)
        consumer_version.increment(engine.seat)
        with pytest.raises(TooOld):
            line.ring.claims.commit()
    assert (young.tolist(), line.ring.write_count) == ([False], 0)
    rollout.give_back()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_learner_that_acknowledges_and_never_publishes_stops_nobody(
    engine: Engine, staleness: int
) -> None:
    """The next learner reports its arrival, and its version applies to the next items."""
    line = Line(engine, RateLimiter(max_staleness=staleness, items_per_version=4))
    ahead = line.fill()
    assert ahead == 4 * (staleness + 1)
    for _ in range(5):
        with line.learner() as consumer:
            assert line.learn(consumer, publish=False) == 0
        assert line.fill() == 0
        with line.learner() as consumer, suppress(RateLimitTimeout), deadline.limit_waits(0):
            consumer.take(64)
        assert line.fill() == 4
    assert line.version == 0


def test_learners_that_publish_as_they_come_make_what_waits_one_version_later(
    engine: Engine,
) -> None:
    """The version of each start counts until the next batch, and no version is counted twice."""
    line = Line(engine)
    behind = []
    for _ in range(6):
        with line.learner() as consumer:
            consumer_version.increment(engine.seat)
            for _ in range(5):
                line.fill()
                behind.append(line.learn(consumer))
    assert max(behind) <= 3
    assert behind[4::5] == [2] * 6

"""A client of a consumer dies at every step: acknowledged items, and only those, stay away."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import EmptyBufferError, RateLimitTimeout
from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.format.ledger import LeasedItems
from shmbuffer.memory.system.deadline import limit_waits
from tests.crash.harness import (
    ended,
    fork,
    native_points,
    python_points,
    schema,
    settings,
    write,
)
from tests.kit.rings import ring_of
from tests.memory.rows import require_sound

pytestmark = [pytest.mark.crash, pytest.mark.product]

#: Points that are passed only after a death: `test_a_repair_that_is_killed_is_repeated`.
OF_A_REPAIR = ("consume.repaired",)
POINTS = [point for point in native_points("consume") if point not in OF_A_REPAIR]
ABOUT, DONE = range(2)


class Victim:
    """Takes, acknowledges, drops and returns items, and reports its acknowledgements.

    It reports each item before and after it acknowledges the item.
    """

    def __init__(self, path: Path, tell: int) -> None:
        self.engine = Engine.open(path, None)
        self.ring = ring_of(self.engine)
        self.tell = tell

    def say(self, kind: int, tickets: np.ndarray) -> None:
        os.write(self.tell, b"".join(struct.pack("<BQ", kind, int(one)) for one in tickets))

    def ack(self, consumer: Consumer, taken: LeasedItems) -> None:
        self.say(ABOUT, taken.tickets)
        applied, refused = consumer.ack(taken.lease, taken.slots, taken.tickets)
        assert (applied, refused) == (len(taken.slots), 0)
        self.say(DONE, taken.tickets)

    def work(self) -> None:
        consumer = self.ring.consumers.open("a")
        self.ack(consumer, consumer.take(2))
        consumer.take(1, 1e-9)
        self.ack(consumer, consumer.take(2))  # items of the expired lease are delivered first
        held = consumer.take(1)
        consumer.give_back(held.lease)
        at = np.array([4, 5], np.int64)
        self.say(ABOUT, at[1:])
        assert consumer.drop(at[1:], at[1:]) == 1
        self.say(DONE, at[1:])
        kept, lease = consumer.claim(at[:1], at[:1], [1])
        assert kept.tolist() == [True]
        self.ack(consumer, LeasedItems(at[:1], at[:1], lease))
        self.ring.consumers.open("beside")
        self.ring.consumers.remove("beside")
        write(self.ring, [8, 9])


def _dies(path: Path, point: str, after: int, tell: int, *, joining: bool = False) -> None:
    if joining:
        _core.arm(point, after=after)
    victim = Victim(path, tell)
    if not joining:
        _core.arm(point, after=after)
    victim.work()
    _core.disarm()


def _heard(fd: int) -> dict[int, set[int]]:
    data = b""
    while more := os.read(fd, 4096):
        data += more
    os.close(fd)
    said: dict[int, set[int]] = {ABOUT: set(), DONE: set()}
    for kind, ticket in struct.iter_unpack("<BQ", data[: len(data) // 9 * 9]):
        said[kind].add(ticket)
    return said


def _rest(consumer: Consumer) -> list[int]:
    """Takes and acknowledges all remaining items."""
    found: list[int] = []
    for count in (3, 1):
        while (taken := _soon(consumer, count)) is not None:
            found += taken.tickets.tolist()
            assert consumer.ack(taken.lease, taken.slots, taken.tickets) == (len(taken.slots), 0)
    return found


def _soon(consumer: Consumer, count: int) -> LeasedItems | None:
    """Takes ``count`` items if they are available, without waiting for a writer."""
    try:
        with limit_waits(0):
            return consumer.take(count)
    except (EmptyBufferError, RateLimitTimeout):
        return None


def _look(engine: Engine, said: dict[int, set[int]]) -> None:
    require_sound(engine)
    ring = ring_of(engine)
    ring.consumers.remove("beside")
    consumer = ring.consumers.open("a")
    tickets = ring.live.tickets()
    there = set(tickets[tickets >= 0].tolist())
    rest = _rest(consumer)
    assert len(rest) == len(set(rest)), "nothing comes twice"
    assert not said[DONE] & set(rest), "what was acknowledged does not come again"
    assert there - set(rest) <= said[ABOUT], "all else comes"
    assert write(ring, range(20, 26)) == ring.head - 6, "the writer goes on"
    assert len(_rest(consumer)) == 6
    require_sound(engine)


def _prepared(path: Path) -> Engine:
    engine = Engine.open(path, settings("rows"))
    engine.define(schema("rows"))
    write(ring_of(engine), range(8))
    return engine


@pytest.mark.parametrize("alone", [False, True], ids=["others live", "nobody lives"])
@pytest.mark.parametrize("point", [*POINTS, "ledger.extended", "mutex.locked", "mutex.unlocked"])
def test_a_client_of_a_consumer_is_killed(
    tmp_path: Path, point: str, alone: bool, full: bool
) -> None:
    passing = 0
    while True:
        path = tmp_path / str(passing)
        engine = _prepared(path)
        if alone:
            engine.close()
        told, tell = os.pipe()
        victim = fork(lambda path=path, after=passing, tell=tell: _dies(path, point, after, tell))
        os.close(tell)
        said = _heard(told)
        died = ended(victim) != 0
        if alone:
            engine = Engine.open(path, None)
        else:
            engine.seat.reap_dead()
        _look(engine, said)
        engine.close()
        if not died:
            break
        passing += 1 if full else 1 + passing  # the first passings differ most
    assert passing > 0


@pytest.mark.parametrize("point", OF_A_REPAIR)
def test_a_repair_that_is_killed_is_repeated(tmp_path: Path, point: str) -> None:
    """A process dies with the mutex, and the next one dies in its repair."""
    passing = 0
    while True:
        path = tmp_path / str(passing)
        engine = _prepared(path)
        told, tell = os.pipe()
        assert ended(fork(lambda path=path, tell=tell: _dies(path, "consume.given", 1, tell))) != 0
        second = fork(
            lambda path=path, after=passing, tell=tell: _dies(
                path, point, after, tell, joining=True
            )
        )
        os.close(tell)
        said = _heard(told)
        died = ended(second) != 0
        engine.seat.reap_dead()
        _look(engine, said)
        engine.close()
        if not died:
            break
        passing += max(1, passing // 2)  # a step for each of 1024 leases
    assert passing > 1024


def test_a_client_that_dies_between_two_calls_gives_back_what_it_holds(tmp_path: Path) -> None:
    engine = _prepared(tmp_path / "buffer")
    mine = ring_of(engine).consumers.open("a")

    def holds() -> None:
        with Engine.open(tmp_path / "buffer", None) as theirs:
            ring_of(theirs).consumers.open("a").take(5, math.inf)
            os.kill(os.getpid(), 9)

    assert ended(fork(holds)) != 0
    assert mine.available(8) == 8, "asked of one who has not waited for anybody"
    assert mine.take(8).tickets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    (found,) = ring_of(engine).consumers.status()
    assert (found.redelivered, found.held) == (5, 8)
    engine.close()


def test_every_point_of_a_consumer_is_tested() -> None:
    assert {*POINTS, *OF_A_REPAIR} == set(native_points("consume"))
    assert python_points("ledger") == ["ledger.extended"]

"""Writers that wait for a slot are woken only when they can continue.

A waiter in these tests sleeps until it is woken, without a timeout, and counts its sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from shmbuffer.memory import Engine, Ring
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Child,
    Maker,
    Parent,
    child,
    contents,
    place,
    slot_held,
    until_it_sleeps,
    write,
)

FOR_EVER_NS = 10**15
OLD_S = 0.002  # age of a queue position that holds others back


class Sleeper:
    """The core's ring with waits that have no timeout."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def wait(self, timeout_ns: int) -> None:
        self.waits += 1
        self._native.wait(FOR_EVER_NS)


def waiting(stack: ExitStack, engine: Engine, turns: int, work: Callable[[Ring], object]) -> Child:
    """Runs a process that sleeps as the last of ``turns`` waiters and may sleep only once."""

    def wait(parent: Parent) -> None:
        engine.seat.rejoin()
        ring = ring_of(engine)
        ring.seat.native = sleeper = Sleeper(ring.seat.native)
        work(ring)
        assert sleeper.waits == 1, f"it slept {sleeper.waits} times"

    waiter = stack.enter_context(child(wait))
    while int(engine.seat.control.runtime["waiters"][0]) < turns:
        pass
    until_it_sleeps(waiter)
    return waiter


def test_the_end_of_a_claim_wakes_those_behind_it_and_nobody_else(make: Maker) -> None:
    engine = make()
    second = ring_of(make.second(engine))
    with slot_held(engine) as other, ExitStack() as stack:
        second.claims.claim(1)
        waiter = waiting(stack, engine, 1, lambda ring: place(ring, [0], [7]))
        before = int(engine.seat.control.runtime["progress"][0])
        second.claims.abort()
        assert int(engine.seat.control.runtime["progress"][0]) > before
        until_it_sleeps(waiter)
        other.go()
        assert waiter.end() == 0
        assert other.end() == 0
    assert contents(ring_of(engine)) == {0: 7}


def test_a_turn_that_is_used_wakes_the_next_which_then_counts_from_there(make: Maker) -> None:
    engine = make()
    write(ring_of(engine), range(8))
    turn_ns = engine.seat.control.entries["turn_ns"]
    with slot_held(engine) as other, ExitStack() as stack:
        first = waiting(stack, engine, 1, lambda ring: place(ring, [0], [10]))
        time.sleep(OLD_S)
        later = [
            waiting(stack, engine, 2 + at, lambda ring, at=at: place(ring, [1 + at], [11 + at]))  # type: ignore[misc]
            for at in range(3)
        ]
        queued = turn_ns.max()
        other.go()
        assert [waiter.end() for waiter in (other, first, *later)] == [0] * 5
        assert (turn_ns > queued).sum() == len(later), "each of those that became the first"
    assert int(engine.seat.control.runtime["waiters"][0]) == 0
    found = contents(ring_of(engine))
    assert [found[slot] for slot in range(4)] == [10, 11, 12, 13]

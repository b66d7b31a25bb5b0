"""A ring without leaves gets more slots without a change in its clients."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shmbuffer.memory import Engine, Ring, Schema, Settings
from shmbuffer.memory.resize import grow

ITEM = {"kind": "leaf"}


def ring_of(capacity: int) -> tuple[Engine, Ring]:
    engine = Engine.anonymous(Settings(capacity=capacity, checksum=False, reserve=False))
    return engine, engine.define(Schema((), capacity, (), ITEM))


def write(ring: Ring, count: int) -> None:
    ring.claims.claim(count)
    ring.claims.commit()


def test_the_ring_is_the_same_object_with_more_slots() -> None:
    engine, ring = ring_of(4)
    write(ring, 3)
    larger = grow(engine, 16)
    assert larger.ring() is ring
    assert (ring.capacity, ring.elements, len(ring.live.words)) == (16, 16, 16)
    assert ring.live.committed().tolist() == [0, 1, 2]
    assert (ring.cursor, ring.write_count, ring.length) == (3, 3, 3)
    assert engine.closed
    write(ring, 5)
    assert ring.live.committed().tolist() == list(range(8))
    larger.close()


def test_slots_without_an_item_stay_empty() -> None:
    engine, ring = ring_of(8)
    ring.claims.claim_slots(np.array([1, 4, 6]), in_place=False)
    ring.claims.commit()
    larger = grow(engine, 9)
    assert ring.live.committed().tolist() == [1, 4, 6]
    assert ring.cursor == 0
    larger.close()


def test_an_empty_ring_grows() -> None:
    engine, ring = ring_of(1)
    larger = grow(engine, 2)
    assert ring.length == ring.head == 0
    assert ring.tree.max_priority is None
    write(ring, 2)
    assert ring.length == 2
    larger.close()


def test_priorities_exponents_and_the_largest_ever_given_come_along() -> None:
    engine, ring = ring_of(4)
    write(ring, 3)
    ring.tree.bind(0.5, 0.0)
    ring.update(np.array([0, 1, 2]), np.array([4.0, 100.0, 9.0]))
    ring.update(np.array([1]), np.array([16.0]))
    larger = grow(engine, 8)
    assert (ring.tree.alpha, ring.tree.eps, ring.tree.max_priority) == (0.5, 0.0, 100.0)
    assert ring.tree.priorities()[:3].tolist() == [4.0, 16.0, 9.0]
    assert ring.tree.p_sum == pytest.approx(2 + 4 + 3)
    assert ring.tree.p_min == pytest.approx(2)
    write(ring, 1)
    assert ring.tree.priorities()[3] == 100.0
    larger.close()


def test_what_decides_on_new_priorities_still_does() -> None:
    engine, ring = ring_of(2)
    ring.tree.bind(1.0, 0.0)
    ring.tree.initial = lambda slots: 5.0
    write(ring, 1)
    larger = grow(engine, 4)
    write(ring, 1)
    assert ring.tree.priorities()[:2].tolist() == [5.0, 5.0]
    larger.close()


def test_a_ring_grows_again_and_again() -> None:
    engine, ring = ring_of(1)
    for capacity in (2, 4, 8, 16, 32, 64, 128):
        engine = grow(engine, capacity)
        write(ring, capacity - 1 - ring.length)
    assert ring.live.committed().tolist() == list(range(127))
    assert ring.write_count == 127
    engine.close()


def test_priorities_that_other_threads_set_meanwhile_are_not_lost() -> None:
    engine, ring = ring_of(64)
    write(ring, 60)
    ring.tree.bind(1.0, 0.0)
    told: dict[int, float] = {}
    stop = threading.Event()

    def update(first: int) -> None:
        value = 1.0
        while not stop.is_set():
            for element in range(first, first + 20):
                value += 1.0
                ring.update(np.array([element]), np.array([value]))
                told[element] = value

    threads = [threading.Thread(target=update, args=(first,)) for first in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for doubled in range(7, 16):
        engine = grow(engine, 2**doubled)
    stop.set()
    for thread in threads:
        thread.join()
    raw = ring.tree.priorities()
    assert {element: raw[element] for element in told} == told
    engine.close()


def test_draws_of_other_threads_go_on_while_the_ring_grows() -> None:
    engine, ring = ring_of(64)
    write(ring, 63)
    stop, drawn = threading.Event(), []

    def draw() -> None:
        index, tickets = np.empty(8, np.int64), np.empty(8, np.int64)
        key = 0
        while not stop.is_set():
            key += 1
            ring.sample(8, key, None, index.ctypes.data, tickets.ctypes.data, prioritized=False)
            drawn.append(int(index.max()))

    thread = threading.Thread(target=draw)
    thread.start()
    for doubled in range(7, 14):
        engine = grow(engine, 2**doubled)
    stop.set()
    thread.join()
    assert drawn
    assert max(drawn) < 63
    engine.close()

"""Snapshots that are taken while others write, and rings that are restored from a snapshot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import BufferNeedsRestart
from shmbuffer.memory import Engine, ItemSnapshot, Ring, Settings
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import (
    LEAVES,
    Maker,
    Rows,
    contents,
    place,
    require_sound,
    sample,
    schema,
    write,
)


def copy_out(ring: Ring) -> tuple[ItemSnapshot, dict[int, int]]:
    """Returns the snapshot, and the number of each copied row that it lists, by element."""
    rows = Rows(ring.schema.leaves, ring.elements)
    moment = ring.copy_out(rows.addresses)
    missing = np.repeat(moment.tickets < 0, ring.width)
    for data in rows.bytes:
        data[missing] = 0
    numbers = rows.numbers()
    return moment, {int(at): int(numbers[at]) for at in np.flatnonzero(~missing)}


def test_a_copy_holds_every_item_its_priority_and_the_counters(make: Maker) -> None:
    engine = make(8, alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(11), np.arange(1.0, 12.0))
    ring.claims.claim(1)
    ring.claims.abort()
    moment, copied = copy_out(ring)
    assert copied == contents(ring) == {n % 8: n for n in range(4, 11)}
    assert moment.tickets.tolist() == [8, 9, 10, -1, 4, 5, 6, 7]
    known = [9.0, 10.0, 11.0, None, 5.0, 6.0, 7.0, 8.0]
    assert [None if np.isnan(p) else p for p in moment.priorities] == known
    assert (moment.head, moment.write_count, moment.max_priority) == (12, 11, 11.0)


def test_a_copy_of_wide_slots_and_of_an_empty_ring(make: Maker) -> None:
    ring = ring_of(make(4, (2, 3)))
    moment, copied = copy_out(ring)
    assert copied == {}
    assert (moment.head, moment.write_count, moment.max_priority) == (0, 0, None)
    write(ring, range(30))
    assert copy_out(ring)[1] == contents(ring) == {n % 24: n for n in range(6, 30)}


WRITER = """
    import sys
    from shmbuffer.memory import Engine
    from tests.memory.rows import write
    with Engine.open(sys.argv[1], None) as engine:
        number = 0
        print("writing", flush=True)
        while True:
            write(engine.ring(), range(number, number + 5))
            number += 5
"""


@pytest.mark.full
def test_a_copy_is_of_one_moment_though_others_keep_writing(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    capacity = 1000
    with Engine.open(path, Settings(capacity=capacity)) as engine:
        ring = engine.define(schema(capacity))
        with Program.python(WRITER, path) as writer:
            assert writer.line() == "writing"
            for _ in range(40):
                moment, copied = copy_out(ring)
                tickets = moment.tickets[moment.tickets >= 0]
                assert {n % capacity: n for n in tickets.tolist()} == copied
                if not len(tickets):
                    continue
                # Batches of five are complete or absent. Only open batches are missing at the new
                # end, with the items that they overwrite at the old end.
                assert moment.write_count == tickets.max() + 1
                assert moment.write_count % 5 == 0
                assert np.array_equal(
                    np.sort(tickets), np.arange(tickets.max() + 1 - len(tickets), tickets.max() + 1)
                )
                assert moment.head - moment.write_count in (0, 5)
                full = min(moment.head, capacity) - (moment.head - moment.write_count)
                assert len(tickets) == full


@pytest.mark.product(few=1)
def test_a_change_while_the_last_round_waits_is_in_the_copy(make: Maker) -> None:
    """The mutex is free between the rounds, so that a thread can write."""
    ring = ring_of(make(64))
    stop = threading.Event()

    def keep_writing() -> None:
        number = 0
        while not stop.is_set():
            write(ring, range(number, number + 3))
            number += 3

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        for _ in range(200):
            moment, copied = copy_out(ring)
            assert copied == {
                slot: ticket for slot, ticket in enumerate(moment.tickets.tolist()) if ticket >= 0
            }
    finally:
        stop.set()
        thread.join()


def test_a_ring_goes_on_where_it_is_set_to(make: Maker) -> None:
    engine = make(8, alpha=1.0)
    ring = ring_of(engine)
    place(ring, range(8), range(100, 108))
    ring.restore(3, 1_000_000, 7.0)
    assert (ring.head % 8, ring.write_count, ring.tree.max_priority) == (3, 1_000_000, 7.0)
    write(ring, [1, 2])
    assert contents(ring) == {0: 100, 1: 101, 2: 102, 3: 1, 4: 2, 5: 105, 6: 106, 7: 107}
    assert ring.write_count == 1_000_002
    assert ring.tree.priorities()[3] == 7.0
    require_sound(engine)
    ring.restore(0, 0, None)
    assert (ring.head % 8, ring.write_count, ring.tree.max_priority) == (0, 0, None)


def test_a_ring_goes_on_with_a_ticket_that_is_still_to_come(make: Maker) -> None:
    engine = make(8, alpha=1.0)
    ring = ring_of(engine)
    place(ring, range(8), range(100, 108))
    ring.restore(1003, 0, None)
    assert ring.head == 1003
    assert write(ring, [1, 2]) == 1003
    assert ring.live.tickets()[3:5].tolist() == [1003, 1004]
    ring.restore(1000, 0, None)  # is past: a ticket is used once
    assert ring.head == 1008
    require_sound(engine)
    with pytest.raises(BufferNeedsRestart, match=r"restore: .* used up its 2.*62 tickets"):
        ring.restore(2**62, 0, None)
    assert ring.head == 1008


@pytest.mark.parametrize("in_place", [True, False])
def test_only_items_of_their_tickets_are_taken(make: Maker, in_place: bool) -> None:
    engine = make(4)
    ring = ring_of(engine)
    write(ring, range(6))
    kept = ring.claims.claim_slots(
        np.array([0, 1, 2, 3]), in_place=in_place, tickets=np.array([0, 5, 2, 99])
    )
    assert kept.tolist() == [False, True, True, False]
    ring.claims.commit()
    assert contents(ring) == {0: 4, 1: 5, 2: 2, 3: 3}
    assert ring.write_count == (6 if in_place else 8)
    head = ring.head
    nothing = ring.claims.claim_slots(
        np.array([0, 3]), in_place=in_place, tickets=np.array([0, 99])
    )
    assert not nothing.any()
    assert ring.head == head
    write(ring, [50])  # no claim was left open
    require_sound(engine)


def test_an_item_that_is_changed_in_place_keeps_its_source(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    with Engine.open(path, Settings(capacity=4)) as first:
        ring = first.define(schema(4))
        write(ring, range(3))
        with Engine.open(path, None) as second:
            place(ring_of(second), [1], [50], in_place=True)
            place(ring_of(second), [2], [60])
            mine, other = ring.seat.incarnation, ring_of(second).seat.incarnation
            assert ring.live.sources[:3].tolist() == [mine, mine, other]
            assert mine != other
        require_sound(first)


def test_a_copy_says_who_wrote_each_item(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    with Engine.open(path, Settings(capacity=4)) as first:
        ring = first.define(schema(4))
        write(ring, range(2))
        with Engine.open(path, None) as second:
            other = ring_of(second)
            write(other, [2])
            moment, _ = copy_out(ring)
            assert moment.sources[:3].tolist() == [ring.seat.incarnation] * 2 + [
                other.seat.incarnation
            ]


@pytest.fixture
def saved(make: Maker) -> Callable[[], tuple[ItemSnapshot, dict[int, int]]]:
    ring = ring_of(make(8))
    write(ring, range(5))
    return lambda: copy_out(ring)


def test_a_copy_does_not_change_the_ring(
    saved: Callable[[], tuple[ItemSnapshot, dict[int, int]]],
) -> None:
    first, second = saved(), saved()
    assert first[1] == second[1]
    assert first[0].tickets.tolist() == second[0].tickets.tolist()
    assert LEAVES[0].name == "number"


def test_a_ring_that_was_restored_is_sampled_as_before(make: Maker) -> None:
    ring = ring_of(make(8, alpha=1.0))
    write(ring, range(8), np.array([0, 0, 0, 5.0, 0, 0, 0, 0]))
    ring.restore(4, 8, 5.0)
    assert set(sample(ring, 200, prioritized=True).numbers.tolist()) == {3}

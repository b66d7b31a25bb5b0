"""The life of a slot, as its word records it.

EMPTY ──claim──▶ WRITING ──commit──▶ COMMITTED ──claimed again──▶ WRITING ──abort──▶ ABORTED
"""

from __future__ import annotations

import numpy as np
import pytest

from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.format import slots
from shmbuffer.memory.format.layout import Phase, SlotState
from tests.memory.rows import contents, fill, place, read, sample, write

EMPTY, WRITING, COMMITTED, ABORTED = SlotState


def life(ring: Ring) -> list[tuple[int, SlotState]]:
    """Returns the ticket and state of every slot."""
    return [
        (int(ticket), SlotState(state))
        for ticket, state in zip(
            slots.tickets(ring.live.words), slots.states(ring.live.words), strict=True
        )
    ]


@pytest.mark.parametrize("ticket", [0, 1, 2**31 - 1, 2**32, 2**53 + 1, 2**62 - 1])
@pytest.mark.parametrize("state", SlotState)
def test_a_word_is_a_ticket_and_a_state(ticket: int, state: SlotState) -> None:
    word = slots.word(ticket, state)
    assert 0 <= word < 2**64
    words = np.array([word], np.uint64)
    assert slots.tickets(words).tolist() == [ticket]
    assert slots.states(words).tolist() == [state]
    assert slots.committed(words).tolist() == [state == COMMITTED]


def test_the_words_of_a_fresh_buffer_are_zero(ring: Ring) -> None:
    assert life(ring) == [(0, EMPTY)] * 8
    assert slots.word(0, EMPTY) == 0


def test_a_claim_marks_its_slots_before_a_byte_is_written(ring: Ring) -> None:
    first = ring.claims.claim(3)
    assert first == 0
    assert life(ring)[:4] == [(0, WRITING), (1, WRITING), (2, WRITING), (0, EMPTY)]
    assert ring.head == 3, "the tickets are taken"
    assert (ring.length, ring.write_count) == (0, 0)
    ring.claims.abort()


def test_a_commit_publishes_them(ring: Ring) -> None:
    ring.claims.claim(3)
    fill(ring, range(3), [10, 11, 12])
    ring.claims.commit()
    assert life(ring)[:4] == [(0, COMMITTED), (1, COMMITTED), (2, COMMITTED), (0, EMPTY)]
    assert contents(ring) == {0: 10, 1: 11, 2: 12}
    assert (ring.length, ring.write_count) == (3, 3)


def test_an_abort_gives_them_back_without_an_item(ring: Ring) -> None:
    write(ring, range(8))
    ring.claims.claim(3)
    ring.claims.abort()
    assert life(ring)[:4] == [(8, ABORTED), (9, ABORTED), (10, ABORTED), (3, COMMITTED)]
    assert ring.head == 11, "tickets are never used again"
    assert contents(ring) == {3: 3, 4: 4, 5: 5, 6: 6, 7: 7}
    assert ring.write_count == 8


def test_an_aborted_slot_is_claimed_again_in_its_turn(ring: Ring) -> None:
    ring.claims.claim(8)
    ring.claims.abort()
    write(ring, range(20, 28))
    assert life(ring) == [(8 + i, COMMITTED) for i in range(8)]


def test_an_item_being_overwritten_is_gone_from_the_claim_on(ring: Ring) -> None:
    write(ring, range(8), np.arange(8.0) + 1)
    before = ring.tree.p_sum
    ring.claims.claim(2)
    assert set(contents(ring)) == {2, 3, 4, 5, 6, 7}
    assert not set(sample(ring, 300, prioritized=True).index) & {0, 1}
    assert not set(sample(ring, 300).index) & {0, 1}
    assert ring.tree.p_sum < before
    assert ring.tree.mass()[:2].tolist() == [0, 0]
    ring.claims.abort()


def test_a_placed_write_takes_the_tickets_of_a_whole_lap(ring: Ring) -> None:
    write(ring, range(5))
    place(ring, [1, 6], [21, 26])
    assert life(ring) == [
        (0, COMMITTED),
        (9, COMMITTED),  # slot 1 has ticket 9 of the lap 5..12
        (2, COMMITTED),
        (3, COMMITTED),
        (4, COMMITTED),
        (0, EMPTY),
        (6, COMMITTED),  # and slot 6 has ticket 6
        (0, EMPTY),
    ]
    assert ring.head == 13
    assert ring.cursor == 5, "the position of the ring stays"


@pytest.mark.parametrize("start", [0, 3, 8, 11, 13])
def test_every_ticket_is_of_its_slot_and_used_once(ring: Ring, start: int) -> None:
    write(ring, range(start)) if start else None
    used: list[int] = []

    def note() -> None:
        tickets = [ticket for ticket, state in life(ring) if state == COMMITTED]
        used.extend(set(tickets) - set(used))
        assert all(ticket % 8 == slot for slot, (ticket, _) in enumerate(life(ring)) if ticket)
        assert max(tickets, default=0) < max(ring.head, 1)

    for step in range(12):
        note()
        if step % 3 == 0:
            place(ring, [step % 8, (step + 3) % 8], [1, 2])
        elif step % 3 == 1:
            write(ring, [1, 2, 3])
        else:
            place(ring, [step % 8], [1], in_place=True)
    note()
    assert len(used) == len(set(used))
    assert ring.live.words[ring.live.words != 0].size == len(
        set(ring.live.words[ring.live.words != 0].tolist())
    )


def test_emptying_makes_the_words_empty_and_starts_at_slot_0(ring: Ring) -> None:
    write(ring, range(11))
    ring.claims.claim(1)
    ring.claims.abort()
    ring.empty()
    assert life(ring) == [(0, EMPTY)] * 8
    assert (ring.head, ring.cursor, ring.length, ring.write_count) == (16, 0, 0, 0)
    write(ring, [5])
    assert life(ring)[0] == (16, COMMITTED)


def test_a_slot_says_who_wrote_it(engine: Engine, ring: Ring) -> None:
    write(ring, range(3))
    assert ring.live.sources[:3].tolist() == [ring.seat.incarnation] * 3
    assert ring.seat.incarnation == 1


def test_the_claim_in_the_registry_covers_every_slot_that_is_being_written(
    engine: Engine, ring: Ring
) -> None:
    entry = engine.seat.control.entries[0:1]
    assert int(entry["phase"][0]) == Phase.IDLE
    ring.claims.claim(3)
    assert int(entry["phase"][0]) == Phase.PAYLOAD
    assert (int(entry["first"][0]), int(entry["count"][0])) == (0, 3)
    ring.claims.commit()
    assert int(entry["phase"][0]) == Phase.IDLE
    assert int(entry["goal"][0]) == ring.write_count == 3
    ring.claims.claim_slots(np.array([6]), in_place=False)
    assert (int(entry["first"][0]), int(entry["count"][0])) == (3, 8)
    assert life(ring)[6] == (6, WRITING)
    ring.claims.abort()
    assert int(entry["phase"][0]) == Phase.IDLE


def test_the_ticket_of_an_item_is_its_generation(ring: Ring) -> None:
    write(ring, range(10))
    numbers, tickets = read(ring, range(8))
    assert tickets.tolist() == [8, 9, 2, 3, 4, 5, 6, 7] == numbers.tolist()
    place(ring, [3], [33], in_place=True)
    assert read(ring, [3])[1].tolist() == [11], "another ticket, so that old updates miss it"


@pytest.mark.parametrize("seed", range(8))
def test_all_words_behind_the_slots_in_use_are_empty(ring: Ring, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for number in range(60):
        kind = int(draw.integers(5))
        if kind == 0:
            ring.empty()
        elif kind == 1:
            place(ring, [int(draw.integers(8))], [number])
        elif kind == 2:  # the next write or claim aborts it
            ring.claims.claim(int(draw.integers(1, 4)))
        else:
            write(ring, [number] * int(draw.integers(1, 4)))
        used = ring.live.used()
        assert not ring.live.words[used:].any()
        assert ring.live.committed_slots().tolist() == np.flatnonzero(ring.live.holds()).tolist()
        held, now = ring.live.holds(), slots.tickets(ring.live.words)
        assert ring.live.tickets().tolist() == np.where(held, now, -1).tolist()
        if ring.head <= 8:
            assert used == ring.head

"""Totals of all masses: as a draw found them, and their current values."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import EmptyBufferError
from shmbuffer.memory import Engine, Ring, Schema, Settings, Totals
from tests.kit.rings import ring_of
from tests.memory.numbered import records
from tests.memory.rows import (
    Maker,
    Parent,
    child,
    draw,
    mutex_held,
    require_sound,
    sample,
    succeeds,
    until_it_sleeps,
    write,
)

ROOTS = np.array([1.0, 4.0, 9.0, 16.0])  # with alpha 0.5 the masses are 1, 2, 3, 4
BY_MASS = Totals(mass=10.0, least=1.0, max_priority=16.0, length=4)
UNIFORM = Totals(mass=4.0, least=1.0, max_priority=16.0, length=4, is_uniform=True)


def in_a_thread(work: Callable[[], object]) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


# Values.


def test_the_totals_are_sum_least_greatest_and_number(ring: Ring) -> None:
    write(ring, range(4), ROOTS)
    assert ring.totals() == BY_MASS
    ring.update(np.array([3, 0]), np.array([4.0, 0.0]))
    # The largest priority ever, which no item has now; masses of 0 do not count for the least.
    assert ring.totals() == Totals(mass=7.0, least=2.0, max_priority=16.0, length=4)
    assert (ring.tree.p_sum, ring.tree.p_min) == (7.0, 2.0)


@pytest.mark.parametrize("how", [sample, draw])
def test_a_draw_tells_what_it_was_made_from(ring: Ring, how: Callable[..., object]) -> None:
    write(ring, range(4), ROOTS)
    how(ring, 3, beta=0.5, prioritized=True)
    assert ring.drawn_from() == BY_MASS
    write(ring, [4], np.array([100.0]))
    assert ring.drawn_from() == BY_MASS
    how(ring, 3, beta=0.5, prioritized=True)
    assert ring.drawn_from() == ring.totals() == Totals(20.0, 1.0, 100.0, 5)


def test_weights_of_several_rings_can_be_made_one_from_them(make: Maker) -> None:
    """The sums and minima equal those of the draw's own weights, bit for bit."""
    ring = ring_of(make(alpha=0.6, eps=1e-3))
    write(ring, range(8), np.random.default_rng(0).random(8))
    index, _, weights = draw(ring, 200, beta=1.0, prioritized=True)
    found = ring.drawn_from()
    assert found is not None
    assert (found.mass, found.least) == (ring.tree.p_sum, ring.tree.p_min)
    mass = ring.tree.mass()[index]
    assert weights == pytest.approx(found.least / mass, rel=1e-6)


def test_in_a_draw_without_priorities_each_item_weighs_the_same(ring: Ring) -> None:
    write(ring, range(4), ROOTS)
    draw(ring, 3, prioritized=False)
    assert ring.drawn_from() == UNIFORM
    assert ring.totals() == BY_MASS


def test_in_a_ring_without_priorities_each_item_weighs_the_same(make: Maker) -> None:
    ring = ring_of(make())
    write(ring, range(3))
    assert ring.totals() == Totals(3.0, 1.0, None, 3, is_uniform=True)
    write(ring, [3], np.array([7.0]))  # recorded, but not used for draws
    for prioritized in (False, True):
        draw(ring, 2, prioritized=prioritized)
        assert ring.drawn_from() == ring.totals() == Totals(4.0, 1.0, 7.0, 4, is_uniform=True)


def test_masses_that_are_all_zero_weigh_the_same(ring: Ring) -> None:
    write(ring, range(3), np.zeros(3))
    draw(ring, 2, prioritized=True)
    assert ring.drawn_from() == ring.totals() == Totals(3.0, 1.0, 0.0, 3, is_uniform=True)
    ring.update(np.array([1]), np.array([1e-300]))
    assert ring.totals() == Totals(1e-150, 1e-150, 1e-300, 3)


def test_an_empty_ring_weighs_nothing(ring: Ring) -> None:
    assert ring.totals() == Totals(0.0, 1.0, None, 0, is_uniform=True)


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_the_elements_of_wide_slots_are_counted(make: Maker, alpha: float | None) -> None:
    ring = ring_of(make(4, (3,), **({} if alpha is None else {"alpha": alpha, "eps": 0.0})))
    write(ring, range(6), np.arange(1.0, 7.0))
    sample(ring, 5, prioritized=True)
    mass = 6.0 if alpha is None else 21.0
    assert ring.drawn_from() == ring.totals() == Totals(mass, 1.0, 6.0, 6, alpha is None)


def test_a_draw_of_records_tells_it_too() -> None:
    settings = Settings(capacity=8, alpha=0.5, eps=0.0, record_bytes=16384)
    with Engine.anonymous(settings) as engine:
        ring = engine.define(Schema((), 8, (), {"kind": "records"}, 16384))
        held = ring.records
        assert held is not None
        held.write(records(range(4)), ROOTS)
        held.sample(3, 1, beta=0.5)
        assert ring.drawn_from() == BY_MASS
        held.sample(3, 1, beta=None)
        assert ring.drawn_from() == UNIFORM
        draw(ring, 3, prioritized=True)
        assert ring.drawn_from() == ring.totals() == BY_MASS


# Which ring, and at which time.


def test_each_thread_is_told_of_its_own_draw(ring: Ring) -> None:
    write(ring, range(4), ROOTS)

    def others() -> object:
        before = ring.drawn_from()
        draw(ring, 1, prioritized=False)
        return before, ring.drawn_from()

    draw(ring, 1, prioritized=True)
    assert in_a_thread(others) == [(None, UNIFORM)]
    assert ring.drawn_from() == BY_MASS


def test_a_draw_that_finds_nothing_tells_nothing(make: Maker) -> None:
    empty, ring = ring_of(make(alpha=0.5)), ring_of(make(alpha=0.5, eps=0.0))
    write(ring, range(4), ROOTS)

    def draws() -> object:
        with pytest.raises(EmptyBufferError):
            draw(empty, 1, prioritized=True)
        before = empty.drawn_from()
        draw(ring, 1, prioritized=True)
        with pytest.raises(EmptyBufferError):
            draw(empty, 1, prioritized=True)
        draw(ring, 0, prioritized=False)
        return before, empty.drawn_from()

    assert in_a_thread(draws) == [(None, BY_MASS)]


@pytest.mark.parametrize("count", [8, 700], ids=["one section", "two sections"])
def test_the_totals_are_of_the_section_in_which_the_first_rows_were_drawn(
    make: Maker, count: int
) -> None:
    engine = make(alpha=0.5, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(4), ROOTS)

    def work(parent: Parent) -> None:
        draw(ring, 1)  # attaches
        parent.pause_at("sample.unlocked")
        draw(ring, count, prioritized=True)
        assert ring.drawn_from() == BY_MASS
        assert ring.totals() == Totals(20.0, 1.0, 100.0, 5)

    with child(work) as drawer:
        drawer.reached()
        write(ring, [4], np.array([100.0]))
        drawer.go()
        assert drawer.end() == 0


def test_rows_that_are_drawn_again_leave_the_totals_as_they_were(make: Maker) -> None:
    ring = ring_of(make(4, alpha=0.5, eps=0.0))
    write(ring, range(4), ROOTS)

    def work(parent: Parent) -> None:
        draw(ring, 1)
        parent.pause_at("sample.unlocked")
        assert sample(ring, 8, prioritized=True).redrawn == 8
        assert ring.drawn_from() == BY_MASS

    with child(work) as reader:
        reader.reached()
        write(ring, range(100, 104), np.full(4, 25.0))
        reader.go()
        assert reader.end() == 0


def test_the_totals_wait_for_the_mutex(make: Maker) -> None:
    engine = make(alpha=0.5, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(4), ROOTS)

    def asks(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        assert ring.totals() == Totals(10.0, 1.0, 16.0, 4)

    with mutex_held(engine) as holder, child(asks) as asker:  # sets the priority of item 1 to 1
        asker.reached()
        until_it_sleeps(asker)
        holder.go()
        assert (holder.end(), asker.end()) == (0, 0)


def test_a_child_asks_and_raises_through_the_handle_that_it_inherited(make: Maker) -> None:
    ring = ring_of(make(alpha=0.5, eps=0.0))
    write(ring, range(4), ROOTS)

    def raises() -> None:
        assert ring.totals() == BY_MASS
        ring.raise_max_priority(25.0)

    succeeds(raises)
    assert ring.tree.max_priority == 25.0


# The largest priority of another ring.


def test_new_items_start_from_the_largest_priority_of_another_ring(
    engine: Engine, ring: Ring
) -> None:
    write(ring, [0])
    ring.raise_max_priority(9.0)
    assert ring.tree.max_priority == ring.tree.default_priority == 9.0
    write(ring, [1])
    assert ring.tree.priorities()[:2].tolist() == [1.0, 9.0]
    assert ring.totals() == Totals(4.0, 1.0, 9.0, 2)
    write(ring, [2], np.array([16.0]))
    write(ring, [3])
    assert ring.tree.priorities()[3] == 16.0
    require_sound(engine)


@pytest.mark.parametrize("value", [0.0, 4.0, 15.9, 16.0])
def test_a_smaller_one_changes_nothing(ring: Ring, value: float) -> None:
    write(ring, range(4), ROOTS)
    ring.raise_max_priority(value)
    assert ring.totals() == BY_MASS


def test_the_first_priority_given_may_be_one_of_another_ring(ring: Ring) -> None:
    ring.raise_max_priority(0.25)
    assert ring.tree.max_priority == 0.25
    assert ring.tree.default_priority == 1.0, "as of one that an item has"
    ring.empty()
    assert ring.tree.max_priority is None


def test_it_counts_in_a_ring_that_keeps_no_priorities_yet(make: Maker) -> None:
    ring = ring_of(make())
    ring.raise_max_priority(9.0)
    ring.tree.bind(0.5, 0.0)
    write(ring, [0])
    assert ring.totals() == Totals(3.0, 3.0, 9.0, 1)


def test_it_is_that_of_all_handles_and_outlives_them(fast_path: Path) -> None:
    with Engine.open(fast_path / "it", Settings(capacity=4, alpha=1.0, eps=0.0)) as engine:
        engine.define(Schema((), 4))
        with Engine.open(fast_path / "it", None) as other:
            ring_of(other).raise_max_priority(9.0)
        assert ring_of(engine).tree.max_priority == 9.0
    with Engine.open(fast_path / "it", None) as again:
        assert ring_of(again).tree.max_priority == 9.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -5e-324, 1e300, 1e100])
def test_a_value_that_no_item_could_have_is_refused_as_an_update_refuses_it(
    make: Maker, value: float
) -> None:
    engine = make(alpha=3.0, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(4), ROOTS)
    before = ring.totals()
    with pytest.raises(ValueError, match=r" at position 0 is not a number from 0 to ") as update:
        ring.update(np.array([0]), np.array([value]))
    with pytest.raises(ValueError, match="nothing was changed") as raising:
        ring.raise_max_priority(value)
    assert str(raising.value) == str(update.value)
    assert ring.totals() == before
    require_sound(engine)

"""A learner is killed at every step of a priority update, of a sample, of a change of alpha."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmbuffer.memory import Engine, Totals
from tests.crash.harness import (
    dies,
    native_points,
    read_all,
    require_sound,
    require_usable,
    sample,
    succeeds,
    waits_for_the_mutex_of,
    write,
)
from tests.kit.rings import path_of, ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

UPDATES = {
    "one item": [3],
    "many": [0, 2, 3, 5, 6],
    "around the end": [6, 7, 0, 1],
    "twice": [4, 4, 1],
}


def update(engine: Engine, index: list[int], priority: float = 50.0) -> None:
    where = np.array(index, np.int64)
    tickets = (ring_of(engine).live.words[where] >> np.uint64(2)).astype(np.int64)
    ring_of(engine).update(where, np.full(len(index), priority), tickets)


@pytest.mark.parametrize("point", native_points("update"))
@pytest.mark.parametrize("name", UPDATES)
def test_each_priority_is_the_old_or_the_new_one(survivor: Engine, name: str, point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    index = UPDATES[name]
    write(ring, range(11))
    before, items = ring.tree.priorities(), read_all(ring)
    passing = 0
    while dies(path, point, lambda engine: update(engine, index), after=passing):
        require_sound(survivor)
        assert read_all(ring) == items
        after = ring.tree.priorities()
        for element in range(8):
            assert after[element] in (
                {before[element], 50.0} if element in index else {before[element]}
            )
        if point in ("update.parents", "update.unlocked"):
            assert (after[index] == 50.0).all()
        assert survivor.stats()["max_priority"] >= after.max()  # new items start with this priority
        succeeds(lambda: fresh(path, items))
        ring.update(np.arange(8), before)
        passing += 1
    assert passing == (len(index) if point in ("update.raw", "update.leaf") else 1)
    require_usable(ring, 999)
    require_sound(survivor)


def fresh(path: Path, items: dict[int, int]) -> None:
    with Engine.open(path, None) as engine:
        require_sound(engine)
        assert read_all(ring_of(engine)) == items


@pytest.mark.parametrize("point", native_points("update"))
def test_a_fresh_process_finds_sums_that_fit_after_the_death_of_all(
    survivor: Engine, point: str
) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(11))
    items = read_all(ring)
    assert dies(path, point, lambda engine: update(engine, UPDATES["many"]))
    survivor.close()
    succeeds(lambda: fresh(path, items))


@pytest.mark.parametrize("point", ["update.locked", "update.raw", "update.leaf", "update.parents"])
def test_a_waiter_gets_the_mutex_of_a_dead_learner(survivor: Engine, point: str) -> None:
    path = path_of(survivor)
    write(ring_of(survivor), range(8))

    def acts(waiter: Engine) -> None:
        sample(ring_of(waiter))
        update(waiter, [1], 3.0)

    waits_for_the_mutex_of(path, point, lambda engine: update(engine, [0, 5]), acts)
    require_sound(survivor)
    assert ring_of(survivor).tree.priorities()[1] == 3.0
    assert survivor.stats()["repairs"] == 1


@pytest.mark.parametrize("point", native_points("sample"))
def test_a_learner_that_dies_while_sampling_changes_nothing(survivor: Engine, point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(11))
    items, priorities = read_all(ring), ring.tree.priorities()
    assert dies(path, point, lambda engine: sample(ring_of(engine)) and None)  # type: ignore[func-returns-value]
    require_sound(survivor)
    assert read_all(ring) == items
    assert (ring.tree.priorities() == priorities).all()
    require_usable(ring, 999)


@pytest.mark.parametrize("point", [*native_points("raise"), "mutex.locked", "mutex.unlocked"])
def test_the_largest_priority_of_another_ring_is_there_or_is_not(
    survivor: Engine, point: str
) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(11))
    items, priorities = read_all(ring), ring.tree.priorities()
    before = ring.totals()
    raised = before._replace(max_priority=50.0)
    assert before.max_priority == 11.0
    assert dies(path, point, lambda engine: ring_of(engine).raise_max_priority(50.0))
    require_sound(survivor)
    assert ring.totals() == (before if point == "mutex.locked" else raised)
    assert read_all(ring) == items
    assert (ring.tree.priorities() == priorities).all()
    ring.raise_max_priority(50.0)
    succeeds(lambda: finds(path, raised))
    require_usable(ring, 999)


def finds(path: Path, totals: Totals) -> None:
    with Engine.open(path, None) as engine:
        require_sound(engine)
        assert ring_of(engine).totals() == totals


@pytest.mark.parametrize("point", native_points("alpha"))
def test_a_change_of_alpha_is_finished_for_the_dead(survivor: Engine, point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(8))
    assert dies(path, point, lambda engine: ring_of(engine).tree.set_alpha(2.0))
    require_sound(survivor)
    assert ring.tree.alpha == 2.0
    assert ring.tree.mass().tolist()[:8] == [float(n + 1) ** 2 for n in range(8)]


@pytest.mark.parametrize("point", [*native_points("alpha"), "mutex.locked"])
@pytest.mark.parametrize("change", [(2.0, 0.0), (0.5, 1e200)], ids=["less eps", "more eps"])
def test_a_change_of_alpha_and_eps_leaves_finite_masses_at_every_step(
    survivor: Engine, change: tuple[float, float], point: str
) -> None:
    """The new alpha with an old, larger eps may overflow, so eps is stored first."""
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(8))
    ring.tree.set_alpha(*((1.0, 1e160) if change[0] > 1 else (2.0, 0.0)))
    assert dies(path, point, lambda engine: ring_of(engine).tree.set_alpha(*change))
    require_sound(survivor)
    assert np.isfinite(ring.tree.mass()).all()
    sample(ring)


def test_an_update_that_meets_a_newer_item_is_dropped_after_a_kill_too(survivor: Engine) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(8))
    tickets = np.arange(8, dtype=np.int64)
    assert dies(
        path, "write.commit", lambda engine: write(ring_of(engine), [100, 101]) and None, after=1
    )  # type: ignore[func-returns-value]
    survivor.seat.reap_dead()
    assert ring.update(np.arange(8), np.full(8, 70.0), tickets) == (6, 2)
    assert ring.tree.priorities()[:2].tolist() == [101.0, 102.0]
    require_sound(survivor)

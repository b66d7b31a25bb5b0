"""The largest stored priority, whether this process, another one or a dead one has set it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shmbuffer import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from shmbuffer.items import maximum
from shmbuffer.memory import Engine, Ring
from tests.crash.harness import dies
from tests.kit.rings import engine_of, ring_of


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maximum, "PIECE", 4)


def within(storage: LazyMemmapStorage | LazyTensorStorage, **options: float) -> ReplayBuffer:
    sampler = PrioritizedSampler(
        storage.max_size,
        **{"alpha": 0.7, "beta": 0.9, **options},  # type: ignore[arg-type]
        max_priority_within_buffer=True,
    )
    return ReplayBuffer(storage=storage, sampler=sampler)


@pytest.fixture
def ours(fast_path: Path) -> Iterator[ReplayBuffer]:
    """Makes a buffer of ten items with priorities 0.0, 0.1, ... 0.9 in a directory."""
    with within(LazyMemmapStorage(10, scratch_dir=fast_path / "buffer")) as rb:
        index = rb.extend(torch.arange(10))
        rb.update_priority(index, torch.arange(10) / 10)
        assert rb.sampler.default_priority == pytest.approx(0.9)
        yield rb


@pytest.fixture
def theirs(ours: ReplayBuffer) -> Iterator[Ring]:
    with Engine.open(ours.storage.scratch_dir, None) as engine:
        yield ring_of(engine)


def set_priority(ring: Ring, element: int, priority: float) -> None:
    assert ring.update(np.array([element]), np.array([priority])) == (1, 0)


def test_the_next_write_sees_priorities_set_by_others(ours: ReplayBuffer, theirs: Ring) -> None:
    set_priority(theirs, 3, 5.0)
    assert ours.sampler.default_priority == 5.0
    set_priority(theirs, 3, 0.5)  # lowered again
    assert ours.sampler.default_priority == pytest.approx(0.9)
    set_priority(theirs, 9, 0.0)
    assert ours.sampler.default_priority == pytest.approx(0.8)
    ours.add(torch.tensor(10))
    assert theirs.tree.priorities()[0] == pytest.approx(0.8)


def test_an_item_that_others_were_writing_counts_once_committed(
    ours: ReplayBuffer, theirs: Ring
) -> None:
    theirs.claims.claim(1)
    for number in range(8):
        ours.add(torch.tensor(number))
        assert ours.sampler.default_priority == pytest.approx(0.9)
    theirs.claims.commit(np.array([7.0]))
    assert ours.sampler.default_priority == 7.0


def test_priorities_set_by_the_dead_count_once_they_are_known_to_be_dead(
    ours: ReplayBuffer, theirs: Ring
) -> None:
    def raise_one(victim: Engine) -> None:
        set_priority(ring_of(victim), 4, 6.0)

    assert dies(ours.storage.scratch_dir, "update.unlocked", raise_one)  # before it was counted
    engine_of(ours).seat.reap_dead()
    assert ours.sampler.default_priority == 6.0


@pytest.mark.parametrize(("alpha", "eps"), [(0.0, 0.0), (1.0, 0.0), (1e-12, 1.0)])
def test_masses_that_say_nothing_of_priorities_lead_to_all_of_them(
    alpha: float, eps: float
) -> None:
    rb = within(LazyTensorStorage(10), alpha=alpha, eps=eps)
    index = rb.extend(torch.arange(9))
    rb.update_priority(index, torch.zeros(9))
    assert rb.sampler.default_priority == 0.0
    rb.update_priority(index, torch.tensor([0.0, 3.0, 1.0, 2.0, 9.0, 4.0, 2.0, 1.0, 9.0]))
    assert rb.sampler._max_priority == (9.0, 4)
    rb.update_priority(torch.tensor([4, 8]), torch.tensor([1.0, 1.0]))
    assert rb.sampler._max_priority == (4.0, 5)


def test_the_whole_slot_of_items_with_lanes_leaves() -> None:
    rb = within(LazyTensorStorage(12, ndim=2), alpha=1.0)
    index = rb.extend(torch.arange(12).view(3, 4))  # three lanes, four slots
    rb.update_priority(index, torch.arange(12.0))
    ring = ring_of(rb)
    for slot in (0, 1, 2, 3, 0):
        known = ring.tree.priorities().reshape(4, 3)
        left = np.delete(known, slot, axis=0).max()
        rb.extend(torch.zeros(3, 1, dtype=torch.int64))
        assert ring.tree.priorities().reshape(4, 3)[slot].tolist() == [left] * 3
        rb.update_priority(index, torch.from_numpy(np.random.default_rng(slot).random(12)))

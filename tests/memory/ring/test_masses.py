"""Priorities with their masses, piece by piece: of a ring that goes on, and of a moment of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shmbuffer.memory import Masses, Ring, masses_of, masses_of_snapshot
from shmbuffer.memory.ring import masses
from tests.kit.rings import ring_of
from tests.memory.rows import Maker, Rows, write


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masses, "PIECE", 4)


def whole(weighed: Masses) -> tuple[list[float], list[float]]:
    pieces = [(mass.copy(), raw.copy()) for mass, raw in weighed.pieces]
    mass, raw = (np.concatenate(each) for each in zip(*pieces, strict=True))
    return mass.tolist(), np.where(np.isnan(raw), -1.0, raw).tolist()


def moment_of(ring: Ring) -> Masses:
    moment = ring.copy_out(Rows(ring.schema.leaves, ring.elements).addresses)
    return masses_of_snapshot(moment, ring.width, ring.tree.alpha, ring.tree.eps)


@pytest.mark.parametrize("of", [masses_of, moment_of])
def test_masses_and_priorities_of_the_stored_items(
    make: Maker, of: Callable[[Ring], Masses]
) -> None:
    ring = ring_of(make(10, alpha=2.0, eps=0.0))
    write(ring, range(7), np.array([1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 6.0]))
    ring.claims.claim(1)
    ring.claims.abort()
    weighed = of(ring)
    assert (weighed.alpha, weighed.eps) == (2.0, 0.0)
    assert (weighed.max_priority, weighed.elements) == (6.0, 10)
    mass, raw = whole(weighed)
    assert mass == [1.0, 4.0, 0.0, 9.0, 16.0, 25.0, 36.0, 0.0, 0.0, 0.0]
    assert raw == [1.0, 2.0, 0.0, 3.0, 4.0, 5.0, 6.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("of", [masses_of, moment_of])
def test_wide_slots_and_an_exponent_of_nothing(make: Maker, of: Callable[[Ring], Masses]) -> None:
    ring = ring_of(make(3, (3, 2), alpha=0.0, eps=0.0))
    write(ring, range(12), np.arange(12.0))
    weighed = of(ring)
    mass, raw = whole(weighed)
    assert mass == [1.0] * 12 + [0.0] * 6
    assert raw == [*range(12)] + [-1.0] * 6


def test_nothing_was_given_yet(make: Maker) -> None:
    weighed = masses_of(ring_of(make(5, alpha=1.0)))
    assert weighed.max_priority is None
    assert whole(weighed) == ([0.0] * 5, [-1.0] * 5)


def test_all_masses_are_of_one_alpha_though_it_is_changed_meanwhile(make: Maker) -> None:
    ring = ring_of(make(10, alpha=1.0, eps=0.0))
    write(ring, range(9), np.arange(1.0, 10.0))
    weighed = masses_of(ring)
    first, _ = next(weighed.pieces)
    ring.tree.set_alpha(2.0)
    ring.claims.claim(1)
    ring.claims.abort()
    mass, raw = whole(weighed)
    assert [*first, *mass] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 0.0]
    assert raw == [5.0, 6.0, 7.0, 8.0, 9.0, -1.0]
    assert whole(masses_of(ring))[0] == [float(n * n) for n in range(1, 10)] + [0.0]

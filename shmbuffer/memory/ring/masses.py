"""Priorities with their masses, piece by piece: a save of them needs no memory of their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.format.priorities import mass_of
from shmbuffer.memory.format.slots_file import PIECE
from shmbuffer.memory.ring import counters
from shmbuffer.memory.ring.item_snapshot import ItemSnapshot
from shmbuffer.memory.ring.ring import Ring


class Masses(NamedTuple):
    """Priorities of all elements of a ring, in their order."""

    alpha: float
    """Priority exponent."""
    eps: float
    """Added to every priority."""
    max_priority: float | None
    """The largest raw priority ever given; None before the first."""
    elements: int
    """The number of elements."""
    pieces: Iterator[tuple[Floats, Floats]]
    """Masses and raw priorities, float64 each: 0 and NaN where there is no item. Not to be kept:
    raw priorities may be those of the ring itself, which change."""


def masses_of(ring: Ring) -> Masses:
    """Masses of a live ring, read once without stopping writers; all are of one alpha and eps."""
    runtime, _ = counters.of_snapshot(ring.snapshot())
    greatest = float(runtime["max_priority"])
    alpha, eps = float(runtime["alpha"]), float(runtime["eps"])
    return Masses(
        alpha,
        eps,
        greatest if greatest >= 0 else None,
        ring.elements,
        _living(ring, alpha, eps, int(runtime["alpha_version"])),
    )


def masses_of_snapshot(moment: ItemSnapshot, width: int, alpha: float, eps: float) -> Masses:
    """Masses of a snapshot, with ``width`` elements in a slot."""
    return Masses(
        alpha,
        eps,
        moment.max_priority,
        len(moment.priorities),
        _copied(moment, width, alpha, eps),
    )


def _living(ring: Ring, alpha: float, eps: float, version: int) -> Iterator[tuple[Floats, Floats]]:
    runtime = ring.seat.control.runtime
    for where, places in _pieces(ring.capacity, ring.width):
        mass, raw = ring.tree.mass(where).copy(), ring.tree.priorities(where)
        # After the masses: a change of alpha is announced before the first of them changes.
        is_older = int(runtime["alpha_version"][0]) != version
        if is_older or not (mass > 0).all():
            items = np.repeat(ring.live.holds(places), ring.width)
            raw = np.where(items, raw, np.nan)
        if is_older:
            mass = _weighed(raw, alpha, eps)
        yield mass, raw


def _copied(
    moment: ItemSnapshot, width: int, alpha: float, eps: float
) -> Iterator[tuple[Floats, Floats]]:
    for where, places in _pieces(len(moment.tickets), width):
        missing = np.repeat(moment.tickets[places] < 0, width)
        raw = np.where(missing, np.nan, moment.priorities[where])
        yield _weighed(raw, alpha, eps), raw


def _weighed(raw: Floats, alpha: float, eps: float) -> Floats:
    """Masses; NaN is no item, and with alpha 0 its power is 1, too."""
    return np.where(np.isnan(raw), 0.0, mass_of(raw, alpha, eps))


def _pieces(capacity: int, width: int) -> Iterator[tuple[slice, slice]]:
    step = max(1, PIECE // width)
    for first in range(0, capacity, step):
        end = min(first + step, capacity)
        yield slice(first * width, end * width), slice(first, end)

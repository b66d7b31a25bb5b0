"""Computes the trajectories of a ring from its memory, item by item and without an index."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from shmbuffer.memory.format import slots
from shmbuffer.samplers.slicing.boundaries import Boundaries
from shmbuffer.samplers.slicing.options import TrajectoryOptions
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.samplers.slicing.windows import Windows

Elements = list[list[int]]


def boundaries(*others: Any, windows: Windows | None = None, **keys: Any) -> Boundaries:
    """Makes the index that a slice sampler uses for its keys; ``others`` are read as well."""
    options = TrajectoryOptions(fragmented="step_key" in keys, **keys)
    return Boundaries(options, others, windows)


def listed(table: Trajectories, steps: int = 1) -> Elements:
    """Returns the elements of every trajectory of at least ``steps`` steps, in counting order."""
    found = table.long(steps)
    numbers = found[np.arange(len(found))]
    each = zip(table.starts(numbers).tolist(), table.lengths(numbers).tolist(), strict=True)
    return [table.elements_of(np.arange(row, row + count)).tolist() for row, count in each]


def require_whole(table: Trajectories) -> None:
    """Checks that each query of the table agrees with its list."""
    every = listed(table)
    assert len(table) == len(every)
    assert table.rows == sum(map(len, every))
    assert table.longest == max(map(len, every), default=0)
    for one in every:
        rows = table.rows_of(np.array(one))
        assert (np.diff(rows) == 1).all()
        trajectory = table.of_rows(rows)
        assert (table.starts(trajectory) == rows[0]).all()
        assert (table.lengths(trajectory) == len(one)).all()
    middle = table.longest // 2 + 1
    assert listed(table, middle) == [one for one in every if len(one) >= middle]
    table.long(1)


def by_age(ring: Any) -> list[int]:
    """Returns the slots, oldest first."""
    head, capacity = ring.head, ring.capacity
    start = head % capacity if head >= capacity else 0
    return [(start + age) % capacity for age in range(min(head, capacity))]


def followed(ring: Any, ends: Any, ids: Any) -> Elements:
    """Returns the trajectories whose items are stored in order.

    Args:
        ring: a ring without open writes.
        ends: bool ``[elements]``, True for the last items; or None.
        ids: trajectory ids ``[elements]``; or None.
    """
    held = slots.committed(ring.live.words)
    found: dict[int, list[int]] = {}
    for lane in range(ring.width):
        open_: dict[int, list[int]] = {}
        for slot in by_age(ring):
            if not held[slot]:
                open_.clear()
                continue
            source, element = int(ring.live.sources[slot]), slot * ring.width + lane
            run = open_.get(source)
            if run is not None and ids is not None and ids[run[-1]] != ids[element]:
                run = None
            if run is None:
                run = open_[source] = found[element] = []
            run.append(element)
            if ends is not None and ends[element]:
                del open_[source]
    return in_order(ring, found)


def in_pieces(ring: Any, ids: Any, steps: Any) -> Elements:
    """Returns the trajectories whose items are stored in any order, by id and step."""
    held = slots.committed(ring.live.words)
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for slot in by_age(ring):
        for lane in range(ring.width) if held[slot] else ():
            element = slot * ring.width + lane
            key = int(ids[element]), int(ring.live.sources[slot]), lane
            groups.setdefault(key, []).append((int(steps[element]), element))
    found: dict[int, list[int]] = {}
    for group in groups.values():
        group.sort()
        run = found[group[0][1]] = [group[0][1]]
        for (step, _), (after, element) in pairwise(group):
            if after != step + 1:
                run = found[element] = []
            run.append(element)
    return in_order(ring, found)


def in_order(ring: Any, found: dict[int, list[int]]) -> Elements:
    """Sorts trajectories by the age of their first items."""
    oldest = by_age(ring)[0] * ring.width if ring.head else 0
    elements = ring.capacity * ring.width
    return [found[first] for first in sorted(found, key=lambda one: (one - oldest) % elements)]

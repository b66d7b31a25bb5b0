"""The trajectories of a ring as its memory says them, item by item and all of them each time."""

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
    """What a slice sampler makes of its keys; ``others`` are entries that will be asked for."""
    options = TrajectoryOptions(fragmented="step_key" in keys, **keys)
    return Boundaries(options, others, windows)


def listed(table: Trajectories, steps: int = 1) -> Elements:
    """The elements of every trajectory of so many steps, in the order in which they are counted."""
    found = table.long(steps)
    numbers = found[np.arange(len(found))]
    each = zip(table.starts(numbers).tolist(), table.lengths(numbers).tolist(), strict=True)
    return [table.elements_of(np.arange(row, row + count)).tolist() for row, count in each]


def require_whole(table: Trajectories) -> None:
    """Each question has the answer that follows from the list."""
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
    """Slots from the oldest on."""
    head, capacity = ring.head, ring.capacity
    start = head % capacity if head >= capacity else 0
    return [(start + age) % capacity for age in range(min(head, capacity))]


def followed(ring: Any, ends: Any, ids: Any) -> Elements:
    """Trajectories that lie in their order.

    Args:
        ring: at rest.
        ends: bool ``[elements]``, of the last items; or None.
        ids: ``[elements]``; or None.
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
    """Trajectories whose items lie anywhere, by id and step."""
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
    """By the age of their first items."""
    oldest = by_age(ring)[0] * ring.width if ring.head else 0
    elements = ring.capacity * ring.width
    return [found[first] for first in sorted(found, key=lambda one: (one - oldest) % elements)]

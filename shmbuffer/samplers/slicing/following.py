"""Follows the trajectories of a ring, at a cost that depends only on the changes.

    ring ──▶ Follower            items committed or removed since the last update
                 └──▶ cuts           the ends of trajectories among the new items (boundaries)
                          └──▶ Trajectories

Several collectors, or several streams of one collector, can write alternately. Each source is
followed separately: an item only follows an item of the same stream and the same collector, without
a restart in between. A slot without an item cuts all trajectories, because its source is unknown.
The oldest item does not follow the newest one. A trajectory continues from the last slot of the
ring to the first.

Writers continue during an update. The tickets of later writes are at least the head that the update
has read. A draw checks the tickets of its items: if all of them are smaller, the items have not
changed. Other items do not matter, because a cut is between two items, and only a draw of both
items can cross the cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.items.indices import elements_of
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.samplers.slicing.cuts import Shown
from shmbuffer.samplers.slicing.trajectories import Trajectories

_PIECE = 2**15  # items per step, so that the arrays fit into the second-level cache
_MOVED = 64  # moved trajectories per item above which items are sorted first


class Fresh(NamedTuple):
    """New items of a ring, oldest first."""

    slots: Ints
    """Slots, int64 ``[n]``."""
    sources: NDArray[np.uint64]
    """Source of each item, ``[n]``."""
    reach: Ints
    """Number of preceding slots that hold items, for each item, int64 ``[n]``."""


class Following:
    """Follows the trajectories of one ring. See `SliceSampler` for the costs of an update."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.native = ring.seat.native
        self.follower = _core.Follower(self.native)
        self.table = Trajectories(ring.capacity, ring.width)
        self._again = False
        self._is_mixed = False  # True if steps arrive unordered
        self._cuts: tuple[Ints, int] | None = None  # columns, and the address of their array
        self.shown: Shown | None = None

    def forget(self) -> None:
        """Discards all items. The next update reads them again."""
        self.follower.forget()

    def cut_by(self, windows: _core.Windows) -> None:
        """Cuts new items into windows, in ticket order up to the first unfinished write."""
        self.follower.report_in_order()
        self.table.cut_by(windows)

    def cut_at(self, columns: Ints | None) -> None:
        """Cuts by these columns (see `cut_columns`), or by the argument of `catch_up` if None."""
        self._cuts = None if columns is None else (columns, columns.ctypes.data)

    @property
    def pending(self) -> int:
        """Number of writes in progress at the last update."""
        return self.follower.pending

    def catch_up(self, cuts: Callable[[Ints, Ints], Flags]) -> None:
        """Follows items in write order.

        ``cuts(slots, before)`` returns True for each slot that starts a trajectory.
        """
        table, seen = self.table, None
        if self._cuts is not None:
            columns, at = self._cuts
            told = table.follow(self.follower, at, len(columns))
            if isinstance(told, int):
                self._seen(told)
                return
            seen = told
        for changed, fresh in self._looks(seen):
            if len(changed):
                around = None
                if table.windows is None:
                    around = table.around(changed, self.ring.live.sources[changed])
                if around is None:  # a source has changed, or the slot was reused: start over
                    self.follower.forget()
                    self._again = True
                    continue
                items, before = around
                reach = np.empty_like(items)
                self.follower.read_reach(items.ctypes.data, len(items), reach.ctypes.data)
                apart = (items - before) % self.ring.capacity > reach
                table.cut(items, cuts(items, np.where(apart, -1, before)))
            for slots, sources, reach in fresh:
                follows = table.before(slots, sources, reach)
                table.append(slots, sources, cuts(slots, follows), self.follower.settled)

    def catch_up_by_step(self, steps_of: Callable[[Ints], tuple[Ints, Ints, str]]) -> None:
        """Follows items in the order of their steps.

        ``steps_of(slots)`` returns ids, steps, and the names of both.
        """
        table, width = self.table, self.ring.width
        for changed, fresh in self._looks():
            table.drop(changed)
            parts: Iterable[Fresh] = fresh
            if self._is_mixed:
                parts = _as_one(list(fresh))
            if len(changed):
                found = Fresh(changed, self.ring.live.sources[changed], changed)
                parts = itertools.chain(parts, (found,))
            before, moved = table.rows, table.moved
            for slots, sources, _ in parts:
                elements = elements_of(slots, width)
                ids, steps, what = steps_of(slots)
                by_lane = sources.repeat(width)
                if self._is_mixed:
                    order = np.lexsort((steps, by_lane, ids))
                    ids, steps, elements = ids[order], steps[order], elements[order]
                    by_lane = by_lane[order]
                put_in_order(table, elements, by_lane, ids, steps, what)
                too_much = _MOVED * (table.rows - before) + _PIECE
                if not self._is_mixed and table.moved - moved > too_much:
                    self._is_mixed = True
                    self.follower.forget()
                    self._again = True
                    break

    # -- inside --------------------------------------------------------------------------------

    def _seen(self, head: int) -> None:
        table, ring = self.table, self.ring
        table.head = head
        table.first = head % ring.capacity * ring.width if head >= ring.capacity else 0

    def flags(
        self, elements: torch.Tensor, steps: int
    ) -> tuple[dict[Any, torch.Tensor], torch.Tensor] | None:
        """Reads the flags of slices; see `Shown.read`."""
        assert self.shown is not None
        return self.shown.read(self.follower, elements, steps)

    def _looks(
        self, seen: tuple[bool, bytes, bytes] | None = None
    ) -> Iterator[tuple[Ints, Iterator[Fresh]]]:
        """Yields changes until there are no more. After an error, all items are read again."""
        follower, table = self.follower, self.table
        try:
            while True:
                if seen is None:
                    seen = follower.poll()
                if seen is None:
                    return
                is_first, gone, changed = seen
                self._again = is_first  # a first update is slow, so other processes have written
                if is_first:
                    table.clear()
                table.drop(np.frombuffer(gone, np.int64))
                seen = None
                self._seen(follower.seen)
                if table.windows is not None:
                    table.windows.seen = follower.seen
                yield np.frombuffer(changed, np.int64).copy(), self._fresh()
                if not self._again:
                    return
        except BaseException:
            follower.forget()
            raise

    def _fresh(self) -> Iterator[Fresh]:
        slots, reach = np.empty((2, _PIECE), np.int64)
        while count := self.follower.next(slots.ctypes.data, reach.ctypes.data, _PIECE):
            new = slots[:count]
            yield Fresh(new.copy(), self.ring.live.sources[new], reach[:count].copy())


def put_in_order(
    table: Trajectories,
    elements: Ints,
    sources: NDArray[np.uint64],
    ids: Ints,
    steps: Ints,
    what: str,
) -> None:
    """Inserts items in the order of their steps.

    Raises RuntimeError for a repeated step. The message contains ``what``.
    """
    twice = table.insert(elements, sources, ids, steps)
    if twice is not None:
        at, there = twice
        raise RuntimeError(
            f"step {steps[at]} of trajectory {ids[at]} occurs twice ({what}), in the items {there} "
            f"and {elements[at]}; trajectories that are stored at the same time must have "
            "different ids"
        )


def _as_one(parts: list[Fresh]) -> list[Fresh]:
    return [Fresh(*map(np.concatenate, zip(*parts, strict=True)))] if parts else []

"""Follows the trajectories in a ring. The cost of an update depends only on what has changed.

    ring ──▶ Follower            items committed or removed since the last update
                 └──▶ cuts           the ends of trajectories among the new items (boundaries)
                          └──▶ Trajectories

Several collectors, or several streams of one collector, can write alternately. Each source is
followed separately: an item only follows an item of the same stream and the same collector, without
a restart in between. A slot without an item cuts all trajectories, because its source is unknown.
The oldest item never follows the newest item. A trajectory continues from the last slot of the
ring to the first slot.

Writers continue during an update. The tickets of their new items are at least as large as the head
that the update has read. A draw compares the tickets of its items with this head. If all tickets
are smaller, the items have not changed. Changes to other items do not matter: a trajectory is cut
between two items, so only a draw that contains both items can cross the cut.
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
from shmbuffer.samplers.slicing.cuts import MarkColumns
from shmbuffer.samplers.slicing.trajectories import Trajectories

_PIECE = 2**15  # items per call, so that the arrays fit into the second-level cache
_MOVED = 64  # if more trajectories than this are moved per item, items are sorted first


class Fresh(NamedTuple):
    """New items of a ring, oldest first."""

    slots: Ints
    """Slots, int64 ``[n]``."""
    sources: NDArray[np.uint64]
    """Source of each item, ``[n]``."""
    reach: Ints
    """Number of slots between each item and the last gap before it, int64 ``[n]``.

    A gap is a slot without an item. If there is none, the number is the capacity of the ring.
    """


class Following:
    """Follows the trajectories in one ring. `SliceSampler` documents the cost of an update."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.native = ring.seat.native
        self.follower = _core.Follower(self.native)
        self.table = Trajectories(ring.capacity, ring.width)
        self._polls_again = False
        self._is_mixed = False  # True if the steps of trajectories are written out of order
        self._cuts: tuple[Ints, int] | None = None  # columns, and the address of their array
        self.mark_columns: MarkColumns | None = None

    def forget(self) -> None:
        """Discards the state of all items. The next update reads every item again."""
        self.follower.forget()

    def cut_by(self, windows: _core.Windows) -> None:
        """Starts to cut new items into windows.

        Windows are cut in the order of tickets, up to the first write that is in progress.
        """
        self.follower.report_in_order()
        self.table.cut_by(windows)

    def cut_at(self, columns: Ints | None) -> None:
        """Sets the columns from which the core cuts trajectories.

        Args:
            columns: result of `cut_columns`. With None, `catch_up` calls its argument instead.
        """
        self._cuts = None if columns is None else (columns, columns.ctypes.data)

    @property
    def pending(self) -> int:
        """Number of writes in progress at the last update."""
        return self.follower.pending

    def catch_up(self, cuts: Callable[[Ints, Ints], Flags]) -> None:
        """Updates the table with items that follow each other in the order of their writes.

        Args:
            cuts: a function ``cuts(slots, before)`` that returns True for each item that starts a
                trajectory. ``before`` has the slots of the previous items, or -1.
        """
        table, seen = self.table, None
        if self._cuts is not None:
            columns, at = self._cuts
            result = table.follow(self.follower, at, len(columns))
            if isinstance(result, int):
                self._seen(result)
                return
            seen = result
        for changed, fresh in self._updates(seen):
            if len(changed):
                neighbours = None
                if table.windows is None:
                    neighbours = table.find_neighbours(changed, self.ring.live.sources[changed])
                if neighbours is None:  # a source has changed, or a slot was reused: read all again
                    self.follower.forget()
                    self._polls_again = True
                    continue
                items, before = neighbours
                reach = np.empty_like(items)
                self.follower.read_reach(items.ctypes.data, len(items), reach.ctypes.data)
                apart = (items - before) % self.ring.capacity > reach
                table.cut(items, cuts(items, np.where(apart, -1, before)))
            for slots, sources, reach in fresh:
                follows = table.before(slots, sources, reach)
                table.append(slots, sources, cuts(slots, follows), self.follower.settled)

    def catch_up_by_step(self, steps_of: Callable[[Ints], tuple[Ints, Ints, str]]) -> None:
        """Updates the table with items that follow each other in the order of their step numbers.

        Args:
            steps_of: a function ``steps_of(slots)`` that returns the trajectory ids and step
                numbers of items, and a text that names the keys of both.
        """
        table, width = self.table, self.ring.width
        for changed, fresh in self._updates():
            table.drop(changed)
            parts: Iterable[Fresh] = fresh
            if self._is_mixed:
                parts = _concatenated(list(fresh))
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
                insert_by_step(table, elements, by_lane, ids, steps, what)
                too_much = _MOVED * (table.rows - before) + _PIECE
                if not self._is_mixed and table.moved - moved > too_much:
                    self._is_mixed = True
                    self.follower.forget()
                    self._polls_again = True
                    break

    # -- inside --------------------------------------------------------------------------------

    def _seen(self, head: int) -> None:
        table, ring = self.table, self.ring
        table.head = head
        table.first = head % ring.capacity * ring.width if head >= ring.capacity else 0

    def flags(
        self, elements: torch.Tensor, steps: int
    ) -> tuple[dict[Any, torch.Tensor], torch.Tensor] | None:
        """Reads the marks and tickets of slices of ``steps`` steps each; see `MarkColumns.read`."""
        assert self.mark_columns is not None
        return self.mark_columns.read(self.follower, elements, steps)

    def _updates(
        self, seen: tuple[bool, bytes, bytes] | None = None
    ) -> Iterator[tuple[Ints, Iterator[Fresh]]]:
        """Polls the follower until it has no more changes.

        After an exception, the next update reads all items again.

        Args:
            seen: result of a poll that the caller has not processed yet, or None.

        Yields:
            The slots of changed items, and an iterator over the new items.
        """
        follower, table = self.follower, self.table
        try:
            while True:
                if seen is None:
                    seen = follower.poll()
                if seen is None:
                    return
                is_first, gone, changed = seen
                # The first update is slow, so writers have probably added items in the meantime.
                self._polls_again = is_first
                if is_first:
                    table.clear()
                table.drop(np.frombuffer(gone, np.int64))
                seen = None
                self._seen(follower.seen)
                if table.windows is not None:
                    table.windows.seen = follower.seen
                yield np.frombuffer(changed, np.int64).copy(), self._fresh()
                if not self._polls_again:
                    return
        except BaseException:
            follower.forget()
            raise

    def _fresh(self) -> Iterator[Fresh]:
        slots, reach = np.empty((2, _PIECE), np.int64)
        while count := self.follower.next(slots.ctypes.data, reach.ctypes.data, _PIECE):
            new = slots[:count]
            yield Fresh(new.copy(), self.ring.live.sources[new], reach[:count].copy())


def insert_by_step(
    table: Trajectories,
    elements: Ints,
    sources: NDArray[np.uint64],
    ids: Ints,
    steps: Ints,
    what: str,
) -> None:
    """Inserts items into the table by trajectory id and step number.

    Args:
        table: the table to change.
        elements: elements of the items, int64 ``[n]``.
        sources: source of each item, ``[n]``.
        ids: trajectory id of each item, int64 ``[n]``.
        steps: step number of each item, int64 ``[n]``.
        what: text for the error message that names the keys of the ids and step numbers.

    Raises:
        RuntimeError: a step occurs twice in a trajectory.
    """
    twice = table.insert(elements, sources, ids, steps)
    if twice is not None:
        at, other = twice
        raise RuntimeError(
            f"step {steps[at]} of trajectory {ids[at]} occurs twice ({what}): in the items {other} "
            f"and {elements[at]}. Trajectories that are in the buffer at the same time must have "
            "different ids"
        )


def _concatenated(parts: list[Fresh]) -> list[Fresh]:
    return [Fresh(*map(np.concatenate, zip(*parts, strict=True)))] if parts else []

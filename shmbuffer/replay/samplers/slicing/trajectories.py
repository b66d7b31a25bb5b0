"""The trajectories of a storage: which items follow each other, and how many of them.

rows            each item is one: its trajectory << 32 | its number in it, so that the items of a
                trajectory are consecutive rows. They are good until the next look
trajectories    numbers without an order; those that are long enough are counted, by age
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory import slots as slot_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.numpy.arrays import Flags, Ints

_ROWS = np.int64(32)  # bits of a row below the trajectory


class Trajectories:
    """Every trajectory of a storage, as it was at the last look.

    Args:
        slots: of the storage.
        width: elements of a slot.

    Attributes:
        head: of the ring at that look: items with tickets from there on are not of it. None where
            there is no ring.
        windows: what cuts it into windows; None: nothing.
        first: the element of the oldest slot: where trajectories begin to be counted.
        starts: int64, by trajectory: its first row.
        lengths: int64, by trajectory: its rows.

    Cost: 12 to 16 bytes an element, made as items come; every question is O(what is asked).
    """

    def __init__(self, slots: int, width: int) -> None:
        self._width = width
        self._all = _core.Trajectories(slots, width)
        self.head: int | None = None
        self.windows: _core.Windows | None = None
        self.first = 0
        self.starts = Starts()
        self.lengths = Lengths(self._all)

    def __len__(self) -> int:
        """How many trajectories there are."""
        return self._all.count

    @property
    def rows(self) -> int:
        """How many items are in them."""
        return self._all.items

    @property
    def longest(self) -> int:
        """Items of the longest. O(trajectories)."""
        return self._all.longest

    def long(self, steps: int) -> Long:
        """Trajectories of at least ``steps`` items, by the age of their first.

        Cost: O(trajectories) for another ``steps`` than the last time, else nothing.
        """
        return Long(self._all, steps, self.first)

    def rows_at(self, numbers: Ints) -> Ints:
        """The rows of items by their place in the order of age, int64 ``[n]``.

        Cost: O(log elements) each; O(elements) the first time.
        """
        return self.rows_of(_each(self._all.held, numbers, self.first))

    def of_rows(self, rows: Ints) -> Ints:
        """The trajectory that each row belongs to, int64 ``[n]``."""
        return rows >> _ROWS

    def elements_of(self, rows: Ints) -> Ints:
        """The element of each row, int64 ``[n]``."""
        return _each(self._all.elements, rows)

    def rows_of(self, elements: Ints) -> Ints:
        """The row of each element, int64 ``[n]``; -1 where there is none."""
        return _each(self._all.rows, elements)

    def are_there(self, ring: Ring, elements: Ints) -> Ints | None:
        """Tickets of items of this table, int64 ``[n]``.

        Returns:
            None where one of them has been written over since.
        """
        words = ring.live.words[elements // ring.width]
        tickets = slot_words.tickets(words)
        there = slot_words.committed(words) & (tickets < (self.head or 0))
        return tickets if there.all() else None

    # -- what has come and gone ----------------------------------------------------------------

    def clear(self) -> None:
        """Nothing is there."""
        self._all.clear()

    def drop(self, slots: Ints) -> None:
        """The items of these slots are gone."""
        self._all.drop(slots.ctypes.data, len(slots))

    def before(self, slots: Ints, sources: NDArray[np.uint64], reach: Ints) -> Ints:
        """The slot that each item is to follow in its source; -1: none, or there is a hole between.

        Args:
            slots: of new items, oldest first.
            sources: uint64 ``[n]``.
            reach: how many slots before each are no hole.
        """
        out = np.empty_like(slots)
        self._all.before(_at(slots), _at(sources), _at(reach), len(slots), _at(out))
        return out

    def append(
        self, slots: Ints, sources: NDArray[np.uint64], cuts: Flags, settled: int = 0
    ) -> None:
        """Items come behind the last of their source; ``cuts[n, lanes]`` where one begins.

        The first ``settled`` of them may complete windows.
        """
        self._all.append(_at(slots), _at(sources), _at(cuts), len(slots), settled)

    def insert(
        self, elements: Ints, sources: NDArray[np.uint64], ids: Ints, steps: Ints
    ) -> tuple[int, int] | None:
        """Items come where their steps belong, of each source and id for itself.

        Returns:
            The number of the first one whose step is there already, and the element that has it.
        """
        return self._all.insert(_at(elements), _at(sources), _at(ids), _at(steps), len(elements))

    def follow(
        self, follower: _core.Follower, cuts: int, count: int
    ) -> int | tuple[bool, bytes, bytes] | None:
        """Look, and append what is new; see ``Trajectories.follow`` of the core.

        Returns:
            The head up to which all is known; else what a look has seen, if there was one.
        """
        return self._all.follow(follower, cuts, count)

    def windows_at(self, count: int, newest: int, out: int) -> int:
        """`take`, with every element of each window, into memory that is there. How many."""
        return self._all.windows(count, newest, out)

    def slices_at(self, which: Ints, begins: Ints, steps: int, out: int) -> bool:
        """The elements of slices, by two numbers each; False: no trajectory is as long."""
        where = _at(which), _at(begins), len(which), steps, self.first, out
        return self._all.slices(*where)

    def cut_by(self, windows: _core.Windows) -> None:
        """Cut what comes from here on into windows."""
        self._all.cut_by(windows)
        self.windows = windows

    def take(self, count: int, newest: int) -> Ints:
        """The first elements of the next windows, int64 ``[n]``, up to ``count``.

        Those that begin before the ``newest`` slots are lost.
        """
        firsts = np.empty(count, np.int64)
        return firsts[: self._all.take(count, newest, _at(firsts))]

    def used(self, elements: int, *, waiting: bool = False) -> Ints:
        """Tickets of items that need no window, or are in one that was taken, by element; -1.

        ``waiting``: or in any.
        """
        tickets = np.empty(elements, np.int64)
        self._all.used(_at(tickets), waiting)
        return tickets

    @property
    def moved(self) -> int:
        """How many trajectories had to make room for others since `clear`."""
        return self._all.moved

    def around(self, slots: Ints, sources: NDArray[np.uint64]) -> tuple[Ints, Ints] | None:
        """Every slot that follows one of these, or is one, and the slot that it follows.

        Returns:
            None where one holds the item of another source than before.
        """
        items, before = np.empty((2, 2 * len(slots)), np.int64)
        found = self._all.around(_at(slots), _at(sources), len(slots), _at(items), _at(before))
        return None if found is None else (items[:found], before[:found])

    def cut(self, slots: Ints, cuts: Flags) -> None:
        """Whether a trajectory begins at these slots, ``[n, lanes]``."""
        self._all.cut(_at(slots), _at(cuts), len(slots))


class Starts:
    """The first row of each trajectory."""

    def __getitem__(self, trajectories: Ints) -> Ints:
        """Int64 ``[n]``."""
        return trajectories << _ROWS


class Lengths:
    """How many items each trajectory has."""

    def __init__(self, trajectories: _core.Trajectories) -> None:
        self._all = trajectories

    def __getitem__(self, trajectories: Ints) -> Ints:
        """Int64 ``[n]``."""
        return _each(self._all.lengths, trajectories)


class Long:
    """Trajectories of some length: the k-th, by the age of their first item."""

    def __init__(self, trajectories: _core.Trajectories, steps: int, first: int) -> None:
        self._all, self._first = trajectories, first
        self._count = trajectories.long(steps)

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def __getitem__(self, numbers: Ints) -> Ints:
        """Trajectories by their place in that order, int64 ``[n]``. O(log elements) each."""
        return _each(self._all.rows, _each(self._all.firsts, numbers, self._first)) >> _ROWS


def _each(call: Any, numbers: Ints, *more: int) -> Ints:
    numbers = np.ascontiguousarray(numbers, np.int64)
    out = np.empty_like(numbers)
    call(numbers.ctypes.data, numbers.size, out.ctypes.data, *more)
    return out


def _at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)

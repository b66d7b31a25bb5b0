"""Tables of a storage's trajectories: which items follow each other, and their numbers.

rows            one number per item, trajectory << 32 | position in the trajectory, so that the
                items of a trajectory are consecutive rows; valid until the next update
trajectories    numbers in no particular order; those that are long enough are ordered by age
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.samplers.item_entries import any_of
from shmbuffer.samplers.slicing.options import TrajectoryOptions
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.tensors.form.tensors import as_numbers, as_tensor

_ROWS = np.int64(32)  # bits of a row below the trajectory


class TrajectoryItems(NamedTuple):
    """Items of trajectories."""

    elements: Ints
    """Elements, int64 ``[n]``."""
    tickets: Ints | None
    """Tickets, int64 ``[n]``, or None without a ring."""

    def select(self, at: Ints) -> TrajectoryItems:
        """Returns the items at these positions."""
        return TrajectoryItems(
            self.elements[at], None if self.tickets is None else self.tickets[at]
        )


class Trajectories:
    """Trajectories of a storage as of the last update. Needs 12 to 16 bytes per element."""

    def __init__(self, slots: int, width: int) -> None:
        self._all = _core.Trajectories(slots, width)
        # Head of the ring at the update, or None without a ring. Items whose tickets are at least
        # ``head`` are newer.
        self.head: int | None = None
        self.windows: _core.Windows | None = None  # windows into which trajectories are cut
        self.first = 0  # element of the oldest slot, where the numbering starts

    def __len__(self) -> int:
        """Returns the number of trajectories."""
        return self._all.count

    @property
    def rows(self) -> int:
        """Number of items in all trajectories."""
        return self._all.items

    @property
    def longest(self) -> int:
        """Returns the number of items in the longest trajectory. O(trajectories)."""
        return self._all.longest

    def long(self, steps: int) -> Long:
        """Returns trajectories of at least ``steps`` items. O(trajectories) for a new ``steps``."""
        return Long(self._all, steps, self.first)

    def rows_at(self, numbers: Ints) -> Ints:
        """Returns the rows of items numbered by age, int64 ``[n]``.

        Each row costs O(log elements). The first call costs O(elements).
        """
        return self.rows_of(_each(self._all.list_items, numbers, self.first))

    def starts(self, trajectories: Ints) -> Ints:
        """Returns the first row of each trajectory, int64 ``[n]``."""
        return trajectories << _ROWS

    def lengths(self, trajectories: Ints) -> Ints:
        """Returns the number of items in each trajectory, int64 ``[n]``."""
        return _each(self._all.read_lengths, trajectories)

    def of_rows(self, rows: Ints) -> Ints:
        """Returns the trajectory of each row, int64 ``[n]``."""
        return rows >> _ROWS

    def elements_of(self, rows: Ints) -> Ints:
        """Returns the element of each row, int64 ``[n]``."""
        return _each(self._all.find_elements, rows)

    def rows_of(self, elements: Ints) -> Ints:
        """Returns the row of each element, int64 ``[n]``, or -1 if there is none."""
        return _each(self._all.find_rows, elements)

    def are_there(self, ring: Ring, elements: Ints) -> Ints | None:
        """Returns the tickets of items of this table, int64 ``[n]``.

        Returns None if one of the items was overwritten.
        """
        tickets = tickets_at(ring, elements // ring.width)
        there = (tickets >= 0) & (tickets < (self.head or 0))
        return tickets if there.all() else None

    # -- updates -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes all items."""
        self._all.clear()

    def drop(self, slots: Ints) -> None:
        """Removes the items in these slots."""
        self._all.drop(slots.ctypes.data, len(slots))

    def before(self, slots: Ints, sources: NDArray[np.uint64], reach: Ints) -> Ints:
        """Returns the slot that each new item follows, or -1 if none is within its ``reach``."""
        out = np.empty_like(slots)
        self._all.find_predecessors(_at(slots), _at(sources), _at(reach), len(slots), _at(out))
        return out

    def append(
        self, slots: Ints, sources: NDArray[np.uint64], cuts: Flags, settled: int = 0
    ) -> None:
        """Appends items to their sources. The first ``settled`` of them may complete windows."""
        self._all.append(_at(slots), _at(sources), _at(cuts), len(slots), settled)

    def insert(
        self, elements: Ints, sources: NDArray[np.uint64], ids: Ints, steps: Ints
    ) -> tuple[int, int] | None:
        """Inserts items by step. Returns the positions of both items of a repeated step."""
        return self._all.insert(_at(elements), _at(sources), _at(ids), _at(steps), len(elements))

    def follow(
        self, follower: _core.Follower, cuts: int, count: int
    ) -> int | tuple[bool, bytes, bytes] | None:
        """Updates the table and returns the new head, or returns the changes if it cannot."""
        return self._all.follow(follower, cuts, count)

    def windows_at(self, count: int, newest: int, out: int) -> int:
        """Takes windows like `take`, writes all their elements, and returns how many it took."""
        return self._all.read_windows(count, newest, out)

    def slices_at(self, which: Ints, begins: Ints, steps: int, out: int) -> bool:
        """Writes the elements of slices, each given by two numbers. Returns False on a mismatch."""
        return self._all.draw_slices(_at(which), _at(begins), len(which), steps, self.first, out)

    def histories(
        self,
        follower: _core.Follower | None,  # follower of the ring, or None
        elements: Ints,
        drawn: Ints | None,  # tickets that the elements must have
        steps: int,
    ) -> TrajectoryItems | None:
        """Returns the ``steps`` items up to and including each element.

        The first item of a trajectory is repeated as needed. Returns None if an item is missing.
        """
        elements = np.ascontiguousarray(elements, np.int64)
        drawn = None if drawn is None else np.ascontiguousarray(drawn, np.int64)
        count = len(elements)
        out, tickets = np.empty(count * steps, np.int64), np.empty(count * steps, np.int64)
        given = address(elements), 0 if drawn is None else address(drawn), count, steps
        if not self._all.read_histories(follower, *given, address(out), address(tickets)):
            return None
        return TrajectoryItems(out, None if follower is None else tickets)

    @property
    def native(self) -> _core.Trajectories:
        """Returns the table for native calls that look up histories themselves."""
        return self._all

    def cut_by(self, windows: _core.Windows) -> None:
        """Cuts items that are added from now on into windows."""
        self._all.cut_by(windows)
        self.windows = windows

    def take(self, count: int, newest: int) -> Ints:
        """Takes the next windows in the ``newest`` slots. Returns first elements, int64 ``[n]``."""
        firsts = np.empty(count, np.int64)
        return firsts[: self._all.claim_windows(count, newest, _at(firsts))]

    def used(self, elements: int, *, waiting: bool = False) -> Ints:
        """Returns the ticket of each element that is in no window or a taken window, else -1.

        With ``waiting``, items in windows that were not taken are also included.
        """
        tickets = np.empty(elements, np.int64)
        self._all.list_used(_at(tickets), waiting)
        return tickets

    @property
    def moved(self) -> int:
        """Number of trajectories that were moved to make space for others since `clear`."""
        return self._all.moved

    def around(self, slots: Ints, sources: NDArray[np.uint64]) -> tuple[Ints, Ints] | None:
        """Returns the followers of slots, and the slot that each of them follows.

        Returns None if a source changed.
        """
        items, before = np.empty((2, 2 * len(slots)), np.int64)
        found = self._all.list_neighbours(
            _at(slots), _at(sources), len(slots), _at(items), _at(before)
        )
        return None if found is None else (items[:found], before[:found])

    def cut(self, slots: Ints, cuts: Flags) -> None:
        """Sets where trajectories start at these slots, ``[n, lanes]``."""
        self._all.cut(_at(slots), _at(cuts), len(slots))


class Long:
    """Trajectories with a minimum length, numbered by the age of their first item."""

    def __init__(self, trajectories: _core.Trajectories, steps: int, first: int) -> None:
        self._all, self._first = trajectories, first
        self._count = trajectories.count_long(steps)

    def __len__(self) -> int:
        """Returns the number of these trajectories."""
        return self._count

    def __getitem__(self, numbers: Ints) -> Ints:
        """Returns trajectories by their number, int64 ``[n]``. O(log elements) each."""
        return (
            _each(self._all.find_rows, _each(self._all.list_firsts, numbers, self._first)) >> _ROWS
        )


def given_trajectories(
    options: TrajectoryOptions, there: Ints, capacity: int, width: int, head: int | None
) -> Trajectories:
    """Builds the trajectories of the slots ``there`` from flags or ids that the user passed.

    The ring's head ends a trajectory. In a full storage, the first item follows the last item.
    """
    table = Trajectories(capacity, width)
    table.head = head
    slots = int(there[-1]) + 1 if len(there) else 0
    is_full = len(there) == capacity
    cut = _cut_behind(options, slots, capacity, width)
    if not is_full:
        cut = cut[:slots]
    if head is not None and 0 < head % capacity <= len(cut):
        cut[head % capacity - 1] = True
    for lane in range(width):
        order = there
        if is_full:  # starts after the last end
            ends = np.flatnonzero(cut[:, lane])
            order = np.roll(there, -int(ends[-1]) - 1) if len(ends) else there
        begins = np.ones(len(order), np.bool_)
        begins[1:] = cut[order[:-1], lane] | ((order[1:] - order[:-1]) % capacity != 1)
        nothing = np.zeros(len(order), np.int64)
        steps = np.arange(len(order)) + np.cumsum(begins)  # a missing step ends a trajectory
        table.insert(order * width + lane, nothing.view(np.uint64), nothing, steps)
    return table


def _cut_behind(options: TrajectoryOptions, slots: int, capacity: int, width: int) -> Flags:
    """Returns True for each item that ends a trajectory, ``[slots, lanes]``."""
    if options.ends is not None:
        return any_of(_checked("ends", options.ends, slots, capacity, width)).copy()
    assert options.trajectories is not None
    ids = _checked("trajectories", options.trajectories, slots, capacity, width)
    return any_of(ids != np.roll(ids, -1, 0))


def _checked(name: str, given: torch.Tensor, slots: int, capacity: int, width: int) -> NDArray[Any]:
    """Checks an array of one number per item, and returns it as ``[slots, width, 1]``."""
    values = as_numbers(as_tensor(given)).reshape(-1)
    count, rest = divmod(len(values), width)
    if rest or not slots <= count <= capacity:
        raise ValueError(
            f"{name} has {len(values)} entries, but the storage has {slots * width} items and a "
            f"capacity of {capacity * width}; pass one for each item, in the order of the storage"
        )
    return values.reshape(count, width, 1)


def _each(call: Any, numbers: Ints, *more: int) -> Ints:
    numbers = np.ascontiguousarray(numbers, np.int64)
    out = np.empty_like(numbers)
    call(numbers.ctypes.data, numbers.size, out.ctypes.data, *more)
    return out


def _at(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)

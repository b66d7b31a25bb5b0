"""Table of the trajectories in a storage, which maps items to trajectories and positions.

row             number of an item: trajectory << 32 | position in the trajectory. The items of a
                trajectory have consecutive rows. Rows are valid until the next update
trajectory      number of a trajectory. The numbers are in no particular order. `LongTrajectories`
                orders the trajectories that are long enough by age
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

_ROWS = np.int64(32)  # number of bits of a row that contain the position


class TrajectoryItems(NamedTuple):
    """Items that were found in trajectories."""

    elements: Ints
    """Element of each item, int64 ``[n]``."""
    tickets: Ints | None
    """Ticket of each item, int64 ``[n]``, or None without a ring."""

    def select(self, at: Ints) -> TrajectoryItems:
        """Returns the items at the positions ``at``."""
        return TrajectoryItems(
            self.elements[at], None if self.tickets is None else self.tickets[at]
        )


class Trajectories:
    """The trajectories in a storage at the last update. The table takes 12 to 16 bytes per element.

    Args:
        slots: number of slots in the storage.
        width: number of elements per slot.
    """

    def __init__(self, slots: int, width: int) -> None:
        self._all = _core.Trajectories(slots, width)
        # Head of the ring at the last update, or None without a ring. Items whose tickets are at
        # least ``head`` are newer than the update.
        self.head: int | None = None
        self.windows: _core.Windows | None = None  # windows into which trajectories are cut
        self.first = 0  # first element of the oldest slot, where the numbering by age starts

    def __len__(self) -> int:
        """Returns the number of trajectories."""
        return self._all.count

    @property
    def rows(self) -> int:
        """Number of items in all trajectories."""
        return self._all.items

    @property
    def longest(self) -> int:
        """Number of items in the longest trajectory. Takes O(trajectories)."""
        return self._all.longest

    def long(self, steps: int) -> LongTrajectories:
        """Returns the trajectories of at least ``steps`` items.

        Takes O(trajectories) if ``steps`` differs from the last call, and O(1) otherwise.
        """
        return LongTrajectories(self._all, steps, self.first)

    def rows_at(self, numbers: Ints) -> Ints:
        """Returns the rows of the items with these numbers, int64 ``[n]``. Item 0 is the oldest.

        Takes O(log elements) per row. The first call takes O(elements).
        """
        return self.rows_of(_read_each(self._all.list_items, numbers, self.first))

    def starts(self, trajectories: Ints) -> Ints:
        """Returns the first row of each trajectory, int64 ``[n]``."""
        return trajectories << _ROWS

    def lengths(self, trajectories: Ints) -> Ints:
        """Returns the number of items in each trajectory, int64 ``[n]``."""
        return _read_each(self._all.read_lengths, trajectories)

    def of_rows(self, rows: Ints) -> Ints:
        """Returns the trajectory of each row, int64 ``[n]``."""
        return rows >> _ROWS

    def elements_of(self, rows: Ints) -> Ints:
        """Returns the element of each row, int64 ``[n]``."""
        return _read_each(self._all.find_elements, rows)

    def rows_of(self, elements: Ints) -> Ints:
        """Returns the row of each element, int64 ``[n]``, or -1 if it is in no trajectory."""
        return _read_each(self._all.find_rows, elements)

    def are_there(self, ring: Ring, elements: Ints) -> Ints | None:
        """Returns the tickets of the items at ``elements``, int64 ``[n]``.

        Returns None if one of the items was removed or overwritten since the last update.
        """
        tickets = tickets_at(ring, elements // ring.width)
        is_current = (tickets >= 0) & (tickets < (self.head or 0))
        return tickets if is_current.all() else None

    # -- updates -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes all items from the table."""
        self._all.clear()

    def drop(self, slots: Ints) -> None:
        """Removes the items in these slots from the table."""
        self._all.drop(slots.ctypes.data, len(slots))

    def before(self, slots: Ints, sources: NDArray[np.uint64], reach: Ints) -> Ints:
        """Returns the slot of the previous item of each new item's source, int64 ``[n]``.

        Args:
            slots: slots of the new items, oldest first, int64 ``[n]``.
            sources: source of each item, ``[n]``.
            reach: maximum distance of the previous item in slots; see `Fresh.reach`. If there is no
                item within this distance, the result is -1.
        """
        out = np.empty_like(slots)
        self._all.find_predecessors(
            _address_of(slots),
            _address_of(sources),
            _address_of(reach),
            len(slots),
            _address_of(out),
        )
        return out

    def append(
        self, slots: Ints, sources: NDArray[np.uint64], cuts: Flags, settled: int = 0
    ) -> None:
        """Appends new items to the last trajectory of their source.

        Args:
            slots: slots of the items, oldest first, int64 ``[n]``.
            sources: source of each item, ``[n]``.
            cuts: True for each item that starts a trajectory, bool ``[n, lanes]``.
            settled: number of first items that can complete windows, because no earlier write is in
                progress.
        """
        self._all.append(
            _address_of(slots), _address_of(sources), _address_of(cuts), len(slots), settled
        )

    def insert(
        self, elements: Ints, sources: NDArray[np.uint64], ids: Ints, steps: Ints
    ) -> tuple[int, int] | None:
        """Inserts items by trajectory id and step number.

        If another item already has the same step, returns the position of the new item in
        ``elements`` and the element of the other item. Otherwise returns None.
        """
        return self._all.insert(
            _address_of(elements),
            _address_of(sources),
            _address_of(ids),
            _address_of(steps),
            len(elements),
        )

    def follow(
        self, follower: _core.Follower, cuts: int, count: int
    ) -> int | tuple[bool, bytes, bytes] | None:
        """Updates the table in the C core, without Python.

        Args:
            follower: source of the changes.
            cuts: address of the columns that cut trajectories; see `cut_columns`.
            count: number of these columns.

        Returns:
            The new head. If items were changed in place or must all be read again, the result of a
            poll, which the caller must process. None if the caller must poll the follower itself,
            because there are many changes.
        """
        return self._all.follow(follower, cuts, count)

    def windows_at(self, count: int, newest: int, out: int) -> int:
        """Takes windows like `take`, and stores the elements of all their steps in memory.

        Args:
            count: maximum number of windows.
            newest: number of newest slots in which windows can begin.
            out: address of the int64 output.

        Returns:
            The number of windows that were taken.
        """
        return self._all.read_windows(count, newest, out)

    def slices_at(self, which: Ints, begins: Ints, steps: int, out: int) -> bool:
        """Draws slices of ``steps`` steps, and stores their elements in memory.

        Args:
            which: random number that selects the trajectory of each slice, int64 ``[n]``.
            begins: random number that selects the first step of each slice, int64 ``[n]``.
            steps: number of steps in a slice.
            out: address of the output, int64 ``[n * steps]``.

        Returns:
            False if no trajectory is long enough.
        """
        return self._all.draw_slices(
            _address_of(which), _address_of(begins), len(which), steps, self.first, out
        )

    def histories(
        self,
        follower: _core.Follower | None,
        elements: Ints,
        drawn: Ints | None,
        steps: int,
    ) -> TrajectoryItems | None:
        """Returns the last ``steps`` items of each trajectory up to and including an element.

        If a trajectory has too few items, its first item is repeated.

        Args:
            follower: follower of the ring, or None without a ring.
            elements: last element of each history, int64 ``[n]``.
            drawn: tickets that the items at ``elements`` must have, int64 ``[n]``, or None.
            steps: number of items in a history.

        Returns:
            The items, ``[n * steps]``, or None if one of them is missing.
        """
        elements = np.ascontiguousarray(elements, np.int64)
        drawn = None if drawn is None else np.ascontiguousarray(drawn, np.int64)
        count = len(elements)
        out, tickets = np.empty(count * steps, np.int64), np.empty(count * steps, np.int64)
        arguments = address(elements), 0 if drawn is None else address(drawn), count, steps
        if not self._all.read_histories(follower, *arguments, address(out), address(tickets)):
            return None
        return TrajectoryItems(out, None if follower is None else tickets)

    @property
    def native(self) -> _core.Trajectories:
        """Table of the C core, for native calls that look up histories themselves."""
        return self._all

    def cut_by(self, windows: _core.Windows) -> None:
        """Starts to cut items that are added from now on into windows."""
        self._all.cut_by(windows)
        self.windows = windows

    def take(self, count: int, newest: int) -> Ints:
        """Takes up to ``count`` windows that begin in the ``newest`` newest slots.

        Returns the first element of each window, int64 ``[n]``.
        """
        firsts = np.empty(count, np.int64)
        return firsts[: self._all.claim_windows(count, newest, _address_of(firsts))]

    def used(self, elements: int, *, waiting: bool = False) -> Ints:
        """Returns which items need no window any more.

        Args:
            elements: number of elements in the storage.
            waiting: if True, items in windows that were not taken yet are also returned.

        Returns:
            The ticket of each item that was in a taken window or can be in no window, int64
            ``[elements]``, and -1 for all other elements.
        """
        tickets = np.empty(elements, np.int64)
        self._all.list_used(_address_of(tickets), waiting)
        return tickets

    @property
    def moved(self) -> int:
        """Number of list entries that insertions of trajectories have shifted since `clear`."""
        return self._all.moved

    def find_neighbours(self, slots: Ints, sources: NDArray[np.uint64]) -> tuple[Ints, Ints] | None:
        """Returns the items whose previous item can have changed, and these previous items.

        Args:
            slots: changed slots, int64 ``[n]``.
            sources: source of the item in each changed slot, ``[n]``.

        Returns:
            Slots of items, int64 ``[k]``, and the slot of the previous item of each. None if a
            changed slot has no item in the table, or an item from another source.
        """
        items, before = np.empty((2, 2 * len(slots)), np.int64)
        found = self._all.list_neighbours(
            _address_of(slots),
            _address_of(sources),
            len(slots),
            _address_of(items),
            _address_of(before),
        )
        return None if found is None else (items[:found], before[:found])

    def cut(self, slots: Ints, cuts: Flags) -> None:
        """Sets for each of ``slots`` whether its item starts a trajectory, bool ``[n, lanes]``."""
        self._all.cut(_address_of(slots), _address_of(cuts), len(slots))


class LongTrajectories:
    """Trajectories with a minimum length, numbered by the age of their first item."""

    def __init__(self, trajectories: _core.Trajectories, steps: int, first: int) -> None:
        self._all, self._first = trajectories, first
        self._count = trajectories.count_long(steps)

    def __len__(self) -> int:
        """Returns the number of trajectories that are long enough."""
        return self._count

    def __getitem__(self, numbers: Ints) -> Ints:
        """Returns trajectories by their number in the order of age, int64 ``[n]``.

        Takes O(log elements) per trajectory.
        """
        return (
            _read_each(self._all.find_rows, _read_each(self._all.list_firsts, numbers, self._first))
            >> _ROWS
        )


def build_trajectories(
    options: TrajectoryOptions, used_slots: Ints, capacity: int, width: int, head: int | None
) -> Trajectories:
    """Builds the table from flags or ids that the user passed.

    The head of the ring ends a trajectory. In a full storage, the first item follows the last item.

    Args:
        options: options with ``ends`` or ``trajectories``.
        used_slots: slots that hold items, in increasing order, int64 ``[n]``.
        capacity: number of slots in the storage.
        width: number of elements per slot.
        head: head of the ring, or None without a ring.
    """
    table = Trajectories(capacity, width)
    table.head = head
    slots = int(used_slots[-1]) + 1 if len(used_slots) else 0
    is_full = len(used_slots) == capacity
    cut = _find_ends(options, slots, capacity, width)
    if not is_full:
        cut = cut[:slots]
    if head is not None and 0 < head % capacity <= len(cut):
        cut[head % capacity - 1] = True
    for lane in range(width):
        order = used_slots
        if is_full:  # the order starts after the last end, so that no trajectory is split
            ends = np.flatnonzero(cut[:, lane])
            order = np.roll(used_slots, -int(ends[-1]) - 1) if len(ends) else used_slots
        begins = np.ones(len(order), np.bool_)
        begins[1:] = cut[order[:-1], lane] | ((order[1:] - order[:-1]) % capacity != 1)
        nothing = np.zeros(len(order), np.int64)
        steps = np.arange(len(order)) + np.cumsum(begins)  # a missing step ends a trajectory
        table.insert(order * width + lane, nothing.view(np.uint64), nothing, steps)
    return table


def _find_ends(options: TrajectoryOptions, slots: int, capacity: int, width: int) -> Flags:
    """Returns True for each item that ends a trajectory, bool ``[n, lanes]``.

    ``n`` is the number of items in the user's array, at least ``slots``.
    """
    if options.ends is not None:
        return any_of(_checked("ends", options.ends, slots, capacity, width)).copy()
    assert options.trajectories is not None
    ids = _checked("trajectories", options.trajectories, slots, capacity, width)
    return any_of(ids != np.roll(ids, -1, 0))


def _checked(name: str, array: torch.Tensor, slots: int, capacity: int, width: int) -> NDArray[Any]:
    """Checks the size of the user's array, and returns it as ``[n, width, 1]``.

    Raises ValueError unless the array has a number for each of ``slots`` slots, up to ``capacity``.
    """
    values = as_numbers(as_tensor(array)).reshape(-1)
    count, rest = divmod(len(values), width)
    if rest or not slots <= count <= capacity:
        raise ValueError(
            f"{name} has {len(values)} entries, but the storage has {slots * width} items and a "
            f"capacity of {capacity * width}; pass one entry per item, in the order of the storage"
        )
    return values.reshape(count, width, 1)


def _read_each(call: Any, numbers: Ints, *more: int) -> Ints:
    numbers = np.ascontiguousarray(numbers, np.int64)
    out = np.empty_like(numbers)
    call(numbers.ctypes.data, numbers.size, out.ctypes.data, *more)
    return out


def _address_of(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)

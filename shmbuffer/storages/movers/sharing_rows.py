"""Rows in which an observation and the equal next observation of the previous item are stored once.

A leaf ``("next", k)`` has no column. Its bytes are those of ``k`` in the next item, so it has no
view, and the C core reads and writes complete items. Observations are changed through the core,
which preserves the next observation of the previous item.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.errors import RingOverrunError
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.saves.tickets import Tickets
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.movers.native_rows import NativeRows
from shmbuffer.storages.movers.storage_mover import ATTEMPTS


class SharingRows(NativeRows):
    """Does the same as `NativeRows`, but lets the C core do what `NativeRows` does with torch."""

    _keeps = True

    def __init__(self, ring: Ring, leaves: Leaves, *, memory_mapped: bool) -> None:
        super().__init__(ring, leaves, memory_mapped=memory_mapped)
        roots = ring.schema.sharing.roots(ring.schema.leaves)
        self._observations = {*roots, *roots.values()}
        self._columns: dict[int, torch.Tensor] = {}

    def fetch(self, index: Any, *, dim_extend: int = 0, as_views: bool = False) -> Any:
        """Copies items by index, in the form in which they were written. Never returns views."""
        return super().fetch(index, dim_extend=dim_extend)

    def patch(
        self, elements: Ints, columns: dict[int, torch.Tensor], tickets: Ints | None = None
    ) -> Flags:
        """Changes leaves of elements in place; see `Rows.patch`.

        If an observation changes, complete items are read, changed and written again.
        """
        changed = np.zeros(len(elements), np.bool_)
        left = np.arange(len(elements))
        for _ in range(ATTEMPTS):
            now = tickets_at(self.ring, elements[left])
            meant = now >= 0 if tickets is None else now == tickets[left]
            left, now = left[meant], now[meant]
            if not len(left):
                return changed
            some = {at: values[torch.from_numpy(left)] for at, values in columns.items()}
            through = self._observations.isdisjoint(some)
            patch = super().patch if through else self._patch_items
            done = patch(elements[left], some, now)
            changed[left[done]] = True
            left = left[~done]
            if tickets is not None:
                return changed
        if len(left):
            raise RingOverrunError(
                f"{self.where}: {len(left)} items were overwritten during each of {ATTEMPTS} "
                "attempts to change them; write more slowly, or make the buffer larger"
            )
        return changed

    def _patch_items(
        self, elements: Ints, columns: dict[int, torch.Tensor], tickets: Ints
    ) -> Flags:
        slots, of_slot = np.unique(elements, return_inverse=True)
        expected = np.empty(len(slots), np.int64)
        expected[of_slot] = tickets
        tensors, found, _ = self.read(torch.from_numpy(slots))
        rows = torch.from_numpy(of_slot)
        for at, values in columns.items():
            # If an item occurs several times, it gets the last value.
            for row, value in zip(rows.tolist(), values, strict=True):
                tensors[at][row] = value
        expected = np.where(found.numpy() == expected, expected, -1)
        kept = self.ring.claims.claim_slots(slots, in_place=True, tickets=expected)
        if kept.any():
            chosen = torch.from_numpy(kept)
            payload = [tensor[chosen].contiguous() for tensor in tensors]
            self._commit(lambda: self.ring.claims.fill([part.data_ptr() for part in payload]))
        done: Flags = kept[of_slot]
        return done

    def _runs(
        self, slots: Ints, cursor: int, exact: Tickets | None
    ) -> tuple[list[Ints], list[int | None], int]:
        """Groups items into runs like `Rows._runs`, always in the order of their age.

        Each item can then be linked to the item that follows it.
        """
        runs, starts, head = super()._runs(slots, cursor, exact)
        if starts != [None]:
            return runs, starts, head
        runs = _runs_of(slots, cursor, self.ring.capacity)
        return runs, [int(slots[run[0]]) for run in runs], head

    def _replace_some(
        self,
        columns: list[torch.Tensor] | None,
        rows: Ints,
        slots: Ints,
        sources: NDArray[np.uint64] | None,
        placed: bool,
    ) -> None:
        """Writes items at the head of the ring.

        Raises SpaceError if too many next observations must be stored in full.
        """
        assert columns is not None  # the files of a save are never reused for these rows
        assert not placed
        if sources is None:
            sources = np.full(len(slots), self.ring.seat.incarnation, np.uint64)
        chosen = torch.from_numpy(rows)
        payload = [column[chosen].contiguous() for column in columns]
        addresses = [one.data_ptr() for one in payload]
        self.ring.claims.write_loaded(addresses, len(slots), np.ascontiguousarray(sources))

    def views(self) -> list[torch.Tensor]:
        """Raises SchemaMismatchError, because some leaves have no column to return a view of."""
        self.ring.schema.require_column(
            next(iter(self.ring.schema.sharing.roots(self.ring.schema.leaves))), self.where
        )
        return super().views()

    def take(self, at: int, elements: Ints) -> torch.Tensor:
        """Copies one leaf of some elements. For a leaf without a column, reads complete items."""
        if self.ring.schema.leaves[at].path not in self.ring.schema.sharing.paths:
            return super().take(at, elements)
        tensors, _, _ = self.read(torch.from_numpy(np.ascontiguousarray(elements, np.int64)))
        tensor: torch.Tensor = tensors[at]
        return tensor

    def column(self, at: int) -> torch.Tensor:
        """Returns the column of a leaf. Raises SchemaMismatchError if the leaf has no column."""
        if at not in self._columns:
            self.ring.schema.require_column(at, self.where)
            self._columns[at] = self._view(at).as_subclass(torch.Tensor)
        return self._columns[at]


def _runs_of(slots: Ints, cursor: int, capacity: int) -> list[Ints]:
    """Groups items in consecutive slots into runs, in the order of the ring from ``cursor``.

    Each run has the positions of its items in ``slots``.
    """
    if not len(slots):
        return []
    places = (slots - cursor) % capacity
    order = np.argsort(places, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(places[order]) != 1) + 1)

"""Rows whose next observations are stored once: the C core gives whole items, and takes them.

A leaf ``("next", k)`` without a column has the bytes of k in the item that follows, and no view. A
change of an observation goes through the core, which keeps the next observation of the item
before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.errors import RingOverrunError
from shmbuffer.items.leaves import Leaves
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.saves.tickets import Tickets
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.mover import ATTEMPTS
from shmbuffer.storages.native_rows import NativeRows


class SharingRows(NativeRows):
    """The hot path is that of `NativeRows`; what torch would move there moves through the core."""

    _keeps = True

    def __init__(self, ring: Ring, leaves: Leaves, *, memory_mapped: bool) -> None:
        super().__init__(ring, leaves, memory_mapped=memory_mapped)
        roots = ring.schema.sharing.roots(ring.schema.leaves)
        self._observations = {*roots, *roots.values()}
        self._columns: dict[int, torch.Tensor] = {}

    def fetch(self, index: Any, *, dim_extend: int = 0, as_views: bool = False) -> Any:
        """See `StorageMover.fetch`. Copies."""
        return super().fetch(index, dim_extend=dim_extend)

    def patch(
        self, elements: Ints, columns: dict[int, torch.Tensor], tickets: Ints | None = None
    ) -> Flags:
        """See `Rows.patch`. Where an observation changes, items are read and written as a whole."""
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
                "changes; write less often, or make the buffer larger"
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
            for row, value in zip(rows.tolist(), values, strict=True):  # the last one counts
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
        """See `Rows._runs`: in the order of their age, so that what follows is linked."""
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
        """See `Rows._replace_some`. SpaceError: too many next observations have to be whole."""
        assert columns is not None  # their files are not those of a storage that shares
        assert not placed
        if sources is None:
            sources = np.full(len(slots), self.ring.seat.incarnation, np.uint64)
        chosen = torch.from_numpy(rows)
        payload = [column[chosen].contiguous() for column in columns]
        addresses = [one.data_ptr() for one in payload]
        self.ring.claims.write_loaded(addresses, len(slots), np.ascontiguousarray(sources))

    def views(self) -> list[torch.Tensor]:
        """Raises SchemaMismatchError: not every leaf has a column."""
        self.ring.schema.require_column(
            next(iter(self.ring.schema.sharing.roots(self.ring.schema.leaves))), self.where
        )
        return super().views()

    def take(self, at: int, elements: Ints) -> torch.Tensor:
        """See `Rows.take`; of a leaf without a column whole items are read."""
        if self.ring.schema.leaves[at].path not in self.ring.schema.sharing.paths:
            return super().take(at, elements)
        tensors, _, _ = self.read(torch.from_numpy(np.ascontiguousarray(elements, np.int64)))
        tensor: torch.Tensor = tensors[at]
        return tensor

    def column(self, at: int) -> torch.Tensor:
        """See `Rows.column`."""
        if at not in self._columns:
            self.ring.schema.require_column(at, self.where)
            self._columns[at] = self._view(at).as_subclass(torch.Tensor)
        return self._columns[at]


def _runs_of(slots: Ints, cursor: int, capacity: int) -> list[Ints]:
    """Which items lie in slots that follow each other, in the order in which the ring goes on."""
    if not len(slots):
        return []
    places = (slots - cursor) % capacity
    order = np.argsort(places, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(places[order]) != 1) + 1)

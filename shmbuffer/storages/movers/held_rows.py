"""Rows in tensors of this process: the caller's tensors, tensors on a GPU, and Python objects.

The ring has no leaves. The rows are written between claim and commit, and the stream of a GPU is
synchronized before commit and before validation.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.mover import Drawn, draw_from, require_one_each
from shmbuffer.memory import ItemSnapshot, Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.streams import GivenStreams, expand_streams
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.memory.system.progress import Progress
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.movers.storage_mover import require_priorities
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.tensors.form.tensor_kit import TENSORS, new_column, values_of
from shmbuffer.tensors.form.tensors import put_rows, take_rows

# Attempts to copy rows that other threads change at the same time.
_ROUNDS = 64


class HeldRows(Rows):
    """Writes and reads rows in one column ``[slots, *lanes, *shape]`` per leaf, on any device."""

    _claim = ForkLock()  # held from claim to commit

    def __init__(self, ring: Ring, leaves: Leaves, columns: list[torch.Tensor]) -> None:
        super().__init__(ring, leaves)
        self.columns = columns
        # The process that can use the Python objects; None if there are only tensors.
        self._owner = os.getpid() if leaves.objects else None
        self._flat = [
            column.view(ring.elements, *leaf.shape)
            for column, leaf in zip(columns, leaves.leaves, strict=True)
        ]

    @classmethod
    def widened(cls, rows: Rows, wider: Leaves) -> HeldRows | None:
        """Adds a column of zeros for each leaf in ``wider`` that ``rows`` does not have.

        Returns None if ``wider`` differs from the leaves of ``rows`` in any other respect.
        """
        if rows.ring.schema.sharing:  # some leaves have no column
            return None
        have = {
            leaf.path: (leaf, column)
            for leaf, column in zip(rows.leaves.leaves, rows.views(), strict=True)
        }
        if not set(have) <= {leaf.path for leaf in wider.leaves} or wider.lanes != rows.lanes:
            return None
        columns = []
        for at, leaf in enumerate(wider.leaves):
            known, column = have.get(leaf.path, (leaf, None))
            if known != leaf:
                return None
            if column is None:
                lead = (rows.ring.capacity, *wider.lanes)
                column = new_column(wider, at, lead, rows.leaves.device)
            columns.append(column)
        wider.device = rows.leaves.device
        return cls(rows.ring, wider, columns)

    def write(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams = None
    ) -> tuple[int, int]:
        """Appends a batch, or one item if ``single`` is True.

        Returns the first ticket and the number of slots.
        """
        self._require_owner()
        values, lead = values_of(self.leaves, data, torch.Size(()) if single else None)
        count = 1 if single else lead[0]
        if single:
            values = [value.unsqueeze(0) for value in values]
        capacity, width = self.ring.capacity, self.ring.width
        if priorities is not None:
            require_priorities(self.ring, priorities)  # before any slot is claimed
        of = expand_streams(streams, count)
        first = -1
        for start in range(0, count, capacity):  # a batch can be larger than the ring
            part = slice(start, min(start + capacity, count))
            given = None if priorities is None else priorities[start * width : part.stop * width]
            its = None if of is None else of[part]
            with self._claim:
                ticket = self.ring.claims.claim(part.stop - start, streams=its)
                slots = (ticket + np.arange(part.stop - start, dtype=np.int64)) % capacity
                self._fill(slots, [value[part] for value in values], given)
            first = ticket if first < 0 else first
        return (first, count) if count else (self.ring.head, 0)

    def place(self, slots: Ints, data: Any, *, in_place: bool) -> None:
        """Writes row i of ``data`` to ``slots[i]``.

        With ``in_place`` the items keep their priorities, and the write is not counted.
        """
        self._require_owner()
        values, lead = values_of(self.leaves, data)
        require_one_each(slots, lead[0])
        if len(slots):
            with self._claim:
                self.ring.claims.claim_slots(slots, in_place=in_place)
                self._fill(slots, values, None)

    def read(self, index: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Copies elements.

        Returns the copies, the tickets (-1 if there is no item), and the number of missing items.
        """
        tickets = self._tickets(index)
        tensors = self._take(index)
        for _ in range(_ROUNDS):
            now = self._tickets(index)
            changed = torch.nonzero(now != tickets).flatten()
            if not changed.numel():
                break
            tickets = now
            for tensor, again in zip(tensors, self._take(index[changed]), strict=True):
                put_rows(tensor, changed.to(tensor.device), again)
        return tensors, tickets, int((tickets < 0).sum())

    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draws elements, and returns their leaves, indices, tickets and weights."""
        index, tickets, weights = draw_from(TENSORS, self.ring, count, key, beta)
        tensors = self._take(index)
        for _ in range(_ROUNDS):
            changed = torch.nonzero(self._tickets(index) != tickets).flatten()
            if not changed.numel():
                break
            # Elements that were overwritten are drawn again, with a key derived from the first one.
            key = (key * 6364136223846793005 + 1442695040888963407) % 2**63
            again, tickets[changed], its = draw_from(TENSORS, self.ring, changed.numel(), key, beta)
            index[changed] = again
            if weights is not None and its is not None:
                weights[changed] = its
            for tensor, part in zip(tensors, self._take(again), strict=True):
                put_rows(tensor, changed.to(tensor.device), part)
        return tensors, index, tickets, weights

    def copy_out(self, columns: list[torch.Tensor]) -> ItemSnapshot:
        """Copies a snapshot of all items to ``columns``. Writers in this process wait meanwhile."""
        with self._claim:
            moment = self.ring.copy_out([])
            # Empty slots are not copied, because the columns can be sparse files.
            held = np.flatnonzero(moment.tickets >= 0)
            with Progress("copy", len(held) * self._slot_bytes) as progress:
                for start, count in progress.cut(len(held), self._slot_bytes):
                    self._copy_some(held[start : start + count], columns)
                    progress.advance(count * self._slot_bytes)
            return moment

    def _copy_some(self, held: Ints, columns: list[torch.Tensor]) -> None:
        for run in np.split(held, np.flatnonzero(np.diff(held) != 1) + 1):
            part = slice(int(run[0]), int(run[-1]) + 1)
            for column, mine in zip(columns, self.columns, strict=True):
                column[part].copy_(mine[part])
        self._settle()

    def views(self) -> list[torch.Tensor]:
        """Returns the column ``[slots, *lanes, *shape]`` of each leaf. Nothing is validated."""
        self._require_owner()
        return self.columns

    def _take(self, index: torch.Tensor) -> list[torch.Tensor]:
        self._require_owner()
        taken = [take_rows(column, index.to(column.device)) for column in self._flat]
        self._settle()
        return taken

    def _fill(self, slots: Ints, values: list[torch.Tensor], priorities: Floats | None) -> None:
        where = torch.from_numpy(slots)

        def fill() -> None:
            for column, value in zip(self.columns, values, strict=True):
                if _same_memory(value, column):
                    value = value.clone()  # the value can overlap the rows that are written
                put_rows(column, where.to(column.device), value.to(column.device))

        self._commit(fill, priorities)

    def _tickets(self, index: torch.Tensor) -> torch.Tensor:
        """Returns the current ticket of each element's slot, or -1 for an empty slot."""
        return torch.from_numpy(tickets_at(self.ring, index.numpy() // self.ring.width))

    def _require_owner(self) -> None:
        """Raises RuntimeError in the child of a fork, which has only copies of the objects."""
        if self._owner is not None and os.getpid() != self._owner:
            raise RuntimeError(
                "this storage was inherited through a fork, but the strings and objects in it "
                f"belong to process {self._owner}; use a LazyMemmapStorage, or a LazyTensorStorage "
                "that contains only tensors, to share items between processes"
            )

    def _settle(self) -> None:
        for column in self.columns:
            if column.is_cuda:
                torch.cuda.current_stream(column.device).synchronize()
                return


def _same_memory(value: Any, column: Any) -> bool:
    if isinstance(column, torch.Tensor):
        return bool(value.untyped_storage().data_ptr() == column.untyped_storage().data_ptr())
    return bool(np.shares_memory(value.array, column.array))

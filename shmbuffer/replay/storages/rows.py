"""Where the payload lies and who moves it: claim, mover, commit.

`NativeRows` are in the ring's memory and are moved by the C core. `HeldRows` are tensors that this
process holds (the caller's own, or on a GPU): torch moves them between claim and commit. Order,
slot words, tickets and priorities are the ring's in both.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.memory.progress import Progress
from shmbuffer.replay.storages.replacing import whole_or_empty

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Moment, Ring
    from shmbuffer.replay.form.leaves import Leaves

# What is replaced in one claim, and gathered in memory before: slots, and about so many bytes.
_PIECE = 4096
_PIECE_BYTES = 2**25

Drawn = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Leaves ``[n, *shape]``, element index int64 ``[n]``, tickets int64 ``[n]``, weights float32
``[n]`` or None."""


class Rows(ABC):
    """The payload of a ring."""

    def __init__(self, ring: Ring, leaves: Leaves) -> None:
        self.ring = ring
        self.leaves = leaves

    @abstractmethod
    def write(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> tuple[int, int]:
        """Append a batch, or one item where ``single``. The first ticket, and how many slots.

        Raises:
            SchemaMismatchError: nothing was changed.
            RingOverrunError, LockTimeout: see `Ring.write`.
        """

    @abstractmethod
    def place(self, slots: NDArray[np.int64], data: Any, *, in_place: bool) -> None:
        """Row i of ``data`` goes to ``slots[i]``; slots are unique.

        ``in_place`` keeps priority and write count.
        """

    @abstractmethod
    def read(self, index: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Copies of elements: leaves, tickets (-1 where there is none), and how many are -1."""

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draw, copy and validate. ``beta`` None draws uniformly.

        Raises:
            EmptyBufferError: nothing to draw from.
        """

    @abstractmethod
    def views(self) -> list[torch.Tensor]:
        """The leaves themselves, ``[slots, *lanes, *shape]``, not copied and not validated."""

    @abstractmethod
    def copy_out(self, columns: list[torch.Tensor]) -> Moment:
        """Copy every item, all of one moment, while others go on writing; see `Ring.copy_out`.

        Args:
            columns: one ``[slots, *lanes, *shape]`` on the CPU for each leaf, contiguous; they may
                be maps of files. What is in places without an item has no meaning.
        """

    def patch(
        self,
        elements: NDArray[np.int64],
        columns: dict[int, torch.Tensor],
        tickets: NDArray[np.int64] | None = None,
    ) -> NDArray[np.bool_]:
        """Change some leaves of some elements where they are.

        The rest of the item, its priority, its source and the write count stay. Nobody can write
        to the item between the look at it and the change.

        Args:
            elements: int64 ``[n]``; of an element that is named twice, the last row.
            columns: by number of the leaf, ``[n, *shape]``, of the leaf's dtype.
            tickets: int64 ``[n]``: items that were written over since are left alone.

        Returns:
            bool ``[n]``: what was changed.
        """
        width = self.ring.width
        slots, first, of_slot = np.unique(elements // width, return_index=True, return_inverse=True)
        with self._claiming():
            expected = None if tickets is None else tickets[first]
            kept = self.ring.claim_slots(slots, in_place=True, tickets=expected)
            changed = kept[of_slot]
            if tickets is not None:
                changed &= tickets == tickets[first][of_slot]
            if not kept.any():
                return changed
            try:
                which = torch.from_numpy(np.nonzero(changed)[0])
                where = torch.from_numpy(elements)[which]
                for at, values in columns.items():
                    view = self.views()[at].as_subclass(torch.Tensor)
                    flat = view.view(-1, *self.leaves.leaves[at].shape)
                    flat[where.to(flat.device)] = values[which.to(values.device)].to(flat.device)
                self._settled()
            except BaseException:
                self.ring.abort()
                raise
            self.ring.commit()
        return changed

    def copy_in(
        self,
        columns: list[torch.Tensor] | None,
        present: NDArray[np.bool_],
        *,
        cursor: int,
        write_count: int,
        priorities: NDArray[np.float64] | None = None,
        max_priority: float | None = None,
    ) -> None:
        """Replace everything that is there.

        Args:
            columns: one ``[slots, *lanes, *shape]`` for each leaf; None: the bytes are in their
                places already.
            present: bool ``[slots]``: where an item is.
            cursor: slot of the next item.
            write_count: elements written so far.
            priorities: raw, float64 ``[elements]``; NaN, or None, is the default priority.
            max_priority: the largest raw priority ever given; None: none yet.

        Cost: the bytes once, in pieces.
        """
        self._replace(present, columns, priorities)
        self.ring.restore(cursor, write_count, max_priority)

    def _replace(
        self,
        present: NDArray[np.bool_],
        columns: list[torch.Tensor] | None,
        priorities: NDArray[np.float64] | None,
    ) -> None:
        ring = self.ring
        ring.empty()
        slots = np.nonzero(present)[0]
        # Where the bytes are in their places there is nothing that would take long.
        total = len(slots) * self._slot_bytes if columns is not None else 0
        with whole_or_empty(ring, self.leaves.where), Progress("load", total) as progress:
            most = max(1, min(_PIECE, _PIECE_BYTES // max(1, self._slot_bytes)))
            for start, count in progress.cut(len(slots), self._slot_bytes, most):
                self._replace_some(slots[start : start + count], columns)
                progress.advance(count * self._slot_bytes)
        if priorities is None:
            return
        elements = ring.committed()
        known = elements[~np.isnan(priorities[elements])]
        ring.update(known, np.ascontiguousarray(priorities[known]))

    def _replace_some(self, slots: NDArray[np.int64], columns: list[torch.Tensor] | None) -> None:
        """The items of some slots, in one claim."""
        with self._claiming():
            self.ring.claim_slots(slots, in_place=False)
            try:
                where = torch.from_numpy(slots)
                for view, column in zip(self.views(), columns or (), strict=columns is not None):
                    view.as_subclass(torch.Tensor)[where.to(view.device)] = column[where].to(
                        view.device
                    )
                self._settled()
            except BaseException:
                self.ring.abort()
                raise
            self.ring.commit()

    @property
    def _slot_bytes(self) -> int:
        """Of a slot, for those who hear of progress; an object counts as the reference to it."""
        leaves, lanes = self.leaves, self.ring.width
        sizes = (
            8 if at in leaves.objects else leaf.nbytes for at, leaf in enumerate(leaves.leaves)
        )
        return sum(sizes) * lanes

    @abstractmethod
    def _claiming(self) -> contextlib.AbstractContextManager[Any]:
        """Held from claim to commit, where more than the ring's own gate is needed."""

    @abstractmethod
    def _settled(self) -> None:
        """Return when what torch was told to write has been written."""

    @staticmethod
    def _one_each(slots: NDArray[np.int64], count: int) -> None:
        if count != len(slots):
            raise ValueError(f"{count} items cannot be written to {len(slots)} places")

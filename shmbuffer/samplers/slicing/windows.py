"""Cuts trajectories into windows, and records which windows were delivered.

    trajectories ──▶ windows.c      a queue of complete windows, and the items that need no window
                        ╰──▶ state  one bit per item: whether the item needs no window

The windows can be computed from the trajectories and from the items that have been in a window.
Therefore a save contains only these items. Tickets identify them as long as the ring is the same.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer._native import _core
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import ItemSnapshot, Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.samplers.sampler import NOTHING_THERE
from shmbuffer.samplers.slicing.following import Following
from shmbuffer.samplers.slicing.race import Race
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu


class Used(NamedTuple):
    """Items that need no window any more: they were in a window, or can never be in one."""

    elements: Ints
    """Element of each item, int64 ``[n]``."""
    below: int
    """Exclusive upper bound on the tickets of these items.

    If an element has a ticket of at least ``below``, a new item has replaced the item.
    """


_REAP_S = 0.1  # seconds between two checks for dead writers

_NONE = Used(np.zeros(0, np.int64), 0)


class Windows:
    """Windows that one sampler delivers. The caller must hold `Boundaries.lock`.

    Args:
        steps: number of items in a window.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._native: _core.Windows | None = None
        self._ring: Ring | None = None
        self._following: Following | None = None
        self._table: Trajectories | None = None
        self._reaped = 0.0
        self._loaded = _NONE
        self.race = Race()

    def ring_of(self, storage: Any) -> Ring:
        """Returns the ring of a storage.

        Raises TypeError if the storage does not belong to this package, EmptyBufferError before the
        first write, and ValueError if the ring is too small for one window.
        """
        ring = ring_of(storage)
        if ring is None:
            if isinstance(storage, RingBacked):
                raise EmptyBufferError(NOTHING_THERE)
            raise TypeError(
                f"StreamingSliceSampler cannot follow the writes to a {type(storage).__name__}; "
                "use a storage of this package, or a SliceSampler"
            )
        if ring.elements < self.steps:
            raise ValueError(
                f"a storage of {ring.elements} items is too small for one window of "
                f"slice_len={self.steps}"
            )
        return ring

    def follow(self, ring: Ring, following: Following) -> None:
        """Starts to cut the trajectories in ``following`` into windows.

        ``following`` must not have read any items yet.
        """
        if self._ring is None or self._ring.seat.native is not ring.seat.native:
            self._native, self._ring = _core.Windows(ring.seat.native, self.steps), ring
            loaded, self._loaded = self._loaded, _NONE
            fit = np.ascontiguousarray(loaded.elements[loaded.elements < ring.elements])
            self._native.mark_used(fit.ctypes.data, len(fit), loaded.below)
        assert self._native is not None
        following.cut_by(self._native)
        self._following, self._table = following, following.table

    def forget(self) -> None:
        """Discards the record of delivered windows, so that every window is delivered again."""
        self._native = self._ring = self._following = self._table = None
        self._loaded = _NONE

    def take(self, count: int) -> Ints:
        """Takes up to ``count`` windows, and returns their first elements, int64 ``[n]``."""
        table, ring = self._table, self._ring
        assert table is not None
        assert ring is not None
        return table.take(count, self.race.newest(ring))

    def put(self, count: int, out: int) -> int:
        """Takes up to ``count`` windows, and stores the elements of their steps in memory.

        Args:
            count: maximum number of windows.
            out: address of ``count * steps`` int64 values.

        Returns:
            The number of windows that were taken.
        """
        table, ring = self._table, self._ring
        assert table is not None
        assert ring is not None
        return table.windows_at(count, self.race.newest(ring), out)

    def are_beyond_margin(self, firsts: Ints) -> Flags:
        """Returns True for each window that is not about to be overwritten, bool ``[n]``.

        Args:
            firsts: first element of each window, int64 ``[n]``.
        """
        ring, table = self._ring, self._table
        assert ring is not None
        assert table is not None
        age = ((table.head or 0) - 1 - firsts // ring.width) % ring.capacity
        ahead: Flags = age < self.race.newest(ring)
        return ahead

    def lose(self, count: int) -> None:
        """Records that ``count`` taken windows were overwritten before they were read."""
        if self._native is not None:
            number, lost = self._native.position
            self._native.take_back(number, lost + count)

    def help(self) -> None:
        """Completes or undoes writes of dead processes, which otherwise block all later windows.

        Does nothing if no write is unfinished, or if the last check was less than 0.1 s ago.
        """
        now = time.monotonic()
        if self._following is None or not self._following.pending:
            return
        if now - self._reaped >= _REAP_S:
            self._reaped = now
            self._following.ring.seat.reap_dead()

    @property
    def followed(self) -> int:
        """Ticket below which all items have been cut into windows, or 0 while a write is open."""
        if self._table is None or self._following is None or self._following.pending:
            return 0
        return self._table.head or 0

    @property
    def is_started(self) -> bool:
        """True if items are being followed."""
        return self._native is not None

    def use(self, elements: Ints, below: int) -> None:
        """Excludes the items at ``elements`` with tickets below ``below`` from windows."""
        if self._native is not None:
            elements = np.ascontiguousarray(elements)
            self._native.mark_used(elements.ctypes.data, len(elements), below)

    @property
    def waiting(self) -> int:
        """Number of windows in the queue, including windows that have been overwritten."""
        return 0 if self._native is None else self._native.waiting

    @property
    def position(self) -> tuple[int, int] | None:
        """Number of the next window and number of lost windows, or None before the first update.

        `rewind` takes this value.
        """
        return None if self._native is None else self._native.position

    def rewind(self, position: tuple[int, int] | None) -> None:
        """Returns the windows that were taken since ``position`` to the queue."""
        if self._native is not None:
            self._native.take_back(*(position or (0, 0)))

    # -- state ---------------------------------------------------------------------------------

    def used(self, moment: Any = None) -> Used:
        """Returns the items that need no window any more, and the head of the ring.

        Args:
            moment: the `ItemSnapshot` of the saved storage, whose items are returned. With any
                other value, the items that are now in the ring are returned.
        """
        if self._table is None or self._ring is None:
            return self._loaded
        tickets = self._table.used(self._ring.elements)
        head = self._ring.head
        if isinstance(moment, ItemSnapshot):
            tickets[tickets != moment.tickets.repeat(self._ring.width)] = -1
            head = moment.head
        return Used(np.flatnonzero(tickets >= 0), head)

    def load(self, used: Used) -> None:
        """Discards the current state, and applies ``used`` when items are followed again."""
        self.forget()
        self._loaded = used

    def loaded_into(self, ring: Ring) -> None:
        """Applies the loaded state to all items in ``ring``, because loading changed their tickets.

        The caller must not have written to the ring since the load.
        """
        self._loaded = self._loaded._replace(below=ring.head)

    def __getstate__(self) -> dict[str, Any]:
        state = dict.fromkeys(("_native", "_ring", "_following", "_table"))
        return {**self.__dict__, **state, "_loaded": _NONE}


def as_bits(elements: Ints) -> torch.Tensor:
    """Converts a set of integers to a bitmap, uint8, with one bit per integer up to the largest."""
    flags = np.zeros(int(elements.max(initial=-1)) + 1, np.bool_)
    flags[elements] = True
    return torch.from_numpy(np.packbits(flags, bitorder="little"))


def from_bits(bits: Any) -> Ints:
    """Returns the integers in a bitmap that `as_bits` made, in increasing order, int64 ``[n]``."""
    given = cpu.as_tensor(bits).cpu().numpy().astype(np.uint8)
    return np.flatnonzero(np.unpackbits(given, bitorder="little"))

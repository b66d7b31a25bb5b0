"""Reserves space in the ring for items that a handle writes later.

    reserve ──▶ name ──hold──▶ a write of this thread uses the reservation ──commit──▶ used up
                  └──give_back, expired, handle closed──▶ other writers can use the space

A reservation waits for the same limits as a write, and counts for them immediately. It has no slot
and no ticket, because the write claims them later. The table of reservations is in the ledger
(``_native/core/reservations.c``). The name of a reservation combines its number with its index in
the table.

If the holder dies, its reservations are freed when the client is reaped. If the commit of a write
had already started, the write is completed and its reservation is used up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.holders import table_of
from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format import ledger
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.ledger import RESERVATION, RESERVATIONS, ReservationState
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS

_FOREVER = 2**64 - 1
_MAX_SECONDS = 2**33  # the end of a longer reservation in nanoseconds might not fit in 64 bits


class Reservations:
    """The reservations of one handle's ring. Available as `Ring.reservations`."""

    def __init__(self, calls: Calls, seat: Seat) -> None:
        self._calls = calls
        self._seat = seat
        self._has_table = False

    def reserve(
        self,
        rows: int,
        nbytes: int = 0,
        *,
        seconds: float | None = None,
        number: int = 0,
        name: NDArray[np.uint64] | None = None,
    ) -> int:
        """Waits like a write of ``rows`` slots, then reserves their space.

        Args:
            rows: The number of slots.
            nbytes: The number of bytes to reserve in the byte ring; 0 if unknown.
            seconds: The time in seconds after which the reservation expires. None: the reservation
                lasts until the handle is closed.
            number: The number of a partial rollout to continue; 0 for a new rollout.
            name: Array ``[1]`` that contains 0. The name is stored in this array as soon as the
                reservation is granted, so that callers know it even if they are interrupted.

        Returns:
            The name of the reservation.
        """
        self._allocate_table()
        ends = _FOREVER
        if seconds is not None and seconds < _MAX_SECONDS:
            ends = _core.boot_ns() + int(seconds * 1e9)

        if name is None:
            name = np.zeros(1, np.uint64)
        arguments = rows, nbytes, ends, number, address(name)
        try:
            self._calls.ask("reserve", *arguments)
            found = int(name[0])
        except BaseException:
            if name[0]:
                self.give_back(int(name[0]))
                name[0] = 0
            raise
        return found

    @contextmanager
    def hold(
        self, name: int, versions: Ints | None = None, young: Flags | None = None
    ) -> Iterator[None]:
        """Uses a reservation for the first write that this thread commits in the ``with`` block.

        Args:
            name: The name of the reservation.
            versions: The policy version of each item, or one version for all items. None if
                unknown.
            young: Array that receives a mask of the items that are young enough if `TooOld` is
                raised.
        """
        native = self._seat.native
        try:  # Ctrl-C may arrive as soon as the reservation is selected
            if versions is None or young is None:
                native.select_reservation(name, 0, 0, 0)
            else:
                native.select_reservation(name, address(versions), address(young), len(versions))
            yield
        finally:
            native.select_reservation(0, 0, 0, 0)

    def give_back(self, name: int) -> bool:
        """Frees the space of a reservation. Returns False if the reservation had already ended."""

        def call() -> int:
            found = int(self._seat.native.cancel_reservation(name, LOCK_TIMEOUT_NS))
            return 1 if found == -_core.NO_RESERVATION else found

        return self._calls.run(call, "abort") == 0

    def note_partial(self, name: int) -> None:
        """Records in the table that the pieces of the reservation's rollout are in a file."""
        self._calls.ask("note_partial", name, what="append")

    def is_done(self, number: int, *, forget: bool = False) -> bool:
        """True if the partial rollout with a number was committed.

        With ``forget``, the record of the commit is also removed, because the rollout's file no
        longer exists.
        """
        return self._calls.ask("partial_is_done", number, forget, what="partials") > 0

    def refuse(self, elements: int) -> None:
        """Adds a number of elements to the count of elements that were rejected as too old."""
        self._seat.native.count_refused(elements)

    def list_committed(self) -> list[int]:
        """Returns the numbers of committed partial rollouts whose files may still exist."""
        table = table_of(self._seat)
        return [int(number) for number in table["id"][table["state"] == ReservationState.DONE]]

    def _allocate_table(self) -> None:
        """Allocates the table of reservations in the ledger, once per handle.

        Raises SpaceError if there is not enough space.
        """
        if self._has_table:
            return
        assert self._seat.mapped is not None
        start, nbytes = _core.parts(1)["reservations"], RESERVATIONS * RESERVATION.itemsize
        with self._seat.backing.lock(60.0):
            self._seat.backing.extend_ledger(start, nbytes)
            ledger.store_length(self._seat.mapped.ledger, start + nbytes)
        self._has_table = True

"""Writes items in separate steps, if Python copies the payload: claim, fill, commit or abort.

A handle has at most one open claim, and other threads wait for its end. If a thread neither commits
nor aborts a claim, the claim is rolled back when the thread claims again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.memory.directory.seat import Closed
from shmbuffer.memory.flow.waiting import Calls
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.streams import Streams
from shmbuffer.memory.ring.tree import PriorityTree
from shmbuffer.memory.system.deadline import LOCK_TIMEOUT_NS, WRITE_TIMEOUT_S

_KEEPS_OBSERVATIONS = 2
"""Mode of a write that changes no observation; ``SHMB_KEEPS_OBSERVATIONS`` in the C core."""


class Claims:
    """The open claim of one handle's ring. Available as `Ring.claims`."""

    def __init__(self, calls: Calls, tree: PriorityTree) -> None:
        self._calls = calls
        self._seat = calls.seat
        self._tree = tree
        self._native: Any = None  # the native ring of the open claim
        self._slots = 0
        self._in_place = False

    def claim(
        self, count: int, streams: Streams | None = None, timeout: float | None = WRITE_TIMEOUT_S
    ) -> int:
        """Claims ``count`` slots at the head for this thread; returns the first ticket."""
        streams_address = address(streams)

        def call() -> int:
            native = self._seat.native
            result: int = native.claim(count, streams_address, LOCK_TIMEOUT_NS)
            if result >= 0:
                self._native, self._slots, self._in_place = native, count, False
            return result

        return self._calls.run(call, "write", timeout)

    def claim_slots(
        self,
        where: Ints,
        *,
        in_place: bool,
        keeps: bool = False,
        tickets: Ints | None = None,
        timeout: float | None = WRITE_TIMEOUT_S,
    ) -> Flags:
        """Claims the given slots, for `commit` or `abort` in the same thread.

        If ``keeps`` is True, the write changes no observations and next observations that are
        stored once. Raises the errors of `Ring.place`.

        Returns bool[n], True for each claimed slot. If no slot was claimed, no claim is open.
        """
        where = np.ascontiguousarray(where, np.int64)
        claimed = np.ones(len(where), np.bool_)
        at, claimed_address = where.ctypes.data, claimed.ctypes.data
        if tickets is not None:
            tickets = np.ascontiguousarray(tickets, np.int64)
            if len(tickets) != len(where):
                raise ValueError(
                    f"claim_slots: {len(where)} slots and {len(tickets)} tickets were given; pass"
                    " one ticket for each slot"
                )
        tickets_address, mode = address(tickets), _KEEPS_OBSERVATIONS if keeps else int(in_place)

        def call() -> int:
            native = self._seat.native
            result: int = native.claim_slots(
                at, len(where), mode, tickets_address, claimed_address, LOCK_TIMEOUT_NS
            )
            if result > 0 or (result == 0 and tickets is None):
                self._native, self._slots, self._in_place = native, result, in_place
            return result

        self._calls.run(call, "place", timeout, None, where)
        return claimed

    def write_loaded(
        self, addresses: Sequence[int], count: int, sources: NDArray[np.uint64]
    ) -> int:
        """Writes items with given ``sources``; adjacent items of one source share observations."""
        arguments = tuple(addresses), count, 0, address(sources)
        return self._calls.ask("write_loaded", *arguments, what="write")

    def fill(self, addresses: Sequence[int]) -> None:
        """Copies the payload of the claimed slots in rows, from one address for each leaf."""
        arguments = tuple(addresses)
        self._calls.run(lambda: int(self._native_of_claim().fill(arguments)), "fill")

    def commit(self, priorities: Floats | int | None = None) -> None:
        """Publishes the claimed slots. If an error is raised, the claim was released."""
        raw_address = 0
        try:
            if priorities is None and self._tree.initial is not None and not self._in_place:
                priorities = self._tree.choose_priorities(None, self._elements)
            if priorities is not None:
                raw_address = address_of_priorities(priorities, self._elements)
        except BaseException:
            self.abort()
            raise
        self._calls.run(
            lambda: self._native_of_claim().commit(raw_address, 0, LOCK_TIMEOUT_NS),
            "commit",
            None,
            priorities,
        )

    def abort(self) -> None:
        """Releases the claimed slots, which are then empty."""
        self._calls.run(lambda: int(self._native_of_claim().abort(LOCK_TIMEOUT_NS)), "abort")

    @property
    def _elements(self) -> int:
        """The number of elements of the open claim."""
        schema = self._calls.schema
        return min(self._slots, schema.capacity) * schema.width

    def _native_of_claim(self) -> Any:
        """Returns the native ring of the claim; `close` replaces it only for other calls."""
        native = self._seat.native
        return self._native if self._native is not None and isinstance(native, Closed) else native


def address_of_priorities(array: Floats | int | None, count: int) -> int:
    """Returns the address of ``count`` priorities, which must be float64 and contiguous."""
    if array is None or isinstance(array, int):
        return address(array)
    if array.dtype != np.float64 or not array.flags.c_contiguous:
        raise ValueError(
            f"priorities must be float64 and contiguous, but are {array.dtype}{list(array.shape)}"
        )
    if array.size != count:
        raise ValueError(f"{array.size} priorities were given for {count} elements")
    return address(array)

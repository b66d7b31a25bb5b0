"""Writes in separate steps: claim, fill, commit or abort.

They are used when Python code copies the payload between claim and commit. A handle has at most one
open claim, and other threads wait until the claim ends. If a thread neither commits nor aborts its
claim, the claim is rolled back when the thread claims again.
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
"""Mode of a write that does not change observations (``SHMB_KEEPS_OBSERVATIONS`` in the C core)."""


class Claims:
    """The writes in separate steps to a handle's ring. Available as `Ring.claims`."""

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
        """Claims ``count`` slots at the head of the ring for this thread.

        Args:
            count: Number of slots.
            streams: Stream number of each slot, uint32[count]. None means stream 0.
            timeout: Seconds to wait for slots that a living writer is filling. None means no limit.

        Returns:
            The ticket of the first slot.
        """
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
        """Claims slots by index. The same thread must then call `commit` or `abort`.

        Args:
            where: Slots, int64[n].
            in_place: If True, existing items keep their raw priorities and sources.
            keeps: If True, the write does not change the observations that ``share_next`` shares.
            tickets: Expected tickets, int64[n]. A slot is claimed only if it still has this ticket.
                None claims all slots.
            timeout: Seconds to wait for slots that a living writer is filling. None means no limit.

        Returns:
            A mask of the claimed slots, bool[n]. If no slot was claimed, no claim is open.

        Raises:
            IndexError, RingOverrunError, ValueError: See `Ring.place`.
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
        """Writes items from a save, whose sources are known.

        With ``share_next``, adjacent items of the same source share their observations.

        Args:
            addresses: Address of the payload for each leaf.
            count: Number of items.
            sources: Source of each item, uint64[count].

        Returns:
            The ticket of the first item.
        """
        arguments = tuple(addresses), count, 0, address(sources)
        return self._calls.ask("write_loaded", *arguments, what="write")

    def fill(self, addresses: Sequence[int]) -> None:
        """Copies the payload to the claimed slots, from one address for each leaf."""
        arguments = tuple(addresses)
        self._calls.run(lambda: int(self._native_of_claim().fill(arguments)), "fill")

    def commit(self, priorities: Floats | int | None = None) -> None:
        """Publishes the claimed slots. If an error is raised, the claim has been released.

        Args:
            priorities: Raw priorities of all claimed elements, as an array or an address. None
                means the default priority, or for a claim ``in_place`` the current priorities.
        """
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
        """Releases the claimed slots. They then contain no items."""
        self._calls.run(lambda: int(self._native_of_claim().abort(LOCK_TIMEOUT_NS)), "abort")

    @property
    def _elements(self) -> int:
        """Number of elements in the open claim."""
        schema = self._calls.schema
        return min(self._slots, schema.capacity) * schema.width

    def _native_of_claim(self) -> Any:
        """Returns the native ring with the open claim.

        After `close`, the seat has a placeholder instead of its ring. A claim that is still open
        must be ended on the ring on which it was made.
        """
        native = self._seat.native
        return self._native if self._native is not None and isinstance(native, Closed) else native


def address_of_priorities(array: Floats | int | None, count: int) -> int:
    """Returns the address of ``count`` priorities.

    Args:
        array: A contiguous float64 array, an address, or None for address 0.
        count: Expected number of priorities.

    Raises:
        ValueError: The array has a wrong dtype or size, or is not contiguous.
    """
    if array is None or isinstance(array, int):
        return address(array)
    if array.dtype != np.float64 or not array.flags.c_contiguous:
        raise ValueError(
            "priorities must be a contiguous array of float64, but are"
            f" {array.dtype}{list(array.shape)}"
        )
    if array.size != count:
        raise ValueError(
            f"{array.size} priorities were given for {count} elements; pass one for each element"
        )
    return address(array)

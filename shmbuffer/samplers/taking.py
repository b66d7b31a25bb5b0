"""What samplers have in common that give each item once among all learners of a consumer."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.keys import GENERATION, LEASE
from shmbuffer.memory.flow.consumer import Consumer, given_back_unless_delivered
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format.ledger import Acknowledged, Taken
from shmbuffer.samplers.sampler import NOTHING_THERE, Sampler
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.storage import ring_of


@dataclass
class Taking:
    """What one call to sample takes."""

    lease_s: float | None  # None: it is acknowledged before the call returns
    taken: list[tuple[Consumer, Taken]] = field(default_factory=list)

    def give_back(self) -> None:
        """It was not delivered: others get it at once."""
        while self.taken:
            consumer, taken = self.taken.pop()
            if taken.lease:
                consumer.give_back(taken.lease)

    def acknowledge(self) -> None:
        """It is delivered, and that is all that was asked for."""
        while self.taken:
            consumer, taken = self.taken.pop()
            consumer.ack(taken.lease, taken.slots, taken.tickets)


class Consumes(Sampler):
    """A sampler that may draw for a consumer.

    Args:
        consumer: its name; None: items may be drawn again and again.
        times: how often each item is to be acknowledged.
        start: where one begins that is not there yet.
    """

    consumer: str | None = None

    def __init__(self, consumer: str | None, times: int, start: Start) -> None:
        if not isinstance(consumer, str | None):
            raise TypeError(f"consumer is a name, a str; got {consumer!r}")
        self.consumer = consumer
        self.start: Start = start
        self._times = times
        self._found: Consumer | None = None
        self._of: weakref.ref[Any] | None = None  # the ring that it was found in
        self._own = threading.local()

    def bind(self, storage: Any) -> Consumer | None:
        """The consumer in a storage, opened once; None before the first write, or without one."""
        if self.consumer is None:
            return None
        if isinstance(storage, ListStorage) and not storage.shared:
            raise ValueError(
                f"{type(self).__name__}: the items of a {type(storage).__name__} are objects of "
                "this process, which others cannot be given; use a LazyTensorStorage, or a storage "
                "with a scratch_dir"
            )
        if getattr(storage, "ndim", 1) != 1:
            raise ValueError(
                f"{type(self).__name__} only supports 1-dimensional storages, got "
                f"storage.ndim={storage.ndim}."
            )
        ring = ring_of(storage)
        if ring is None:
            return None
        if self._found is None or self._of is None or self._of() is not ring:
            self._found = ring.consumers.open(self.consumer, times=self._times, start=self.start)
            self._of = weakref.ref(ring)
        return self._found

    def opened(self, storage: Any) -> Consumer:
        """The same; EmptyBufferError before the first write."""
        found = Consumes.bind(self, storage)
        if found is None:
            raise EmptyBufferError(NOTHING_THERE)
        return found

    def _empty(self) -> None:
        self._found = self._of = None  # a load removes the consumer and opens it again
        super()._empty()

    @contextmanager
    def taking(self, lease_s: float | None) -> Iterator[Taking]:
        """What this thread takes in here, is given back where it is not delivered."""
        before = getattr(self._own, "taking", None)
        now = self._own.taking = Taking(lease_s)
        try:
            with given_back_unless_delivered():
                yield now
        finally:
            self._own.taking = before

    def _lease_s(self) -> float:
        taking: Taking | None = getattr(self._own, "taking", None)
        return math.inf if taking is None or taking.lease_s is None else taking.lease_s

    def _took(self, consumer: Consumer, parts: list[Taken]) -> bool:
        """Notes what was taken; acknowledges it, where nobody will. Whether samples say so."""
        taking: Taking | None = getattr(self._own, "taking", None)
        if taking is None:
            for taken in parts:
                consumer.ack(taken.lease, taken.slots, taken.tickets)
            return False
        taking.taken += [(consumer, taken) for taken in parts]
        return taking.lease_s is not None

    def _delivered(
        self, consumer: Consumer, parts: list[Taken]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Notes what was taken. Returns the index of the items, and their tickets and leases."""
        none = np.empty(0, np.int64)
        each = [(part.slots, part.tickets, np.full(len(part.slots), part.lease)) for part in parts]
        rows = map(np.concatenate, zip(*(each or [(none, none, none)]), strict=True))
        slots, tickets, leases = map(torch.from_numpy, rows)
        info = {GENERATION: tickets}
        if self._took(consumer, parts):
            info[LEASE] = leases
        return slots, info

    def _waiting(
        self,
        consumer: Consumer,
        attempt: Callable[[int], list[Taken]],
        most: int,
        size: int,
        why: Callable[[], str],
    ) -> list[Taken]:
        """What an attempt takes, under its leases; see `Consumer.wait_for`, which waits for it.

        ``attempt`` is told how many items, groups or windows there have to be at least.
        """
        parts: list[Taken] = attempt(0) if not most else []

        def choose(least: int) -> int:
            parts[:] = attempt(least)
            return sum(len(part.slots) for part in parts) // size

        try:
            consumer.wait_for(choose, most, size, why)
        except BaseException:
            for part in parts:
                consumer.give_back(part.lease)
            raise
        return parts

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """Other items: the buffer was emptied before these were read."""
        taking: Taking | None = getattr(self._own, "taking", None)
        if taking is not None:
            taking.give_back()
        return super()._again(storage, index)

    def ack(self, storage: Any, leases: Any, index: Any, tickets: Any) -> Acknowledged:
        """Acknowledge items; see `ReplayBuffer.ack`."""
        rows = (np.ascontiguousarray(one, np.int64) for one in (leases, index, tickets))
        under, slots, theirs = rows
        return self.opened(storage).ack(under.view(np.uint64), slots, theirs)

    def ack_rows(self, storage: Any, rows: list[torch.Tensor]) -> Acknowledged:
        """The same of index, tickets and leases, int64 ``[n]`` each and contiguous."""
        index, tickets, leases = (row.data_ptr() for row in rows)
        return self.opened(storage).ack_at(leases, index, tickets, rows[0].numel(), rows[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_found": None, "_of": None, "_own": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = threading.local()


def consumes(sampler: Any) -> TypeGuard[Consumes]:
    """Whether a sampler draws for a consumer."""
    return isinstance(sampler, Consumes) and sampler.consumer is not None

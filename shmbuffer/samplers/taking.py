"""Base class for samplers that can sample on behalf of a consumer.

A consumer is a group of learners that together receive each item once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory.flow.consumer import Consumer, Leases, given_back_unless_delivered
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format.ledger import Acknowledged, LeasedItems
from shmbuffer.samplers.sampler import NOTHING_THERE, Sampler
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.storage import ring_of


@dataclass
class Taking:
    """Items claimed by one `sample` call. They return to the consumer unless delivered."""

    lease_s: float | None  # None: items are acknowledged before the call returns
    leases: Leases
    taken: list[tuple[Consumer, LeasedItems]] = field(default_factory=list)

    @property
    def under(self) -> tuple[float, Leases]:
        """Returns the seconds of a lease, and the list of leases; see `Consumer.take`."""
        return math.inf if self.lease_s is None else self.lease_s, self.leases

    def give_back(self) -> None:
        """Returns the items to the consumer immediately, because they are not delivered."""
        self.taken.clear()
        self.leases.give_back()

    def acknowledge(self) -> None:
        """Acknowledges the items."""
        while self.taken:
            consumer, taken = self.taken.pop()
            consumer.ack(taken.lease, taken.slots, taken.tickets)


class Consumes(Sampler):
    """Base class of samplers that can draw for a consumer.

    Args:
        consumer: name of the consumer. With None, items can be drawn repeatedly.
        times: number of times that each item must be acknowledged.
        start: position of a new consumer.
    """

    consumer: str | None = None

    def __init__(self, consumer: str | None, times: int, start: Start) -> None:
        if not isinstance(consumer, str | None):
            raise TypeError(f"consumer must be a string, got {consumer!r}")
        self.consumer = consumer
        self.start: Start = start
        self._times = times
        self._found: Consumer | None = None
        self._of: weakref.ref[Any] | None = None  # ring to which the consumer belongs

    def bind(self, storage: Any) -> Consumer | None:
        """Returns the storage's open consumer, or None before the first write or without one."""
        if self.consumer is None:
            return None
        if isinstance(storage, ListStorage) and not storage.shared:
            raise ValueError(
                f"{type(self).__name__}: the items of a {type(storage).__name__} are objects of "
                "this process, which other processes cannot read; use a LazyTensorStorage, or a "
                "storage with a scratch_dir"
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
        """Returns the open consumer, or raises EmptyBufferError before the first write."""
        found = Consumes.bind(self, storage)
        if found is None:
            raise EmptyBufferError(NOTHING_THERE)
        return found

    def _empty(self) -> None:
        self._found = self._of = None  # a load replaces the consumer
        super()._empty()

    @contextmanager
    def taking(self, lease_s: float | None) -> Iterator[Taking]:
        """Starts a call of a buffer. Returns its items to the consumer if the block raises."""
        with given_back_unless_delivered() as leases:
            yield Taking(lease_s, leases)

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws items; see `Sampler.sample`.

        Args:
            storage: the storage to draw from.
            batch_size: number of items.
            taking: the call of a buffer that receives the items. With None, items for a consumer
                are acknowledged immediately.
        """
        return super().sample(storage, batch_size)

    def _acknowledged(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draws without a buffer, and acknowledges the items."""
        with self.taking(None) as taking:
            found = self.sample(storage, batch_size, taking)
            taking.acknowledge()
        return found

    def _again(
        self, storage: Any, index: Any, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws other items, because the buffer was emptied before the items were read."""
        if taking is None:
            return super()._again(storage, index)
        taking.give_back()
        return self.sample(storage, self._size_of(index), taking)

    def ack(self, storage: Any, leases: Any, index: Any, tickets: Any) -> Acknowledged:
        """Acknowledges items; see `ReplayBuffer.ack`."""
        rows = (np.ascontiguousarray(one, np.int64) for one in (leases, index, tickets))
        under, slots, theirs = rows
        return self.opened(storage).ack(under.view(np.uint64), slots, theirs)

    def ack_rows(self, storage: Any, rows: list[torch.Tensor]) -> Acknowledged:
        """Acknowledges items by contiguous index, tickets and leases, int64 ``[n]`` each."""
        index, tickets, leases = (row.data_ptr() for row in rows)
        return self.opened(storage).ack_at(leases, index, tickets, rows[0].numel(), rows[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_found": None, "_of": None}


def consumes(sampler: Any) -> TypeGuard[Consumes]:
    """True if a sampler draws for a consumer."""
    return isinstance(sampler, Consumes) and sampler.consumer is not None

"""The base class of samplers that can sample on behalf of a consumer.

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
    """Items that one call of `sample` has claimed.

    The items are returned to the consumer unless they are delivered.
    """

    lease_s: float | None  # seconds of the leases; None: the call acknowledges the items itself
    leases: Leases  # the open leases of the call
    taken: list[tuple[Consumer, LeasedItems]] = field(default_factory=list)  # claimed items

    @property
    def under(self) -> tuple[float, Leases]:
        """Duration of the leases in seconds, and the list of leases; see `Consumer.take`."""
        return math.inf if self.lease_s is None else self.lease_s, self.leases

    def give_back(self) -> None:
        """Returns the claimed items to the consumer now, because they will not be delivered."""
        self.taken.clear()
        self.leases.give_back()

    def acknowledge(self) -> None:
        """Acknowledges all claimed items."""
        while self.taken:
            consumer, taken = self.taken.pop()
            consumer.ack(taken.lease, taken.slots, taken.tickets)


class Consumes(Sampler):
    """Base class for samplers that can draw items for a consumer.

    Args:
        consumer: name of the consumer. None means that items are drawn without a consumer, so that
            they can be drawn repeatedly.
        times: number of times that each item must be acknowledged.
        start: first item of a new consumer, "oldest" or "newest".
    """

    consumer: str | None = None

    def __init__(self, consumer: str | None, times: int, start: Start) -> None:
        if not isinstance(consumer, str | None):
            raise TypeError(f"consumer must be a string, got {consumer!r}")
        self.consumer = consumer
        self.start: Start = start
        self._times = times
        self._found: Consumer | None = None
        self._of: weakref.ref[Any] | None = None  # the ring in which the consumer was opened

    def bind(self, storage: Any) -> Consumer | None:
        """Opens the consumer in a storage, and returns it.

        Returns None if the sampler has no consumer, or if nothing has been written to the storage.

        Raises:
            ValueError: the storage does not support consumers.
        """
        if self.consumer is None:
            return None
        if isinstance(storage, ListStorage) and not storage.shared:
            raise ValueError(
                f"{type(self).__name__}: the items of a {type(storage).__name__} are objects in "
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
        """Opens the consumer, and returns it. Raises EmptyBufferError before the first write."""
        found = Consumes.bind(self, storage)
        if found is None:
            raise EmptyBufferError(NOTHING_THERE)
        return found

    def _empty(self) -> None:
        self._found = self._of = None  # a load replaces the consumer
        super()._empty()

    @contextmanager
    def taking(self, lease_s: float | None) -> Iterator[Taking]:
        """Context manager of one `sample` call of a buffer.

        Items that are claimed in the block return to the consumer if the block raises an exception.

        Args:
            lease_s: duration of the leases in seconds, or None to acknowledge the items.
        """
        with given_back_unless_delivered() as leases:
            yield Taking(lease_s, leases)

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws items; see `Sampler.sample`.

        Args:
            storage: the storage to draw from.
            batch_size: number of items.
            taking: the `sample` call of the buffer, which records the claimed items. If None, the
                items of a consumer are acknowledged immediately.
        """
        return super().sample(storage, batch_size)

    def _acknowledged(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draws items outside of a buffer's call, and acknowledges them immediately."""
        with self.taking(None) as taking:
            found = self.sample(storage, batch_size, taking)
            taking.acknowledge()
        return found

    def _again(
        self, storage: Any, index: Any, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws other items, because the items were removed before they could be read."""
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
        """Acknowledges items; see `ReplayBuffer.ack`.

        Args:
            storage: the storage.
            rows: index, tickets and leases of the items, each contiguous int64 ``[n]``.
        """
        index, tickets, leases = (row.data_ptr() for row in rows)
        return self.opened(storage).ack_at(leases, index, tickets, rows[0].numel(), rows[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_found": None, "_of": None}


def consumes(sampler: Any) -> TypeGuard[Consumes]:
    """True if a sampler draws for a consumer."""
    return isinstance(sampler, Consumes) and sampler.consumer is not None

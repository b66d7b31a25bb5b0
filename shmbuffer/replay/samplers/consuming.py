"""Each item once, whoever of a consumer's learners draws it."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.numpy.keys import GENERATION, LEASE
from shmbuffer.replay.samplers.sampler import NOTHING_THERE, Sampler, lanes_of
from shmbuffer.replay.storages.list import ListStorage
from shmbuffer.replay.storages.storage import ring_of

if TYPE_CHECKING:
    from shmbuffer.memory.consumers import Acknowledged, Consumer, Start, Taken


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


class ConsumingSampler(Sampler):
    """Each item once, oldest first; whichever of the consumer's learners draws it.

    A consumer is known by its name, to every process that has the buffer, and it stays when they
    end. All learners with a sampler of that name share its items; those of another name get every
    item themselves. Up to eight consumers go through a buffer, each with a position of its own.

    An item is delivered under a lease: ``sample(lease=60.0)`` gives the learner so many seconds to
    train on it and to say so with `ReplayBuffer.ack`. It is delivered again, before anything else,
    only where its holder died or its lease was over before that; an `ack` that comes too late is
    refused and counted, so two learners never both own an item. Without ``lease`` a sample is
    acknowledged before it is returned.

    Writers wait rather than write over what a consumer has not acknowledged; items that have
    places of their own (``rb[3] = item``) cannot be written meanwhile. A consumer that nobody
    serves any more holds them up: the wait names it, and ``shmbuffer consumers DIR --remove NAME``
    or `ReplayBuffer.remove_consumer` ends it.

    A sample waits for ``batch_size`` items; where nobody is there to write more, it has what is
    left, and with nothing left it is an `EmptyBufferError`.

    Args:
        max_sample_count: how often each item is to be acknowledged, up to 1023.
        consumer: its name, up to 48 bytes.
        start: where one begins that is not there yet: with the ``"oldest"`` item that is there, or
            with the next that is written, ``"newest"``.

    Raises:
        TypeError: ``max_sample_count`` is no int.
        ValueError: it is below 1.

    Cost: a native call for the draw, and one for the acknowledgement; 16 bytes a slot and consumer.

    Example:
        >>> import torch
        >>> from shmbuffer import ConsumingSampler, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(10),
        ...     sampler=ConsumingSampler(),
        ...     batch_size=3,
        ... )
        >>> index = rb.extend(torch.arange(4))
        >>> rb.sample().tolist(), rb.sample().tolist()
        ([0, 1, 2], [3])

    Source: ``torchrl.data.replay_buffers.ConsumingSampler``, which draws at random.
    """

    def __init__(
        self, max_sample_count: int = 1, *, consumer: str = "default", start: Start = "oldest"
    ) -> None:
        if isinstance(max_sample_count, bool) or not isinstance(max_sample_count, int | np.integer):
            raise TypeError("max_sample_count must be a positive integer.")
        if max_sample_count < 1:
            raise ValueError("max_sample_count must be a positive integer.")
        self.max_sample_count = int(max_sample_count)
        self.consumer = consumer
        self.start: Start = start
        self._found: Consumer | None = None
        self._of: weakref.ref[Any] | None = None  # the ring that it was found in
        self._own = threading.local()

    # -- the consumer --------------------------------------------------------------------------

    def bind(self, storage: Any) -> Consumer | None:
        """The consumer in a storage, opened once; None before the first write."""
        if isinstance(storage, ListStorage) and not storage.shared:
            raise ValueError(
                f"{type(self).__name__}: the items of a {type(storage).__name__} are objects of "
                "this process, which others cannot be given; use a LazyTensorStorage, or a storage "
                "with a scratch_dir"
            )
        if lanes_of(storage):
            raise ValueError(
                f"{type(self).__name__} only supports 1-dimensional storages, got "
                f"storage.ndim={storage.ndim}."
            )
        ring = ring_of(storage)
        if ring is None:
            return None
        if self._found is None or self._of is None or self._of() is not ring:
            self._found = ring.consumers.open(
                self.consumer, times=self.max_sample_count, start=self.start
            )
            self._of = weakref.ref(ring)
        return self._found

    def opened(self, storage: Any) -> Consumer:
        """The same; EmptyBufferError before the first write."""
        found = self.bind(storage)
        if found is None:
            raise EmptyBufferError(NOTHING_THERE)
        return found

    def reopen(self) -> None:
        """The consumer was made again, by a load."""
        self._found = self._of = None

    @contextmanager
    def taking(self, lease_s: float | None) -> Iterator[Taking]:
        """What this thread takes in here, is given back where it is not delivered."""
        before = getattr(self._own, "taking", None)
        now = self._own.taking = Taking(lease_s)
        try:
            yield now
        except BaseException:
            now.give_back()
            raise
        finally:
            self._own.taking = before

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw; see `Sampler.sample`. What is drawn without a buffer is acknowledged at once.

        Returns:
            The oldest items that the consumer has not been given.

        Raises:
            EmptyBufferError: there is none, and nobody writes.
            ConsumerError: the consumer was removed.
        """
        consumer = self.opened(storage)
        taking: Taking | None = getattr(self._own, "taking", None)
        lease_s = None if taking is None else taking.lease_s
        taken = consumer.take(batch_size, math.inf if lease_s is None else lease_s)
        if taking is None:
            consumer.ack(taken.lease, taken.slots, taken.tickets)
        else:
            taking.taken.append((consumer, taken))
        known = {GENERATION: torch.from_numpy(taken.tickets)}
        if lease_s is not None:
            known[LEASE] = torch.full((len(taken.slots),), taken.lease)
        return torch.from_numpy(taken.slots), known

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """Other items: the buffer was emptied before these were read."""
        taking: Taking | None = getattr(self._own, "taking", None)
        if taking is not None:
            taking.give_back()
        return self.sample(storage, len(index))

    # -- what learners say ---------------------------------------------------------------------

    def ack(self, storage: Any, leases: Any, index: Any, tickets: Any) -> Acknowledged:
        """Acknowledge items; see `ReplayBuffer.ack`."""
        rows = (np.ascontiguousarray(one, np.int64) for one in (leases, index, tickets))
        under, slots, theirs = rows
        return self.opened(storage).ack(under.view(np.uint64), slots, theirs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_found": None, "_of": None, "_own": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = threading.local()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_sample_count={self.max_sample_count}, "
            f"consumer={self.consumer!r})"
        )

    @classmethod
    def of(cls, count: Any) -> Self:
        """What ``consume_after_n_samples`` stands for; TypeError, ValueError where it is none."""
        try:
            return cls(count)
        except (TypeError, ValueError) as error:
            raise type(error)("consume_after_n_samples must be a positive integer.") from None

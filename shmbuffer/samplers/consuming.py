"""Each item once, to one of the learners of a consumer."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from shmbuffer.items.keys import GENERATION, LEASE
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format.ledger import Taken
from shmbuffer.samplers.taking import Consumes, Taking
from shmbuffer.tensors.form import cpu


class ConsumingSampler(Consumes):
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
        TypeError: ``max_sample_count`` is no int, or ``consumer`` no str.
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
        if consumer is None:
            raise TypeError(
                "ConsumingSampler: consumer is None, and each item is consumed by name; give a "
                "name, or leave it out, or use a RandomSampler to draw items again and again"
            )
        super().__init__(consumer, int(max_sample_count), start)
        self.max_sample_count = int(max_sample_count)

    # -- drawing -------------------------------------------------------------------------------

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws; see `Consumes.sample`.

        Returns:
            The oldest items that the consumer has not been given.

        Raises:
            EmptyBufferError: there is none, and nobody writes.
            ConsumerError: the consumer was removed.
        """
        if taking is None:
            return self._acknowledged(storage, batch_size)
        consumer = self.opened(storage)
        slots = cpu.empty(batch_size, dtype=torch.int64)
        tickets = torch.empty_like(slots)
        where = slots.data_ptr(), tickets.data_ptr()
        lease_s, leases = taking.under
        found, lease = consumer.take_at(batch_size, lease_s, *where, leases)
        if found < batch_size:
            slots, tickets = slots[:found].clone(), tickets[:found].clone()
        taking.taken.append((consumer, Taken(slots.numpy(), tickets.numpy(), lease)))
        known = {GENERATION: tickets}
        if taking.lease_s is not None:
            known[LEASE] = torch.full_like(slots, lease)
        return slots, known

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """See `Sampler.can_sample`: whether there are items that it was not given."""
        consumer = self.bind(storage)
        return consumer is not None and consumer.can_give(batch_size)

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        consumer = self.bind(storage)
        return 0 if consumer is None else consumer.available(batch_size)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_sample_count={self.max_sample_count}, "
            f"consumer={self.consumer!r})"
        )

    @classmethod
    def of(cls, count: Any) -> Self:
        """Convert ``consume_after_n_samples``; TypeError or ValueError if it is invalid."""
        try:
            return cls(count)
        except (TypeError, ValueError) as error:
            raise type(error)("consume_after_n_samples must be a positive integer.") from None


def consuming_instead(sampler: Any, count: Any, prefetch: int | None) -> ConsumingSampler:
    """The sampler that ``consume_after_n_samples`` asks for."""
    wanted = ConsumingSampler.of(count)
    if prefetch:
        raise ValueError("Prefetching is not supported when consume_after_n_samples is set.")
    if sampler is None:
        return wanted
    if isinstance(sampler, ConsumingSampler):
        if sampler.max_sample_count == wanted.max_sample_count:
            return sampler
        raise ValueError(
            f"consume_after_n_samples={count} conflicts with the sampler's max_sample_count="
            f"{sampler.max_sample_count}; give one of them"
        )
    raise ValueError(
        "consume_after_n_samples only supports the default sampler, or a ConsumingSampler; got "
        f"{sampler!r}"
    )

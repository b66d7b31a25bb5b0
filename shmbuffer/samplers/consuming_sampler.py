"""A sampler that delivers each item to one of the learners of a consumer."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from shmbuffer.items.keys import GENERATION, LEASE
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format.ledger import LeasedItems
from shmbuffer.samplers.taking import Consumes, Taking
from shmbuffer.tensors.form import cpu


class ConsumingSampler(Consumes):
    """Delivers each item once, oldest first, to one of the consumer's learners.

    A consumer has a name, is visible to all processes that use the buffer, and outlives these
    processes. All learners whose samplers have the same consumer name share the items. Learners of
    another consumer also receive each item once. A buffer has up to eight consumers, each with its
    own position.

    An item is delivered under a lease: ``sample(lease=60.0)`` gives the learner 60 seconds to train
    on the item and to acknowledge it with `ReplayBuffer.ack`. If the learner dies or the lease
    expires before the acknowledgement, the item is delivered again, before all other items. A late
    `ack` is rejected and counted, so that two learners never acknowledge the same delivery. Without
    ``lease``, a sample is acknowledged before it is returned.

    Writers wait instead of overwriting items that a consumer has not acknowledged. Items cannot be
    written to explicit indices (``rb[3] = item``). A consumer without learners blocks the writers.
    The writers' messages name this consumer. It can be removed with ``shmbuffer consumers DIR
    --remove NAME`` or `ReplayBuffer.remove_consumer`.

    A call to ``sample`` waits for ``batch_size`` items. If there is no writer, the call returns the
    remaining items, or raises `EmptyBufferError` if no items remain.

    Args:
        max_sample_count: number of times that each item must be acknowledged, at most 1023.
        consumer: name of the consumer, at most 48 bytes.
        start: first item of a new consumer: the oldest item (``"oldest"``), or the next item that
            is written (``"newest"``).

    Raises:
        TypeError: ``max_sample_count`` is not an int, or ``consumer`` is not a str.
        ValueError: ``max_sample_count`` is below 1.

    Cost: one native call for the draw, and one for the acknowledgement. The ledger of leases takes
        16 bytes per slot and consumer.

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

    Source: ``torchrl.data.replay_buffers.ConsumingSampler``, which samples at random.
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
                "ConsumingSampler: consumer must be a name, got None; omit it to use the name "
                "'default', or use a RandomSampler to sample items repeatedly"
            )
        super().__init__(consumer, int(max_sample_count), start)
        self.max_sample_count = int(max_sample_count)

    # -- drawing -------------------------------------------------------------------------------

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws the oldest items that have not been delivered; see `Consumes.sample`.

        Returns:
            The slots of the items, and a dict with their tickets and, if the call has a lease, the
            number of the lease.

        Raises:
            EmptyBufferError: no undelivered item remains, and there is no writer.
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
        taking.taken.append((consumer, LeasedItems(slots.numpy(), tickets.numpy(), lease)))
        known = {GENERATION: tickets}
        if taking.lease_s is not None:
            known[LEASE] = torch.full_like(slots, lease)
        return slots, known

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if `sample` would return items without waiting."""
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
        """Creates the sampler for TorchRL's argument ``consume_after_n_samples``.

        Raises TypeError or ValueError if the value is not a positive integer.
        """
        try:
            return cls(count)
        except (TypeError, ValueError) as error:
            raise type(error)("consume_after_n_samples must be a positive integer.") from None


def consuming_instead(sampler: Any, count: Any, prefetch: int | None) -> ConsumingSampler:
    """Returns the sampler of a buffer that was created with ``consume_after_n_samples``.

    Args:
        sampler: the buffer's argument ``sampler``, or None.
        count: value of ``consume_after_n_samples``.
        prefetch: the buffer's argument ``prefetch``.

    Raises:
        TypeError: ``count`` is not an integer.
        ValueError: ``count`` is below 1, or the other arguments cannot be combined with it.
    """
    wanted = ConsumingSampler.of(count)
    if prefetch:
        raise ValueError("Prefetching is not supported when consume_after_n_samples is set.")
    if sampler is None:
        return wanted
    if isinstance(sampler, ConsumingSampler):
        if sampler.max_sample_count == wanted.max_sample_count:
            return sampler
        raise ValueError(
            f"consume_after_n_samples={count} conflicts with the sampler's "
            f"max_sample_count={sampler.max_sample_count}; pass only one of the two"
        )
    raise ValueError(
        "consume_after_n_samples only supports the default sampler or a ConsumingSampler, got "
        f"{sampler!r}"
    )

"""Samples from several shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from shmbuffer.buffers.data_path.sample_info import with_info
from shmbuffer.distributed.shards.credits import Credits
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.shard_batches import EFFECTIVE_SIZE, Begun, ShardBatches
from shmbuffer.items.indices import asked_size
from shmbuffer.items.raw_priorities import as_beta
from shmbuffer.samplers import RandomSampler
from shmbuffer.samplers.sampler import draw_key


class Sampling:
    """The part of a handle that draws batches."""

    _beta: float | None
    _members: Members
    _batches: ShardBatches
    _face: dict[str, Any]
    _begun: deque[tuple[int, Begun]]
    _prefetch: int  # batches that are begun ahead
    _at_once: int  # batches that are begun by one message
    _credits: Credits
    _draws: RandomSampler  # the source of random keys

    @property
    def beta(self) -> float | None:
        """Exponent of the importance weights of this handle's samples; None: they have none.

        Raises:
            TypeError: set to what is no number.
            ValueError: set to a number that is negative or not finite.
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = as_beta(value)

    @property
    def batch_size(self) -> int | None:
        """The size of a batch of ``sample()`` and of iteration."""
        size: int | None = self._face["batch_size"]
        return size

    def __len__(self) -> int:
        """Number of items in the shards that answer. One round trip."""
        self._members.refresh(all_of_them=True)
        return sum(member.totals.length for member in self._members.living())

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Draw a batch from all shards, as if they were one buffer.

        Args:
            batch_size: how many items; None is the constructor's.
            return_info: return ``(data, info)``.
            include_info: False leaves index, weights and shard out of a sample of TensorDicts.
            min_size: wait until the shards that answer have so many items.
            timeout: seconds to wait for them, and for the rate limiter; None: as long as it takes.

        Returns:
            The data ``[batch_size, ...]``, in random order. A sample has the entries of a sample of
            one shard, and ``"shard"``, int64 ``[batch_size]``, which index and generation belong
            to. The info of a prioritized sample has ``"effective_sample_size"``, a float: how many
            items of equal weight have the same variance.

        Raises:
            EmptyBufferError: no shard that answers has an item.
            RateLimitTimeout: ``min_size`` items, or those that the rate limiter demands, were not
                written in time.
            RateLimitError: the rate limiter can never admit it.
            RuntimeError: no batch size anywhere.

        Cost: one message to each shard on another node that draws, all at once; a copy of the
            answers.
        """
        count = self._count(batch_size)
        if min_size is not None and min_size < 0:
            raise ValueError(f"min_size has to be at least 0, got {min_size}")
        data, info = self._next(count, min_size or 0, timeout)
        if self._face["samples_tensordicts"] and include_info is not False:
            entries = {key: value for key, value in info.items() if key != EFFECTIVE_SIZE}
            data = with_info(data, entries, stack_dim=self._face["stack_dim"])
        return (data, info) if return_info else data

    def __iter__(self) -> Iterator[Any]:
        """Samples without end."""
        while True:
            yield self.sample()

    def next(self) -> Any:
        """A sample."""
        return self.sample()

    def _count(self, batch_size: int | None) -> int:
        return asked_size(batch_size, self.batch_size, "the constructor of the buffer", 3, least=1)

    def _next(self, count: int, min_size: int, timeout: float | None) -> tuple[Any, dict[str, Any]]:
        """The oldest batch that was begun ahead, or one that is begun now."""
        begun = self._begun
        if begun and begun[0][0] != count:
            begun.clear()
        paid = 0
        if not begun:
            self._credits.spend(count, min_size, timeout)
            paid = 1
        elif min_size:
            self._credits.spend(0, min_size, timeout)
        missing = self._prefetch + 1 - len(begun)
        if paid or missing >= self._at_once:
            while paid < missing and self._credits.spend_now(count):
                paid += 1
            keys = [draw_key(self._draws, None) for _ in range(paid)]
            begun.extend((count, one) for one in self._batches.begin(count, keys, self._beta))
        _, first = begun.popleft()
        return self._batches.finish(first)

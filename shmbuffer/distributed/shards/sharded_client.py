"""A handle to a buffer over several nodes. It writes on its own node and draws from all nodes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from shmbuffer.buffers.data_path import priority_entry
from shmbuffer.buffers.data_path.sample_info import with_info
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.distributed.keeper import open_answer
from shmbuffer.distributed.nearby import WRITE
from shmbuffer.distributed.runtime import own_node, require_ray
from shmbuffer.distributed.shards.flow.credits import Credits
from shmbuffer.distributed.shards.member import Member
from shmbuffer.distributed.shards.members import Members
from shmbuffer.distributed.shards.shard_batches import (
    EFFECTIVE_SIZE,
    SHARD,
    ShardBatches,
    StartedBatch,
)
from shmbuffer.distributed.shards.shard_map import find_map
from shmbuffer.distributed.shards.shard_saves import load_shards, save_shards, saves_of_nodes
from shmbuffer.distributed.shards.updates import ShardedUpdate, send_updates
from shmbuffer.errors import BufferUnlinkedError, EmptyBufferError, RateLimitTimeout
from shmbuffer.items.indices import resolve_batch_size
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.items.raw_priorities import as_beta, check_raw, reduced
from shmbuffer.memory import RateLimiter
from shmbuffer.samplers.random import RandomSampler
from shmbuffer.samplers.rank import known_rank
from shmbuffer.samplers.sampler import draw_key
from shmbuffer.tensors.form import cpu

TURN_S = 0.05
"""Maximum time in seconds that a write waits in a keeper. The client then sends it again."""


class ShardIndex(NamedTuple):
    """The location of written items, returned by a write to a sharded buffer."""

    shard: int
    """The number of the shard, as in the entry ``"shard"`` of a sample."""
    index: Any
    """The index in the shard, as returned by the shard's buffer."""


class Options(NamedTuple):
    """The settings of a handle. See `ShardedReplayBuffer`."""

    name: str
    prefetch: int = 0
    locality: str = "global"
    rank: int | None = None
    answer_timeout: float = 5.0


class ShardedClient:
    """A handle on a `ShardedReplayBuffer`, for any process of the Ray cluster.

    The handle can be pickled and sent to tasks and other actors. It writes in memory to the shard
    on its own node. On a node without a shard, it writes through Ray to the shard with the most
    free space.

    Args:
        options: name of the buffer and settings of the handle; see `ShardedReplayBuffer`.

    Raises:
        ValueError: there is no buffer with this name in the cluster.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._ray = require_ray()
        self._at_once = max(1, (options.prefetch + 1) // 2)  # number of batches per message
        self._node = own_node()
        self._members = Members(
            self._ray,
            partial(find_map, options.name),
            f"sharded buffer {options.name!r}",
            self._node,
            options.answer_timeout,
            self._at_once,
        )
        self._face = self._ask_face()
        local = options.locality == "local"
        self._batches = ShardBatches(self._members, self._face, self._node if local else None)
        self._credits = Credits(self._ray, self._members, f"sharded buffer {options.name!r}")
        self._batches.drawn_again = self._credits.spend_more
        self._beta: float | None = self._face["beta"]
        self._begun: deque[tuple[int, StartedBatch]] = (
            deque()
        )  # prefetched batches, each with its size
        self._draws = RandomSampler()
        self._draws._rank_in_draws = known_rank(options.rank) or 0

    # -- state ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the buffer in the cluster."""
        return self._options.name

    @property
    def shards(self) -> dict[int, str]:
        """The node of each shard that contains data, keyed by the number of the shard.

        The number is the entry ``"shard"`` of a sample.
        """
        self._members.refresh()
        return {number: one.node for number, one in self._members.by_identity().items()}

    @property
    def beta(self) -> float | None:
        """Exponent of the importance weights of this handle's samples, or None without weights.

        Raises:
            TypeError: the new value is not a number.
            ValueError: the new value is negative or not finite.
        """
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = as_beta(value)

    @property
    def batch_size(self) -> int | None:
        """Default batch size of ``sample()`` and iteration."""
        size: int | None = self._face["batch_size"]
        return size

    @property
    def priority_key(self) -> Any:
        """Key of the sample's entry that contains priorities for `update_tensordict_priority`."""
        return self._face["priority_key"]

    def __len__(self) -> int:
        """Returns the number of items in the shards that answer. Takes one round trip."""
        self._members.refresh(all_of_them=True)
        return sum(member.totals.length for member in self._members.living())

    def stats(self) -> dict[str, Any]:
        """Returns the counters of the shards that answer, and their sums.

        Returns:
            A dict with the total ``"length"`` and ``"capacity"``. ``"shards"`` maps each node to
            the `ReplayBuffer.stats` of its shard. ``"missing"`` lists the nodes whose shards do not
            answer.
        """
        self._members.refresh(all_of_them=True)
        shards = {}
        for member in self._members.living():
            if member.identity is not None:
                with suppress(RuntimeError):  # the shard died since the refresh
                    shards[member.node] = member.whole("stats")
        living = self._members.living()
        return {
            "length": sum(member.totals.length for member in living),
            "capacity": sum(member.capacity for member in living),
            "shards": shards,
            "missing": self._members.missing_nodes(),
        }

    # -- writing -------------------------------------------------------------------------------

    def add(self, data: Any, **options: Any) -> ShardIndex:
        """Writes one item to one shard; see `extend`."""
        return self._write("add", data, options)

    def extend(self, data: Any, **options: Any) -> ShardIndex:
        """Writes a batch atomically to one shard.

        The batch is written in memory to the shard on this process's node. If no shard on this node
        answers, the batch is written through Ray to the shard with the most free space. If a keeper
        dies during the write, the batch is written to another shard. In this case the first shard
        may also contain the batch when it returns.

        Args:
            data: see `ReplayBuffer.extend`.
            **options: see `ReplayBuffer.extend`.

        Returns:
            The shard and the index in the shard, which `update_priority` accepts.

        Raises:
            SchemaMismatchError, ValueError, TypeError: see `ReplayBuffer.extend`.
            EmptyBufferError: no shard answers.
            RateLimitTimeout: the rate limiter did not admit the write in time. Nothing was written.

        Cost: on a node with a shard, 2 µs more than a write to a local buffer (see `local`). On a
            node without a shard, about 1 ms.
        """
        return self._write("extend", data, options)

    @property
    def local(self) -> ReplayBuffer | None:
        """The buffer of the shard on this node, or None if this node has no shard.

        A write to this buffer is 2 µs faster than a write to this handle. Samples from this buffer
        contain items of this shard only.
        """
        home = self._members.at(self._node)
        buffer: ReplayBuffer | None = None if home is None else home.near(WRITE)
        return buffer

    def _write(self, name: str, data: Any, options: dict[str, Any]) -> ShardIndex:
        """Calls the method ``name``, "add" or "extend", of the shard that should get the data."""
        home = self._members.at(self._node)
        if home is not None and home.identity is not None:
            buffer = home.near(WRITE)
            if buffer is not None:
                try:
                    return ShardIndex(home.identity, getattr(buffer, name)(data, **options))
                except BufferUnlinkedError as error:
                    home.leave(error)
        timeout = options.pop("timeout", None)
        began = time.monotonic()
        while True:
            member = home if home is not None and home.can_write() else self._emptiest()
            wait = timeout
            if member.near(WRITE) is None:  # a wait in the keeper blocks its other clients
                left = TURN_S if timeout is None else began + timeout - time.monotonic()
                wait = max(0.0, min(TURN_S, left))
            try:
                index = getattr(member.handle, name)(data, timeout=wait, **options)
            except BufferUnlinkedError as error:
                member.leave(error)
            except RateLimitTimeout:
                if timeout is not None and time.monotonic() - began >= timeout:
                    raise
            except member.handle.owner_is_gone as error:
                member.lose(type(error).__name__)
            else:
                return ShardIndex(self._identity_of(member), index)

    def _emptiest(self) -> Member:
        """Returns the shard that answers and is filled the least, relative to its capacity."""
        self._members.refresh()
        living = self._members.living()
        if not living:
            raise EmptyBufferError(
                f"{self!r}: nothing can be written, because {self._members.missing()}"
            )
        return min(living, key=lambda one: one.totals.length / max(one.capacity, 1))

    def _identity_of(self, member: Member) -> int:
        """Returns the identity of a shard, or -1 if the shard has not reported its identity."""
        if member.identity is None and not member.look():  # this was the shard's first write
            for _, _, message in self._members.answers([(member, member.ask("news"))]):
                member.take_news(message)
        return -1 if member.identity is None else member.identity

    # -- sampling ------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Draws a batch from all shards, as if they were one buffer.

        Args:
            batch_size: number of items. If None, uses the batch size that was passed to the
                constructor of the buffer.
            return_info: if True, returns ``(data, info)``.
            include_info: if False, a sample of TensorDicts has no entries for the index, the weight
                and the shard of each item.
            min_size: waits until the shards that answer contain at least this number of items.
            timeout: seconds to wait for ``min_size`` items and for the rate limiter. If None, waits
                without a limit.

        Returns:
            The data ``[batch_size, ...]``, in random order. A sample has the entries of a sample
            from a single buffer, and the entry ``"shard"``, int64 ``[batch_size]``. This entry is
            the number of the shard to which each index and generation belongs. The info of a
            prioritized sample also has the float ``"effective_sample_size"``, which is the number
            of equally weighted items whose mean would have the same variance.

        Raises:
            EmptyBufferError: no shard that answers has an item.
            RateLimitTimeout: the items that ``min_size`` or the rate limiter requires were not
                written in time.
            RateLimitError: the rate limiter can never admit a sample of this size.
            RuntimeError: no batch size was passed, and the buffer has no default.

        Cost: one message to each contributing shard on another node, all sent in parallel, and one
            copy of the rows.
        """
        count = self._count(batch_size)
        if min_size is not None and min_size < 0:
            raise ValueError(f"min_size must be at least 0, got {min_size}")
        data, info = self._next(count, min_size or 0, timeout)
        if self._face["samples_tensordicts"] and include_info is not False:
            entries = {key: value for key, value in info.items() if key != EFFECTIVE_SIZE}
            data = with_info(data, entries, stack_dim=self._face["stack_dim"])
        return (data, info) if return_info else data

    def __iter__(self) -> Iterator[Any]:
        """Yields samples indefinitely."""
        while True:
            yield self.sample()

    def next(self) -> Any:
        """Returns ``sample()``."""
        return self.sample()

    def _count(self, batch_size: int | None) -> int:
        """Returns the number of items to sample. Raises RuntimeError if there is no default."""
        return resolve_batch_size(
            batch_size, self.batch_size, "the constructor of the buffer", 3, least=1
        )

    def _next(self, count: int, min_size: int, timeout: float | None) -> tuple[Any, dict[str, Any]]:
        """Returns the data and the info of the next batch, and begins batches in advance.

        Args:
            count: number of items in the batch. Prefetched batches of another size are discarded.
            min_size: see `sample`.
            timeout: see `sample`.
        """
        begun = self._begun
        if begun and begun[0][0] != count:
            begun.clear()
        paid = 0
        if not begun:
            self._credits.spend(count, min_size, timeout)
            paid = 1
        elif min_size:
            self._credits.spend(0, min_size, timeout)
        missing = self._options.prefetch + 1 - len(begun)
        if paid or missing >= self._at_once:
            while paid < missing and self._credits.spend_now(count):
                paid += 1
            keys = [draw_key(self._draws, None) for _ in range(paid)]
            begun.extend((count, one) for one in self._batches.begin(count, keys, self._beta))
        _, first = begun.popleft()
        return self._batches.finish(first)

    # -- priorities ----------------------------------------------------------------------------

    def update_tensordict_priority(self, data: TensorDictBase) -> ShardedUpdate:
        """Sets the priorities of a sample from its entry ``priority_key``.

        Args:
            data: a sample or part of a sample, with the entries ``"shard"``, ``"index"``,
                ``"index_generation"`` and ``priority_key``.

        Returns:
            The numbers of priorities that were applied, stale and lost.

        Raises:
            KeyError: an entry is missing.
            ValueError: a priority is NaN, infinite or negative. Nothing was changed.

        Cost: one message to each shard on another node. The call does not wait for the answers.
        """
        if self.beta is None:
            return ShardedUpdate(self._members, (0, 0, 0), [])
        if data.get(INDEX, None) is None:
            raise priority_entry.no_index(data)
        for key in (SHARD, self.priority_key):
            if data.get(key, None) is None:
                raise KeyError(
                    f"update_tensordict_priority: this sample has no entry {key!r}; it has "
                    f"{sorted(map(str, data.keys()))}"
                )
        shard = priority_entry.one_each(data.get(SHARD))
        generation = data.get(GENERATION, None)
        if generation is not None:
            generation = priority_entry.one_each(generation)
        priority = data.get(self.priority_key)
        return self.update_priority(data.get(INDEX), priority, generation=generation, shard=shard)

    def update_priority(
        self, index: Any, priority: Any = None, *, generation: Any = None, shard: Any = None
    ) -> ShardedUpdate:
        """Sets the priorities of items.

        Args:
            index: the result of `add` or `extend`, or a whole sample, as for
                `update_tensordict_priority`. If ``shard`` is passed, the entry ``"index"`` of a
                sample, ``[n]`` or ``[n, ndim]``.
            priority: priority of each item, ``[n]``, or one number for all items, finite and not
                negative. If None, uses the entry `priority_key` of the sample.
            generation: the entry ``"index_generation"`` of the sample, ``[n]``. If an item has been
                overwritten since it was sampled, its priority is discarded and counted as stale.
            shard: the entry ``"shard"`` of the sample, ``[n]``, or one number for all items.

        Returns:
            The numbers of priorities that were applied, stale and lost.

        Raises:
            TypeError: the shard or the priorities are missing. Nothing was changed.
            ValueError: a priority is NaN, infinite or negative, or an argument does not have one
                value per item. Nothing was changed.
        """
        if priority is None:
            sample = priority_entry.sample_alone(index, index_generation=generation, shard=shard)
            return self.update_tensordict_priority(sample)
        if isinstance(index, ShardIndex):
            shard, index = index
        if shard is None:
            raise TypeError(
                "update_priority(index, priority) of a sharded buffer needs shard=, which is the "
                f"entry {SHARD!r} of the sample, or an index that was returned by extend()"
            )
        index = torch.stack(index, -1) if isinstance(index, tuple) else cpu.as_tensor(index)
        where = index.reshape(-1, index.shape[-1]) if index.dim() > 1 else index.reshape(-1)
        count = len(where)
        raw = reduced(priority, count, self._face["reduction"])
        check_raw(raw)
        shards = np.asarray(shard).reshape(-1)
        tickets = None if generation is None else np.asarray(generation).reshape(-1)
        if len(shards) not in (1, count) or (tickets is not None and len(tickets) != count):
            raise ValueError(
                f"update_priority of {count} items needs one value per item, got {len(shards)} "
                "for shard"
                + ("" if tickets is None else f" and {len(tickets)} for generation")
                + ". Nothing was changed"
            )
        shards = np.broadcast_to(shards, (count,))
        self._batches.largest = max(self._batches.largest, float(raw.max(initial=0.0)))
        return send_updates(self._members, shards, where.numpy(), raw, tickets)

    # -- flow control --------------------------------------------------------------------------

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The rate limiter of all shards, or None; see `set_rate`. Reading it sends one message."""
        found: RateLimiter | None = self._members.ask_map("flow", "rate")
        return found

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        self.set_rate(limiter)

    def set_rate(
        self, limiter: RateLimiter | EllipsisType | None = ..., **changes: Any
    ) -> RateLimiter | None:
        """Changes the rate limiter of all shards, while clients continue to write and draw.

            rb.set_rate(samples_per_insert=8)     # keeps the other settings
            rb.set_rate(RateLimiter(samples_per_insert=8, min_size=1_000))

        Items that were written or sampled before the call do not count for the new ratio. Existing
        learners wait up to 3 s for their first quota under the new ratio.

        Args:
            limiter: the new rate limiter, or None to remove the current one.
            **changes: arguments of `RateLimiter` to change in the current rate limiter.

        Returns:
            The new rate limiter.

        Raises:
            TypeError: both a limiter and changes were passed, or neither, or `RateLimiter` does not
                accept an argument.
            ValueError: `RateLimiter` rejects a value, the limiter is a queue, or ``min_size`` is
                larger than the capacity of all shards.
        """
        if bool(changes) == (limiter is not ...):
            raise TypeError(
                "set_rate() needs a RateLimiter or None, or keyword arguments to change the "
                "current one"
            )
        if isinstance(limiter, EllipsisType):
            limiter = (self.rate_limiter or RateLimiter()).changed(**changes)
        require_ratio(limiter)
        self._members.ask_map("flow", "set_rate", limiter)
        self._credits.forget()
        return limiter

    # -- the buffer as a whole -----------------------------------------------------------------

    def empty(self) -> None:
        """Removes all items from all shards.

        Raises:
            RuntimeError: a shard does not answer. Nothing was changed unless the shard died during
                the call.
        """
        self._begun.clear()
        self._members.refresh(all_of_them=True)
        self._members.require_all("emptied")
        for member in self._members:
            member.whole("empty")
        self._members.refresh(all_of_them=True)

    def dumps(
        self,
        path: str | os.PathLike[str],
        *,
        consistent: bool = False,
        without: Collection[str] = (),
    ) -> None:
        """Saves a snapshot of each shard.

        If an error or a crash interrupts the call, either the previous save or the new one remains.

        Args:
            path: directory that all nodes can access under this path. Other files in it are kept.
            consistent: if True, saves all shards at the same point in time, and makes writers wait
                until the save is complete. If a write is in the save, all earlier writes are in the
                save too. Priorities may change during the save.
            without: names of nodes that will not return. Their shards are left out of the save.

        Raises:
            RuntimeError: a shard does not answer, no shard contains any items, or the writers could
                not be paused.
            ValueError: a node in ``without`` has no shard, or a node's name contains a slash.
            BufferInUseError: another process is saving to the same path.
            UnsafePathError: the directory belongs to another user, or all users can write to it.
            OSError: a node cannot access the directory, or has no space or permission to write.
        """
        self._members.refresh(all_of_them=True)
        save_shards(self._members, path, consistent=consistent, without=without)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Loads a save that `dumps` has written, possibly with a different number of shards.

        Each shard loads the save of its node. If the save is from other nodes, its items are
        distributed over the shards in chunks, with their priorities. The rate limiter is suspended
        during the load. Items that were written or sampled before the end of the load do not count
        for its ratio.

        Args:
            path: directory of the save.

        Raises:
            FileNotFoundError: the list of shards, or the save of a shard in the list, is missing.
                Nothing was changed.
            CorruptBufferError, UnsafePathError: the list is damaged, or the save contains a link.
                Nothing was changed.
            NotImplementedError: the save is from other nodes, and the buffer has transforms.
                Nothing was changed.
            RuntimeError: a shard does not answer. Nothing was changed unless the shard died during
                the load.
        """
        self._begun.clear()
        self._members.refresh(all_of_them=True)
        parts = self._members.ask_map("parts")
        saves = saves_of_nodes(self._members, path)
        limiter = self.rate_limiter
        self.set_rate(None)  # otherwise the load would wait until items are sampled
        try:
            load_shards(self._members, saves, parts)
        finally:
            self.set_rate(limiter)
        self._members.refresh(all_of_them=True)

    def detach(self) -> None:
        """Detaches from the directories open in this process. The next call opens them again."""
        self._begun.clear()
        self._members.leave()

    def _ask_face(self) -> dict[str, Any]:
        """Returns `Shard.face` of the first shard that answers. The result is equal for all."""
        asked = [(one, one.ask("face")) for one in self._members]
        failed: Exception | None = None
        for member, _, message in self._members.answers(asked):
            try:
                face: dict[str, Any] = open_answer(message)
            except Exception as error:  # the keeper could not create or open its buffer
                member.lose(f"{type(error).__name__}: {error}")
                failed = error
            else:
                return face
        if failed is not None:
            raise failed
        raise EmptyBufferError(f"{self!r}: {self._members.missing() or 'no node has a shard'}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedClient, (self._options,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options.name!r})"


def require_ratio(limiter: RateLimiter | None) -> None:
    """Raises ValueError if the limiter is a queue."""
    if limiter is not None and limiter.max_times_sampled is not None:
        raise ValueError(
            "the rate_limiter of a sharded buffer must not have max_times_sampled, because no "
            "process knows the oldest items of all shards; pass samples_per_insert, min_size or "
            "both instead"
        )

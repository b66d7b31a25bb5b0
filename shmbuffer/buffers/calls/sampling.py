"""Samples: drawn now or ahead, iterated over, and the priorities that come back.

             ┌─ fast (TensorDict buffers) ─▶ FastRead
    sample ──┼─ whole ─▶ drawn ─────────────────────┐
             ├─ by parts ─▶ sampler.sample ─▶ chosen ─┼─▶ collate_fn ─▶ transforms ─▶ pinned memory
             └─ out of a queue ─▶ taken ─────────────┘

The plan decides. A rate limiter, or ``min_size``, is waited for first. A `SampleUnit` replaces the
draw before it is read, and assembles the batch after ``collate_fn``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from shmbuffer.buffers.calls.access import swap_dims
from shmbuffer.buffers.calls.dataset import BatchDataset
from shmbuffer.buffers.data_path.drawing import Choice, chosen, drawn, expanded, taken
from shmbuffer.buffers.data_path.parts import ring_backed
from shmbuffer.buffers.data_path.prefetch import Batch, Order
from shmbuffer.buffers.data_path.priority_entry import sample_alone
from shmbuffer.buffers.flow.consuming import Consuming
from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.indices import asked_size
from shmbuffer.memory import Ring
from shmbuffer.samplers.taking import consumes
from shmbuffer.tensors import pinned
from shmbuffer.tensors.eager import FRAMES, eager
from shmbuffer.tensors.form import cpu


class Sampling(Consuming):
    """The part of a buffer that makes batches."""

    _iterator: Iterator[Any] | None

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: how many items; None is the constructor's, another number warns.
            return_info: return ``(data, info)``; info has ``"index"`` and, if any, the weights and
                ``"index_generation"``.
            min_size: wait until the buffer has so many items.
            timeout: seconds to wait, for ``min_size``, a `RateLimiter`, or a batch of a consumer;
                None: without end.
            lease: for a sampler with a consumer: seconds until items are given to others, unless
                `ack` comes first; ``math.inf``: until this handle is closed, or its process ends.
                None acknowledges them at once.

        Returns:
            The data ``[batch_size, ...]`` in the form in which they were written.

        Raises:
            EmptyBufferError: nothing to draw from.
            RateLimitTimeout, RateLimitError: items have to be written first.
            CollectorsDiedError: they never will be; see `RateLimiter`.
            RuntimeError: no batch size.

        Cost: one native call; 0.4 µs a leaf for the tensors that it fills.
        """
        draw = self._delivering(lease, self._next)
        data, info = self._in_turn(self._count(batch_size), min_size, timeout, draw)
        return (data, info) if return_info else data

    def __iter__(self) -> Iterator[Any]:
        """Samples to the end of the sampler's pass, without end if it has none.

        A batch is waited for without end, as in `sample`. With a limit in seconds, for instance
        over a queue that may be empty: ``for batch in rb.as_dataset(timeout=30)``.
        """
        if self._batch_size is None:
            raise RuntimeError("iteration needs a batch size: give batch_size to the constructor")
        return self._batches(self.sample)

    def as_dataset(
        self,
        batch_size: int | None = None,
        *,
        return_info: bool = False,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> BatchDataset:
        """The batches of this buffer as a data set for torch's ``DataLoader``.

            data = rb.as_dataset(256)
            loader = DataLoader(
                data, batch_size=None, collate_fn=data.collate_fn, num_workers=2
            )
            for batch in loader:
                batch["td_error"] = learn(batch)
                rb.update_tensordict_priority(batch)

        Each worker opens the buffer itself and draws its own batches, from the loader's seed mixed
        with rank and worker; a `generator` of the buffer applies to this process only. Workers
        share each pass of a `SamplerWithoutReplacement`, which ends the loader; other samplers
        never end. With a ``world_size`` of its own, every pass of new workers has the same order:
        use ``persistent_workers=True``.

        Batches are whole: pass ``batch_size=None`` and the data set's ``collate_fn``, because the
        loader's own takes TensorDicts apart. Priorities go back from the loop as usual. They are
        later by the batches in the loader, two a worker unless ``prefetch_factor`` is set.

        Args:
            batch_size: see `sample`, as are the others.
            return_info: see there.
            min_size: see there.
            timeout: see there.

        Returns:
            The data set. Create it where the process has its rank. With ``num_workers=0`` it is the
            same as iterating over the buffer.

        Raises:
            RuntimeError: no batch size.

        Cost: 0.4 ms for a TensorDict of up to 1 MB, through a pipe; 2 ms or more, through torch's
            shared memory, for a larger one, or text or objects. `sample` takes 30 µs: workers only
            pay for slow transforms.
        """
        from shmbuffer.buffers.calls.dataset import BatchDataset

        if batch_size is None and self._batch_size is None:
            raise RuntimeError("no batch size: give batch_size to as_dataset() or to the buffer")
        options = {"return_info": return_info, "min_size": min_size, "timeout": timeout}
        return BatchDataset(self, batch_size=batch_size, **options)

    def _batches(self, sample: Callable[[], Any]) -> Iterator[Any]:
        """Samples to the end of the pass."""
        if self._passes.ran_out:
            self._passes.ran_out = False
        delivered = False
        while not self._passes.ran_out:
            try:
                batch = sample()
            except EmptyBufferError:
                if delivered and consumes(self._sampler):
                    return  # the consumer has every item, and there is no writer
                raise
            delivered = True
            yield batch

    @property
    def _passes(self) -> Any:
        """Tells where a pass ends; looked up each time, as the sampler may be exchanged."""
        return self._sampler if self._prefetcher is None else self._prefetcher

    def next(self) -> Any:
        """The next sample of an iteration over the buffer; None at the end of a pass."""
        if self._iterator is None:
            self._iterator = iter(self)
        data = next(self._iterator, None)
        if data is None:
            self._iterator = None
        return data

    @eager
    def update_priority(self, index: Any, priority: Any = None, *, generation: Any = None) -> Any:
        """Change priorities.

        Args:
            index: of a sample or a write: ``[n]``, ``[n, ndim]``, an int; or a sample of a
                TensorDict buffer, as for ``update_tensordict_priority``.
            priority: ``[n]`` or one number; finite and not negative. With ``dim_extend`` also in
                the form of the batch, ``[lanes, n]``. None: the entry ``priority_key`` of the
                sample.
            generation: ``index_generation`` of the sample, ``[n]``: an item that was overwritten
                since is left alone, and counted as stale. None sets any item.

        Returns:
            `PriorityUpdate`: how many were applied, and how many were stale.

        Raises:
            ValueError: NaN, infinite or negative; nothing was changed.
            IndexError: out of range, a mask or fractions; nothing was changed.
            TypeError: the priorities are missing; nothing was changed.

        Cost: one native call.
        """
        if priority is None:
            return self._update_by_sample(sample_alone(index, index_generation=generation))
        if (updates := self._plan.updates) is not None:
            found = updates.update_given(index, priority, generation)
            if found is not None:
                return found
        if self.dim_extend and np.ndim(priority) > 1:
            priority = swap_dims(cpu.as_tensor(priority), self.dim_extend).flatten()
        if generation is None:
            return self._sampler.update_priority(index, priority, storage=self._storage)
        return self._sampler.update_priority(
            index, priority, storage=self._storage, generation=generation
        )

    def _update_by_sample(self, data: Any) -> Any:
        """Sets the priorities of a sample from its own entries."""
        raise TypeError(
            f"update_priority: samples of a {type(self).__name__} have no entry for priorities. "
            "Nothing was changed. Call sample(return_info=True) and "
            'update_priority(info["index"], priority), or use a TensorDictReplayBuffer'
        )

    def mark_update(self, index: Any) -> None:
        """Give the items at ``index`` the default priority."""
        self._sampler.mark_update(index, storage=self._storage)

    # -- inside --------------------------------------------------------------------------------

    def _count(self, batch_size: int | None) -> int:
        own = self._batch_size
        return asked_size(batch_size, own, "the constructor of the buffer", 3 + FRAMES)

    def _in_turn(
        self,
        count: int,
        min_size: int | None,
        timeout: float | None,
        draw: Callable[[int], Batch],
        shown: Callable[[Batch], Batch] | None = None,
    ) -> Batch:
        """Draws a batch once its items may be drawn; ``shown`` adapts one out of a queue."""
        if min_size is not None or timeout is not None:
            ring_backed(self._storage, "min_size and timeout need")
        oldest = partial(self._oldest, shown)
        return self._planned().limits.in_turn(count, min_size, timeout, draw, oldest)

    def _oldest(
        self, shown: Callable[[Batch], Batch] | None, ring: Ring, count: int
    ) -> Batch | None:
        """The oldest items of a queue; None if it is not a queue any more."""
        found = taken(self._planned(), ring, count)
        if found is None:
            return None
        batch = self._finished(*found)
        return batch if shown is None else shown(batch)

    def _next(self, count: int) -> Batch:
        if self._prefetcher is not None and count == self._batch_size:
            return self._prefetcher.next()
        self._planned()
        return self._draw_batch(count)()

    def _order(self, at_once: bool) -> Order:
        """Draw the next batch for the prefetcher, and read its items unless a thread does that."""
        assert self._batch_size is not None
        with self._planned().choosing():
            before = self._draws()
            if at_once:
                make = self._draw_batch(self._batch_size)
            else:
                make = partial(self._gathered, *self._choose(self._batch_size))
            return Order(make, self._sampler.ran_out, before)

    def _draw_batch(self, count: int) -> Callable[[], Batch]:
        """Draw by the shortest way; returns the call that makes the batch in this thread."""
        if self._plan.draws:
            return partial(self._finished, *drawn(self._plan, count, pins=self._pin_memory))
        return partial(self._gathered, *self._choose(count))

    def _choose(self, count: int) -> Choice:
        """Choose the next batch, by the plan that the caller has looked at."""
        return expanded(self._plan, *self._sampler.sample(self._storage, count))

    def _choose_again(self, index: Any) -> Choice:
        """Choose again, instead of a choice that was overwritten before it was read."""
        return expanded(self._plan, *self._sampler._again(self._storage, index))

    def _gathered(self, index: Any, known: dict[Any, Any]) -> Batch:
        plan = self._planned()
        with pinned.gathering(self._pin_memory):
            data, info = chosen(plan, index, known, self._choose_again)
        if plan.reader is not None:
            return self._passed_on(data, plan.reader.of_anchors(info))
        return self._finished(data, info)

    def _finished(self, data: Any, info: dict[str, Any]) -> Batch:
        """The user's batch: items collated, assembled, transformed, in pinned memory."""
        data = self._collate(data)
        if self._plan.unit is not None:
            data, info = self._plan.unit.assemble(data, info)
        return self._passed_on(data, info)

    def _passed_on(self, data: Any, info: dict[str, Any]) -> Batch:
        """A collated batch, transformed and in pinned memory."""
        if self._transform.transforms:
            data = self._transform(data)
        if self._pin_memory:
            return pinned.pin(data), pinned.pin(info)
        return data, info

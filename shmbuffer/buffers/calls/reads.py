"""Samples batches: chooses items, reads them, and finishes the batch.

             ┌────────────── FastRead.sample ──────────────┐      all in one native call
    sample ──┤  choose ───────▶ read ─────────▶ finish     ├──▶ batch
             │  sampler, unit   FastRead.read   collate_fn, transforms, pinned memory, info
             └─ a queue ──────▶ taken ────────▶ finish ────┘

The call first waits for the rate limiter and for ``min_size``. With ``prefetch``, items are chosen
when a batch is ordered, and a thread reads and finishes the batch. The plan defines which steps run
in one native call. If this is not possible for a batch, the steps run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tensordict import TensorDict

from shmbuffer.buffers.data_path.drawing import (
    Choice,
    chosen,
    drawn,
    expanded,
    take_batch,
    written_over,
)
from shmbuffer.buffers.data_path.fast_read import NO_OUT
from shmbuffer.buffers.data_path.parts import Parts, ring_backed
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.data_path.prefetch import Batch, Order
from shmbuffer.buffers.data_path.sample_info import (
    ANCHORS,
    has_info,
    stack_dim_of,
    with_info,
    without_info,
)
from shmbuffer.buffers.flow.consuming import delivering
from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.indices import as_int, resolve_batch_size
from shmbuffer.memory import Ring
from shmbuffer.samplers.sampler import ATTEMPTS
from shmbuffer.samplers.taking import Taking, consumes
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors import pinned
from shmbuffer.tensors.eager import FRAMES


class Reads:
    """Implements the methods of a buffer that sample."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def sample(
        self,
        count: int,
        include_info: bool | None = None,
        out: TensorDict | None = None,
        min_size: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Batch:
        """Waits until sampling is allowed, then samples a batch; see `ReplayBuffer.sample`.

        Returns:
            The data, and the dict ``info``.
        """
        parts = self._parts
        plan = parts.plan
        if (
            plan.fast is not None
            and not plan.limiter_version[0]
            and out is include_info is min_size is timeout is lease is None
            and not plan.transforms
        ):
            batch = None
            if plan.fast_read is not None:
                batch = plan.fast_read.sample(count)
            elif plan.draws and count == parts.batch_size and plan.prefetcher is not None:
                batch = plan.prefetcher.next_of_one_call(plan.fast.sample, count)
                batch = None if batch is None else self._with_entries(None, None, batch)
            if batch is not None:
                return batch
        if min_size is not None or timeout is not None:
            ring_backed(parts.storage, "min_size and timeout need")
        draw = delivering(parts.sampler, lease, partial(self._next, include_info, out))

        def oldest(ring: Ring, count: int) -> Batch | None:
            found = take_batch(parts.planned(), ring, count)
            return (
                None
                if found is None
                else self._with_entries(include_info, out, self.finish(*found))
            )

        return parts.planned().limits.in_turn(count, min_size, timeout, draw, oldest)

    def _next(
        self, include_info: bool | None, out: TensorDict | None, count: int, *taking: Taking
    ) -> Batch:
        """Returns the next batch without waiting for the rate limiter.

        The batch is a prefetched batch or a new one. With ``out``, it is read into these tensors.
        """
        parts, plan = self._parts, self._parts.planned()
        if out is not None:
            found = None
            if plan.fast_read is not None and include_info is None and not plan.transforms:
                found = self._refill(plan, out, count)
            if found is not None:
                return found
            if not (plan.payload is None and isinstance(parts.storage, TensorStorage)):
                # Before the first write, the call below raises EmptyBufferError.
                raise ValueError(NO_OUT)
        if parts.prefetcher is not None and count == parts.batch_size:
            return self._with_entries(include_info, None, parts.prefetcher.next(self.order))
        return self._with_entries(include_info, None, self._begin(count, False, *taking)())

    def order(self, at_once: bool) -> Order:
        """Chooses the items of a batch in advance, for the prefetcher.

        Args:
            at_once: if True, the caller prepares the batch immediately in its own thread. If False,
                another thread prepares it.

        Returns:
            The function that prepares the batch, and the state of the sampler at this point.
        """
        parts = self._parts
        assert parts.batch_size is not None
        with parts.planned().choosing():
            before = parts.draws()
            make = self._begin(parts.batch_size, not at_once)
            return Order(make, parts.sampler.ran_out, before)

    # -- the three steps -----------------------------------------------------------------------

    def _begin(self, count: int, is_for_thread: bool, *taking: Taking) -> Callable[[], Batch]:
        """Chooses the items of a batch, and returns a function that reads and finishes the batch.

        Args:
            count: number of items.
            is_for_thread: True if another thread will call the function.
            taking: the claim of a consumer, or nothing if the sampler has no consumer.
        """
        plan = self._parts.plan
        if is_for_thread or not plan.draws:
            return partial(self._read_fast, *self.choose(count, *taking), *taking)
        batch = None if plan.fast is None or plan.transforms else plan.fast.sample(count)
        if batch is not None:
            return partial(tuple, batch)
        return partial(self.finish, *drawn(plan, count, pins=self._parts.pin_memory))

    def choose(self, count: int, *taking: Taking) -> Choice:
        """Chooses ``count`` items, and extends the choice with the unit's items or with goals."""
        plan = self._parts.plan
        return self._completed(plan, plan.sampler.sample(plan.storage, count, *taking), taking)

    def choose_again(self, index: Any, *taking: Taking) -> Choice:
        """Chooses other items, because chosen items were overwritten before they were read."""
        plan = self._parts.plan
        return self._completed(plan, plan.sampler._again(plan.storage, index, *taking), taking)

    def _completed(self, plan: Plan, choice: Choice, taking: tuple[Taking, ...]) -> Choice:
        """Returns the sampler's choice, extended with the items of each sample unit or with goals.

        Only a `HERReplayBuffer` has goals.
        """
        goals = self._parts.goals
        if goals is None:
            return expanded(plan, *choice)
        return goals.with_goals(plan, *choice, *taking)  # type: ignore[no-any-return]

    def read(self, index: Any, known: dict[Any, Any], *taking: Taking) -> Batch:
        """Reads chosen items in several steps, and finishes the batch."""
        plan = self._parts.planned()
        with pinned.read_into_pinned(self._parts.pin_memory):
            data, info = chosen(plan, index, known, lambda drawn: self.choose_again(drawn, *taking))
        if plan.reader is not None:
            return self._passed_on(data, plan.reader.of_anchors(info))
        return self.finish(data, info)

    def _read_fast(self, index: Any, known: dict[Any, Any], *taking: Taking) -> Batch:
        """Reads chosen items, in one native call if possible, and finishes the batch."""
        plan = self._parts.plan
        batch = None if plan.fast is None or plan.transforms else plan.fast.read(index, known)
        return self.read(index, known, *taking) if batch is None else batch

    def finish(self, data: Any, info: dict[str, Any]) -> Batch:
        """Collates items, assembles the sample units, and applies the transforms."""
        data = self._parts.collate(data)
        if (unit := self._parts.plan.unit) is not None:
            data, info = unit.assemble(data, info)
        return self._passed_on(data, info)

    def _passed_on(self, data: Any, info: dict[str, Any]) -> Batch:
        """Relabels goals in a collated batch, applies the transforms, and pins the memory.

        Each of these steps is skipped if the buffer does not use it.
        """
        parts = self._parts
        if parts.goals is not None:
            data = parts.goals.relabelled(data, info)
        if parts.transform.transforms:
            data = parts.transform(data)
        if parts.pin_memory:
            return pinned.pin(data), pinned.pin(info)
        return data, info

    def _with_entries(
        self, include_info: bool | None, out: TensorDict | None, batch: Batch
    ) -> Batch:
        """Returns the batch with index and weights as entries, if its data are a TensorDict."""
        if out is not None:
            raise ValueError(NO_OUT)  # the batch was not read into the tensors of ``out``
        data, info = batch
        if self._parts.mapping == "dict":
            return batch
        if include_info is False:
            return without_info(data, info), info
        if not has_info(data, info):
            data = with_info(data, info, stack_dim=stack_dim_of(self._parts.storage))
        return data, info

    # -- special cases of a step ---------------------------------------------------------------

    def _refill(self, plan: Plan, out: TensorDict, count: int) -> Batch | None:
        """Samples a batch into the tensors of ``out``.

        Returns None if this would require more than one native call.
        """
        fast: Any = plan.fast_read
        found: Batch | None = fast.refill(out, count)
        if found is not None or fast.reader is None:
            return found
        index, known = self.choose(count)  # the frames before each item are read with the item
        for _ in range(ATTEMPTS):
            found = fast.refill_chosen(out, count, index, known)
            if found is not None:
                return found
            index, known = self.choose_again(known.get(ANCHORS, index))
        raise written_over(plan)

    # -- sizes, passes -------------------------------------------------------------------------

    def count(self, batch_size: int | None) -> int:
        """Returns the number of items to sample.

        Issues a warning if it differs from the constructor's batch size. Raises RuntimeError if no
        batch size was specified.
        """
        own = self._parts.batch_size
        return resolve_batch_size(batch_size, own, "the constructor of the buffer", 3 + FRAMES)

    def can_sample(self, batch_size: int | None) -> bool:
        """True if a batch could be sampled now without waiting; see `ReplayBuffer.can_sample`."""
        batch_size = self._parts.batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise RuntimeError(
                "batch_size was not specified. Pass it to can_sample or to the constructor of the "
                "buffer"
            )
        count = as_int("batch_size", batch_size)
        parts, limits = self._parts, self._parts.planned().limits
        if not limits.admits(count):
            return False
        is_queue = limits.ring is not None and limits.ring.admission.is_queue
        return is_queue or bool(parts.sampler.can_sample(parts.storage, count))

    def batches(self, sample: Callable[[], Any]) -> Iterator[Any]:
        """Yields batches from ``sample`` until the end of the sampler's pass.

        With a consumer, the iteration ends when all items were delivered and no writer is attached.
        """
        if self._passes.ran_out:
            self._passes.ran_out = False
        delivered = False
        while not self._passes.ran_out:
            try:
                batch = sample()
            except EmptyBufferError:
                if delivered and consumes(self._parts.sampler):
                    return  # the consumer has received every item, and no writer is attached
                raise
            delivered = True
            yield batch

    @property
    def _passes(self) -> Any:
        """The prefetcher or the sampler, whichever records the end of the delivered pass.

        It can be replaced while an iteration is in progress.
        """
        prefetcher = self._parts.prefetcher
        return self._parts.sampler if prefetcher is None else prefetcher

"""Samples batches: chooses items, reads them, and finishes the batch.

             ┌────────────── FastRead.sample ──────────────┐      all in one native call
    sample ──┤  choose ───────▶ read ─────────▶ finish     ├──▶ batch
             │  sampler, unit   FastRead.read   collate_fn, transforms, pinned memory, entries
             └─ a queue ──────▶ taken ────────▶ finish ────┘

The call first waits for the rate limiter and for ``min_size``. With ``prefetch``, items are chosen
when a batch is ordered, and a thread reads and finishes the batch. The plan defines which steps run
in one native call. If a step cannot take its shortest path, it takes the next longer one.
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
    """Implements the sampling of a buffer."""

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
        """Waits until sampling is allowed, then chooses, reads and finishes the items."""
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
                batch = None if batch is None else self._shown(None, None, batch)
            if batch is not None:
                return batch
        if min_size is not None or timeout is not None:
            ring_backed(parts.storage, "min_size and timeout need")
        draw = delivering(parts.sampler, lease, partial(self._next, include_info, out))

        def oldest(ring: Ring, count: int) -> Batch | None:
            found = take_batch(parts.planned(), ring, count)
            return None if found is None else self._shown(include_info, out, self.finish(*found))

        return parts.planned().limits.in_turn(count, min_size, timeout, draw, oldest)

    def _next(
        self, include_info: bool | None, out: TensorDict | None, count: int, *taking: Taking
    ) -> Batch:
        """Returns the next batch without waiting: prefetched, written into ``out``, or new."""
        parts, plan = self._parts, self._parts.planned()
        if out is not None:
            found = None
            if plan.fast_read is not None and include_info is None and not plan.transforms:
                found = self._refilled(plan, out, count)
            if found is not None:
                return found
            if not (plan.payload is None and isinstance(parts.storage, TensorStorage)):
                # Before the first write, `sample` raises this error itself.
                raise ValueError(NO_OUT)
        if parts.prefetcher is not None and count == parts.batch_size:
            return self._shown(include_info, None, parts.prefetcher.next(self.order))
        return self._shown(include_info, None, self._begin(count, False, *taking)())

    def order(self, at_once: bool) -> Order:
        """Chooses the items of the next batch in advance, and reads them unless a thread does."""
        parts = self._parts
        assert parts.batch_size is not None
        with parts.planned().choosing():
            before = parts.draws()
            make = self._begin(parts.batch_size, not at_once)
            return Order(make, parts.sampler.ran_out, before)

    # -- the three steps -----------------------------------------------------------------------

    def _begin(self, count: int, is_for_thread: bool, *taking: Taking) -> Callable[[], Batch]:
        """Chooses the items of a batch and returns a function that reads and finishes the batch.

        Only samplers with a consumer receive the argument ``taking``.
        """
        plan = self._parts.plan
        if is_for_thread or not plan.draws:
            return partial(self._made, *self.choose(count, *taking), *taking)
        whole = None if plan.fast is None or plan.transforms else plan.fast.sample(count)
        if whole is not None:
            return partial(tuple, whole)
        return partial(self.finish, *drawn(plan, count, pins=self._parts.pin_memory))

    def choose(self, count: int, *taking: Taking) -> Choice:
        """Chooses items according to the plan that the caller has read."""
        plan = self._parts.plan
        return self._completed(plan, plan.sampler.sample(plan.storage, count, *taking), taking)

    def choose_again(self, index: Any, *taking: Taking) -> Choice:
        """Chooses items again, because chosen items were overwritten before they were read."""
        plan = self._parts.plan
        return self._completed(plan, plan.sampler._again(plan.storage, index, *taking), taking)

    def _completed(self, plan: Plan, choice: Choice, taking: tuple[Taking, ...]) -> Choice:
        """Returns the choice of a sampler, extended with the items of its unit or with goals."""
        goals = self._parts.goals
        if goals is None:
            return expanded(plan, *choice)
        return goals.with_goals(plan, *choice, *taking)  # type: ignore[no-any-return]

    def read(self, index: Any, known: dict[Any, Any], *taking: Taking) -> Batch:
        """Reads chosen items step by step and finishes the batch."""
        plan = self._parts.planned()
        with pinned.gathering(self._parts.pin_memory):
            data, info = chosen(plan, index, known, lambda drawn: self.choose_again(drawn, *taking))
        if plan.reader is not None:
            return self._passed_on(data, plan.reader.of_anchors(info))
        return self.finish(data, info)

    def _made(self, index: Any, known: dict[Any, Any], *taking: Taking) -> Batch:
        """Reads chosen items in one native call if possible, and finishes the batch."""
        plan = self._parts.plan
        whole = None if plan.fast is None or plan.transforms else plan.fast.read(index, known)
        return self.read(index, known, *taking) if whole is None else whole

    def finish(self, data: Any, info: dict[str, Any]) -> Batch:
        """Collates, assembles and transforms the items, and adds the entries of the sample."""
        data = self._parts.collate(data)
        if (unit := self._parts.plan.unit) is not None:
            data, info = unit.assemble(data, info)
        return self._passed_on(data, info)

    def _passed_on(self, data: Any, info: dict[str, Any]) -> Batch:
        """Adds goals to a collated batch, transforms it and copies it to pinned memory."""
        parts = self._parts
        if parts.goals is not None:
            data = parts.goals.relabelled(data, info)
        if parts.transform.transforms:
            data = parts.transform(data)
        if parts.pin_memory:
            return pinned.pin(data), pinned.pin(info)
        return data, info

    def _shown(self, include_info: bool | None, out: TensorDict | None, batch: Batch) -> Batch:
        """Returns the batch as `sample` does, with index and weights in a TensorDict."""
        if out is not None:
            raise ValueError(NO_OUT)  # the tensors of the batch are not those of ``out``
        data, info = batch
        if self._parts.mapping == "dict":
            return batch
        if include_info is False:
            return without_info(data, info), info
        if not has_info(data, info):
            data = with_info(data, info, stack_dim=stack_dim_of(self._parts.storage))
        return data, info

    # -- special cases of a step ---------------------------------------------------------------

    def _refilled(self, plan: Plan, out: TensorDict, count: int) -> Batch | None:
        """Samples into the tensors of ``out``; None if that needs more than one native call."""
        fast: Any = plan.fast_read
        found: Batch | None = fast.refill(out, count)
        if found is not None or fast.reader is None:
            return found
        index, known = self.choose(count)  # steps, whose frame stacks are read later
        for _ in range(ATTEMPTS):
            found = fast.refill_chosen(out, count, index, known)
            if found is not None:
                return found
            index, known = self.choose_again(known.get(ANCHORS, index))
        raise written_over(plan)

    # -- sizes, passes -------------------------------------------------------------------------

    def count(self, batch_size: int | None) -> int:
        """Returns the number of items to sample; warns if it differs from the constructor's."""
        own = self._parts.batch_size
        return resolve_batch_size(batch_size, own, "the constructor of the buffer", 3 + FRAMES)

    def can_sample(self, batch_size: int | None) -> bool:
        """True if a batch could be sampled now without waiting."""
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
        """Yields samples until the end of the pass."""
        if self._passes.ran_out:
            self._passes.ran_out = False
        delivered = False
        while not self._passes.ran_out:
            try:
                batch = sample()
            except EmptyBufferError:
                if delivered and consumes(self._parts.sampler):
                    return  # the consumer has received every item, and no writer is open
                raise
            delivered = True
            yield batch

    @property
    def _passes(self) -> Any:
        """Returns the part that signals the end of a pass; it can be replaced between calls."""
        prefetcher = self._parts.prefetcher
        return self._parts.sampler if prefetcher is None else prefetcher

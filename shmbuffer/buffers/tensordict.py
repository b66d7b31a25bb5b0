"""Buffers of TensorDicts, whose samples have their index and weights as entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shmbuffer.buffers.data_path import priority_entry
from shmbuffer.buffers.data_path.drawing import written_over
from shmbuffer.buffers.data_path.fast_read import NO_OUT, FastRead
from shmbuffer.buffers.data_path.prefetch import Batch
from shmbuffer.buffers.data_path.sample_info import (
    ANCHORS,
    has_info,
    stack_dim_of,
    stacks_items,
    with_info,
    without_info,
)
from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.items.batches import one_of_each
from shmbuffer.items.keys import GENERATION, INDEX, OWN_KEYS
from shmbuffer.items.mismatch import no_names
from shmbuffer.items.raw_priorities import check_raw, reduced
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.samplers import PrioritizedSampler, PriorityUpdate
from shmbuffer.samplers.sampler import ATTEMPTS, lanes_of
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form.batches import as_tensordict
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.writers import TensorDictRoundRobinWriter


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for TensorDicts: samples have their index, data may have a priority.

    A priority in ``data[priority_key]`` becomes the item's, in the same write.

    A dict of tensors or numpy arrays (nested, or with tuple keys) is written like the TensorDict
    with these entries, and faster. Numbers, lists of them and arrays of other libraries (JAX) are
    converted. A plain number takes the dtype of its leaf if that can hold it; other differences of
    dtype are errors.

    A sample has these entries, which are never stored. If an item has a batch size of its own, they
    are expanded to it.

    | key | shape, dtype | when |
    |---|---|---|
    | ``"index"`` | ``[n]`` int64, or ``[n, ndim]`` | always |
    | ``"_weight"``, ``"priority_weight"`` | ``[n]`` float32, one tensor | prioritized |
    | ``"index_generation"`` | ``[n]`` int64 | shared, or the writer tracks generations |

    Args:
        priority_key: entry of the data and of samples that holds priorities.
        **kwargs: see `ReplayBuffer`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> rb.extend(TensorDict({"obs": torch.arange(3)}, [3]))
        tensor([0, 1, 2])
        >>> sorted(rb.sample().keys())
        ['index', 'obs']

    Source: ``torchrl.data.TensorDictReplayBuffer``.
    """

    family = "TensorDictReplayBuffer"
    default_writer = TensorDictRoundRobinWriter
    _mapping = "tensordict"
    _priority_key: str | tuple[str, ...]
    _said_what_is_missing = False  # warned of a sample without priorities

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **kwargs: Any) -> None:
        self._priority_key = priority_key
        super().__init__(**kwargs)

    @property
    def priority_key(self) -> str | tuple[str, ...]:
        """Entry that holds priorities."""
        return self._priority_key

    @priority_key.setter
    def priority_key(self, key: str | tuple[str, ...]) -> None:
        self._priority_key = key
        self._join()

    # -- writing -------------------------------------------------------------------------------

    @eager
    def extend(
        self,
        tensordicts: Any,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> torch.Tensor:
        """Write a batch: whole or not at all.

        Priorities in ``tensordicts[priority_key]`` become the items', in the same native call.

        Args:
            tensordicts: a TensorDict ``[n, *lanes]``, a dict, or a list of TensorDicts.
            update_priority: False ignores priorities in the data: items get the default one.
            timeout: see `ReplayBuffer.extend`.
            streams: see there.
            stream_dim: see there.

        Returns and raises as `ReplayBuffer.extend`; a tuple is a TypeError, too.
        """
        if streams is not None or stream_dim is not None:
            return self._in_streams(  # type: ignore[no-any-return]
                tensordicts, False, streams, stream_dim, update_priority, timeout
            )
        if timeout is None and update_priority is None:
            plan = self._plan
            if plan.fast_write is not None and not plan.transforms:
                index = plan.fast_write.write(tensordicts, False)
                if index is not None:
                    return index  # type: ignore[no-any-return]
        return self._written(tensordicts, False, update_priority, timeout)  # type: ignore[no-any-return]

    # -- sampling ------------------------------------------------------------------------------

    @eager
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: TensorDict | None = None,
        min_size: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: see `ReplayBuffer.sample`.
            return_info: see there.
            include_info: False leaves index and weights out of the sample; they are in ``info``.
            out: a sample that is no longer needed: its tensors are filled again, other entries are
                dropped. Any TensorDict ``[batch_size]`` will do.
            min_size: see there.
            timeout: see there.
            lease: see there.

        Returns:
            A TensorDict ``[batch_size]`` with the entries of the class's table; ``out``, if given.
            For tensorclasses, and items of your own storage that are no TensorDicts, index and
            weights are in ``info`` only.

        Raises:
            EmptyBufferError, RateLimitTimeout, RateLimitError: see there.
            RuntimeError: no batch size, or a transform has changed it, so that index and weights do
                not fit (then take them from ``return_info=True``).
            TypeError: ``out`` is no TensorDict.
            ValueError: ``out`` has another batch size, or the sample takes more than one native
                call: ``out`` works for TensorDicts of tensors of one shape in the ring's own
                memory, one storage dimension, and no ``include_info=False``, ``sample_unit`` (but a
                `FrameStack`), ``collate_fn``, transform, ``pin_memory`` or ``prefetch``.

        Cost: one native call; 0.4 µs a leaf for new tensors, nothing with ``out``.
        """
        count = self._batch_size if batch_size is None else None
        if count is None:
            count = self._count(batch_size)
        plan, found = self._plan, None
        fast = plan.fast
        if (
            fast is not None
            and out is None
            and include_info is None
            and not plan.transforms
            and not plan.limiter_version[0]
            and min_size is None
            and timeout is None
            and lease is None
        ):
            if plan.fast_read is not None:
                found = fast.sample(count)
            elif plan.draws and count == self._batch_size and plan.prefetcher is not None:
                found = plan.prefetcher.next_of_one_call(fast.sample, count)
                if found is not None and not has_info(*found):
                    found = self._shown(None, None, found)
        if found is None:
            draw = self._delivering(lease, partial(self._sampled, include_info, out))
            shown = partial(self._shown, include_info, out)
            found = self._in_turn(count, min_size, timeout, draw, shown)
        return found if return_info else found[0]

    def _sampled(self, include_info: bool | None, out: TensorDict | None, count: int) -> Batch:
        """`sample`, now."""
        plan = self._planned()
        if out is not None:
            if plan.fast_read is not None and include_info is None and not plan.transforms:
                found = plan.fast_read.refill(out, count)
                if found is None and plan.fast_read.reader is not None:
                    found = self._refilled(plan.fast_read, out, count)
                if found is not None:
                    return found
            if not (plan.payload is None and isinstance(self._storage, TensorStorage)):
                raise ValueError(NO_OUT)
        return self._shown(include_info, None, self._next(count))

    def _refilled(self, fast: FastRead, out: TensorDict, count: int) -> Batch:
        """`sample` into ``out``, of steps that are drawn before their stacks are read."""
        index, known = self._choose(count)
        for _ in range(ATTEMPTS):
            found = fast.refill_chosen(out, count, index, known)
            if found is not None:
                return found
            index, known = self._choose_again(known.get(ANCHORS, index))
        raise written_over(self._plan)

    def _draw_batch(self, count: int) -> Callable[[], Batch]:
        """See `Sampling._draw_batch`; the batch may have its index and weights already."""
        plan = self._plan
        if plan.transforms or plan.fast is None:
            return super()._draw_batch(count)
        if plan.draws:
            whole = plan.fast.sample(count)
            return super()._draw_batch(count) if whole is None else partial(tuple, whole)
        chosen = self._choose(count)
        read = plan.fast.read(*chosen)
        return partial(self._gathered, *chosen) if read is None else partial(tuple, read)

    def _shown(self, include_info: bool | None, out: TensorDict | None, batch: Batch) -> Batch:
        """A batch as `sample` gives it."""
        if out is not None:
            raise ValueError(NO_OUT)
        data, info = batch
        if include_info is False:
            data = without_info(data, info)
        elif not has_info(data, info):
            data = with_info(data, info, stack_dim=stack_dim_of(self._storage))
        return data, info

    @eager
    def update_tensordict_priority(self, data: TensorDictBase) -> PriorityUpdate:
        """Set the priorities of a sample from its entry ``priority_key``.

        With ``"index_generation"``, items that were overwritten since are left alone and counted.
        Without an entry ``priority_key`` the items get the default priority, as in TorchRL, and one
        warning is given.

        Args:
            data: a sample, or part of one: entries ``"index"`` and ``priority_key``. Several
                priorities of an item (a stored trajectory) are reduced by the sampler's
                ``reduction``; those of a window go to the item that was drawn, see `Sequence`.

        Returns:
            How many were applied and how many were stale; zeros if the sampler has no priorities.

        Raises:
            KeyError: no entry ``"index"``.
            ValueError: NaN, infinite or negative; nothing was changed.

        Cost: one native call.
        """
        updates = self._plan.updates
        if updates is not None and type(data) is TensorDict:
            get = data._tensordict.get
            found = updates.update_given(get(INDEX), get(self._priority_key), get(GENERATION))
            if found is not None:
                return found
        return self._update_by_sample(data)

    # -- inside --------------------------------------------------------------------------------

    def _update_by_sample(self, data: Any) -> PriorityUpdate:
        """See `update_tensordict_priority`."""
        key, sampler, storage = self._priority_key, self._sampler, self._storage
        if not isinstance(sampler, PrioritizedSampler):
            return PriorityUpdate(0, 0)
        given = data
        lanes: tuple[int, ...] = () if storage.ndim == 1 else lanes_of(storage)
        if self._plan.unit is not None:
            data = self._plan.unit._by_anchor(data, key, sampler.reduction, lanes)
        if stacks_items(data, stack_dim_of(storage)):
            data = priority_entry.of_items(data, key, sampler.reduction)
        entries = data._tensordict if type(data) is TensorDict else data
        index = entries.get(INDEX, None)
        if index is None:
            raise priority_entry.no_index(data)
        priority = entries.get(key, None) if type(key) is str else data.get(key, None)
        generation = entries.get(GENERATION, None)
        if lanes:
            count = index.numel() // index.shape[-1]
        else:
            index = index if index.dim() < 2 else priority_entry.one_each(index)
            count = index.numel()
        if generation is not None and generation.dim() > 1:
            generation = priority_entry.one_each(generation)
        raw: Any = priority
        if priority is None:
            if not self._said_what_is_missing:
                self._said_what_is_missing = True
                priority_entry.say_what_is_missing(key, given)
            raw = sampler.default_priority
        elif not (isinstance(priority, torch.Tensor) and priority.numel() == count):
            raw = reduced(priority, count, sampler.reduction)
        return sampler.update_priority(index, raw, storage=storage, generation=generation)

    def _named(self, data: Any, single: bool) -> Any:
        """Dicts as TensorDicts, for transforms and storages that do not take them apart."""
        rows = isinstance(self._storage, TensorStorage)
        if is_collection(data) or (rows and not self._plan.transforms):
            return data
        if isinstance(data, list) and not single:
            if rows or all(map(is_collection, one_of_each(data))):
                return data
            return [self._named(item, True) for item in data]
        if isinstance(data, tuple) and not rows:
            raise TypeError(no_names(data))
        if not isinstance(data, Mapping):
            return data
        return as_tensordict(data, self._storage.ndim - single)

    def _join(self) -> None:
        storage = self._storage
        if isinstance(storage, TensorStorage):
            key = self._priority_key
            extra = [name for name in (key, self._weight_key) if isinstance(name, str)]
            storage.allow(OWN_KEYS.union(extra))
        super()._join()

    def _priorities_in(self, data: Any, single: bool) -> Floats | None:
        """Raw priorities in the data, float64 ``[n * lanes]``; None if there are none."""
        sampler = self._sampler
        if not isinstance(sampler, PrioritizedSampler):
            return None
        storage, key = self._storage, self._priority_key
        rows = isinstance(storage, TensorStorage)
        if not (single or rows) and isinstance(data, (list, LazyStackedTensorDict)):
            items = data if isinstance(data, list) else list(data.unbind(0))
            raw = priority_entry.in_items(items, key, sampler.reduction)
        else:
            dims = storage.ndim - 1 if single else storage.ndim
            raw = priority_entry.in_batch(data, key, dims, sampler.reduction)
        plan = self._plan
        if raw is not None and not (rows and plan.payload is not None and plan.gives_priorities):
            check_raw(raw)  # before anything is made or written
        return raw

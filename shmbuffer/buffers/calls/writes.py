"""Writes data that must be converted or transformed, or that has priorities or streams.

extend ──▶ FastWrite.write ──▶ index
└─ None ──▶ Writes.write ──▶ named ──▶ stacked, transformed ──▶ FastWrite.write
└─▶ storage.append, or writer ──▶ storage.set
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict
from torch.utils._pytree import tree_flatten, tree_unflatten

from shmbuffer.buffers.data_path import priority_entry
from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.items.form.batches import one_of_each
from shmbuffer.items.form.mismatch import no_names
from shmbuffer.items.raw_priorities import check_raw
from shmbuffer.items.stream_numbers import require_rows, steps_and_streams
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.format.streams import GivenStreams, Streams, check_streams, expand_streams
from shmbuffer.memory.system import deadline
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_batches import as_tensordict, stack, swap_dims
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.writers.round_robin import length_of


class Writes:
    """Implements ``add`` and ``extend`` for data that `FastWrite` does not accept unchanged."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def write(
        self,
        data: Any,
        single: bool,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> Any:
        """Writes a batch or an item that the fast path could not write.

        Args:
            data: the batch or the item.
            single: True for an item, False for a batch.
            update_priority: False ignores priorities in the data.
            timeout: see `ReplayBuffer.add`.
            streams: see `ReplayBuffer.extend`.
            stream_dim: see `ReplayBuffer.extend`.

        Returns:
            The index of the items.
        """
        parts = self._parts
        if stream_dim is not None:
            if streams is not None:
                raise TypeError("streams and stream_dim cannot be combined; pass one of them")
            items, streams, lead = _flatten_steps(data, stream_dim, parts.storage.ndim)
            index = self.write(items, single, update_priority, timeout, streams)
            return _unflatten_index(index, lead, stream_dim)
        if streams is not None:
            streams = _checked_streams(streams, parts)
        if timeout is None:
            return self._write(data, single, update_priority, streams, is_new=streams is not None)
        with deadline.limit_waits(timeout):
            return self._write(data, single, update_priority, streams, is_new=True)

    def _write(
        self,
        data: Any,
        single: bool,
        update_priority: bool | None,
        streams: GivenStreams,
        *,
        is_new: bool,  # True if the fast path has not been tried with these arguments
    ) -> Any:
        if data is None:
            call, what = "add", "an item"
            if not single:
                call, what = "extend", "a batch (an empty list writes nothing)"
            raise TypeError(
                f"{self._parts.family}.{call}(None): there is nothing to write; pass {what}, or do "
                f"not call {call}()"
            )
        plan = self._parts.plan
        if plan.rewrites or plan.transforms or type(data) is list:
            data, is_new = self._prepare(self._as_tensordicts(data, single), single), True
        if data is None:  # a transform keeps all items back, or the list is empty
            ndim = self._parts.storage.ndim
            return cpu.zeros((0,) if ndim == 1 else (0, ndim), dtype=torch.int64)
        if is_new and plan.fast_write is not None and update_priority is None:
            index = plan.fast_write.write(data, single, streams)
            if index is not None:
                return index
        priorities = None if update_priority is False else self._priorities_in(data, single)
        return self._store(data, single, priorities, streams)

    def _as_tensordicts(self, data: Any, single: bool) -> Any:
        """Converts dicts to TensorDicts if a transform or the storage requires TensorDicts.

        Raises TypeError for a tuple if the items of the storage must have keys.
        """
        storage = self._parts.storage
        rows = isinstance(storage, TensorStorage)
        if self._parts.mapping == "dict" or is_collection(data):
            return data
        if rows and not self._parts.plan.transforms:
            return data
        if isinstance(data, list) and not single:
            if rows or all(map(is_collection, one_of_each(data))):
                return data
            return [self._as_tensordicts(item, True) for item in data]
        if isinstance(data, tuple) and not rows:
            raise TypeError(no_names(data))
        if not isinstance(data, Mapping):
            return data
        return as_tensordict(data, storage.ndim - single)

    def _prepare(self, data: Any, single: bool) -> Any:
        """Stacks and transforms new data, and moves `dim_extend` to the front.

        Returns None if there is nothing to write, because the list is empty or a transform keeps
        all items back.
        """
        parts, plan = self._parts, self._parts.plan
        if single:
            return self._inverted(data) if plan.transforms else data
        if type(data) is list and isinstance(parts.storage, TensorStorage):
            if not data:
                return None
            # Transforms, and writers from other packages, must receive tensors.
            seen = not plan.appends or bool(plan.transforms or parts.dim_extend)
            data = stack(data, parts.mapping, tensors=seen)
        if plan.transforms:
            data = parts.transform.inv(data)
        if parts.dim_extend and data is not None:
            data = swap_dims(data, parts.dim_extend)
        return data

    def _inverted(self, item: Any) -> Any:
        """Applies the inverse transforms to a new item.

        The transforms receive the item with an additional batch dimension of size 1.
        """
        inverse = self._parts.transform.inv
        if not is_collection(item):
            return inverse(item)
        with item.unsqueeze(-1) as batch:
            found = inverse(batch)
            return None if found is None else found.squeeze(-1)

    def _priorities_in(self, data: Any, single: bool) -> Floats | None:
        """Returns the raw priorities in the data, float64 ``[n * lanes]``.

        Returns None if the data have no priorities or the sampler does not use them.
        """
        sampler, key = self._parts.sampler, self._parts.priority_key
        if key is None or not isinstance(sampler, PrioritizedSampler):
            return None
        storage, plan = self._parts.storage, self._parts.plan
        rows = isinstance(storage, TensorStorage)
        if not (single or rows) and isinstance(data, (list, LazyStackedTensorDict)):
            items = data if isinstance(data, list) else list(data.unbind(0))
            raw = priority_entry.in_items(items, key, sampler.reduction)
        else:
            dims = storage.ndim - 1 if single else storage.ndim
            raw = priority_entry.in_batch(data, key, dims, sampler.reduction)
        if raw is not None and not (rows and plan.payload is not None and plan.gives_priorities):
            check_raw(raw)  # before anything is created or written
        return raw

    def _store(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams
    ) -> Any:
        parts, plan = self._parts, self._parts.planned()
        storage, sampler = plan.ring_backed, parts.sampler
        if storage is None or not plan.appends:
            index = (parts.writer.add if single else parts.writer.extend)(data)
            if index is not None:
                (sampler.add if single else sampler.extend)(index)
                if priorities is not None:
                    sampler.update_priority(index, priorities, storage=parts.storage)
            return index
        if plan.payload is None:  # creates the ring first, so that the write can set priorities
            data = data if single or not isinstance(data, Iterator) else list(data)
            if not isinstance(streams, int | None):  # checks their number before the ring exists
                expand_streams(streams, 1 if single else length_of(data))
            storage.prepare(data, single)
            plan = parts.planned()
        written_priorities = priorities if plan.gives_priorities else None
        # A custom storage may not have this parameter, so it is only passed if necessary.
        known: tuple[Any, ...] = () if streams is None else (streams,)
        first, count = storage.append(data, single, written_priorities, *known)
        index = storage.written(first, count, single=single)
        if (plan.payload is None or written_priorities is not None) and parts.planned() is not plan:
            written_priorities = None  # the write has created a new ring without the priorities
        if plan.tells_sampler:
            (sampler.add if single else sampler.extend)(index)
        if written_priorities is not priorities:
            sampler.update_priority(index, priorities, storage=storage)
        return index


def _checked_streams(streams: Any, parts: Parts) -> int | Streams:
    """Converts and checks the user's argument ``streams``.

    Raises TypeError if the items in the buffer have no streams.
    """
    found, storage = check_streams(streams), parts.storage
    if not parts.plan.appends or not isinstance(storage, RingBacked):
        raise TypeError(
            f"streams: a {type(storage).__name__} with a {type(parts.writer).__name__} keeps no "
            "streams, because only items that a RoundRobinWriter appends to a storage of this "
            "package have a stream. Nothing was written. Write without streams, or use such a "
            "storage and writer"
        )
    require_rows(found, storage.ndim)
    return found


def _flatten_steps(data: Any, dim: int, ndim: int) -> tuple[Any, Streams, tuple[int, int]]:
    """Flattens data of several streams step by step.

    Args:
        data: a tensor, a TensorDict or a PyTree with the dimensions of steps and streams first.
        dim: dimension of the streams, 0 or 1.
        ndim: number of dimensions of the storage.

    Returns:
        The items, ``[T * streams, ...]``. The stream of each item. The sizes ``(T, streams)``.
    """
    leaves, form = tree_flatten(data, is_leaf=is_collection)
    lead, streams = steps_and_streams([tuple(_lead(leaf)) for leaf in leaves], dim, ndim)
    if dim == 0:
        leaves = [
            leaf.transpose(0, 1) if _is_torch(leaf) else leaf.swapaxes(0, 1) for leaf in leaves
        ]
    items = [_flat(leaf) for leaf in leaves]
    return tree_unflatten(items, form), streams, lead


def _unflatten_index(index: torch.Tensor, lead: tuple[int, int], dim: int) -> torch.Tensor:
    """Reshapes the index of flattened items to the dimensions that `_flatten_steps` removed.

    Args:
        index: index of the written items.
        lead: numbers of steps and streams.
        dim: dimension of the streams in the data, 0 or 1.
    """
    if index.numel() != lead[0] * lead[1]:
        return index  # a transform has kept some items back, so the index cannot be reshaped
    shaped = index.view(lead)
    return shaped.t() if dim == 0 else shaped


def _is_torch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or is_collection(leaf)


def _lead(leaf: Any) -> Any:
    return (leaf.batch_size if is_collection(leaf) else np.shape(leaf))[:2]


def _flat(leaf: Any) -> Any:
    if is_collection(leaf):
        return leaf.reshape(leaf.batch_size[:2].numel(), *leaf.batch_size[2:])
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])

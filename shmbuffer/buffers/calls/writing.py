"""Writes of data that the fast way does not accept as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shmbuffer.buffers.calls.access import swap_dims
from shmbuffer.buffers.data_path import streams as by_stream
from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.format.streams import GivenStreams, of_each
from shmbuffer.memory.system import deadline
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.batches import stack
from shmbuffer.tensors.form.nodes import is_collection
from shmbuffer.writers.round_robin import length_of


class Writing(Parts):
    """Writes data."""

    if TYPE_CHECKING:
        add: Any
        extend: Any

    def _written(
        self,
        data: Any,
        single: bool,
        update_priority: bool | None,
        timeout: float | None,
        streams: GivenStreams = None,
    ) -> Any:
        """`add` or `extend`, after the fast way."""
        if timeout is not None:
            given: dict[str, Any] = {} if streams is None else {"streams": streams}
            if update_priority is not None:
                given["update_priority"] = update_priority
            with deadline.within(timeout):
                return (self.add if single else self.extend)(data, **given)
        if data is None:
            call, what = "add", "an item"
            if not single:
                call, what = "extend", "a batch (an empty list writes nothing)"
            raise TypeError(
                f"{type(self).__name__}.{call}(None): there is nothing to write; give it {what}, "
                "or leave the call out"
            )
        plan = self._plan
        changed = plan.rewrites or plan.transforms or type(data) is list
        if changed:
            data = self._taken_in(self._named(data, single), single)
        if data is None:  # a transform keeps all back, or the list is empty
            ndim = self._storage.ndim
            return cpu.zeros((0,) if ndim == 1 else (0, ndim), dtype=torch.int64)
        if plan.fast_write is not None and update_priority is None:
            index = plan.fast_write.write(data, single, streams) if changed else None
            if index is not None:
                return index
        priorities = None if update_priority is False else self._priorities_in(data, single)
        return self._write(data, single, priorities, streams)

    def _named(self, data: Any, single: bool) -> Any:
        """Data whose entries have names, where transforms and the storage want them."""
        return data

    def _taken_in(self, data: Any, single: bool) -> Any:
        """Data for the storage: stacked, transformed, the right dimension first."""
        plan = self._plan
        if single:
            return self._inverted(data) if plan.transforms else data
        if type(data) is list and isinstance(self._storage, TensorStorage):
            if not data:
                return None
            # Transforms and foreign writers get tensors.
            seen = not plan.appends or bool(plan.transforms or self.dim_extend)
            data = stack(data, self._mapping, tensors=seen)
        if plan.transforms:
            data = self._transform.inv(data)
        if self.dim_extend and data is not None:
            data = swap_dims(data, self.dim_extend)
        return data

    def _inverted(self, item: Any) -> Any:
        """Transform one new item, with an additional dimension of size 1."""
        if not is_collection(item):
            return self._transform.inv(item)
        with item.unsqueeze(-1) as batch:
            found = self._transform.inv(batch)
            return None if found is None else found.squeeze(-1)

    def _priorities_in(self, data: Any, single: bool) -> Floats | None:
        """Raw priorities in the data; None if there are none."""
        return None

    def _write(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams
    ) -> Any:
        plan, sampler = self._planned(), self._sampler
        storage = plan.ring_backed
        if storage is not None and plan.appends:
            if plan.payload is None:  # so that priorities go with the write
                data = data if single or not isinstance(data, Iterator) else list(data)
                if not isinstance(streams, int | None):  # before anything is made
                    of_each(streams, 1 if single else length_of(data))
                storage.prepare(data, single)
                plan = self._planned()
            given = priorities if plan.gives_priorities else None
            if streams is None:  # a storage of the user's may know none
                first, count = storage.append(data, single, given)
            else:
                first, count = storage.append(data, single, given, streams)
            index: Any = storage.written(first, count, single=single)
            if (plan.payload is None or given is not None) and self._planned() is not plan:
                given = None  # of another form, or the first of a list: another ring
            if plan.tells_sampler:
                (sampler.add if single else sampler.extend)(index)
            if given is not priorities:
                sampler.update_priority(index, priorities, storage=storage)
            return index
        index = (self._writer.add if single else self._writer.extend)(data)
        if index is not None:
            (sampler.add if single else sampler.extend)(index)
            if priorities is not None:
                sampler.update_priority(index, priorities, storage=self._storage)
        return index

    def _in_streams(
        self,
        data: Any,
        single: bool,
        streams: Any,
        stream_dim: int | None,
        update_priority: bool | None,
        timeout: float | None,
    ) -> Any:
        """`add` or `extend` with streams."""
        if stream_dim is not None:
            if streams is not None:
                raise TypeError("streams and stream_dim exclude each other; give one of them")
            items, streams, lead = by_stream.in_time_order(data, stream_dim, self._storage.ndim)
            index = self._in_streams(items, single, streams, None, update_priority, timeout)
            return by_stream.as_given(index, lead, stream_dim)
        plan = self._plan
        streams = by_stream.taken_in(streams, plan, self._storage, self._writer)
        fast = plan.fast_write
        if fast is not None and timeout is update_priority is None and not plan.transforms:
            index = fast.write(data, single, streams)
            if index is not None:
                return index
        return self._written(data, single, update_priority, timeout, streams)

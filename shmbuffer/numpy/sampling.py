"""Samples items as arrays, and updates their priorities."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmbuffer.items import indices
from shmbuffer.items.form.arrays import named
from shmbuffer.items.form.nodes import entry_of
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.items.limits import take_oldest
from shmbuffer.items.mover import Drawn
from shmbuffer.items.raw_priorities import PriorityUpdate, as_raw, reduced
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.numpy.handle import Handle


class Sampling(Handle):
    """Adds sampling and priority updates to `Handle`."""

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        min_size: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Samples a batch of items.

        Args:
            batch_size: number of items, or None for the default of the handle.
            return_info: if True, return ``(data, info)``.
            min_size: number of items that the buffer must contain before the batch is sampled.
            timeout: seconds to wait for these items and for a `RateLimiter`. With None there is no
                limit.

        Returns:
            A dict of arrays ``[batch_size, ...]`` that also has the entries in the table above. If
            the items are arrays or tuples, the data have the same form, and the index is in
            ``info``. A buffer of records returns a list of items. Those that are dicts have these
            entries.

        Raises:
            EmptyBufferError: the buffer has no items.
            RateLimitTimeout, RateLimitError: more items must be written first.
            RuntimeError: neither the call nor the handle has a batch size.

        Cost: one native call, plus 0.5 µs per leaf to create the arrays.
        """
        count = self._count(batch_size)
        if self._rows is None:
            self._open_rows()
        drawn = self._limits.in_turn(count, min_size, timeout, self._draw, self._oldest)
        rows = self._need()
        data, info = rows.build(drawn[0], (count,)), self._info(*drawn[1:])
        if type(data) is dict:
            data.update(info)
        elif rows.by_item:
            data = [_with_info(item, info, at) for at, item in enumerate(data)]
        return (data, info) if return_info else data

    def update_priority(
        self, index: Any, priority: Any = None, generation: Any = None
    ) -> PriorityUpdate:
        """Sets the priorities of items.

        Args:
            index: the index returned by a sample or a write, or a whole sample, which contains its
                index and generation. A sample of records is a list of items. Indices of -1 are
                ignored.
            priority: ``[n]`` or one number, finite and not negative. If an item has several
                priorities, they are combined by the ``reduction`` of the buffer. With None, the
                priorities are read from the entry `priority_key` of the sample.
            generation: ``index_generation`` of the sample, ``[n]``. If an item has been overwritten
                since then, its priority is not applied and counts as stale. With None, the update
                is applied to the new item in the same place.

        Returns:
            The numbers of applied and stale priorities. Both are 0 if the buffer has no priorities.

        Raises:
            KeyError: the sample has no entry `priority_key`.
            ValueError: a priority is NaN, infinite or negative. Nothing was changed.
            IndexError: an index is out of range, or the indices are a mask or not integers. Nothing
                was changed.

        Cost: one native call.
        """
        if isinstance(index, list) and index and isinstance(index[0], Mapping):
            index = _entries_of(index, self._priority_key)
        is_sample = isinstance(index, Mapping)
        if is_sample:
            index, priority, generation = self._update_of_sample(index, priority, generation)
        elif priority is None:
            raise TypeError("update_priority(index, priority): the priorities are missing")
        ring = self._ring()
        if ring is None or not ring.tree.prioritized:
            return PriorityUpdate(0, 0)
        rows = self._rows or self._need()
        if self._max_priority is None and not self._dim_extend:
            applied = ring.update_arrays(index, priority, generation)
            if applied is not None:
                return PriorityUpdate._make(applied)
        if self._dim_extend and np.ndim(priority) > 1:
            priority = np.asarray(named(priority)[1]).swapaxes(0, self._dim_extend).reshape(-1)
        elements = indices.ravel(index, rows.lanes)
        count = len(elements)
        raw = reduced(priority, count, self._reduction) if is_sample else as_raw(priority, count)
        tickets = None if generation is None else indices.ravel(generation, ())
        try:
            found = PriorityUpdate(*ring.update(elements, raw, tickets))
        except IndexError:  # only then is it worth searching for indices of -1
            written = indices.are_written(elements, rows.lanes)
            if written.all():
                raise
            elements, raw = elements[written], raw[written]
            tickets = None if tickets is None else tickets[written]
            found = PriorityUpdate(*ring.update(elements, raw, tickets))
        if self._max_priority is not None:
            self._max_priority.updated(elements, raw, found.applied)
        return found

    # -- inside ----------------------------------------------------------------------

    def _count(self, batch_size: int | None) -> int:
        return indices.resolve_batch_size(
            batch_size, self._batch_size, "shmbuffer.numpy.attach()", 3
        )

    def _draw(self, count: int) -> Drawn:
        rows = self._need()
        beta = self._beta if rows.ring.tree.prioritized else None
        return rows.sample(count, self._key(), beta)

    def _oldest(self, ring: Ring, count: int) -> Drawn | None:
        """Takes the oldest items from a queue, or returns None if the buffer is not a queue."""
        rows = self._need()

        def read(index: Ints, tickets: Ints) -> Drawn | None:
            found, now, _ = rows.read(index)
            return (found, index, tickets, None) if np.array_equal(now, tickets) else None

        return take_oldest(ring, count, read)

    def _key(self) -> int:
        """Returns 64 random bits as the key of a sample, by default from the operating system."""
        if self._rng is None:
            return int.from_bytes(os.urandom(8), "little")
        return int(self._rng.bit_generator.random_raw())

    def _info(self, index: Ints, tickets: Ints, weights: Any) -> dict[str, Any]:
        """Returns the entries of a sample that are not part of the data."""
        rows = self._need()
        if rows.lanes:
            index = np.stack(indices.unravel(index, rows.lanes), -1)
        info: dict[str, Any] = {INDEX: index}
        if weights is not None:
            for key in self._weight_keys:
                info[key] = weights
        info[GENERATION] = tickets
        return info

    def _update_of_sample(
        self, sample: Mapping[Any, Any], priority: Any, generation: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the index, priorities and generation for an update from a whole sample.

        Priorities or a generation that were passed explicitly take precedence.

        Raises:
            KeyError: the sample lacks its index or its priorities.
        """
        if INDEX not in sample:
            raise KeyError(
                f"update_priority needs the entry {INDEX!r} of a sample, but this dict has "
                f"{sorted(map(str, sample))}"
            )
        if priority is None:
            key = self._priority_key
            priority = None if key is None else entry_of(sample, key)
            if priority is None:
                raise KeyError(
                    f"update_priority: this sample has no entry {key!r}; set it to the new "
                    "priorities, or pass them as the second argument"
                )
        return sample[INDEX], priority, sample.get(GENERATION) if generation is None else generation


def _with_info(item: Any, info: dict[str, Any], at: int) -> Any:
    """Adds row ``at`` of ``info`` to a sampled item if it is a dict, and returns the item."""
    if isinstance(item, dict):
        item.update({key: values[at] for key, values in info.items()})
    return item


def _entries_of(items: list[Any], key: str | tuple[str, ...] | None) -> dict[Any, Any]:
    """Stacks the indices, generations and priorities of sampled items.

    An entry that some of the items lack is left out. ``key`` is the key of the priorities.
    """
    found: dict[Any, Any] = {}
    for name in (INDEX, GENERATION, key):
        column = [None if name is None else entry_of(item, name) for item in items]
        if all(one is not None for one in column):
            found[name] = np.stack([np.asarray(one) for one in column])
    return found

"""Writes arrays to a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items import indices
from shmbuffer.items.form.arrays import named
from shmbuffer.items.form.batches import stack, unbound
from shmbuffer.items.form.kit import ARRAYS
from shmbuffer.items.form.leaves import Leaves, swap
from shmbuffer.items.form.nodes import entry_of
from shmbuffer.items.raw_priorities import check_raw, reduced
from shmbuffer.items.stream_numbers import in_time_order, require_rows
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.format.streams import GivenStreams, check_streams, expand_streams
from shmbuffer.memory.system import deadline
from shmbuffer.numpy.handle import Handle, Rows
from shmbuffer.numpy.rows import ArrayRows


class Writing(Handle):
    """Adds `add` and `extend` to `Handle`."""

    def add(
        self, data: Any, timeout: float | None = None, streams: int | None = None
    ) -> int | Ints:
        """Writes one item ``[*lanes, ...]``.

        Args:
            data: the item.
            timeout: seconds to wait for other clients. With None, 5 s for a slot that another
                process is filling, and no limit for a `RateLimiter`.
            streams: number of the item's stream, as in `extend`.

        Returns:
            The index of the item, an int. If the storage has lanes, an int64 array
            ``[lanes, ndim]``.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or has a different dtype or shape.
                Nothing was changed. A Python number is converted to the dtype of its leaf if the
                dtype can represent the number.
            TypeError: an entry is not an array.
            ValueError: a priority is NaN, infinite or negative. Nothing was changed.
            RingOverrunError: a living writer is still filling the next slot.
            RateLimitTimeout, RateLimitError: items must be sampled first. Nothing was changed.

        Cost: one native call, plus 2 µs per leaf if data must be converted.
        """
        numbers = None if streams is None else check_streams(streams)
        return self._write(data, True, timeout, numbers)  # type: ignore[no-any-return]

    def extend(
        self,
        data: Any,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> Ints:
        """Writes a batch completely or not at all, even if the process is killed during the call.

        If the data have the entry `priority_key`, it contains the priorities of the items.

        Args:
            data: the batch ``[n, *lanes, ...]``, or a list of items. With ``dim_extend``, the items
                are along that dimension of the data.
            timeout: see `add`.
            streams: number of the environment of this handle that generated the items: an int, or
                an array ``[n]`` with one number per item. See `shmbuffer.ReplayBuffer.extend`.
            stream_dim: dimension of the streams in the data and in the index: 0 for
                ``[streams, T, ...]``, 1 for ``[T, streams, ...]``.

        Returns:
            The indices, int64 ``[n]``, or ``[n * lanes, ndim]`` if the storage has lanes.

        Raises:
            The errors of `add`. Also TypeError or ValueError if ``streams`` does not match the
            data. In this case nothing was changed.

        Cost: one native call, plus 2 µs per leaf if data must be converted.
        """
        if stream_dim is not None:
            if streams is not None:
                raise TypeError("streams and stream_dim cannot be combined; pass one of them")
            items, sorted_numbers, lead = in_time_order(data, stream_dim, self._ndim)
            index = self._write(items, False, timeout, sorted_numbers).reshape(lead)
            return index if stream_dim else index.T  # type: ignore[no-any-return]
        numbers = None if streams is None else check_streams(streams)
        if numbers is not None:
            require_rows(numbers, self._ndim)
        return self._write(data, False, timeout, numbers)  # type: ignore[no-any-return]

    # -- inside -----------------------------------------------------------------------

    def _write(self, data: Any, single: bool, timeout: float | None, streams: GivenStreams) -> Any:
        """Writes an item (``single``) or a batch, and returns its index."""
        if timeout is not None:
            with deadline.limit_waits(timeout):
                return self._write(data, single, None, streams)
        rows = self._rows or self._open_rows()
        if type(rows) is ArrayRows and not self._dim_extend:
            index = rows.write_as_it_is(data, single, streams)
            if index is not None:
                return index
        if data is None:
            call, what = ("add", "an item") if single else ("extend", "a batch")
            raise TypeError(
                f"{call}(None): there is nothing to write; pass {what}, or skip the call"
            )
        if type(data) is list and not single:
            if not data:
                return np.zeros((0,) if self._ndim == 1 else (0, self._ndim), np.int64)
            if rows is None or not rows.by_item:
                data = stack(data, self._mapping)
        if rows is not None and not isinstance(rows, ArrayRows):
            items = [data] if single else unbound(data)
            raw = self._priorities_of(rows.ring, items)
            first, count = rows.write(rows.encode(items, single), raw, streams)
        else:
            rows = rows or self._define(data, single, streams)
            raw = self._priorities_in(rows.ring, data, single)
            swapped = 0 if single else self._dim_extend
            first, count = rows.write(data, single, raw, streams, swapped)
        return self._written(rows, first, count, single)

    def _define(self, data: Any, single: bool, streams: GivenStreams) -> ArrayRows:
        """Defines the schema of the buffer from the data of the first write.

        Raises:
            KeyError: the argument ``dtypes`` of ``attach`` contains an unknown leaf.
        """
        swapped = 0 if single else self._dim_extend

        def form(value: Any, path: KeyPath) -> tuple[str, Sequence[int]]:
            value = swap(value, swapped) if swapped else value
            name, shape = ARRAYS.form_of(value, path)
            return self._dtype_of(path, name), shape

        options: dict[str, Any] = {
            "ndim": self._ndim,
            "single": single,
            "mapping": self._mapping,
            "form": form,
        }
        leaves = Leaves.of_data(ARRAYS, data, **options, where=self._engine.where)
        paths = [leaf.path for leaf in leaves.leaves]
        if unknown := sorted(self._dtype_names.keys() - set(paths)):
            raise KeyError(
                f"dtypes: {'.'.join(unknown[0])!r} is not a leaf of this write, which has "
                f"{['.'.join(path) for path in paths]}"
            )
        leaves.allow(self._optional)
        # Raises an error for invalid streams before anything is created.
        expand_streams(streams, leaves.match(data, single, swapped)[2])
        width = max(1, int(np.prod(leaves.lanes, dtype=np.int64)))
        self._engine.define(leaves.schema(-(-self._capacity // width)))
        rows = self._need()
        assert isinstance(rows, ArrayRows)
        return rows

    def _dtype_of(self, path: KeyPath, name: str) -> str:
        """Returns the dtype of a leaf whose arrays have the dtype ``name``.

        It is ``name`` unless the argument ``dtypes`` of ``attach`` contains the leaf.

        Raises:
            SchemaMismatchError: the arrays do not have the dtype that represents the leaf's dtype.
        """
        dtype = self._dtype_names.get(path, name)
        if dtype == name:
            return name
        wanted = DTYPES[dtype]
        if wanted.bits != name:
            bytes_of = dtype if wanted.in_numpy else f"{wanted.bits}, its bytes"
            raise SchemaMismatchError(
                f"the dtype of leaf {'.'.join(path)!r} is {dtype}, but this write has {name}; "
                f"pass arrays of {bytes_of}, or choose another dtype",
                leaf=".".join(path),
                expected=dtype,
                found=name,
            )
        return dtype

    def _priorities_in(self, ring: Ring, data: Any, single: bool) -> Floats | None:
        """Returns the raw priorities in the data, one per element, or None if there are none."""
        key = self._priority_key
        if key is None or not ring.tree.prioritized or not isinstance(data, Mapping):
            return None
        priority = entry_of(data, key)
        if priority is None:
            return None
        array = np.asarray(named(priority)[1])
        if self._dim_extend and not single and array.ndim > self._dim_extend:
            array = array.swapaxes(0, self._dim_extend)
        dims = self._ndim - 1 if single else self._ndim
        count = int(np.prod(array.shape[:dims], dtype=np.int64))
        raw = reduced(array, count, self._reduction)
        check_raw(raw)  # raises an error for invalid priorities before anything is written
        return raw

    def _priorities_of(self, ring: Ring, items: list[Any]) -> Floats | None:
        """Returns the raw priorities of a list of items, or None if an item has no priority."""
        key = self._priority_key
        if key is None or not ring.tree.prioritized:
            return None
        found = [entry_of(item, key) if isinstance(item, Mapping) else None for item in items]
        if any(one is None for one in found):
            return None
        raw = np.array([reduced(one, 1, self._reduction)[0] for one in found])
        check_raw(raw)  # raises an error for invalid priorities before anything is written
        return raw

    def _written(self, rows: Rows, first: int, count: int, single: bool) -> Any:
        """Returns the index of ``count`` written items.

        It is an int for a single item, int64 ``[n]`` for a batch, and int64 ``[n, ndim]`` if the
        storage has lanes. ``first`` is the ticket of the first item.
        """
        capacity, width = rows.ring.capacity, rows.ring.width
        start = first % capacity
        if rows.lanes:
            elements = np.arange(start * width, (start + count) * width) % (capacity * width)
            return np.stack(indices.unravel(elements, rows.lanes), -1)
        return start if single else np.arange(start, start + count) % capacity

"""The fast path for writes: one native call checks and writes a batch.

    data ──▶ write ──▶ one call into the C core ──▶ index
               └─ None ──▶ the same call, after `Leaves.converted_batch`
                              └─ None: the storage writes the data, waits, or raises

The fast path writes the same data as the storage would. Before every call it excludes the cases
that only the storage can handle: new columns, watchers, and priorities that the sampler chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.raw_priorities import as_raw
from shmbuffer.items.rows import intake_form, priority_of
from shmbuffer.memory.format.streams import GivenStreams
from shmbuffer.storages.movers.native_rows import NativeRows
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_nodes import is_collection


class FastWrite:
    """The fast path for writes into the rows of a storage.

    Args:
        storage: the storage. If its rows are replaced, `write` returns None.
        rows: rows of the storage.
        form: description of an item for the C core; see `intake_form`.
        key: key of the entry with priorities. With None, items get the default priority.
    """

    __slots__ = ("_form", "_key", "_of_ring", "_priority", "_rows", "_seat", "_storage", "_tree")

    def __init__(
        self,
        storage: TensorStorage,
        rows: NativeRows,
        form: dict[str, Any],
        key: str | tuple[str, ...] | None,
    ) -> None:
        self._storage, self._rows, self._seat = storage, rows, rows.ring.seat
        self._form, self._tree, self._key = form, form["tree"], key
        self._of_ring = rows.ring.tree
        leaves = rows.leaves
        self._priority = priority_of(
            [leaf.path for leaf in leaves.leaves],
            leaves.optional,
            key if leaves.is_tensordict else None,
        )

    @classmethod
    def into(cls, storage: TensorStorage, key: str | tuple[str, ...] | None) -> FastWrite | None:
        """Creates the fast path for a storage. Returns None if the C core cannot write its rows."""
        rows = storage.mover()
        if not isinstance(rows, NativeRows):
            return None
        how = {"tensors": True, "box": TensorDict, "inside": "_tensordict"}
        form = intake_form(rows.ring, rows.leaves, _examples(rows.leaves), **how)
        return None if form is None else cls(storage, rows, form, key)

    def write(
        self, data: Any, single: bool, streams: GivenStreams = None, converts: bool = True
    ) -> Any:
        """Writes a batch or an item.

        Args:
            data: the batch or the item.
            single: True for an item, False for a batch.
            streams: streams of the items; see `ReplayBuffer.extend`.
            converts: if True, data that the core does not accept are converted first.

        Returns:
            The index of the items. None if nothing was written, because the storage must write the
            data, wait, or raise an exception.
        """
        storage = self._storage
        if storage._mover is not self._rows or storage._watchers or self._of_ring.initial:
            return None
        index: Any
        core: Any
        try:
            core = self._seat.intakes[self._priority]
        except KeyError:
            core = self._seat.intake(self._priority, **self._form)
            if core is None:
                return None
        index = core.add(data, streams) if single else core.extend(data, streams)
        if index is not None:
            if type(index) is not int:  # a tensor with the indices of a batch
                return index
            if index >= 0:
                return index
            self._rows.ring.raise_if_timed_out(index)
        return self._write_converted(data, single, streams) if converts else None

    def _write_converted(self, data: Any, single: bool, streams: GivenStreams) -> Any:
        """Converts data and writes them. Returns None in the same cases as `write`."""
        if data is None or type(data) is list:  # the items in a list must be stacked first
            return None
        key, given = self._key, None
        beside = isinstance(key, str) and not isinstance(self._priority, int)
        if beside and (isinstance(data, Mapping) or is_collection(data)):
            given = data.get(key, None)
            if given is not None and self._priority is None:
                return None
        try:
            plain, count = self._rows.leaves.converted_batch(data, single, self._tree)
        # The storage raises the same exception, unless it can add a column or define a new schema.
        except SchemaMismatchError:
            return None
        if given is not None:
            size = given.numel() if isinstance(given, torch.Tensor) else getattr(given, "size", 0)
            if size != count:
                return None
            plain[self._priority] = as_raw(given, count)
        return self.write(plain, single, streams, converts=False)


def _examples(leaves: Leaves) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a NumPy array, a NumPy scalar and a tensor with the dtype of each leaf.

    The array and the scalar are None if NumPy does not have the dtype.
    """
    for array, dtype in zip(leaves.arrays, leaves.dtypes, strict=True):
        known = (None, None) if array is None else (np.zeros((2, 3), array), array.type())
        yield (*known, cpu.empty((), dtype=dtype))

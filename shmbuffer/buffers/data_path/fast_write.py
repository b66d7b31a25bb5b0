"""The fast path for writes: one native call checks and writes a batch.

    data ──▶ write ──▶ one call of the C core ──▶ index
               └─ None ──▶ the same call, after `Leaves.converted`
                              └─ None: the storage writes it, waits, or raises

The fast path accepts the same data as the storage. Before every call it excludes the cases that
only the storage can handle: new columns, watchers, and priorities that the sampler chooses.
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
    """The fastest path for writes."""

    __slots__ = ("_form", "_key", "_of_ring", "_priority", "_rows", "_seat", "_storage", "_tree")

    def __init__(
        self,
        storage: TensorStorage,  # its rows or watchers may be replaced
        rows: NativeRows,
        form: dict[str, Any],  # form of an item; see `intake_form`
        key: str | tuple[str, ...] | None,  # entry with priorities; None: the default priority
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
        """Returns the fast path into the rows of a storage; None if there is none."""
        rows = storage.mover()
        if not isinstance(rows, NativeRows):
            return None
        how = {"tensors": True, "box": TensorDict, "inside": "_tensordict"}
        form = intake_form(rows.ring, rows.leaves, _examples(rows.leaves), **how)
        return None if form is None else cls(storage, rows, form, key)

    def write(
        self, data: Any, single: bool, streams: GivenStreams = None, converts: bool = True
    ) -> Any:
        """Writes a batch or an item; None if the storage must write, wait or raise an error."""
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
            if type(index) is not int:  # the indices of a batch
                return index
            if index >= 0:
                return index
            self._rows.ring.refused(index)
        return self._write_converted(data, single, streams) if converts else None

    def _write_converted(self, data: Any, single: bool, streams: GivenStreams) -> Any:
        """Converts data and writes them; None in the same cases as `write`."""
        if data is None or type(data) is list:  # no data, or items that must be stacked first
            return None
        key, given = self._key, None
        beside = isinstance(key, str) and not isinstance(self._priority, int)
        if beside and (isinstance(data, Mapping) or is_collection(data)):
            given = data.get(key, None)
            if given is not None and self._priority is None:
                return None
        try:
            plain, count = self._rows.leaves.converted_batch(data, single, self._tree)
        # The storage raises the error, unless it now accepts another form.
        except SchemaMismatchError:
            return None
        if given is not None:
            size = given.numel() if isinstance(given, torch.Tensor) else getattr(given, "size", 0)
            if size != count:
                return None
            plain[self._priority] = as_raw(given, count)
        return self.write(plain, single, streams, converts=False)


def _examples(leaves: Leaves) -> Iterator[tuple[Any, Any, Any]]:
    """Yields an array, a number and a tensor with the dtype of each leaf."""
    for array, dtype in zip(leaves.arrays, leaves.dtypes, strict=True):
        known = (None, None) if array is None else (np.zeros((2, 3), array), array.type())
        yield (*known, cpu.empty((), dtype=dtype))

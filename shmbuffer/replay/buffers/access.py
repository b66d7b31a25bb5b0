"""Items in storage order: ``rb[i]``, ``rb[:]``, ``read_all_in_order``, ``write_all``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shmbuffer.replay.buffers.parts import Parts
from shmbuffer.replay.storages.list import ListStorage
from shmbuffer.replay.storages.ring_storage import RingStorage


class StorageOrder(Parts):
    """The part of a buffer that is about its items as they lie there."""

    def __getitem__(self, index: Any) -> Any:
        """Items by index, through ``collate_fn`` and the transforms.

        Args:
            index: int, slice, list, array or tensor of the first dimension; a tuple for several; a
                key of the data.

        Returns:
            The items. On a buffer that is shared: validated copies of what is committed. Else an
            int or a slice gives views of the storage.

        Raises:
            IndexError: a place that holds no item.
            EmptyBufferError: nothing was ever written.
        """
        if isinstance(index, str) or _is_key(index):
            return self[:][index]
        data = self._fetch(index)
        if not _is_one(index):
            data = self._collate(data)
        return self._transform(data) if len(self._transform) else data

    def __setitem__(self, index: Any, value: Any) -> None:
        """Change items where they are; their priority and the write count stay.

        Args:
            index: as for reading. A key changes that entry of every item.
            value: the data, as ``rb[index]`` gives them, on their way in through the transforms.

        Raises:
            SchemaMismatchError: other leaves. A new key adds a column where the buffer is not
                shared.
            ValueError: another number of items than the index names.
        """
        if isinstance(index, str) or _is_key(index):
            self._patch(index, value)
            return
        value = self._transform.inv(value) if len(self._transform) else value
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, tuple) or (self.dim_extend and index != slice(None)):
            self._patch(index, value)
        else:
            self._put(index, value)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Every item in storage order: ``rb[:end]``.

        Args:
            end: read the first ``end`` only.

        Returns:
            A batch; see `__getitem__`. It is as large as the buffer; `iter_in_order` bounds memory.
        """
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Write every item anew in storage order: ``rb[:end] = data``.

        The cursor, the write count and the priorities stay.

        Args:
            data: as many items as there are, or as ``end`` says.
            end: write the first ``end`` only.

        Raises:
            SchemaMismatchError: other leaves. A new key adds a column where the buffer is not
                shared.
            ValueError: another number of items.
        """
        self[:end] = data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Items in storage order, ``chunk`` slots at a time: copies, bounded memory.

        Args:
            chunk: slots in a batch.

        Yields:
            Batches, through ``collate_fn`` and the transforms.
        """
        storage = self._storage
        if not isinstance(storage, RingStorage):
            for start in range(0, len(storage), chunk):
                yield self[start : start + chunk]
            return
        for data in storage.iter_in_order(chunk):
            collated = self._collate(data)
            yield self._transform(collated) if len(self._transform) else collated

    def _patch(self, index: Any, value: Any) -> None:
        """Change part of the items: whole slots are written, the rest with what it has.

        Raises:
            RuntimeError: others have the buffer open: what they write between the read and the
                write would be undone.
        """
        storage = self._storage
        engine = storage._engine if isinstance(storage, RingStorage) else None
        if engine is not None and len(engine.registry.alive()) > 1:
            raise RuntimeError(
                f"{index!r} names part of the items of a buffer that other processes have open, "
                "and what they commit meanwhile would be undone; write whole items with rb[i] = ..."
            )
        data = self._fetch(slice(None))
        if not hasattr(data, "clone"):
            raise TypeError(
                f"part of a {type(data).__name__} cannot be changed by {index!r}; read the items "
                "with rb[:], change them, and write_all() them"
            )
        data = data.clone()
        data[index] = value
        self._put(slice(None), data)

    def _fetch(self, index: Any) -> Any:
        storage = self._storage
        if not isinstance(storage, RingStorage):
            return storage.get(index)
        return storage.fetch(
            index, dim_extend=self.dim_extend, views=False if self.shared else None
        )

    def _put(self, index: Any, value: Any) -> None:
        if self.dim_extend:
            value = swap_dims(value, self.dim_extend)
        if isinstance(self._storage, (RingStorage, ListStorage)):
            self._storage.put(index, value, in_place=True)
        else:
            self._storage[index] = value


def swap_dims(data: Any, dim: int) -> Any:
    """``data`` with the dimensions 0 and ``dim`` exchanged, of every leaf."""
    if hasattr(data, "transpose"):
        return data.swapaxes(0, dim) if isinstance(data, np.ndarray) else data.transpose(0, dim)
    if isinstance(data, dict):
        return {key: swap_dims(value, dim) for key, value in data.items()}
    if hasattr(data, "_fields"):
        return type(data)(*(swap_dims(value, dim) for value in data))
    return type(data)(swap_dims(value, dim) for value in data)


def _is_key(index: Any) -> bool:
    """A nested key: a tuple of strings."""
    return isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)


def _is_one(index: Any) -> bool:
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer))

"""Reads and changes stored items by index, key or ticket.

A patch changes an item only if the item still has the given ticket. With ``prefetch``, a submitted
patch is applied after the batches that were ordered before it. Batches that are ordered later wait
for the patch:

    sample() ◀── batches ordered before ──▶ the patch ──▶ batches ordered after
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils._pytree import tree_map

from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.memory.format.array_types import Flags
from shmbuffer.memory.format.leaf import path_of
from shmbuffer.storages.indexing import is_one, ravel
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.movers.item_store import changes_of
from shmbuffer.storages.storage import Storage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_batches import swap_dims
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.form.tensors import as_numbers


class ConditionalUpdateResult(NamedTuple):
    """The result of `ReplayBuffer.update_if_present`."""

    updated: torch.Tensor
    """True for each item that was changed, bool ``[n]``."""
    version_rejected: torch.Tensor | None = None
    """True for each item that was skipped because its version was newer, bool ``[n]``.

    None if no versions were passed.
    """

    @property
    def updated_count(self) -> int:
        """Number of items that were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of items that were skipped because their version was newer."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of items that were overwritten or removed before the change."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class StoredItems:
    """Implements the methods of a buffer that read and change items by index."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __getitem__(self, index: Any) -> Any:
        """Returns items by index or key, after ``collate_fn`` and the transforms."""
        if is_key(index):
            return self[:][index]
        index, below = self._split(index)
        data = self.fetch(index)
        if not is_one(index):
            data = self._parts.collate(data)
        if below:
            data = tree_map(lambda leaf: leaf[below], data, is_leaf=is_collection)
        return self.transformed(data)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Changes the items at an index, or the entry with a key in all items.

        If items lack the key, and the buffer is not shared, a new column is added.
        """
        parts = self._parts
        if is_key(index):
            if parts.storage.knows(path_of(index)):
                self.change(slice(None), value, index)
            else:
                self._add_column(index, value)
            return
        value = parts.transform.inv(value) if len(parts.transform) else value
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, tuple) or (parts.dim_extend and index != slice(None)):
            parts.storage.change(index, value, None, dim_extend=parts.dim_extend)
        else:
            self._put(index, value)

    def change(self, index: Any, value: Any, key: str | tuple[str, ...]) -> None:
        """Changes the entry ``key`` of the items at ``index``; see `ReplayBuffer.set_at_`."""
        parts = self._parts
        parts.storage.change(index, value, path_of(key), dim_extend=parts.dim_extend)

    def update_if_present(
        self,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: str | tuple[str, ...] | None,
        version: Any,
        require_newer: bool,
    ) -> ConditionalUpdateResult:
        """Changes items that were not overwritten; see `ReplayBuffer.update_if_present`."""
        if (version_key is None) != (version is None):
            raise ValueError(
                "version_key and version must be passed together (the key of an entry, and its "
                f"new value), got version_key={version_key!r} and version={version!r}"
            )
        parts, plan = self._parts, self._parts.planned()
        storage, dim = parts.storage, parts.dim_extend
        tracks = plan.info.generation or getattr(parts.writer, "tracks_generations", False)
        if storage.supports_conditional_update and not tracks and not _has_tickets(generation):
            raise RuntimeError(
                f"update_if_present() needs the generations of items, which this {parts.family} "
                "does not track, so overwritten items cannot be detected. Nothing was changed. "
                "Create the buffer with writer=TensorDictRoundRobinWriter(track_generations=True), "
                "with shared=True, or in a directory"
            )
        if dim and version is not None and cpu.as_tensor(version).dim() > 1:
            version = swap_dims(cpu.as_tensor(version), dim)
        rejected = None
        if version_key is not None:
            patch = changes_of(patch)
            path = path_of(version_key)
            if path in patch:
                raise ValueError(
                    f"the patch contains the version_key {version_key!r}; remove this entry, and "
                    "pass its new value as version"
                )
            generation, versions, lost = compare_versions(
                storage, index, generation, path, version, newer=require_newer
            )
            patch, rejected = {**patch, path: versions}, torch.from_numpy(lost)
        updated = storage.change_if_present(index, generation, patch, dim_extend=dim)
        return ConditionalUpdateResult(torch.from_numpy(updated), rejected)

    def submit(self, change: Callable[..., Any], arguments: dict[str, Any]) -> Future[Any]:
        """Calls ``change`` after the batches that were ordered so far.

        Args:
            change: function that changes items.
            arguments: keyword arguments of ``change``. Tensors on a GPU are copied first.

        Returns:
            A future with the result. Without ``prefetch``, the call is made immediately.
        """
        call = partial(staged(arguments), change)
        prefetcher = self._parts.prefetcher
        return done(call) if prefetcher is None else prefetcher.submit(call)

    def transformed(self, data: Any) -> Any:
        """Applies the transforms to items that were read by index."""
        parts = self._parts
        if not len(parts.transform):
            return data
        if is_collection(data) and isinstance(parts.storage, ListStorage):
            data = data.copy()  # otherwise a transform could change the stored item
        return parts.transform(data)

    def fetch(self, index: Any) -> Any:
        """Returns items before the transforms: copies, or views if the buffer is not shared."""
        parts = self._parts
        views = False if parts.shared else None
        return parts.storage.fetch(index, dim_extend=parts.dim_extend, views=views)

    def _add_column(self, key: str | tuple[str, ...], value: Any) -> None:
        """Adds the entry ``key`` to every item, by writing all items again."""
        data = self.fetch(slice(None))
        if not hasattr(data, "clone"):
            raise TypeError(
                f"the entry {key!r} cannot be added to items of type {type(data).__name__}; read "
                "the items with rb[:], change them, and write them with write_all()"
            )
        data = data.clone()
        data[key] = value
        self._put(slice(None), data)

    def _split(self, index: Any) -> tuple[Any, tuple[Any, ...]]:
        """Splits an index tuple into an index for the storage and an index into each item."""
        ndim = self._parts.storage.ndim
        if not (isinstance(index, tuple) and len(index) > ndim):
            return index, ()
        if not all(isinstance(part, (int, slice)) for part in index):
            return index, ()
        outer = index[:ndim]
        kept = (slice(None),) * sum(isinstance(part, slice) for part in outer)
        return outer if ndim > 1 else outer[0], (*kept, *index[ndim:])

    def _put(self, index: Any, value: Any) -> None:
        parts = self._parts
        if parts.dim_extend:
            value = swap_dims(value, parts.dim_extend)
        if isinstance(parts.storage, ListStorage) and isinstance(value, TensorDictBase):
            value = value.exclude(*OWN_KEYS)  # a sample has entries that are not stored
        parts.storage.put(index, value, in_place=True)


def _has_tickets(generation: Any) -> bool:
    """True if at least one generation is a ticket. Generations of -1 stand for unknown tickets."""
    return generation is not None and bool((cpu.as_tensor(generation) >= 0).any())


def is_key(index: Any) -> bool:
    """True if ``index`` is a key: a string, or a tuple of strings."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, str) for part in parts)


def compare_versions(
    storage: Storage,
    index: Any,
    generation: Any,
    path: tuple[str, ...],
    version: Any,
    *,
    newer: bool,
) -> tuple[torch.Tensor, torch.Tensor, Flags]:
    """Compares the versions of items in the storage with new versions.

    Args:
        storage: the storage.
        index: index of the items, ``[n]`` or ``[n, ndim]``.
        generation: tickets that the items had when they were sampled, ``[n]``.
        path: path of the entry that contains the version.
        version: new version, one number or ``[n]``.
        newer: if True, only items with an older version are changed. If False, items with the same
            version are also changed.

    Returns:
        Tickets, int64 ``[n]``, with -1 for items that must not be changed. The new versions, with
        the shape of the entry. A flag for each item that is present but was rejected because of its
        version, bool ``[n]``.

    Raises:
        ValueError: versions are not scalars, or do not have one number per item.
        RuntimeError: ``generation`` does not have one number per item.
    """
    elements, column, now = storage.entry(index, path)
    tickets, stored = ravel(generation, ()), as_numbers(column).reshape(-1)
    if len(stored) != len(elements):
        raise ValueError(
            f"{'.'.join(path)!r} has shape {list(column.shape[1:])} in an item, but only scalars "
            "can be compared; choose another version_key"
        )
    if len(tickets) != len(elements):
        raise RuntimeError(
            f"got {len(tickets)} generations for {len(elements)} items; pass the entries index and "
            "index_generation of the same sample"
        )
    candidates = as_numbers(version) if isinstance(version, torch.Tensor) else np.asarray(version)
    versions = version if isinstance(version, torch.Tensor) else torch.from_numpy(candidates.copy())
    if not candidates.ndim:  # a plain number is converted to the dtype of the entry
        candidates, versions = candidates.astype(stored.dtype), versions.to(column.dtype)
    if candidates.size not in (1, len(elements)):
        raise ValueError(
            f"version must be one number, or one for each of {len(elements)} items, got "
            f"{candidates.size} numbers"
        )
    candidates = np.broadcast_to(candidates.reshape(-1), elements.shape)
    live = (tickets >= 0) & (now == tickets)
    wins = live & (candidates > stored if newer else candidates >= stored)
    rows = np.flatnonzero(wins)
    # If an item occurs twice, only the row with the highest version is kept. The sort is stable, so
    # of equal versions the last row is kept.
    order = rows[np.lexsort((candidates[rows], elements[rows]))]
    wins[order[:-1][elements[order[1:]] == elements[order[:-1]]]] = False
    found = torch.from_numpy(np.where(wins, tickets, -1))
    versions = versions.detach().cpu().reshape(-1).expand(len(elements))
    return found, versions.reshape(column.shape), live & ~wins


def done(call: Callable[[], Any]) -> Future[Any]:
    """Makes a call, and returns a completed future with its result or exception."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def staged(arguments: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    """Starts to copy tensors from a GPU to the CPU, in the order of the current stream.

    Args:
        arguments: keyword arguments, which can contain tensors on a GPU.

    Returns:
        A function that waits for the copies, and calls its argument with the copied arguments.
    """
    found: list[torch.Tensor] = []

    def copied(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return value
        found.append(value)
        return value.to("cpu", non_blocking=True)

    staged = tree_map(copied, arguments)
    if not found:
        return partial(_change, arguments, None)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(found[0].device))
    return partial(_change, staged, event)


def _change(arguments: dict[str, Any], copied: Any, change: Callable[..., Any]) -> Any:
    if copied is not None:
        copied.synchronize()
    return change(**arguments)

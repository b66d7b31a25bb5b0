"""Items where they are stored: read and changed by index, key, or ticket.

A patch is applied under an item's ticket, and only if the item still has that ticket. A submitted
patch waits for the batches that were ordered before it, and later ones wait for the patch:

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
    """bool ``[n]``: the items that were changed."""
    version_rejected: torch.Tensor | None = None
    """bool ``[n]``: the items with a newer version; None if no versions were compared."""

    @property
    def updated_count(self) -> int:
        """Items that were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Items with a newer version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Items that were overwritten, or forgotten."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class StoredItems:
    """The items of a buffer, by their places in its storage."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __getitem__(self, index: Any) -> Any:
        """Reads items by an index, through the transforms."""
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
        """Writes items to an index."""
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
        """Changes one entry of some items."""
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
        """Changes the items that have not been overwritten."""
        if (version_key is None) != (version is None):
            raise ValueError(
                "version_key and version must be passed together (the name of an entry, and its "
                f"new value); got version_key={version_key!r}, version={version!r}"
            )
        parts, plan = self._parts, self._parts.planned()
        storage, dim = parts.storage, parts.dim_extend
        tracks = plan.info.generation or getattr(parts.writer, "tracks_generations", False)
        if storage.supports_conditional_update and not tracks and not _has_tickets(generation):
            raise RuntimeError(
                f"update_if_present: this {parts.family} tracks no generations, so it "
                "cannot tell which of these items have been overwritten. Nothing was changed. "
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
                raise ValueError(f"the patch contains the version_key, {version_key!r}; remove it")
            generation, versions, lost = compared(
                storage, index, generation, path, version, newer=require_newer
            )
            patch, rejected = {**patch, path: versions}, torch.from_numpy(lost)
        updated = storage.change_if_present(index, generation, patch, dim_extend=dim)
        return ConditionalUpdateResult(torch.from_numpy(updated), rejected)

    def submit(self, change: Callable[..., Any], given: dict[str, Any]) -> Future[Any]:
        """Makes a change of items after the batches that are ordered so far."""
        call = partial(staged(given), change)
        prefetcher = self._parts.prefetcher
        return done(call) if prefetcher is None else prefetcher.submit(call)

    def transformed(self, data: Any) -> Any:
        """Items through the transforms."""
        parts = self._parts
        if not len(parts.transform):
            return data
        if is_collection(data) and isinstance(parts.storage, ListStorage):
            data = data.copy()  # a transform must not change the stored item
        return parts.transform(data)

    def fetch(self, index: Any) -> Any:
        """Items as they are stored: copies, or views if the buffer is not shared."""
        parts = self._parts
        views = False if parts.shared else None
        return parts.storage.fetch(index, dim_extend=parts.dim_extend, views=views)

    def _add_column(self, key: str | tuple[str, ...], value: Any) -> None:
        """Adds a new entry to every item."""
        data = self.fetch(slice(None))
        if not hasattr(data, "clone"):
            raise TypeError(
                f"items of a {type(data).__name__} have no entry {key!r}; read the items with "
                "rb[:], change them, and write them with write_all()"
            )
        data = data.clone()
        data[key] = value
        self._put(slice(None), data)

    def _split(self, index: Any) -> tuple[Any, tuple[Any, ...]]:
        """The part of an index for the storage, and the rest, for the items."""
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
            value = value.exclude(*OWN_KEYS)  # of a sample
        parts.storage.put(index, value, in_place=True)


def _has_tickets(generation: Any) -> bool:
    """True if one of the generations belongs to an item, as of `Storage.tickets`."""
    return generation is not None and bool((cpu.as_tensor(generation) >= 0).any())


def is_key(index: Any) -> bool:
    """True if an index is a key: a string, or a tuple of strings."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, str) for part in parts)


def compared(
    storage: Storage,
    index: Any,
    generation: Any,
    path: tuple[str, ...],
    version: Any,
    *,
    newer: bool,
) -> tuple[torch.Tensor, torch.Tensor, Flags]:
    """Tickets of items to change, else -1; versions to store; which present items are newer."""
    elements, column, now = storage.entry(index, path)
    tickets, stored = ravel(generation, ()), as_numbers(column).reshape(-1)
    if len(stored) != len(elements):
        raise ValueError(
            f"{'.'.join(path)!r} has shape {list(column.shape[1:])} in an item, but only scalars "
            "can be compared"
        )
    if len(tickets) != len(elements):
        raise RuntimeError(f"got {len(tickets)} generations for {len(elements)} items")
    given = as_numbers(version) if isinstance(version, torch.Tensor) else np.asarray(version)
    versions = version if isinstance(version, torch.Tensor) else torch.from_numpy(given.copy())
    if not given.ndim:  # a plain number takes the dtype of the entry
        given, versions = given.astype(stored.dtype), versions.to(column.dtype)
    if given.size not in (1, len(elements)):
        raise ValueError(f"version must be one number, or one for each of {len(elements)} items")
    given = np.broadcast_to(given.reshape(-1), elements.shape)
    live = (tickets >= 0) & (now == tickets)
    wins = live & (given > stored if newer else given >= stored)
    rows = np.flatnonzero(wins)
    order = rows[np.lexsort((given[rows], elements[rows]))]  # stable: of equal ones the last wins
    wins[order[:-1][elements[order[1:]] == elements[order[:-1]]]] = False
    found = torch.from_numpy(np.where(wins, tickets, -1))
    versions = versions.detach().cpu().reshape(-1).expand(len(elements))
    return found, versions.reshape(column.shape), live & ~wins


def done(call: Callable[[], Any]) -> Future[Any]:
    """A finished future with the result or the error of a call."""
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def staged(given: dict[str, Any]) -> Callable[[Callable[..., Any]], Any]:
    """Arguments, copied from a GPU in stream order; it calls a change with them."""
    found: list[torch.Tensor] = []

    def copied(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return value
        found.append(value)
        return value.to("cpu", non_blocking=True)

    staged = tree_map(copied, given)
    if not found:
        return partial(_change, given, None)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(found[0].device))
    return partial(_change, staged, event)


def _change(given: dict[str, Any], copied: Any, change: Callable[..., Any]) -> Any:
    if copied is not None:
        copied.synchronize()
    return change(**given)

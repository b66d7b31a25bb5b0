"""Items in storage order: ``rb[i]``, ``rb[:]``, ``read_all_in_order``, ``write_all``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDictBase
from torch.utils._pytree import tree_map

from shmbuffer.buffers.calls.patches import compared
from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.items.mismatch import ONE_ITEM
from shmbuffer.memory.format.leaf import path_of
from shmbuffer.storages.indexing import is_one
from shmbuffer.storages.item_store import changes_of
from shmbuffer.storages.list import ListStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.nodes import is_collection


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


class StorageOrder(Parts):
    """Reads and changes items where they are."""

    def __getitem__(self, index: Any) -> Any:
        """Items by index, through ``collate_fn`` and the transforms.

        Of a shared buffer they are validated copies; else an int or a slice gives views.
        """
        if is_key(index):
            return self[:][index]
        index, below = self._split(index)
        data = self._fetch(index)
        if not is_one(index):
            data = self._collate(data)
        if below:
            data = tree_map(lambda leaf: leaf[below], data, is_leaf=is_collection)
        return self._transformed(data)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Change items in place; their priorities and the write count stay."""
        if is_key(index):
            if self._storage.knows(path_of(index)):
                self.set_(index, value)
            else:
                self._add_column(index, value)
            return
        value = self._transform.inv(value) if len(self._transform) else value
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if index is Ellipsis:
            index = slice(None)
        if isinstance(index, tuple) or (self.dim_extend and index != slice(None)):
            self._storage.change(index, value, None, dim_extend=self.dim_extend)
        else:
            self._put(index, value)

    def set_(self, key: str | tuple[str, ...], value: Any) -> Self:
        """Change one entry of every item, ``rb[:][key] = value``; see `set_at_`."""
        return self.set_at_(key, value, slice(None))

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> Self:
        """Change one entry of some items: ``rb[index][key] = value``.

        Other entries, priorities and the write count stay, also while others write.

        Args:
            key: of an existing entry; nested as a tuple.
            value: as ``rb[index][key]`` gives it, or a value that expands to it.
            index: as for reading.

        Returns:
            The buffer.

        Raises:
            KeyError: no such entry.
            SchemaMismatchError: another dtype or shape.
            IndexError: there is no item.
        """
        self._storage.change(index, value, path_of(key), dim_extend=self.dim_extend)
        return self

    def update_(
        self,
        input_dict_or_td: Any,
        clone: bool = False,
        *,
        keys_to_update: Sequence[str | tuple[str, ...]] | None = None,
    ) -> Self:
        """Change several entries of every item; see `set_`.

        Args:
            input_dict_or_td: entries, each ``[len, ...]``.
            clone: accepted; values are always copied.
            keys_to_update: only these.

        Returns:
            The buffer.
        """
        for key, value in input_dict_or_td.items():
            if keys_to_update is None or key in keys_to_update:
                self.set_(key, value)
        return self

    def update_if_present(
        self,
        *,
        index: torch.Tensor,
        generation: torch.Tensor,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: int | torch.Tensor | None = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Change entries of the items of a sample that have not been overwritten since.

        Comparison and change are atomic. A changed item has another generation: to change it again,
        sample it again.

        Args:
            index: ``sample["index"]``: int64 ``[n]``, or ``[n, ndim]``.
            generation: ``sample["index_generation"]``: int64 ``[n]``.
            patch: TensorDict or dict of the new entries, each ``[n, ...]``; beside the index that
                `extend` returned also in the form of its data, such as ``[lanes, T, ...]``.
            version_key: entry of the items that holds their version, one number. An item with a
                newer one is left alone, others get ``version`` with the patch. If an item comes
                twice, the highest version counts.
            version: of the patch: one number, or ``[n]``.
            require_newer: leave items with the same version alone, too.

        Returns:
            The items that were changed.

        Raises:
            KeyError: no such entry.
            SchemaMismatchError: another dtype or shape; nothing was changed.
            RuntimeError: the storage keeps no generations, or this buffer tracks none; nothing was
                changed.
            ValueError: ``version_key`` without ``version``, or in the patch, or of several numbers
                an item.
        """
        if (version_key is None) != (version is None):
            raise ValueError(
                "version_key and version go together: the entry, and what it is to become; got "
                f"version_key={version_key!r}, version={version!r}"
            )
        storage, plan = self._storage, self._planned()
        tracks = plan.info.generation or getattr(self._writer, "tracks_generations", False)
        if storage.supports_conditional_update and not tracks and not _has_tickets(generation):
            raise RuntimeError(
                f"update_if_present: this {type(self).__name__} tracks no generations, so it "
                "cannot tell which of these items have been overwritten. Nothing was changed. "
                "Create the buffer with writer=TensorDictRoundRobinWriter(track_generations=True), "
                "with shared=True, or in a directory"
            )
        if self.dim_extend and version is not None and cpu.as_tensor(version).dim() > 1:
            version = swap_dims(cpu.as_tensor(version), self.dim_extend)
        rejected = None
        if version_key is not None:
            patch = changes_of(patch)
            path = path_of(version_key)
            if path in patch:
                raise ValueError(f"{version_key!r} is the version_key, and in the patch; leave it")
            generation, versions, lost = compared(
                storage, index, generation, path, version, newer=require_newer
            )
            patch, rejected = {**patch, path: versions}, torch.from_numpy(lost)
        updated = self._storage.change_if_present(
            index, generation, patch, dim_extend=self.dim_extend
        )
        return ConditionalUpdateResult(torch.from_numpy(updated), rejected)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """``rb[:end]``: the items in storage order, as one batch; see also `iter_in_order`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """``rb[:end] = data``: write every item, or the first ``end``, again in storage order.

        Cursor, write count and priorities stay.

        Raises:
            SchemaMismatchError: other leaves; in a buffer that is not shared, a new key adds a
                column.
            ValueError: another number of items.
        """
        self[:end] = data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yield copies of the items in storage order, in batches of ``chunk`` slots."""
        for data in self._storage.iter_in_order(chunk):
            yield self._transformed(self._collate(data))

    def _transformed(self, data: Any) -> Any:
        """Items through the transforms."""
        if not len(self._transform):
            return data
        if is_collection(data) and isinstance(self._storage, ListStorage):
            data = data.copy()  # a transform must not change the stored item
        return self._transform(data)

    def _add_column(self, key: str | tuple[str, ...], value: Any) -> None:
        """Add a new entry to every item."""
        data = self._fetch(slice(None))
        if not hasattr(data, "clone"):
            raise TypeError(
                f"a {type(data).__name__} has no entry {key!r}; read the items with rb[:], change "
                "them, and write_all() them"
            )
        data = data.clone()
        data[key] = value
        self._put(slice(None), data)

    def _split(self, index: Any) -> tuple[Any, tuple[Any, ...]]:
        """The part of an index for the storage, and the rest, for the items."""
        ndim = self._storage.ndim
        if not (isinstance(index, tuple) and len(index) > ndim):
            return index, ()
        if not all(isinstance(part, (int, slice)) for part in index):
            return index, ()
        outer = index[:ndim]
        kept = (slice(None),) * sum(isinstance(part, slice) for part in outer)
        return outer if ndim > 1 else outer[0], (*kept, *index[ndim:])

    def _fetch(self, index: Any) -> Any:
        return self._storage.fetch(
            index, dim_extend=self.dim_extend, views=False if self.shared else None
        )

    def _put(self, index: Any, value: Any) -> None:
        if self.dim_extend:
            value = swap_dims(value, self.dim_extend)
        if isinstance(self._storage, ListStorage) and isinstance(value, TensorDictBase):
            value = value.exclude(*OWN_KEYS)  # of a sample
        self._storage.put(index, value, in_place=True)


def _has_tickets(generation: Any) -> bool:
    """True if one of the generations belongs to an item, as of `Storage.tickets`."""
    return generation is not None and bool((cpu.as_tensor(generation) >= 0).any())


def swap_dims(data: Any, dim: int) -> Any:
    """``data`` with the dimensions 0 and ``dim`` exchanged, of every leaf."""

    def swapped(leaf: Any) -> Any:
        size = tuple(leaf.batch_size if is_collection(leaf) else leaf.shape)
        if len(size) <= dim:
            raise ValueError(
                f"items are along dimension {dim} of the data (dim_extend), and these have the "
                f"{'batch size' if is_collection(leaf) else 'shape'} {list(size)}. Nothing was "
                "changed. Give data of more dimensions, or the buffer another dim_extend; "
                f"{ONE_ITEM}"
            )
        return leaf.transpose(0, dim) if is_collection(leaf) else leaf.swapaxes(0, dim)

    return tree_map(swapped, data, is_leaf=is_collection)


def is_key(index: Any) -> bool:
    """True if an index is a key: a string, or a tuple of strings."""
    parts = index if isinstance(index, tuple) else (index,)
    return bool(parts) and all(isinstance(part, str) for part in parts)

"""Converts a list of items to a batch, and a batch to a list of items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils._pytree import tree_map

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.form import batches
from shmbuffer.items.form.arrays import NO_ARRAY, is_array
from shmbuffer.items.form.mismatch import ONE_ITEM
from shmbuffer.items.form.nodes import nest
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.tensors.form.deferred import deferred
from shmbuffer.tensors.form.objects import Objects, non_tensor
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.form.tensor_structure import leaves_of
from shmbuffer.tensors.form.tensors import as_tensor

# Errors that torch.stack raises for TensorDicts that differ.
_DIFFERS = (RuntimeError, KeyError, TypeError, ValueError, AttributeError)


def stack(items: list[Any], mapping: str = "dict", *, tensors: bool = False) -> Any:
    """Stacks items that have the same structure. Every leaf gets a new first dimension."""
    if not items:
        raise ValueError(
            "an empty list cannot be stacked to a batch; skip the call, or pass a batch of size 0"
        )
    return _Stacking(mapping == "tensordict", tensors=tensors).join(items)


def collate(items: list[Any]) -> Any:
    """Stacks items, or returns the list if they are not arrays or differ in type.

    TensorDicts that differ in keys or shapes are stacked lazily.

    Raises:
        RuntimeError: dicts differ in their keys, or arrays in their shapes.
    """
    return _Stacking(False, tensors=True, strict=False).join(items) if items else items


def stack_lazily(items: list[Any], dim: int = 0, *, fresh: bool = False) -> Any:
    """Stacks TensorDicts or tensorclasses lazily.

    Setting an entry of the stack does not change ``items``, because the stack contains shallow
    copies. With ``fresh`` it contains the items themselves.

    Cost: 0.1 µs per item. The first access to the stack copies the items, at 0.5 µs per item.

    Raises:
        RuntimeError: the batch sizes of the items differ.
    """
    stack = lazy_stack_of(items, dim, fresh=fresh)
    if stack is None:
        sizes = {item.batch_size for item in items}
        raise RuntimeError(
            f"all items of a stack must have the same batch size, but these have {sorted(sizes)}; "
            f"{_APART}"
        )
    return stack


def lazy_stack_of(items: list[Any], dim: int = 0, *, fresh: bool = False) -> Any:
    """Stacks TensorDicts like `stack_lazily`, or tensors of one shape like `torch.stack`.

    Returns None if the items cannot be stacked.
    """
    if not items:
        raise EmptyBufferError("there are no items that could be stacked")
    if not fresh and (size := _size_of_plain(items)) is not None:
        at = dim + (len(size) + 1 if dim < 0 else 0)
        if 0 <= at <= len(size):
            return deferred(lambda: list(map(shallow, items)), len(items), size, at)
    if all(isinstance(item, torch.Tensor) for item in items):
        alike = all(item.shape == items[0].shape for item in items)
        return torch.stack(items, dim) if alike else None
    if not all(map(is_collection, items)):
        return None
    if len({item.batch_size for item in items}) > 1:
        return None
    if dim < 0:
        dim += items[0].batch_dims + 1
    return lazy_stack(items if fresh else [item.copy() for item in items], dim)


def shallow(item: TensorDict) -> TensorDict:
    """Makes the same shallow copy as `TensorDict.copy`, at a quarter of the cost."""
    entries = item._tensordict
    for value in entries.values():
        if type(value) is not torch.Tensor and is_collection(value):
            return item.copy()
    return TensorDict._new_unsafe(
        dict(entries), item._batch_size, item._device, item._td_dim_names, nested=False
    )


def _size_of_plain(items: list[Any]) -> torch.Size | None:
    """Returns the common batch size of items, with -1 for each size in which they differ.

    Returns None unless all items are plain TensorDicts on one device with the same number of batch
    dimensions.
    """
    if type(items[0]) is not TensorDict:
        return None
    first: torch.Size = items[0]._batch_size
    device, alike = items[0]._device, True
    for item in items:
        if type(item) is not TensorDict or item._device != device:
            return None
        alike = alike and item._batch_size == first
    if alike:
        return first
    sizes = {item._batch_size for item in items}
    if len({len(size) for size in sizes}) > 1:
        return None
    columns = zip(*sizes, strict=True)
    return torch.Size([each[0] if len(set(each)) == 1 else -1 for each in columns])


def is_batch(data: Any) -> bool:
    """True for tensors, arrays and TensorDicts. They are split along their first dimension."""
    return isinstance(data, (torch.Tensor, np.ndarray)) or is_collection(data)


def as_tensordict(data: Mapping[Any, Any], dims: int) -> TensorDict:
    """Creates a TensorDict from a dict whose keys may be tuples and whose values may be dicts.

    The entries that a sample adds (`OWN_KEYS`) are left out. ``dims`` is the number of batch
    dimensions.

    Raises:
        TypeError: a leaf cannot be converted to a tensor.
        ValueError: the leaves differ in their batch dimensions.
    """
    entries = _as_entries(nest({key: data[key] for key in data if key not in OWN_KEYS}))
    if not dims:
        return TensorDict(entries, [])
    leaves = leaves_of(entries)
    tensors = {path: one for path, one in leaves.items() if is_array(one)}
    lead = None
    for path, one in tensors.items():
        if not hasattr(one, "shape"):
            raise TypeError(
                f"leaf {'.'.join(path)!r} of the batch is a {type(one).__name__}, which cannot be "
                "converted to a tensor; pass tensors or arrays, or a list with a dict for each item"
            )
        lead = one.shape[:dims] if lead is None else lead
        if len(one.shape) < dims or one.shape[:dims] != lead:
            raise ValueError(
                f"leaf {'.'.join(path)!r} has shape {list(one.shape)}, but the batch is "
                f"{list(lead)} in leaf {'.'.join(next(iter(tensors)))!r}; every leaf must begin "
                f"with the batch dimensions. To pass items one by one, use a list of dicts; "
                f"{ONE_ITEM}"
            )
    if lead is None:
        raise ValueError(
            f"the entries {list(map(str, data))} are not tensors or arrays, so the number of items "
            "is unknown; pass a list of dicts, one for each item"
        )
    for path, one in leaves.items():
        if isinstance(one, (list, tuple)) and len(one) != lead[0]:
            raise ValueError(
                f"leaf {'.'.join(path)!r} is a {type(one).__name__} of {len(one)}, but the batch "
                f"has {lead[0]} items in leaf {'.'.join(next(iter(tensors)))!r}; pass one value "
                "for each item"
            )
    return TensorDict(_with_objects(entries, lead), lead)


def _as_entries(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Converts the arrays and lists of numbers among the entries to tensors."""
    entries: dict[Any, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and not is_collection(value):
            entries[key] = _as_entries(nest(value))
            continue
        entries[key] = value
        if isinstance(value, (list, tuple)) or (is_array(value) and not is_collection(value)):
            with suppress(*NO_ARRAY):  # such as text
                entries[key] = as_tensor(value)
    return entries


def _with_objects(entries: dict[Any, Any], lead: Sequence[int]) -> dict[Any, Any]:
    """Converts arrays of text and tuples of objects to columns with one object per item.

    A TensorDict would otherwise repeat the whole array or tuple in every item. Lists need no
    conversion, because a TensorDict splits them.
    """
    found: dict[Any, Any] = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            value = _with_objects(value, lead)
        elif isinstance(value, tuple):
            value = list(value)
        elif hasattr(type(value), "__array__") and not isinstance(value, torch.Tensor):
            array = np.asarray(value)
            rows = array.reshape(-1, *array.shape[len(lead) :])
            value = non_tensor(Objects.of(batches.plain_values(rows) or list(rows), lead))
        found[key] = value
    return found


def unbound(data: Any) -> list[Any]:
    """Returns a list of the items in an iterable or batch.

    If ``data`` is a dict of batches, each item is a dict with the same keys.
    """
    if isinstance(data, list):
        return list(data)
    if isinstance(data, Mapping) and not is_collection(data):
        columns = {}
        for key, value in data.items():
            try:
                columns[key] = unbound(value)
            except (TypeError, RuntimeError) as error:
                raise type(error)(f"entry {key!r} of the batch: {error}") from error
        return batches.rows_of(columns)
    if is_batch(data):
        if not data.shape:
            raise RuntimeError(
                f"a {type(data).__name__} without a batch dimension is one item: use add()"
            )
        if isinstance(data, np.ndarray):
            return batches.plain_values(data) or list(data)
        return list(data.unbind(0))
    if isinstance(data, (tuple, str, bytes)) or not isinstance(data, Iterable):
        raise TypeError(
            "extend() of a list storage needs a list of items, or a generator, tensor, TensorDict "
            f"or dict of them; got {type(data).__name__}. A tuple of batches is for tensor "
            "storages; pass list(data) if its elements are the items"
        )
    return list(data)


class _Stacking(batches.Stacking):
    """Stacks items that may be TensorDicts.

    If ``strict`` is set, items that differ are an error. Otherwise they are stacked lazily or
    returned as a list.
    """

    instead = (
        "use a LazyStackStorage or a ListStorage for items of different shapes or keys. If each "
        "leaf contains all items along its first dimension, pass the batch as a tuple, dict or "
        "TensorDict"
    )
    stacked = staticmethod(torch.stack)

    def __init__(self, arrays: bool, *, tensors: bool = False, strict: bool = True) -> None:
        super().__init__(arrays)
        self.numbers = not tensors
        self._strict = strict
        if not strict:
            self.instead, self.refused = _APART, ()

    @staticmethod
    def named(item: Any) -> tuple[None, torch.Tensor]:
        """Returns None as the name of the dtype, so that torch can promote it, and the tensor."""
        return None, as_tensor(item)

    def kind(self, item: Any) -> type:
        return object if is_collection(item) else super().kind(item)

    def form(self, item: Any) -> str:
        if is_collection(item):
            return f"a {type(item).__name__}"
        if isinstance(item, (torch.Tensor, np.ndarray)):
            return f"a tensor of shape {list(item.shape)}"
        return super().form(item)

    def mixed(self, items: list[Any], where: str, at: int) -> Any:
        return super().mixed(items, where, at) if self._strict else items

    def leaves(self, items: list[Any], where: str, kind: type) -> Any:
        if kind is object:
            return self._collections(items)
        if not self._strict and not all(map(is_array, batches.one_of_each(items))):
            return items
        return super().leaves(items, where, kind)

    def _collections(self, items: list[Any]) -> Any:
        try:
            return torch.stack(items)
        except _DIFFERS as error:
            if not self._strict:
                return stack_lazily(items)
            raise RuntimeError(
                "all items of a batch must have the same form, but these TensorDicts differ "
                f"({error}). To store them, {self.instead}"
            ) from error


_APART = (
    "pass a collate_fn to the buffer (list keeps the items separate), or use a LazyStackStorage "
    "for TensorDicts that differ"
)


def swap_dims(data: Any, dim: int) -> Any:
    """Exchanges dimensions 0 and ``dim`` in every leaf of ``data``."""

    def swapped(leaf: Any) -> Any:
        size = tuple(leaf.batch_size if is_collection(leaf) else leaf.shape)
        if len(size) <= dim:
            raise ValueError(
                f"items are along dimension {dim} of the data (dim_extend), but this data has the "
                f"{'batch size' if is_collection(leaf) else 'shape'} {list(size)}. Nothing was "
                "changed. Pass data with more dimensions, or create the buffer with another "
                "dim_extend; "
                f"{ONE_ITEM}"
            )
        return leaf.transpose(0, dim) if is_collection(leaf) else leaf.swapaxes(0, dim)

    return tree_map(swapped, data, is_leaf=is_collection)

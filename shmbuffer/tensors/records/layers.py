"""A table of TensorDicts with one column per key.

    TensorDict ─┐
    TensorDict ─┼─▶ Table {"tokens": Column, "next": {...}, "text": [NonTensorData, ...]}
    TensorDict ─┘

`TensorDecoder.table` creates such a table from records, and this module creates one from items in
this process. A column is a `Column` of records, a `Tensors` object, or a list. The list contains a
NonTensorData, a NonTensorStack or a lazy stack for each item.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from shmbuffer.errors import EmptyBufferError
from shmbuffer.items.form.batches import one_of_each
from shmbuffer.items.records.containers import register
from shmbuffer.items.records.decoding.table import Table, differing
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import KeyPath, key_of
from shmbuffer.tensors.form.tensor_nodes import is_collection
from shmbuffer.tensors.form.tensors import dtype_name


class Tensors:
    """The values of one leaf in a list of TensorDicts.

    All tensors have the same dtype, number of dimensions and device.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        first, count = tensors[0], len(tensors)
        sizes = chain.from_iterable([tensor.shape for tensor in tensors])
        self.dims = np.fromiter(sizes, np.int64, count * first.dim()).reshape(count, first.dim())

        self.dtype = first.dtype
        self.nbytes = self.dims.prod(axis=1) * first.itemsize

    @property
    def is_plain(self) -> bool:
        """True if the bytes can be copied directly.

        All tensors must be on the CPU, and none may require a gradient.
        """
        return all(one.is_cpu and not one.requires_grad for one in self.tensors)

    @property
    def ragged(self) -> list[int]:
        """Dimensions in which the sizes of the tensors differ."""
        return differing(self.dims)


def has(tree: Any, path: KeyPath) -> bool:
    """True if an entry cannot be added at ``path``.

    This is the case if the tree already has an entry there, or if a key on the path leads to an
    object other than a TensorDict.
    """
    for key in path:
        tree = tree[2] if tree[0] == "tensorclass" else tree
        if tree[0] != "tensordict":
            return True
        tree = dict(tree[-1]).get(key)
        if tree is None:
            return False
    return True


def name_of(path: KeyPath) -> str:
    """Formats the path of a leaf as a key, for error messages."""
    return repr(key_of(path))


def _describe(path: KeyPath) -> str:
    return f"the entries {name_of(path)} of the items" if path else "the items"


def items_of(data: Any) -> list[Any]:
    """Converts a lazy stack, a batch or a list to a list of TensorDicts or tensorclasses.

    Raises:
        EmptyBufferError: there are no items.
        TypeError: an item is not a TensorDict or tensorclass.
        RuntimeError: a lazy stack is not stacked along dimension 0.
    """
    if isinstance(data, LazyStackedTensorDict):
        if data.stack_dim != 0:
            raise RuntimeError(
                "the items of a lazy stack must be stacked along dimension 0, but this one is "
                f"stacked along dimension {data.stack_dim}; pass "
                f"list(data.unbind({data.stack_dim}))"
            )
        items = list(data.tensordicts)
    elif is_collection(data):
        if is_tensorclass(data) and isinstance(data._tensordict, LazyStackedTensorDict):
            return [type(data).from_tensordict(one) for one in items_of(data._tensordict)]
        if not data.batch_dims:
            raise TypeError(
                "a TensorDict without a batch dimension is not a batch of items; pass a list"
            )
        items = list(data.unbind(0))
    elif isinstance(data, (list, tuple)):
        items = list(data)
    else:
        _refuse_item(data)
    if not items:
        raise EmptyBufferError("there are no items that could be padded or nested")
    for item in one_of_each(items):
        if not is_collection(item) or is_non_tensor(item):
            _refuse_item(item)
    return items


def _refuse_item(item: Any) -> NoReturn:
    raise TypeError(
        "items that are padded or nested must be TensorDicts or tensorclasses, in a list or a lazy "
        f"stack, got {type(item).__name__}; write TensorDicts, or write dicts with a "
        "TensorDictReplayBuffer, which converts them"
    )


def to_table(items: list[Any]) -> Table:
    """Converts a list of TensorDicts to a table with one column per key."""
    builder = _TableBuilder()
    tree = builder.tree(items, ())
    return Table(tree, np.concatenate(builder.batch_dims, axis=1), builder.columns)


class _TableBuilder:
    """Collects the entries of all items by key."""

    def __init__(self) -> None:
        self.columns: list[Any] = []
        self.batch_dims: list[Ints] = []

    def tree(self, items: list[Any], path: KeyPath) -> Any:
        """Adds the entries of all items to the columns, and returns their common tree.

        ``items`` contains one TensorDict or tensorclass per item. ``path`` is its location in the
        item.
        """
        kinds = one_of_each(items)
        classes = [type(item) for item in kinds if is_tensorclass(item)]
        inner = [item._tensordict if type(item) in classes else item for item in items]
        first = inner[0]
        sizes = [item.batch_size for item in inner]
        if len({len(size) for size in sizes}) > 1:
            found = sorted({tuple(size) for size in sizes})
            raise RuntimeError(
                f"{_describe(path)} cannot be joined to one batch, because their batch sizes are "
                f"{found}"
            )
        rank = len(sizes[0])
        self.batch_dims.append(np.array(sizes, np.int64).reshape(len(inner), rank))
        every = [_entries_of(item) for item in inner]
        keys = dict.fromkeys(key for entries in every for key in entries)
        entries = [
            [key, self._entry([one.get(key) for one in every], sizes, (*path, key))] for key in keys
        ]
        names = list(first.names) if any(first.names) else None
        tree = ["tensordict", ["dims", rank], first.device, names, entries]
        if classes and len(kinds) == 1:
            tree = ["tensorclass", register(classes[0]), tree]
        return tree

    def _entry(self, values: list[Any], sizes: list[torch.Size], path: KeyPath) -> Any:
        """Adds a column for the values of all items at ``path``, and returns its tree.

        The value is None for an item without this entry.
        """
        kinds = [value for value in one_of_each(values) if value is not None]
        if all(isinstance(value, torch.Tensor) for value in kinds):
            return self._chunk(_tensors(values, sizes, path))
        if all(map(is_non_tensor, kinds)):
            return self._chunk(
                [
                    NonTensorData(data=None, batch_size=size) if value is None else value
                    for value, size in zip(values, sizes, strict=True)
                ]
            )
        if not all(map(is_collection, kinds)) or any(map(is_non_tensor, kinds)):
            found = sorted({type(value).__name__ for value in kinds})
            raise TypeError(f"{name_of(path)} is a {' in some items and a '.join(found)} in others")
        if any(_is_lazy(value) for value in values if value is not None):
            if any(value is None for value in values):
                raise RuntimeError(
                    f"some items have a lazy stack in {name_of(path)}, but others do not"
                )
            return self._chunk(values)
        whole = [
            TensorDict(batch_size=size) if value is None else value
            for value, size in zip(values, sizes, strict=True)
        ]
        return self.tree(whole, path)

    def _chunk(self, column: Any) -> Any:
        self.columns.append(column)
        return ["chunk", len(self.columns) - 1]


def _entries_of(item: TensorDictBase) -> dict[str, Any]:
    if type(item) is TensorDict:
        return item._tensordict
    return {key: item.get(key, None) for key in item.keys()}  # noqa: SIM118


def _is_lazy(value: Any) -> bool:
    inner = value._tensordict if is_tensorclass(value) else value
    return isinstance(inner, LazyStackedTensorDict)


def _tensors(values: list[Any], sizes: list[torch.Size], path: KeyPath) -> Tensors:
    if any(value is None for value in values):
        values = _filled(values, sizes, path)
    kinds = {(one.dtype, one.ndim, one.layout, one.is_nested) for one in values}
    if any(layout is not torch.strided or is_nested for _, _, layout, is_nested in kinds):
        raise TypeError(
            f"{name_of(path)} is a nested or sparse tensor, which cannot be padded or nested; "
            "stack the items instead"
        )
    if len(kinds) > 1:
        found = sorted({f"{dtype_name(one.dtype)}{list(one.shape)}" for one in values})
        raise RuntimeError(
            f"{name_of(path)} differs in dtype or in the number of dimensions, so it cannot be "
            f"joined to one tensor: it is {' and '.join(found[:3])}"
        )
    return Tensors(values)


def _filled(values: list[Any], sizes: list[torch.Size], path: KeyPath) -> list[torch.Tensor]:
    """Replaces each missing value (None) by a tensor of length 0.

    Raises:
        RuntimeError: the leaf has no dimension besides those of the batch.
    """
    first = next(value for value in values if value is not None)
    filled = []
    for value, size in zip(values, sizes, strict=True):
        if value is None and first.dim() <= len(size):
            raise RuntimeError(
                f"some items do not have {name_of(path)}, which has no dimension that could have "
                "length 0 for them; leave it out, or include it in all items"
            )
        nothing = (*size, 0, *first.shape[len(size) + 1 :])
        filled.append(first.new_empty(nothing) if value is None else value)
    return filled

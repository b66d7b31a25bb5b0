"""Items from their leaves: all items of one form at once, one column of leaves after the other.

A tree is in the grammar of `packing`, as `bodies.Form` has it. It is walked once
for all items, so that what an item costs is making its containers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from shmbuffer.errors import CorruptBufferError
from shmbuffer.replay.form import labels
from shmbuffer.replay.form.batches import collate
from shmbuffer.replay.form.nodes import class_of
from shmbuffer.replay.records.layers import Layer

_new_tensordict = TensorDict._new_unsafe
OBJECTS = frozenset(("object", "objects"))
"""Nodes that are NonTensorData: one for each item, also in a batch."""
APART = OBJECTS | {"lazy"}
"""Nodes that stay one for each item in a `Layer`."""

_IMPOSSIBLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class NotDenseError(Exception):
    """The items are no batch of one tensor a leaf; the caller takes them one by one."""


def build(
    tree: Any,
    batch_dims: NDArray[np.int64],
    columns: Sequence[Sequence[Any]],
    device: torch.device | None = None,
    where: str = "this buffer",
) -> list[Any]:
    """Items of one form.

    Args:
        tree: of the form.
        batch_dims: int64[m, ...]: the sizes of all batches in the tree, in its order.
        columns: m leaves for each chunk, in order.
        device: where the tensors are; that of each TensorDict that has a device.
        where: the buffer's name in messages.

    Returns:
        m items. They share no containers.

    Raises:
        CorruptBufferError: no such items can be made.

    Cost: 1 µs an item for each TensorDict in it, 0.1 µs a leaf; 1.5 µs for each text in a
        TensorDict.
    """
    found: list[Any] = _built(lambda: list(_Rows(batch_dims, columns, device).of(tree)), where)
    return found


def stacked(
    tree: Any,
    batch_dims: NDArray[np.int64],
    columns: Sequence[Any],
    device: torch.device | None = None,
    where: str = "this buffer",
) -> Any:
    """The same as one batch: what `torch.stack` makes of TensorDicts, and `collate` of the rest.

    Args:
        tree: see `build`.
        batch_dims: see `build`; all rows are equal.
        columns: for each chunk a tensor ``[m, ...]``; of text and other values a list of m.
        device: see `build`.
        where: see `build`.

    Raises:
        NotDenseError: items of this form cannot be one batch.
        CorruptBufferError: no such batch can be made.
    """
    return _built(lambda: _Batch(batch_dims, columns, device).of(tree), where)


def layered(
    tree: Any,
    batch_dims: NDArray[np.int64],
    columns: Sequence[Any],
    device: torch.device | None = None,
    where: str = "this buffer",
) -> Layer:
    """Items of one form as one TensorDict of columns.

    Args:
        tree: one that `is_layer`.
        batch_dims: see `build`.
        columns: for each chunk a `Column`, which is put there; of those that are below nodes in
            `APART`, as in `build`.
        device: see `build`.
        where: see `build`.

    Raises:
        CorruptBufferError: no such items can be made.
    """
    layer: Layer = _built(lambda: _Layers(batch_dims, columns, device).of(tree), where)
    return layer


def is_layer(tree: Any) -> bool:
    """Whether items are TensorDicts, or tensorclasses of them, and no lazy stacks."""
    inner = tree[2] if tree[0] == "tensorclass" else tree
    return bool(inner[0] == "tensordict")


def chunks_under(tree: Any, kinds: Container[str]) -> set[int]:
    """The chunks of a tree that belong to nodes of these kinds."""
    if tree[0] in kinds:
        return _chunks_in(tree)
    return {chunk for child in _children_of(tree) for chunk in chunks_under(child, kinds)}


def chunk_at(tree: Any, path: Sequence[Any]) -> int | None:
    """The chunk at a path of keys, through TensorDicts, tensorclasses and dicts.

    None where there is none.
    """
    for key in path:
        if tree[0] == "tensorclass":
            tree = tree[2]
        if tree[0] not in ("tensordict", "dict", "ordered"):
            return None
        entries = {labels.from_json(name): child for name, child in tree[-1]}
        if key not in entries:
            return None
        tree = entries[key]
    return tree[1] if tree[0] == "chunk" else None


def _children_of(tree: Any) -> list[Any]:
    """The trees right below the root of one."""
    match tree:
        case ["chunk", _]:
            return []
        case ["tensordict" | "dict" | "ordered", *_, entries]:
            return [child for _, child in entries]
        case ["tensorclass" | "object", _, child]:
            return [child]
    return list(tree[-1])


def _chunks_in(tree: Any) -> set[int]:
    if tree[0] == "chunk":
        return {tree[1]}
    return {chunk for child in _children_of(tree) for chunk in _chunks_in(child)}


def _built(make: Callable[[], Any], where: str) -> Any:
    """What ``make`` gives; no error of tensordict's comes through."""
    try:
        return make()
    except _IMPOSSIBLE as error:
        raise CorruptBufferError(
            f"{where}: no item can be made of a record ({type(error).__name__}: {error}); it is "
            "damaged, or a tensorclass or namedtuple has other fields here than where it was "
            "written",
            path=where,
        ) from error


class _Walk:
    """A walk through a tree takes the sizes of batches as it meets them.

    Args:
        batch_dims: see `build`.
        columns: see `build`.
        device: see `build`.
    """

    def __init__(
        self,
        batch_dims: NDArray[np.int64],
        columns: Sequence[Any],
        device: torch.device | None,
    ) -> None:
        self.columns = columns
        self.count = len(batch_dims)
        self.device = device
        self._batch_dims = batch_dims
        self._at = 0

    def take(self, rank: int) -> NDArray[np.int64]:
        """int64[m, rank]: the next sizes."""
        self._at += rank
        return self._batch_dims[:, self._at - rank : self._at]

    def device_of(self, device: str | None) -> torch.device | None:
        """Of a TensorDict that had this one when it was written."""
        return None if device is None else (self.device or torch.device(device))


class _Rows(_Walk):
    """Makes one thing for each item."""

    def of(self, tree: Any) -> Sequence[Any]:
        match tree:
            case ["chunk", int(number)]:
                return self.columns[number]  # type: ignore[no-any-return]
            case ["tensordict", ["dims", int(rank)], device, names, entries]:
                return self._tensordicts(rank, self.device_of(device), names, entries)
            case ["object", ["dims", int(rank)], child]:
                dims = self.take(rank)
                return list(map(_non_tensor, self.of(child), _sizes(dims)))
            case ["tensorclass", str(name), child]:
                cls, rows = class_of(name), self.of(child)
                return rows if cls is None else [cls.from_tensordict(row) for row in rows]  # type: ignore[attr-defined]
            case ["dict" | "ordered" as kind, entries]:
                keys = [labels.from_json(key) for key, _ in entries]
                make = dict if kind == "dict" else OrderedDict
                rows = self._across([child for _, child in entries])
                return [make(zip(keys, row, strict=True)) for row in rows]
            case ["list", parts]:
                return [list(row) for row in self._across(parts)]
            case ["tuple", parts]:
                return self._across(parts)
            case ["namedtuple", str(name), parts]:
                cls, rows = class_of(name), self._across(parts)
                return rows if cls is None else [cls(*row) for row in rows]
            case ["lazy", int(dim), parts]:
                return [LazyStackedTensorDict(*row, stack_dim=dim) for row in self._across(parts)]
            case ["objects", int(dim), parts]:
                return [NonTensorStack(*row, stack_dim=dim) for row in self._across(parts)]
        raise AssertionError(f"no form has {tree!r:.60}")

    def _tensordicts(
        self, rank: int, device: torch.device | None, names: Any, entries: Any
    ) -> list[Any]:
        dims = self.take(rank)
        keys = [key for key, _ in entries]
        rows = self._across([child for _, child in entries])
        if names is not None or rank:
            return [
                _new_tensordict(
                    dict(zip(keys, row, strict=True)),
                    batch_size=size,
                    device=device,
                    names=None if names is None else list(names),
                    nested=False,
                )
                for row, size in zip(rows, _sizes(dims), strict=True)
            ]
        # All have the attributes of a first one, but for their entries: half of what it costs to
        # make each.
        attributes = _new_tensordict({}, torch.Size(()), device).__dict__
        entries_of = type(attributes["_tensordict"])
        made = []
        for row in rows:
            one = TensorDict.__new__(TensorDict)
            one.__dict__.update(attributes)
            one._tensordict = entries_of(zip(keys, row))  # noqa: B905 - they are as many
            made.append(one)
        return made

    def _across(self, parts: Sequence[Any]) -> list[tuple[Any, ...]]:
        """For each item what its parts are."""
        if not parts:
            return [()] * self.count
        return list(zip(*[self.of(part) for part in parts], strict=True))


class _Whole(_Walk):
    """Makes one thing for all items."""

    def rows(self, tree: Any) -> list[Any]:
        """One thing for each item, of a part of the tree; its batch sizes are taken here."""
        rows = _Rows(self._batch_dims, self.columns, self.device)
        rows._at = self._at
        found = list(rows.of(tree))
        self._at = rows._at
        return found


class _Layers(_Whole):
    """Makes the layers of all items."""

    def of(self, tree: Any) -> Any:
        match tree:
            case ["chunk", int(number)]:
                return self.columns[number]
            case ["tensordict", ["dims", int(rank)], device, names, entries]:
                dims, where = self.take(rank), self.device_of(device)
                return Layer(dims, names, where, {key: self.of(child) for key, child in entries})
            case ["tensorclass", str(name), child] if is_layer(tree):
                layer = self.of(child)
                layer.cls = class_of(name)
                return layer
        return self.rows(tree)


class _Batch(_Whole):
    """Makes the batch of all items."""

    def of(self, tree: Any) -> Any:
        match tree:
            case ["chunk", int(number)]:
                column = self.columns[number]
                return column if isinstance(column, torch.Tensor) else _collated(column)
            case ["tensordict", ["dims", int(rank)], device, names, entries]:
                size = torch.Size((self.count, *self.take(rank)[0].tolist()))
                return _new_tensordict(
                    {key: self.of(child) for key, child in entries},
                    batch_size=size,
                    device=self.device_of(device),
                    names=None if names is None else [None, *names],  # type: ignore[list-item]
                    nested=False,
                )
            case ["tensorclass", str(name), child]:
                cls, batch = class_of(name), self.of(child)
                return batch if cls is None else cls.from_tensordict(batch)  # type: ignore[attr-defined]
            case ["object" | "objects", *_]:
                return torch.stack(self.rows(tree))
            case ["dict" | "ordered", entries]:
                return {labels.from_json(key): self.of(child) for key, child in entries}
            case ["list" | "tuple" as kind, parts]:
                found = [self.of(part) for part in parts]
                return found if kind == "list" else tuple(found)
            case ["namedtuple", str(name), parts]:
                cls, found = class_of(name), [self.of(part) for part in parts]
                return tuple(found) if cls is None else cls(*found)
        raise NotDenseError


def _collated(values: Sequence[Any]) -> Any:
    """Numbers as a tensor; what is none as a list."""
    try:
        return collate(list(values))
    except (OverflowError, RuntimeError, ValueError) as error:  # an int of more than 64 bits
        raise NotDenseError from error


_attributes = NonTensorData(data=None, batch_size=[]).__dict__


def _non_tensor(value: Any, size: torch.Size) -> Any:
    """NonTensorData, a quarter as dear as its constructor: with the attributes of another one."""
    made = NonTensorData.__new__(NonTensorData)
    attributes = made.__dict__
    attributes.update(_attributes)
    attributes["_tensordict"] = _new_tensordict({}, batch_size=size, nested=False)
    attributes["_non_tensordict"] = {**_attributes["_non_tensordict"], "data": value}
    return made


def _sizes(dims: NDArray[np.int64]) -> list[torch.Size]:
    """A batch size for each row."""
    if not (dims != dims[:1]).any():
        return [torch.Size(dims[0].tolist())] * len(dims)
    return list(map(torch.Size, dims.tolist()))

"""Items from their leaves: all items of one form at once, one column of leaves after the other.

A tree is in the grammar of `record_format.grammar`, as `record_format.Form` has it. It is walked
once for all items, so that what an item costs is making its containers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from shmbuffer.items import labels
from shmbuffer.items.records import building
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.record_format.grammar import KEYED, Container, split
from shmbuffer.tensors.form.batches import collate
from shmbuffer.tensors.form.containers import made

OBJECTS = frozenset(("object", "objects"))
"""Nodes that are NonTensorData: one for each item, also in a batch."""
APART = OBJECTS | {"lazy"}
"""Nodes that stay one for each item where TensorDicts are joined to one."""


class NotDenseError(Exception):
    """The items are no batch of one tensor a leaf; the caller takes them one by one."""


def is_layer(tree: Any) -> bool:
    """True if items are TensorDicts or tensorclasses, and no lazy stacks."""
    inner = tree[2] if tree[0] == "tensorclass" else tree
    return bool(inner[0] == "tensordict")


def chunks_under(tree: Any, kinds: Collection[str], inside: bool = False) -> set[int]:
    """The chunks of a tree that belong to nodes of these kinds."""
    if tree[0] == "chunk":
        return {tree[1]} if inside else set()
    inside = inside or tree[0] in kinds
    return {chunk for part in split(tree).parts for chunk in chunks_under(part, kinds, inside)}


def chunks_at(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """The chunks under keys of TensorDicts, tensorclasses and dicts, by their path."""
    if tree[0] == "chunk":
        return {path: tree[1]}
    if tree[0] == "tensorclass":
        return chunks_at(tree[2], path)
    found: dict[tuple[Any, ...], int] = {}
    for key, entry in tree[-1] if tree[0] in KEYED else ():
        found.update(chunks_at(entry, (*path, labels.from_json(key))))
    return found


class TensorItemBuilder(building.ItemBuilder):
    """Makes one thing for each item, with TensorDicts; see `items.records.building`.

    Cost: 1 µs an item for each TensorDict in it, 0.1 µs a leaf; 1.5 µs for each text in a
        TensorDict.
    """

    def __init__(
        self,
        batch_dims: Ints,
        columns: Any,
        device: torch.device | None,  # where the tensors are; that of each TensorDict that has one
    ) -> None:
        super().__init__(batch_dims, columns)
        self.device = device

    def made(self, node: Container, rows: Sequence[Any], dims: Ints) -> Sequence[Any]:
        """See `items.records.building`."""
        return made(node, rows, _sizes(dims) if node.batch else ())

    def node(self, tree: Any) -> tuple[Container, Ints]:
        """See `items.records.building`."""
        node, dims = super().node(tree)
        if node.kind == "tensordict" and node.about[0] is not None:
            node.about[0] = self.device or torch.device(node.about[0])
        return node, dims


class Batch(TensorItemBuilder):
    """Makes one batch of all items: as `torch.stack` does it, and `collate` what is no TensorDict.

    A column is a tensor ``[m, ...]``, or a list of m. All batch sizes of a tree are equal.
    """

    def of(self, tree: Any, dims: Any = None) -> Any:
        """One thing for all items; ``dims`` is the batch sizes that it is in."""
        if tree[0] == "chunk":
            return self.leaf(self.columns[tree[1]], dims)
        if tree[0] in APART:
            return self.apart(tree, dims)
        node, dims = self.node(tree)
        parts = tuple([self.of(part, dims) for part in node.parts])
        if node.kind == "tensordict" and node.about[1] is not None:
            node.about[1] = [None, *node.about[1]]
        elif node.kind == "ordered":
            node = node._replace(kind="dict")
        return made(node, [parts], [torch.Size((self.count, *self.size(dims)))])[0]

    def leaf(self, column: Any, dims: Ints) -> Any:
        """What a column becomes."""
        return column if isinstance(column, torch.Tensor) else _collated(column)

    def apart(self, tree: Any, dims: Ints) -> Any:
        """What a part in `APART` becomes."""
        if tree[0] == "lazy":
            raise NotDenseError
        return torch.stack(list(self.rows(tree)))

    def size(self, dims: Ints) -> list[int]:
        """The batch size of a TensorDict, after its first dim."""
        found: list[int] = dims[0].tolist()
        return found


def _collated(values: Sequence[Any]) -> Any:
    """Numbers as a tensor; anything else as a list."""
    try:
        return collate(list(values))
    except (OverflowError, RuntimeError, ValueError) as error:  # an int of more than 64 bits
        raise NotDenseError from error


def _sizes(dims: Ints) -> list[torch.Size]:
    """A batch size for each row."""
    if not dims.shape[1]:
        return [torch.Size(())] * len(dims)
    if not (dims != dims[:1]).any():
        return [torch.Size(dims[0].tolist())] * len(dims)
    return list(map(torch.Size, dims.tolist()))

"""Builds items from columns of leaves.

The tree of a `record_format.Form` follows the grammar of `record_format.grammar`. All items of one
form are built in a single traversal of the tree, so that the cost per item is only that of
creating its containers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from shmbuffer.items.form import labels
from shmbuffer.items.records.decoding import building
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.record_format.grammar import KEYED, Container, split
from shmbuffer.tensors.form.tensor_batches import collate
from shmbuffer.tensors.form.tensor_containers import make_containers

OBJECTS = frozenset(("object", "objects"))
"""Kinds of nodes for NonTensorData. A batch contains one NonTensorData per item."""
SEPARATE = OBJECTS | {"lazy"}
"""Kinds of nodes that cannot be joined to one tensor, so that each item is built separately."""


class NotDenseError(Exception):
    """Raised if the items cannot form a batch with one tensor per leaf.

    The items are then decoded separately.
    """


def is_layer(tree: Any) -> bool:
    """True if the root of a tree is a TensorDict or a tensorclass."""
    inner = tree[2] if tree[0] == "tensorclass" else tree
    return bool(inner[0] == "tensordict")


def chunks_under(tree: Any, kinds: Collection[str], inside: bool = False) -> set[int]:
    """Returns the numbers of the chunks that are below a node of one of these kinds."""
    if tree[0] == "chunk":
        return {tree[1]} if inside else set()
    inside = inside or tree[0] in kinds
    return {chunk for part in split(tree).parts for chunk in chunks_under(part, kinds, inside)}


def chunks_at(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """Returns a dict from the path of keys to the number of each chunk.

    It contains the chunks that can be reached through TensorDicts, tensorclasses and dicts.
    """
    if tree[0] == "chunk":
        return {path: tree[1]}
    if tree[0] == "tensorclass":
        return chunks_at(tree[2], path)
    found: dict[tuple[Any, ...], int] = {}
    for key, entry in tree[-1] if tree[0] in KEYED else ():
        found.update(chunks_at(entry, (*path, labels.from_json(key))))
    return found


class TensorItemBuilder(building.ItemBuilder):
    """Builds items that may contain TensorDicts (`items.records.decoding.building`).

    Cost per item: 1 µs per TensorDict, 0.1 µs per leaf, and 1.5 µs per text in a TensorDict.
    """

    def __init__(
        self,
        batch_dims: Ints,
        columns: Any,
        # Device of TensorDicts, instead of the device that the record names. None is no override.
        device: torch.device | None,
    ) -> None:
        super().__init__(batch_dims, columns)
        self.device = device

    def make_containers(self, node: Container, rows: Sequence[Any], dims: Ints) -> Sequence[Any]:
        """Creates one container for each row of entries."""
        return make_containers(node, rows, _sizes(dims) if node.batch else ())

    def node(self, tree: Any) -> tuple[Container, Ints]:
        """Returns the root container of a tree, with its device set, and its batch sizes."""
        node, dims = super().node(tree)
        if node.kind == "tensordict" and node.about[0] is not None:
            node.about[0] = self.device or torch.device(node.about[0])
        return node, dims


class Batch(TensorItemBuilder):
    """Builds one batch of all items. Stacks TensorDicts and collates other items.

    A column is a tensor ``[m, ...]`` or a list of length m. All items must have the same batch
    sizes.
    """

    def build(self, tree: Any, dims: Any = None) -> Any:
        """Builds the part of the batch that a subtree describes.

        ``dims`` are the batch sizes of the TensorDict that contains it, int64 ``[m, rank]``.
        """
        if tree[0] == "chunk":
            return self.leaf(self.columns[tree[1]], dims)
        if tree[0] in SEPARATE:
            return self.build_each(tree, dims)
        node, dims = self.node(tree)
        parts = tuple([self.build(part, dims) for part in node.parts])
        if node.kind == "tensordict" and node.about[1] is not None:
            node.about[1] = [None, *node.about[1]]
        elif node.kind == "ordered":
            node = node._replace(kind="dict")
        return make_containers(node, [parts], [torch.Size((self.count, *self.size(dims)))])[0]

    def leaf(self, column: Any, dims: Ints) -> Any:
        """Converts a column to a leaf of the batch."""
        return column if isinstance(column, torch.Tensor) else _collated(column)

    def build_each(self, tree: Any, dims: Ints) -> Any:
        """Builds the objects of each item separately and stacks them.

        Raises:
            NotDenseError: the subtree is a lazy stack.
        """
        if tree[0] == "lazy":
            raise NotDenseError
        return torch.stack(list(self.rows(tree)))

    def size(self, dims: Ints) -> list[int]:
        """Returns the batch size of a TensorDict without the dimension of the items."""
        found: list[int] = dims[0].tolist()
        return found


def _collated(values: Sequence[Any]) -> Any:
    """Collates the values of one leaf: numbers become a tensor, and other values a list."""
    try:
        return collate(list(values))
    except (OverflowError, RuntimeError, ValueError) as error:  # an int of more than 64 bits
        raise NotDenseError from error


def _sizes(dims: Ints) -> list[torch.Size]:
    """Returns one batch size per item from sizes, int64 ``[n, rank]``."""
    if not dims.shape[1]:
        return [torch.Size(())] * len(dims)
    if not (dims != dims[:1]).any():
        return [torch.Size(dims[0].tolist())] * len(dims)
    return list(map(torch.Size, dims.tolist()))

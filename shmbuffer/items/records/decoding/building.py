"""Builds all items of one form at once from their columns of leaves.

The tree of a `record_format.Form` follows the grammar of `record_format.grammar`. It is traversed
once for all items, so that the cost per item is that of its containers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shmbuffer.errors import CorruptBufferError
from shmbuffer.items.form import labels
from shmbuffer.items.records import containers
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.record_format.grammar import DICTS, Container, split

Made = TypeVar("Made")
_IMPOSSIBLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def built(make: Callable[[], Made], where: str) -> Made:
    """Calls ``make`` on records, and converts errors of tensordict to CorruptBufferError."""
    try:
        return make()
    except _IMPOSSIBLE as error:
        raise CorruptBufferError(
            f"{where}: a record cannot be converted to an item ({type(error).__name__}: {error}). "
            "It is damaged, or a tensorclass or namedtuple has other fields here than in the "
            "program that wrote it",
            path=where,
        ) from error


class ItemBuilder:
    """Builds each item. Batch sizes are used in the order of the tree.

    Args:
        batch_dims: sizes of all batches in the tree, in its order, int64 ``[m, ...]``.
        columns: m leaves for each chunk, in order.
    """

    def __init__(self, batch_dims: Ints, columns: Any) -> None:
        self.columns = columns
        self.count = len(batch_dims)
        self._batch_dims = batch_dims
        self._at = 0

    def rows(self, tree: Any) -> Sequence[Any]:
        """Builds one object per item. The objects share no containers."""
        if tree[0] == "chunk":
            return self.columns[tree[1]]  # type: ignore[no-any-return]
        node, dims = self.node(tree)
        parts = [self.rows(part) for part in node.parts]
        rows = list(zip(*parts, strict=True)) if parts else [()] * self.count
        return self.make_containers(node, rows, dims)

    def make_containers(self, node: Container, rows: Sequence[Any], dims: Ints) -> Sequence[Any]:
        """Creates one container per row of entries; ``dims`` are its batch sizes."""
        return containers.make_containers(node, rows)

    def node(self, tree: Any) -> tuple[Container, Ints]:
        """Returns a container with the keys of this process, and its batch sizes, ``[m, rank]``."""
        node = split(tree)
        rank = node.batch[1] if node.batch else 0
        self._at += rank
        if node.kind in DICTS:
            node.keys[:] = map(labels.from_json, node.keys)
        return node, self._batch_dims[:, self._at - rank : self._at]

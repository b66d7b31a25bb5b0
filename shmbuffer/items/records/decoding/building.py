"""Builds all items of one form together, from columns of their leaves.

The tree of a `record_format.Form` follows the grammar in `record_format.grammar`. The tree is
traversed once for all items, so the only cost per item is the creation of its containers.
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
    """Calls ``make``, which builds items from records.

    Raises CorruptBufferError if ``make`` fails, for example because tensordict rejects the values.
    """
    try:
        return make()
    except _IMPOSSIBLE as error:
        raise CorruptBufferError(
            f"{where}: a record cannot be converted to an item ({type(error).__name__}: {error}). "
            "The record is damaged, or the fields of a tensorclass or namedtuple differ from those "
            "in the program that wrote it; use the same classes, or restore the buffer from a copy",
            path=where,
        ) from error


class ItemBuilder:
    """Builds m items from columns of their leaves.

    Args:
        batch_dims: batch sizes of all containers in each item, in the order of the tree, int64
            ``[m, ...]``.
        columns: a sequence of m leaves for each chunk, in order.
    """

    def __init__(self, batch_dims: Ints, columns: Any) -> None:
        self.columns = columns
        self.count = len(batch_dims)
        self._batch_dims = batch_dims
        self._at = 0

    def rows(self, tree: Any) -> Sequence[Any]:
        """Builds the part of each item that ``tree`` describes. Items share no containers."""
        if tree[0] == "chunk":
            return self.columns[tree[1]]  # type: ignore[no-any-return]
        node, dims = self.node(tree)
        parts = [self.rows(part) for part in node.parts]
        rows = list(zip(*parts, strict=True)) if parts else [()] * self.count
        return self.make_containers(node, rows, dims)

    def make_containers(self, node: Container, rows: Sequence[Any], dims: Ints) -> Sequence[Any]:
        """Creates one container per row of entries. ``dims`` has their batch sizes."""
        return containers.make_containers(node, rows)

    def node(self, tree: Any) -> tuple[Container, Ints]:
        """Parses a container in the tree.

        Returns the container with Python keys, and its batch size in each item, ``[m, rank]``.
        """
        node = split(tree)
        rank = node.batch[1] if node.batch else 0
        self._at += rank
        if node.kind in DICTS:
            node.keys[:] = map(labels.from_json, node.keys)
        return node, self._batch_dims[:, self._at - rank : self._at]

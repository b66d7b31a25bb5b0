"""A storage as it lies in files: looked at, not yet read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import CorruptBufferError, SchemaMismatchError
from shmbuffer.memory import Leaf
from shmbuffer.replay.checkpointers.memmap import (
    SINGLE,
    Folder,
    pytree_column,
    pytree_name,
    read_folder,
)
from shmbuffer.replay.checkpointers.nontensors import (
    objects_of_list,
    read_objects,
    shapes_of_objects,
)
from shmbuffer.replay.checkpointers.record import METADATA, Record, read_metadata
from shmbuffer.replay.form import structure
from shmbuffer.replay.form.leaves import Leaves, dtype_name
from shmbuffer.replay.form.nodes import LEAF, Node
from shmbuffer.replay.form.nodes import Path as Key
from shmbuffer.replay.form.objects import OBJECT, Objects
from shmbuffer.replay.values import reading


@dataclass
class Saved:
    """A storage as it lies in files.

    Attributes:
        where: in messages.
        record: which item is in which slot.
        node: the form of the data; None where the files do not tell.
        keys: of all leaves; those that no buffer stores are left out.
        column: ``[n, *lanes, *shape]`` at a key, a tensor or `Objects`; n is the capacity, or as
            much as hooks have left.
    """

    where: str
    record: Record
    node: Node | None
    keys: list[Key]
    column: Callable[[Key], Any]

    @classmethod
    def of_columns(cls, where: str, record: Record, node: Node, columns: list[Any]) -> Saved:
        """Of columns that are there, in the order of the node's leaves."""
        by_key = dict(zip(node.paths(), columns, strict=True))
        return cls(where, record, node, list(by_key), by_key.__getitem__)

    def example(self) -> Any:
        """A batch of one item of this form, without content.

        Raises:
            RuntimeError: the files do not tell the form.
        """
        if self.node is None:
            raise RuntimeError(
                f"{self.where}: holds a PyTree that TorchRL saved, without its form: write an item "
                "first, or call storage.define(example), and load then"
            )
        blank = []
        for key in self.node.paths():
            column = self.column(key)
            shape = (1, *column.shape[1:])
            blank.append(
                Objects.of((), shape)
                if isinstance(column, Objects)
                else torch.zeros(shape, dtype=column.dtype)
            )
        return self.node.build(iter(blank), (1, *self.record.lanes), torch.device("cpu"))

    def columns(self, leaves: Leaves) -> list[Any]:
        """One column for each leaf of a storage.

        Raises:
            SchemaMismatchError: a leaf is missing, unknown, or of another dtype or shape.
        """
        wanted = list(leaves.node.paths())
        for key in self.keys:
            if key not in wanted and key[0] not in leaves.optional:
                raise SchemaMismatchError(
                    f"{leaves.where}: the checkpoint in {self.where} has leaf {'.'.join(key)!r}, "
                    "which is not a leaf of this buffer; load it into a new buffer"
                )
        if self.record.lanes != leaves.lanes:
            raise SchemaMismatchError(
                f"{leaves.where}: has {list(leaves.lanes)} after the first dimension, the "
                f"checkpoint in {self.where} has {list(self.record.lanes)}; load it into a new "
                "buffer"
            )
        return [
            self._column_of(key, leaf, leaves)
            for key, leaf in zip(wanted, leaves.leaves, strict=True)
        ]

    def _column_of(self, key: Key, leaf: Leaf, leaves: Leaves) -> Any:
        if key not in self.keys:
            raise SchemaMismatchError(
                f"{leaves.where}: leaf {leaf.name!r} ({leaf}) is missing in the checkpoint in "
                f"{self.where}; load it into a new buffer",
                leaf=leaf.name,
            )
        column = self.column(key)
        dtype = OBJECT if isinstance(column, Objects) else dtype_name(column.dtype)
        if (dtype, tuple(column.shape[1:])) != (leaf.dtype, (*leaves.lanes, *leaf.shape)):
            saved = f"{dtype}{list(column.shape[1 + len(leaves.lanes) :])}"
            raise SchemaMismatchError(
                f"{leaves.where}: leaf {leaf.name!r} is {leaf}, the checkpoint in {self.where} has "
                f"{saved}; load it into a new buffer",
                leaf=leaf.name,
                expected=str(leaf),
                found=saved,
            )
        return column


def saved_in(path: Path, *, ndim: int, allow_pickle: bool) -> Saved:
    """Look at what is in a directory.

    Args:
        path: of the storage.
        ndim: leading dimensions of the data that belong to the storage that it is for: TorchRL does
            not say how many it had.
        allow_pickle: unpickle what was pickled, which runs code from the file.

    Raises:
        FileNotFoundError: no tensor storage was saved there.
        CorruptBufferError: the files are damaged.
        ValueError: something in there could only be unpickled.
    """
    found = read_metadata(path)
    record = Record.read(path, found)
    if found.get("is_pytree"):
        return _saved_pytree(path, found, record, ndim)
    folder = read_folder(path)
    if record is None:
        record = _first_slots(folder.shape[:ndim], found, path)
    if record.structure is None:
        if folder.pickled():
            raise ValueError(
                f"{path}: entries {folder.pickled()} are no tensors and were pickled, and loading "
                "them would run code from the files; nothing was unpickled. Save them as text, "
                "numbers, or lists of them"
            )
        node = folder.node(1 + len(record.lanes))
    else:
        with reading(path / METADATA):
            node = structure.from_json(record.structure)
            if not next(node.paths(), None) and node is not LEAF:
                raise ValueError("there is nothing in the form of an item")
    return Saved(str(path), record, node, *_of_folder(path, folder, record, node, allow_pickle))


def _of_folder(
    path: Path, folder: Folder, record: Record, node: Node, allow_pickle: bool
) -> tuple[list[Key], Callable[[Key], Any]]:
    """What leaves there are, and how to get at each."""
    shapes = shapes_of_objects(node)
    if record.structure is None:
        shape = (record.slots, *record.lanes)
        objects = {key: objects_of_list(folder.value(key), shape) for key in shapes}
    else:
        lead = record.present, record.lanes
        objects = read_objects(path, shapes, *lead, allow_pickle=allow_pickle)
    there = {*folder.names(), *objects}

    def column(key: Key) -> Any:
        return objects[key] if key in objects else _whole(folder.tensor(key), record, key, path)

    return [key for key in node.paths() if key in there], column


def _whole(column: torch.Tensor, record: Record, key: Key, path: Path) -> torch.Tensor:
    """CorruptBufferError where a tensor has another number of items than the storage."""
    lead = (record.slots, *record.lanes)
    if tuple(column.shape[: len(lead)]) != lead:
        raise CorruptBufferError(
            f"{path}: the tensor {'.'.join(key)!r} is {list(column.shape)}, and the storage that "
            f"it belongs to {list(lead)}; take another copy of the checkpoint",
            path=str(path),
        )
    return column


def _first_slots(shape: tuple[int, ...], found: dict[str, Any], path: Path) -> Record:
    """What TorchRL knows: items are in the first ``len`` places."""
    try:
        slots, *lanes = shape
        width = int(np.prod(lanes, dtype=np.int64))
        return Record(slots, tuple(lanes), np.arange(slots) < -(-int(found["len"]) // width))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptBufferError(
            f"{path}: a storage of shape {list(shape)} makes no sense ({error!r}); take another "
            "copy of the checkpoint",
            path=str(path),
        ) from error


def _saved_pytree(path: Path, found: dict[str, Any], record: Record | None, ndim: int) -> Saved:
    node: Node | None = None
    with reading(path / METADATA):
        metadata: dict[str, Any] = found["metadata"]
        if record is not None and record.structure is not None:
            node = structure.from_json(record.structure)
            names = {key: pytree_name(key) for key in node.paths()}
        elif list(metadata) == [SINGLE]:
            node, names = LEAF, {(): SINGLE}
        else:  # a key with a dot in it looks like nested ones: the storage has to know the form
            names = {tuple(name.split(".")): name.replace(".", "/") for name in metadata}
        tensors = {key: pytree_column(path, name, metadata) for key, name in names.items()}
        first = next(iter(tensors.values()))
    if record is None:
        record = _first_slots(tuple(first.shape[:ndim]), found, path)
    tensors = {key: _whole(column, record, key, path) for key, column in tensors.items()}
    return Saved(str(path), record, node, list(tensors), tensors.__getitem__)

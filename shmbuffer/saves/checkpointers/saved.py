"""Reads a saved tensor storage as columns over its files or over another buffer, without copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import BufferExistsError, SchemaMismatchError
from shmbuffer.items.form.leaves import OBJECT, Leaves
from shmbuffer.items.form.nodes import LEAF, Node
from shmbuffer.memory import Engine, Leaf, Ring
from shmbuffer.memory.attaching import open_save
from shmbuffer.memory.directory.diagnosis import is_save
from shmbuffer.memory.directory.neighbours import directory_of, is_buffer
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.saves.checkpointers.object_files import read_objects
from shmbuffer.saves.checkpointers.record_image import moment_of
from shmbuffer.saves.checkpointers.saved_storage import SavedStorage
from shmbuffer.saves.safe_files import exists
from shmbuffer.saves.values import damaged, reading
from shmbuffer.tensors.form import cpu, tensor_structure
from shmbuffer.tensors.form.objects import Objects
from shmbuffer.tensors.form.tensor_kit import TENSORS, new_columns
from shmbuffer.tensors.form.tensors import dtype_name, torch_dtype
from shmbuffer.torchrl.compat.folders import (
    TensorDictFolder,
    objects_of,
    read_folder,
    shapes_of_objects,
)
from shmbuffer.torchrl.compat.storage_files import METADATA, pytree_columns, read_metadata


@dataclass
class Saved:
    """The columns of a saved storage, and the record of its slots."""

    where: str  # path of the save, for messages
    record: SavedStorage  # the slots that contain items
    node: Node | None  # structure of an item; None if the files do not contain it
    # One column per leaf: a tensor ``[n, *lanes, *shape]`` or `Objects`. n is the capacity, or the
    # length after load hooks. Entries that a buffer cannot store are not included.
    by_key: dict[KeyPath, Any]

    @classmethod
    def of_columns(cls, where: str, record: SavedStorage, node: Node, columns: list[Any]) -> Saved:
        """Creates a `Saved` from columns that are in the order of the leaves of ``node``."""
        return cls(where, record, node, dict(zip(node.paths(), columns, strict=True)))

    @classmethod
    def of_buffer(cls, engine: Engine, path: Path, *, allow_pickle: bool = False) -> Saved:
        """Reads the buffer in a directory, which is copied if other processes have it open."""
        ring = engine.ring()
        if ring is None:
            raise RuntimeError(f"{path}: is a buffer to which nothing was ever written")
        if ring.records is not None:
            raise SchemaMismatchError(
                f"{path}: contains the save of a list of items; load it into a LazyStackStorage or "
                "another list"
            )
        if ring.schema.structure.get("kind") == layout.OBJECTS:
            return cls._of_objects(ring, path, allow_pickle=allow_pickle)
        leaves = Leaves.of_schema(TENSORS, ring.schema, str(path))
        if ring.seat.is_alone() and not ring.schema.sharing:
            columns = [_mapped(ring, at) for at in range(len(leaves.leaves))]
            moment = moment_of(ring)
        else:
            columns = new_columns(leaves, ring.capacity, cpu.DEVICE)
            moment = ring.copy_out([column.data_ptr() for column in columns])
        record = SavedStorage.of_moment(moment, leaves.lanes, leaves.node.to_json())
        return cls.of_columns(str(path), record, leaves.node, columns)

    @classmethod
    def _of_objects(cls, ring: Ring, path: Path, *, allow_pickle: bool) -> Saved:
        """Reads a save whose rows contain text and other objects in addition to tensors."""
        schema, moment = ring.schema, moment_of(ring)
        if "item" not in schema.structure:
            raise SchemaMismatchError(
                f"{path}: contains the save of a list of objects; load it into a ListStorage"
            )
        with reading(path / layout.SCHEMA):
            node = tensor_structure.from_json(schema.structure["item"])
            shapes = shapes_of_objects(node)
        record = SavedStorage.of_moment(moment, schema.lanes, node.to_json())
        by_key = {leaf.path: _mapped(ring, at) for at, leaf in enumerate(schema.leaves)}
        slots = record.present, schema.lanes
        objects = read_objects(path, shapes, *slots, allow_pickle=allow_pickle)
        return cls(str(path), record, node, by_key | objects)

    @classmethod
    def in_files(cls, path: Path, *, ndim: int, allow_pickle: bool) -> Saved:
        """Reads a save in TorchRL's layout, from this library or from TorchRL."""
        found = read_metadata(path)
        record = SavedStorage.read(path, found)
        node: Node | None = None
        if record is not None and record.structure is not None:
            with reading(path / METADATA):
                node = tensor_structure.from_json(record.structure)
                if not next(node.paths(), None) and node is not LEAF:
                    raise ValueError("the structure of an item has no leaves")
        if found.get("is_pytree"):
            node, columns = pytree_columns(path, found, node)
            shape = tuple(next(iter(columns.values())).shape)
            record = record or _first_slots(shape[:ndim], found, path)
        else:
            folder = read_folder(path, ndim)
            record = record or _first_slots(folder.shape[:ndim], found, path)
            node, columns = _of_folder(folder, record, node, allow_pickle)
        lead = (record.slots, *record.lanes)
        for key, column in columns.items():
            if tuple(column.shape[: len(lead)]) != lead:
                raise damaged(
                    path,
                    f"the shape of tensor {'.'.join(key)!r} must begin with {list(lead)}, which is "
                    f"the shape of the storage, got {list(column.shape)}",
                )
        return cls(str(path), record, node, columns)

    @classmethod
    def of_data_set(cls, path: Path, *, ndim: int) -> Saved:
        """Opens a save of a buffer or a storage, or a memory-mapped TensorDict, as a data set.

        Raises:
            BufferExistsError: The directory is that of a live buffer.
            FileNotFoundError: The directory contains no data.
        """
        folder = path / "storage" if exists(path / "storage" / METADATA) else directory_of(path)
        if is_buffer(folder) and is_save(folder):
            # the maps stay valid after this block, as long as the columns exist
            with open_save(folder, verify=False) as engine:
                return cls.of_buffer(engine, folder)
        if is_buffer(folder):
            raise BufferExistsError(
                f"{folder}: is a buffer that other processes may be writing to, not a data set; "
                "call attach() to use it, or open a save of it that was written by dumps()",
                path=str(folder),
            )
        if exists(folder / METADATA):
            return cls.in_files(folder, ndim=ndim, allow_pickle=False)
        if not exists(folder / "meta.json"):
            raise FileNotFoundError(
                f"{folder}: contains no data set (neither a save that dumps() has written, nor a "
                "memory-mapped TensorDict)"
            )
        found = read_folder(folder, ndim)
        slots, *lanes = found.shape[:ndim]
        record = SavedStorage(slots, tuple(lanes), np.ones(slots, np.bool_))
        return cls(str(folder), record, *_of_folder(found, record, None, False))

    def example(self) -> Any:
        """Returns a batch of one item with the structure of the saved items; values are 0."""
        if self.node is None:
            raise RuntimeError(
                f"{self.where}: contains a PyTree whose structure TorchRL did not save; write an "
                "item, or call storage.define(example), before you load the save"
            )
        for key in self.node.paths():
            if key not in self.by_key:
                raise damaged(self.where, f"the leaf {'.'.join(key)!r} is missing")
        columns = [self.by_key[key] for key in self.node.paths()]
        lead = (1, *self.record.lanes)
        with reading(Path(self.where) / METADATA):
            return self.node.build(map(blank, columns), lead, cpu.DEVICE)

    def columns(self, leaves: Leaves) -> list[Any]:
        """Returns the columns in the order of the leaves of the storage that is loaded.

        Raises:
            SchemaMismatchError: The save does not have the same leaves.
        """
        keys = list(leaves.node.paths())
        for key in self.by_key:
            if key not in keys and key[0] not in leaves.optional:
                raise SchemaMismatchError(
                    f"{leaves.where}: the checkpoint in {self.where} has leaf {'.'.join(key)!r}, "
                    "which is not a leaf of this buffer; load it into a new buffer"
                )
        if self.record.lanes != leaves.lanes:
            raise SchemaMismatchError(
                f"{leaves.where}: the dimensions of the storage after the first are "
                f"{list(leaves.lanes)}, but those of the checkpoint in {self.where} are "
                f"{list(self.record.lanes)}; load it into a new buffer"
            )
        return [
            self._column_of(key, leaf, leaves)
            for key, leaf in zip(keys, leaves.leaves, strict=True)
        ]

    def _column_of(self, key: KeyPath, leaf: Leaf, leaves: Leaves) -> Any:
        column = self.by_key.get(key)
        if column is None:
            raise SchemaMismatchError(
                f"{leaves.where}: leaf {leaf.name!r} ({leaf}) is missing in the checkpoint in "
                f"{self.where}; load it into a new buffer",
                leaf=leaf.name,
            )
        dtype = OBJECT if isinstance(column, Objects) else dtype_name(column.dtype)
        if (dtype, tuple(column.shape[1:])) != (leaf.dtype, (*leaves.lanes, *leaf.shape)):
            saved = f"{dtype}{list(column.shape[1 + len(leaves.lanes) :])}"
            raise SchemaMismatchError(
                f"{leaves.where}: leaf {leaf.name!r} is {leaf}, but the checkpoint in "
                f"{self.where} has {saved}; load it into a new buffer",
                leaf=leaf.name,
                expected=str(leaf),
                found=saved,
            )
        return column


def _mapped(ring: Ring, at: int) -> torch.Tensor:
    """Returns the column of a leaf, ``[slots, *lanes, *shape]``, over the memory of the ring."""
    leaf = ring.schema.leaves[at]
    shape, dtype = (ring.capacity, *ring.schema.lanes, *leaf.shape), torch_dtype(leaf.dtype)
    if not math.prod(shape) * dtype.itemsize:
        return cpu.empty(shape, dtype=dtype)
    return torch.frombuffer(ring.leaf(at), dtype=dtype).view(shape)


def blank(column: Any) -> Any:
    """Returns a column of one item with the same dtype and shape as ``column``; values are 0."""
    shape = (1, *column.shape[1:])
    if isinstance(column, Objects):
        return Objects.of((), shape)
    return cpu.zeros(shape, dtype=column.dtype)


def _of_folder(
    folder: TensorDictFolder, record: SavedStorage, node: Node | None, allow_pickle: bool
) -> tuple[Node, dict[KeyPath, Any]]:
    """Returns the structure of the items and the columns in tensordict's files.

    Args:
        folder: The files.
        record: The slots that contain items.
        node: The structure of the items; None if it is not recorded. It is then determined from the
            files.
        allow_pickle: True if pickled objects may be loaded.
    """
    path = folder.path
    if node is None:
        if folder.refused:
            raise ValueError(
                f"{path}: the entries {folder.refused} are not tensors and were pickled, so "
                "loading them would run code from the files; nothing was unpickled. Save these "
                "entries as text, numbers, or lists of these"
            )
        node, lead = folder.node, (record.slots, *record.lanes)
        with reading(path / "meta.json"):
            keys = shapes_of_objects(node)
            columns: dict[KeyPath, Any] = {
                key: objects_of(folder.values[key], lead) for key in keys
            }
    else:
        shapes = shapes_of_objects(node)
        slots = record.present, record.lanes
        columns = {**read_objects(path, shapes, *slots, allow_pickle=allow_pickle)}
    columns |= {key: folder.tensor(key) for key in node.paths() if key in folder.tensors}
    return node, columns


def _first_slots(shape: tuple[int, ...], found: dict[str, Any], path: Path) -> SavedStorage:
    """Returns the record for a save by TorchRL, whose items are in the first slots.

    Args:
        shape: The shape of the storage: the number of slots, and the lanes.
        found: The content of TorchRL's metadata file.
        path: The directory of the save, for messages.
    """
    try:
        slots, *lanes = shape
        width = int(np.prod(lanes, dtype=np.int64))
        return SavedStorage(slots, tuple(lanes), np.arange(slots) < -(-int(found["len"]) // width))
    except (KeyError, TypeError, ValueError) as error:
        why = f"the shape {list(shape)} or the length of the storage is invalid ({error!r})"
        raise damaged(path, why) from error

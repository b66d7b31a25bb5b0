"""The schema of a buffer: names, dtypes and shapes of the leaves, and the layout of their files.

A leaf is one tensor of an item. One file contains this leaf of all items, in C order, without a
header and with space for the whole capacity, so that tensordict's ``load_memmap`` can read the
directory. Items with varying structures or sizes are stored as records in a ring of bytes instead.
Their schema has no leaves.

This module does not import torch, because a dtype is represented by its name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError, SchemaMismatchError, SpaceError
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.key_names import require_file_names
from shmbuffer.memory.format.layout import LEDGER, OBJECTS, PAGE, RECORDS, SLOTS
from shmbuffer.memory.format.leaf import MAX_DEPTH, Leaf, size_of, sizes_of
from shmbuffer.memory.format.sharing import NOT_SHARED, Sharing

MAX_LEAVES = 4096
MAX_ELEMENTS = 2**40
MAX_RECORD_BYTES = 2**46

NEW_BUFFER = 'create a new buffer, in its directory with Coordinator(..., on_existing="overwrite")'
"""Advice in errors about data that do not match the schema of a buffer."""


@dataclass(frozen=True)
class Schema:
    """The leaves of an item and the shape of the storage.

    Raises:
        SchemaMismatchError: A leaf, a size or a combination of them is invalid.
        SpaceError: The storage would have too many elements.
    """

    leaves: tuple[Leaf, ...]  # in the order in which a write passes their addresses
    capacity: int  # number of slots, the first storage dimension
    lanes: tuple[int, ...] = ()  # the storage dimensions after the first; empty for `ndim=1`
    # How the leaves are combined to the user's items (TensorDict, tensor, PyTree), as JSON. Only
    # higher layers interpret it.
    structure: dict[str, Any] = field(default_factory=lambda: {"kind": "tensordict"})
    # size of the byte ring, a multiple of the page size; 0 if items are stored as leaves
    record_bytes: int = 0
    # the leaves that are stored once (`share_next`)
    sharing: Sharing = NOT_SHARED

    def __post_init__(self) -> None:
        self._check_records()
        self.sharing.require_fits(self.leaves, self.capacity, self.lanes)
        if self.capacity < 1 or any(n < 1 for n in self.lanes):
            raise SchemaMismatchError(
                f"a buffer needs at least one slot and one lane, but capacity is {self.capacity} "
                f"and lanes is {self.lanes}",
                capacity=self.capacity,
                lanes=self.lanes,
            )
        if self.elements > MAX_ELEMENTS:
            raise SpaceError(
                f"a buffer of {self.elements} elements exceeds the limit of {MAX_ELEMENTS}; use a "
                "smaller capacity",
                needed_bytes=8 * self.elements,
            )
        if len(self.leaves) > MAX_LEAVES:
            raise SchemaMismatchError(
                f"the item has {len(self.leaves)} leaves, but the limit is {MAX_LEAVES}; combine"
                " some of them"
            )
        for leaf in self.leaves:
            self._check_leaf(leaf)
        require_file_names(leaf.path for leaf in self.leaves)

    def _check_records(self) -> None:
        """Raises SchemaMismatchError if the size of the byte ring is invalid."""
        if not self.record_bytes:
            return
        if self.leaves or self.lanes:
            raise SchemaMismatchError(
                "a schema cannot have both a byte ring and leaves or lanes; leave one of them out"
            )
        if not PAGE <= self.record_bytes <= MAX_RECORD_BYTES or self.record_bytes % PAGE:
            raise SchemaMismatchError(
                f"a byte ring must have from {PAGE} to {MAX_RECORD_BYTES} bytes, in multiples of "
                f"{PAGE}, but record_bytes is {self.record_bytes}",
                record_bytes=self.record_bytes,
            )

    def _check_leaf(self, leaf: Leaf) -> None:
        """Raises SchemaMismatchError if the dtype, path, shape or size of a leaf is invalid."""
        if leaf.dtype not in DTYPES:
            raise SchemaMismatchError(
                f"leaf '{leaf.name}' has dtype {leaf.dtype}, which cannot be stored; convert it"
                " to another dtype",
                leaf=leaf.name,
            )
        if not 0 < len(leaf.path) <= MAX_DEPTH or any(n < 0 for n in leaf.shape):
            raise SchemaMismatchError(
                f"leaf '{leaf.name}' has an invalid path or shape; a path must have from 1 to"
                f" {MAX_DEPTH} keys, and a size must not be negative",
                leaf=leaf.name,
            )
        if max(leaf.nbytes, 1) * self.elements >= 2**62:
            raise SchemaMismatchError(
                f"leaf '{leaf.name}' ({leaf}) is too large for {self.elements} elements; use a"
                " smaller capacity or shape",
                leaf=leaf.name,
            )

    @property
    def width(self) -> int:
        """Number of elements in a slot: the product of ``lanes``."""
        return math.prod(self.lanes)

    @property
    def elements(self) -> int:
        """Number of elements in the storage."""
        return self.capacity * self.width

    @property
    def leaf_bytes(self) -> tuple[int, ...]:
        """Size of each leaf's file in bytes."""
        shared, own_rows = self.sharing.paths, self.sharing.own_rows
        return tuple(
            leaf.nbytes * (own_rows if leaf.path in shared else self.elements)
            for leaf in self.leaves
        )

    @property
    def leaf_files(self) -> tuple[str, ...]:
        """Name of each leaf's file."""
        return tuple(map(self.sharing.file_of, self.leaves))

    @property
    def columns(self) -> list[int]:
        """Indices of the leaves that have a column: a file with one row for each element."""
        return [at for at, leaf in enumerate(self.leaves) if leaf.path not in self.sharing.paths]

    def require_column(self, at: int, where: str) -> None:
        """Raises SchemaMismatchError if the leaf with the index ``at`` has no column."""
        leaf = self.leaves[at]
        if leaf.path in self.sharing.paths:
            raise SchemaMismatchError(
                f"{where}: leaf {leaf.name!r} is stored once (share_next), so it has no column;"
                " read items with get() or sample(), which return all leaves",
                leaf=leaf.name,
            )

    def require_columns(self, where: str) -> None:
        """Raises ValueError if a leaf has no column, because such files cannot serve as a save."""
        if self.sharing:
            raise ValueError(
                f"{where}: this buffer has {self.sharing} (share_next), so its files do not have"
                " the format of a save; save to another directory and load from there. Nothing was"
                " changed"
            )

    @property
    def map_bytes(self) -> tuple[int, ...]:
        """Size in bytes of each payload file: one file per leaf, or one file for all records."""
        return (self.record_bytes,) if self.record_bytes else self.leaf_bytes

    def bytes_of_slots(self, slots: int) -> tuple[int, ...]:
        """Returns the size in bytes of the first ``slots`` slots in each payload file.

        The own rows of shared leaves are always counted completely, because any slot can use any of
        them.
        """
        if slots >= self.capacity:
            return self.map_bytes
        if slots == 0 or self.record_bytes:
            return (0,) * len(self.map_bytes)
        return tuple(
            nbytes if leaf.path in self.sharing.paths else nbytes // self.capacity * slots
            for leaf, nbytes in zip(self.leaves, self.leaf_bytes, strict=True)
        )

    @property
    def map_files(self) -> tuple[str, ...]:
        """Name of each payload file."""
        return (RECORDS,) if self.record_bytes else self.leaf_files

    @property
    def mapped_files(self) -> list[str]:
        """Names of all files that are mapped, except the control file."""
        if self.record_bytes:
            return [SLOTS, LEDGER, RECORDS]
        sizes = zip(self.leaf_files, self.leaf_bytes, strict=True)
        return [SLOTS, LEDGER, *(file for file, nbytes in sizes if nbytes)]

    @property
    def sections(self) -> dict[str, int]:
        """Offset of each section of the slots file, and the size of the file, from the C core."""
        own_rows = self.sharing.own_rows
        return _core.sections(self.capacity, self.width, bool(self.record_bytes), own_rows)

    @property
    def ledger_bytes(self) -> int:
        """Maximum size of the ledger in bytes."""
        return _core.parts(self.capacity)["bytes"]

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON. Two schemas are equal if their digests are equal."""
        return hashlib.sha256(self.to_json()).digest()

    def to_json(self) -> bytes:
        """Returns the schema as canonical JSON in UTF-8: equal schemas have equal bytes."""
        fields: dict[str, Any] = {
            "capacity": self.capacity,
            "lanes": list(self.lanes),
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "structure": self.structure,
        }
        if self.record_bytes:
            fields["record_bytes"] = self.record_bytes
        if self.sharing:
            fields["sharing"] = self.sharing.to_json()
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Schema:
        """Parses the output of `to_json`.

        Args:
            data: The JSON in UTF-8.
            where: Path of the file, for messages.

        Raises:
            CorruptBufferError: The JSON does not describe a valid schema.
        """
        try:
            fields = json.loads(data)
            schema = cls(
                tuple(map(Leaf.from_json, fields["leaves"])),
                size_of(fields["capacity"]),
                sizes_of(fields["lanes"]),
                fields["structure"],
                size_of(fields.get("record_bytes", 0)),
                Sharing.from_json(fields.get("sharing")),
            )
        except (
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
            SchemaMismatchError,
            SpaceError,
        ) as error:
            raise CorruptBufferError(
                f"{where}: the schema cannot be read ({error}); restore the file from a copy",
                path=where,
            ) from error
        return schema

    def require_same(self, other: Schema, where: str) -> None:
        """Raises SchemaMismatchError if another schema differs. Names the first difference.

        Args:
            other: The schema of the data that are written.
            where: Path of the buffer, for the message.
        """
        difference = self.difference(other)
        if difference is not None:
            raise SchemaMismatchError(f"{where}: {difference}; convert it, or {NEW_BUFFER}")

    def difference(self, other: Schema) -> str | None:
        """Returns the first difference between this schema and the schema of a write, as a clause.

        Returns None if both schemas are equal. The order of the leaves does not matter.
        """
        leaves = difference_of(self.leaves, other.leaves, "this buffer", "this write")
        if leaves is not None:
            return leaves
        if self.record_bytes != other.record_bytes:
            return (
                f"the byte ring has {self.record_bytes} bytes, but this write is for a ring of"
                f" {other.record_bytes} bytes"
            )
        if self.sharing != other.sharing:
            return f"the buffer has {self.sharing}, but this write is for {other.sharing}"
        if (self.capacity, self.lanes) != (other.capacity, other.lanes):
            return (
                f"the storage has the shape {[self.capacity, *self.lanes]}, but this write is for"
                f" the shape {[other.capacity, *other.lanes]}"
            )
        return None

    def meta_files(self, slots: int | None = None) -> dict[str, bytes]:
        """Returns the content of tensordict's ``meta.json`` files, by name.

        Names are relative to the scratch directory.

        Args:
            slots: Number of slots that the files describe. None means the capacity.
        """
        if self.record_bytes or self.structure.get("kind") == OBJECTS:
            return {}
        batch = [self.capacity if slots is None else slots, *self.lanes]
        folders: dict[tuple[str, ...], dict[str, Any]] = {(): {}}
        for leaf in (self.leaves[at] for at in self.columns):
            for depth in range(1, len(leaf.path)):
                folders.setdefault(leaf.path[:depth], {})
                folders[leaf.path[: depth - 1]][leaf.path[depth - 1]] = {"type": "TensorDict"}
            folders[leaf.path[:-1]][leaf.path[-1]] = {
                "device": "cpu",
                "shape": batch + list(leaf.shape),
                "dtype": f"torch.{leaf.dtype}",
                "is_nested": False,
            }
        tail = {
            "shape": batch,
            "device": "cpu",
            "_type": "<class 'tensordict._td.TensorDict'>",
            "_format_version": 1,
            "_class": "tensordict:TensorDict",
        }
        return {
            "/".join([*(quote(part, safe="") for part in path), "meta.json"]): json.dumps(
                {**folder, **tail}
            ).encode()
            for path, folder in folders.items()
        }


def difference_of(
    expected: Iterable[Leaf], actual: Iterable[Leaf], expected_name: str, actual_name: str
) -> str | None:
    """Returns the first difference between two lists of leaves as a clause, or None if equal.

    Args:
        expected: The leaves of a schema.
        actual: The leaves that are compared with them, in any order.
        expected_name: Phrase for the object with the expected leaves, such as "this buffer".
        actual_name: Phrase for the object with the other leaves, such as "this write".
    """
    known, found = ({leaf.path: leaf for leaf in leaves} for leaves in (expected, actual))
    for path, leaf in known.items():
        if path not in found:
            return f"leaf '{leaf.name}' ({leaf}) is missing in {actual_name}"
        if found[path] != leaf:
            return f"leaf '{leaf.name}' is {leaf}, but {actual_name} has {found[path]}"
    for path, leaf in found.items():
        if path not in known:
            return f"leaf '{leaf.name}' ({leaf}) is not a leaf of {expected_name}"
    return None

"""Converts the columns of Parquet files between Arrow's arrays and tensors, without copies.

Dtypes that Arrow does not support are stored as integers or floats with the same bits
(`DType.arrow`). Columns of other programs can contain numbers, lists of numbers with the same
length, fixed-size binaries, or structs of these.

Invariant: before a tensor is created over the memory of a column, the Arrow type and the number of
values are compared with those of the leaf. The metadata of the file are not trusted.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.extras import missing
from shmbuffer.memory import Leaf
from shmbuffer.memory.format.dtypes import DTYPES
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import contiguous, dtype_name, torch_dtype, torch_dtype_like


class Column:
    """The column of a leaf. As a tensor, it has the shape ``[rows, *lanes, *shape]``."""

    def __init__(self, leaf: Leaf, lanes: tuple[int, ...]) -> None:
        self.leaf = leaf
        self.shape = (*lanes, *leaf.shape)
        self._dtype = torch_dtype(leaf.dtype)
        self._stored = torch_dtype(DTYPES[leaf.dtype].arrow or leaf.dtype)
        # how many numbers of the dtype `_stored` a row has
        self.count = math.prod(self.shape) * (self._dtype.itemsize // self._stored.itemsize)
        self.nbytes = self.count * self._stored.itemsize

    def type(self, pa: Any) -> Any:
        """Returns the Arrow type of the column."""
        if self._stored is torch.uint8 and self.count > 1:
            return pa.binary(self.count)
        number = self._number_type(pa)
        if self.count == 1:
            return number
        return pa.list_(pa.field("element", number, nullable=False), self.count)

    def _number_type(self, pa: Any) -> Any:
        """Returns the Arrow type of one number of the column."""
        return pa.from_numpy_dtype(cpu.empty(0, dtype=self._stored).numpy().dtype)

    def array(self, pa: Any, tensor: torch.Tensor) -> Any:
        """Returns an Arrow array over the memory of a tensor. Booleans are copied and packed."""
        flat = contiguous(tensor).view(-1)
        numbers = (flat if self._stored is self._dtype else flat.view(self._stored)).numpy()
        kind = self.type(pa)
        if pa.types.is_fixed_size_binary(kind):
            return pa.FixedSizeBinaryArray.from_buffers(
                kind, len(tensor), [None, pa.py_buffer(numbers)]
            )
        values = pa.array(numbers)
        return values if self.count == 1 else pa.FixedSizeListArray.from_arrays(values, type=kind)

    def tensor(self, path: Path, arrays: dict[str, Any], rows: int, first: int) -> torch.Tensor:
        """Returns a tensor over the memory of the column's Arrow array. Booleans are copied.

        Args:
            path: The file, for messages.
            arrays: The Arrow arrays of a batch, by column.
            rows: The number of rows in the batch.
            first: The row of the file at which the batch starts, for messages.
        """
        array = arrays.get(self.leaf.name)
        if array is None:
            if not self.count:  # files of this package have no column for an empty leaf
                return cpu.empty((rows, *self.shape), dtype=self._dtype)
            raise SchemaMismatchError(
                f"{path}: the file has no column for the leaf {self.leaf.name!r}; write the file "
                "again",
                leaf=self.leaf.name,
            )
        depth = 0
        while _is_list(array.type):
            array = _require_no_nulls(path, self.leaf.name, array)
            if not hasattr(array.type, "list_size"):
                self._require_length(path, array, depth, first)
            array, depth = array.flatten(), depth + 1
        self._require_type(path, _require_no_nulls(path, self.leaf.name, array), rows)
        if not self.count:
            return cpu.empty((rows, *self.shape), dtype=self._dtype)
        if self._dtype is torch.bool:  # packed in Arrow
            found = torch.from_numpy(array.to_numpy(zero_copy_only=False).astype(np.bool_))
        else:
            size = self.nbytes * rows
            at = array.offset * (size // max(1, len(array)))
            found = torch.frombuffer(_memory(array.buffers()[1], at, size), dtype=self._stored)
        return found.view(self._dtype).view(rows, *self.shape)

    def _require_length(self, path: Path, array: Any, depth: int, first: int) -> None:
        """Raises SchemaMismatchError if a list does not have the same length as in the first row.

        ``depth`` is the level of nested lists, and ``first`` the row of the file at which the array
        starts.
        """
        lengths = array.value_lengths().to_numpy()
        expected = self.shape[depth] if depth < len(self.shape) else 1
        for at in np.flatnonzero(lengths != expected)[:1]:
            row = first + at // math.prod(self.shape[:depth])
            raise SchemaMismatchError(
                f"{path}: column {self.leaf.name!r} has a list of {lengths[at]} in row {row}, but "
                f"the list in the first row has {expected}. All lists of a column must have the "
                "same length: pad them, or leave the column out",
                leaf=self.leaf.name,
            )

    def _require_type(self, path: Path, array: Any, rows: int) -> None:
        """Raises SchemaMismatchError unless an array has the type and the size of ``rows`` rows."""
        pa, _ = arrow()
        if pa.types.is_fixed_size_binary(array.type):
            fits = self._stored is torch.uint8 and array.type.byte_width == self.count
            count = len(array) * self.count
        else:
            fits = array.type == self._number_type(pa)
            count = len(array)
        if not fits or count != rows * self.count:
            raise SchemaMismatchError(
                f"{path}: column {self.leaf.name!r} has {count} values of type {array.type} in "
                f"{rows} rows, but {self.leaf} per row was expected; write the file again",
                leaf=self.leaf.name,
            )


def _memory(buffer: Any, at: int, size: int) -> Any:
    """Returns ``size`` bytes of an Arrow buffer as a ctypes array that keeps the buffer alive."""
    memory = (ctypes.c_char * size).from_address(buffer.address + at)
    memory.owner = buffer  # type: ignore[attr-defined] # arrays of ctypes accept attributes
    return memory


def _require_no_nulls(path: Path, name: str, array: Any) -> Any:
    """Returns an Arrow array. Raises SchemaMismatchError if values are missing in it."""
    if array.null_count:
        raise SchemaMismatchError(
            f"{path}: column {name!r} has {array.null_count} rows without a value, but every item "
            "needs a value; fill in the values, or leave the column out",
            leaf=name,
        )
    return array


def flattened(table: Any) -> Any:
    """Converts each struct column of a table to separate columns, with dots in their names."""
    while any(str(field.type).startswith("struct") for field in table.schema):
        table = table.flatten()
    return table


def path_of(name: str) -> KeyPath:
    """Returns the nested key of a column, which is its name split at the dots."""
    return tuple(name.split("."))


def leaf_of(path: Path, field: Any, key: KeyPath, lengths: list[int]) -> Leaf:
    """Returns the leaf for a column that another program has written.

    Args:
        path: The file, for messages.
        field: The Arrow field of the column.
        key: The nested key of the leaf.
        lengths: The lengths of the lists in the first row, outermost first.
    """
    kind, shape = field.type, list[int]()
    while _is_list(kind):
        found = lengths[len(shape)] if len(shape) < len(lengths) else 0
        shape.append(getattr(kind, "list_size", found))
        kind = kind.value_type
    if str(kind).startswith("fixed_size_binary") and not shape:
        return Leaf(key, "uint8", (kind.byte_width,))
    try:
        dtype = torch_dtype_like(np.dtype(kind.to_pandas_dtype()))
    except (NotImplementedError, TypeError):
        dtype = None
    if dtype is None:
        raise SchemaMismatchError(
            f"{path}: column {field.name!r} has the type {field.type}, which is not supported. A "
            "column must contain numbers, lists of numbers with the same length, fixed-size "
            "binaries, or structs of these: convert the column, or leave it out",
            leaf=field.name,
            found=str(field.type),
        )
    return Leaf(key, dtype_name(dtype), tuple(shape))


def lengths_of_lists(path: Path, part: Any) -> dict[str, list[int]]:
    """Returns the lengths of the lists in the first row of a file, by column, outermost first."""
    pa, _ = arrow()
    table = flattened(pa.Table.from_batches([next(part.iter_batches(1))]))
    lengths: dict[str, list[int]] = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        while _is_list(array.type):
            array = _require_no_nulls(path, name, array)
            lengths.setdefault(name, []).append(
                array.value_lengths()[0].as_py() if len(array) else 0
            )
            array = array.flatten()
    return lengths


def _is_list(kind: Any) -> bool:
    types = arrow()[0].types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def arrow() -> tuple[Any, Any]:
    """Imports and returns pyarrow and pyarrow.parquet. Raises MissingExtra if it cannot."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise missing(
            "reading and writing Parquet files needs pyarrow", "parquet", name=error.name
        ) from error
    return pyarrow, pyarrow.parquet

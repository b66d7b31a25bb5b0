"""Items as columns in a Parquet file: a leaf a column, a batch a row group, no copy of a row.

    next.obs   float32[17]      fixed_size_list<float>[17]: the numbers of all rows, one by one
    frame      uint8[64, 64]    fixed_size_binary[4096]: bytes, which Parquet takes as they are
    reward     float32[1]       float: one number a row
    shmbuffer                   under this key of the file: dtypes, shapes, and the form of an item

Arrow is handed the memory of a batch, and a batch is made over Arrow's memory. dtypes that Arrow
has not are stored as integers or floats of the same bits. A file of another program has columns of
numbers, of fixed-size lists and of structs of these; dots in a name nest.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import FormatError, SchemaMismatchError, ShmBufferError
from shmbuffer.extras import missing
from shmbuffer.memory import Leaf
from shmbuffer.memory.format.leaf import KeyPath
from shmbuffer.memory.format.names import require_file_names
from shmbuffer.replay.form import cpu, structure
from shmbuffer.replay.form.leaves import Leaves
from shmbuffer.replay.form.tensors import contiguous, dtype_name, torch_dtype, torch_dtype_like
from shmbuffer.replay.publication import publish_file
from shmbuffer.replay.storages.rows import Rows
from shmbuffer.replay.storages.tensor import TensorStorage
from shmbuffer.replay.values import reading
from shmbuffer.replay.work_directory import located

_KEY = b"shmbuffer"
_BATCH_BYTES = 2**26
"""Of the rows that are read, or written, at once."""
_AS = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), torch.uint8),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), torch.uint8),
    "bfloat16": torch.int16,
    "complex32": torch.float16,
    "complex64": torch.float32,
    "complex128": torch.float64,
}
"""dtypes that Arrow has not, and what has the same bits there."""


def write(storage: Any, path: str | os.PathLike[str], compression: str) -> int:
    """Write every item, the oldest first; see `ReplayBuffer.to_parquet`."""
    _arrow()
    return write_rows(rows_of(storage, path), Path(path), compression)


def write_rows(rows: Rows, path: Path, compression: str) -> int:
    """Writes all rows into a file that appears complete; returns their number."""
    pa, pq = _arrow()
    columns = [_Column(leaf, rows.lanes) for leaf in rows.leaves.leaves]
    require_file_names([one.leaf.path for one in columns], f"{path}: leaf")
    form = {
        "format": 1,
        "structure": rows.leaves.node.to_json(),
        "leaves": [leaf.to_json() for leaf in rows.leaves.leaves],
        "lanes": list(rows.lanes),
    }
    fields = [pa.field(one.leaf.name, one.type(pa), nullable=False) for one in columns if one.count]
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SchemaMismatchError(
            f"{path}: several entries make a column {twice[0]!r}, as ('a', 'b') and 'a.b' do; "
            "rename one, or save it with dumps(). Nothing was written",
            leaf=twice[0],
        )
    schema = pa.schema(fields, metadata={_KEY: json.dumps(form).encode()})
    count = 0
    with (
        errors_located(path),
        publish_file(path) as beside,
        pq.ParquetWriter(
            beside, schema, compression=compression, use_dictionary=False, write_statistics=False
        ) as file,
    ):
        for tensors in in_order_of_age(rows):
            arrays = [
                one.array(pa, tensor)
                for one, tensor in zip(columns, tensors, strict=True)
                if one.count
            ]
            count += len(tensors[0])
            file.write_batch(pa.record_batch(arrays, schema=schema), row_group_size=2**30)
    return count


@contextmanager
def errors_located(path: Path) -> Iterator[None]:
    """Adds the path to an OSError that lacks it, and the cause to an error of a library.

    Arrow, for one, only says "error closing file".
    """
    try:
        with located(path):
            yield
    except OSError as error:
        if isinstance(error, ShmBufferError) or error.errno is not None:
            raise
        number = getattr(error.__context__, "errno", None) or errno.EIO
        raise OSError(number, str(error), str(path)) from error


def rows_of(storage: Any, path: str | os.PathLike[str]) -> Rows:
    """The rows of a storage that are columns of ``path``; TypeError where it has none."""
    rows: Rows | None = storage.mover() if isinstance(storage, TensorStorage) else None
    if rows is None or rows.leaves.objects:
        raise TypeError(
            f"{path}: columns are made of tensors of one form, and this {type(storage).__name__} "
            "has none; save it with dumps()"
        )
    return rows


class File:
    """An open file of columns; SchemaMismatchError if one is not of numbers or fixed-size lists."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = self._path = Path(path)
        pa, pq = _arrow()
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except pa.ArrowInvalid as error:
            raise FormatError(f"{path}: not a Parquet file ({error}); check the path") from error
        self.rows = int(self._file.metadata.num_rows)
        form = (self._file.schema_arrow.metadata or {}).get(_KEY)
        self.lanes: tuple[int, ...] = ()
        if form is None:
            columns = _flat(self._file.schema_arrow.empty_table()).schema
            require_file_names((_path_of(one.name) for one in columns), f"{path}: column")
            by_path = {leaf.path: leaf for leaf in (_leaf_of(path, one) for one in columns)}
            node = structure.of_schema({"kind": "tensordict"}, list(by_path), str(path))
            leaves = tuple(by_path[key] for key in node.paths())
        else:
            with reading(path):
                known = json.loads(form)
                if known["format"] != 1:
                    raise ValueError(f"format {known['format']!r} is of another version")
                leaves = tuple(map(Leaf.from_json, known["leaves"]))
                self.lanes = tuple(int(size) for size in known["lanes"])
                paths = [leaf.path for leaf in leaves]
                node = structure.of_schema(known["structure"], paths, str(path))
                require_file_names(paths, f"{path}: column")
        self._leaves = Leaves(node, leaves, self.lanes, str(path))
        self._columns = [_Column(leaf, self.lanes) for leaf in leaves]
        self.chunk = _chunk(self._columns)

    def batches(self, rows: int) -> Iterator[Any]:
        """The items in their order, so many at once; a batch lies over what was read."""
        pa, _ = _arrow()
        for batch in self._file.iter_batches(rows):
            table = _flat(pa.Table.from_batches([batch]))
            arrays = {name: table[name].combine_chunks() for name in table.column_names}
            tensors = [one.tensor(self._path, arrays, len(batch)) for one in self._columns]
            yield self._leaves.build(tensors, (len(batch), *self.lanes))


class _Column:
    """One leaf, ``[rows, *lanes, *shape]``."""

    def __init__(self, leaf: Leaf, lanes: tuple[int, ...]) -> None:
        self.leaf = leaf
        self.shape = (*lanes, *leaf.shape)
        self._dtype = torch_dtype(leaf.dtype)
        self._stored = _AS.get(leaf.dtype, self._dtype)
        # numbers in a row, as they are stored
        self.count = math.prod(self.shape) * (self._dtype.itemsize // self._stored.itemsize)
        self.nbytes = self.count * self._stored.itemsize

    def type(self, pa: Any) -> Any:
        """Arrow's."""
        if self._stored is torch.uint8 and self.count > 1:
            return pa.binary(self.count)
        one = pa.from_numpy_dtype(cpu.empty(0, dtype=self._stored).numpy().dtype)
        if self.count == 1:
            return one
        return pa.list_(pa.field("element", one, nullable=False), self.count)

    def array(self, pa: Any, tensor: torch.Tensor) -> Any:
        """Arrow's array over a tensor; booleans are packed."""
        flat = contiguous(tensor).view(-1)
        numbers = (flat if self._stored is self._dtype else flat.view(self._stored)).numpy()
        kind = self.type(pa)
        if pa.types.is_fixed_size_binary(kind):
            return pa.FixedSizeBinaryArray.from_buffers(
                kind, len(tensor), [None, pa.py_buffer(numbers)]
            )
        values = pa.array(numbers)
        return values if self.count == 1 else pa.FixedSizeListArray.from_arrays(values, type=kind)

    def tensor(self, path: Path, arrays: dict[str, Any], rows: int) -> torch.Tensor:
        """A tensor over Arrow's array."""
        if not self.count:
            return cpu.empty((rows, *self.shape), dtype=self._dtype)
        array = arrays.get(self.leaf.name)
        if array is None:
            raise SchemaMismatchError(
                f"{path}: there is no column {self.leaf.name!r}, which an item has",
                leaf=self.leaf.name,
            )
        while hasattr(array, "flatten") and hasattr(array.type, "list_size"):
            array = _whole(path, self.leaf.name, array).flatten()
        _whole(path, self.leaf.name, array)
        if self._dtype is torch.bool:  # packed there
            found = torch.from_numpy(array.to_numpy(zero_copy_only=False).astype(np.bool_))
        else:
            size = self.nbytes * rows
            at = array.offset * (size // max(1, len(array)))
            found = torch.frombuffer(_memory(array.buffers()[1], at, size), dtype=self._stored)
        return found.view(self._dtype).view(rows, *self.shape)


def _memory(buffer: Any, at: int, size: int) -> Any:
    """Some bytes of Arrow's, which stay as long as they are looked at."""
    memory = (ctypes.c_char * size).from_address(buffer.address + at)
    memory.owner = buffer  # type: ignore[attr-defined] # ctypes' arrays have attributes
    return memory


def _whole(path: Path, name: str, array: Any) -> Any:
    if array.null_count:
        raise SchemaMismatchError(
            f"{path}: column {name!r} has {array.null_count} rows without a value, and an item has "
            "all of its entries; fill them, or leave the column out",
            leaf=name,
        )
    return array


def _chunk(columns: list[_Column]) -> int:
    return max(1, min(2**17, _BATCH_BYTES // max(1, sum(one.nbytes for one in columns))))


def in_order_of_age(rows: Rows) -> Iterator[list[torch.Tensor]]:
    """All items ``[n, ...]``, validated; what is written over meanwhile is left out."""
    chunk = _chunk([_Column(leaf, rows.lanes) for leaf in rows.leaves.leaves])
    tickets, width = rows.ring.live.tickets(), rows.ring.width
    slots = np.flatnonzero(tickets >= 0)
    slots = slots[np.argsort(tickets[slots], kind="stable")]
    for start in range(0, len(slots), chunk):
        part = slots[start : start + chunk]
        elements = (part[:, None] * width + np.arange(width)).reshape(-1)
        tensors, now, _ = rows.read(torch.from_numpy(elements))
        kept = (now.numpy().reshape(-1, width) == tickets[part][:, None]).all(1)
        shaped = [tensor.view(len(part), *rows.lanes, *tensor.shape[1:]) for tensor in tensors]
        if not kept.all():
            shaped = [tensor[torch.from_numpy(kept)] for tensor in shaped]
        if kept.any():
            yield shaped


def _flat(table: Any) -> Any:
    """A table, with what is in structs as columns of their own, with dots in their names."""
    while any(str(field.type).startswith("struct") for field in table.schema):
        table = table.flatten()
    return table


def _path_of(name: str) -> KeyPath:
    """The nested key of a column: dots nest."""
    return tuple(name.split("."))


def _leaf_of(path: Path, field: Any) -> Leaf:
    """What a column of another program's is."""
    kind, shape = field.type, []
    while hasattr(kind, "list_size"):
        shape.append(kind.list_size)
        kind = kind.value_type
    if str(kind).startswith("fixed_size_binary"):
        return Leaf(_path_of(field.name), "uint8", (kind.byte_width,))
    try:
        dtype = torch_dtype_like(np.dtype(kind.to_pandas_dtype()))
    except (NotImplementedError, TypeError):
        dtype = None
    if dtype is None:
        raise SchemaMismatchError(
            f"{path}: column {field.name!r} is {field.type}; columns are numbers, fixed-size lists "
            "of them, fixed-size binaries, and structs of these: convert it, or leave it out",
            leaf=field.name,
            found=str(field.type),
        )
    return Leaf(_path_of(field.name), dtype_name(dtype), tuple(shape))


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise missing(
            "to read and write files of Parquet needs pyarrow", "parquet", name=error.name
        ) from error
    return pyarrow, pyarrow.parquet

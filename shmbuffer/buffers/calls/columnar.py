"""A buffer as a file of columns, and back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from shmbuffer.buffers.calls.access import swap_dims
from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.saves import parquet_file
from shmbuffer.storages import LazyTensorStorage, Storage


class Columnar(Parts):
    """``to_parquet`` and ``from_parquet``."""

    if TYPE_CHECKING:
        extend: Any

        def __init__(self, **options: Any) -> None: ...

    def to_parquet(self, path: str | os.PathLike[str], *, compression: str = "none") -> int:
        """Write all items into a Parquet file, oldest first; needs the extra ``parquet``.

        A leaf is a column: a number, a fixed-size list of numbers, or, of several uint8, a
        fixed-size binary. Dots join nested keys. `from_parquet` restores the items bit for bit, in
        their form; other programs read plain columns. Priorities and cursor are left out (see
        `dumps`). The file appears as a whole, on the disk.

        Args:
            path: the file; an existing one is replaced.
            compression: ``"none"``, ``"zstd"``, ``"lz4"`` or ``"snappy"``.

        Returns:
            How many items were written; those that others overwrite meanwhile are left out.

        Raises:
            TypeError: the storage has no tensors, or also text.
            MissingExtra: pyarrow is not installed; the message has the command.
            OSError: no room, or no permission; the existing file stays.

        Cost: all bytes once; memory for 64 MiB of items.
        """
        return parquet_file.write(self._storage, path, compression)

    @classmethod
    def from_parquet(
        cls,
        path: str | os.PathLike[str],
        *,
        storage: Storage | Callable[[int], Storage] | None = None,
        rename: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Self:
        """Makes a buffer with the items of a Parquet file, in order; needs the extra ``parquet``.

        Args:
            path: the file, from `to_parquet` or another program. A column holds numbers, lists of
                numbers, fixed-size binaries, or structs of these; all lists of a column have one
                length, which becomes the shape. A dot in a name nests. Of a folder, all
                ``*.parquet`` files in it and in folders below are read in the order of their names
                (``part.2`` before ``part.10``), except those that begin with a dot or underscore.
            storage: for the items, or a function of their number that makes one; None is a
                `LazyTensorStorage`.
            rename: new names for columns of another program, by their names in the file:
                ``{"index": "stored_index"}`` for LeRobot's column, whose name is that of an entry
                of each sample.
            **options: of the buffer.

        Raises:
            FileNotFoundError: no such file, or no part file in the folder.
            SchemaMismatchError: a column has another type, lists of several lengths, rows without
                a value, or a name that no entry can have; or part files have different columns.
                The message names the file and the column.
            ValueError: ``rename`` names a column that is not there.
            MissingExtra: see `to_parquet`.

        Cost: all bytes once; 64 MiB of memory besides the storage.
        """
        file = parquet_file.File(path, rename)
        ndim = 1 + len(file.lanes)
        items = file.rows * math.prod(file.lanes)
        if storage is None:
            storage = LazyTensorStorage(max(1, items), ndim=ndim)
        elif not isinstance(storage, Storage):
            storage = storage(max(1, items))
        buffer = cls(storage=storage, **options)
        for batch in file.batches(file.chunk):
            dim = buffer.dim_extend
            buffer.extend(swap_dims(batch, dim) if dim else batch)
        return buffer

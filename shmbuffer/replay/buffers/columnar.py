"""A buffer to a file of columns, and back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from shmbuffer.replay import columns
from shmbuffer.replay.buffers.access import swap_dims
from shmbuffer.replay.buffers.parts import Parts
from shmbuffer.replay.storages import LazyTensorStorage, Storage


class Columnar(Parts):
    """``to_parquet`` and ``from_parquet``."""

    if TYPE_CHECKING:
        extend: Any

        def __init__(self, **options: Any) -> None: ...

    def to_parquet(self, path: str | os.PathLike[str], *, compression: str = "none") -> int:
        """Write all items into a Parquet file, the oldest first: the extra ``parquet``.

        A leaf is a column: a number, a fixed-size list of numbers, or, where it is several uint8,
        a fixed-size binary. Dots join nested keys. `from_parquet` gives the items back bit for bit,
        in their form; other programs read plain columns. Priorities and cursor are not in there:
        `dumps` saves those. The file appears as a whole, on the disk.

        Args:
            path: the file; one that is there is replaced.
            compression: ``"none"``, ``"zstd"``, ``"lz4"`` or ``"snappy"``.

        Returns:
            How many items were written. What others write over meanwhile is left out.

        Raises:
            TypeError: the storage has no tensors, or text beside them.
            MissingExtra: pyarrow is not installed; the message says how to.
            OSError: no room, or no permission; what was there is as it was.

        Cost: all bytes once; memory for 64 MiB of items.
        """
        return columns.write(self._storage, path, compression)

    @classmethod
    def from_parquet(
        cls,
        path: str | os.PathLike[str],
        *,
        storage: Storage | Callable[[int], Storage] | None = None,
        **options: Any,
    ) -> Self:
        """A buffer with the items of a Parquet file, in their order: the extra ``parquet``.

        Args:
            path: the file, written by `to_parquet` or another program: columns of numbers, of
                fixed-size lists or binaries, or structs of these. A dot in a name nests.
            storage: where they go; or what makes it, called with the number of items. None is a
                `LazyTensorStorage` of that number.
            **options: of the buffer.

        Raises:
            FileNotFoundError: no such file.
            SchemaMismatchError: a column is something else, or has rows without a value.
            MissingExtra: pyarrow is not installed; the message says how to.

        Cost: all bytes once; memory for 64 MiB of them beside the storage.
        """
        file = columns.File(path)
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

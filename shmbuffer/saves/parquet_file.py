"""Stores items in a Parquet file: one column per leaf, one row group per batch, no copies.

    next.obs   float32[17]      fixed_size_list<float>[17]: 17 numbers per row
    frame      uint8[64, 64]    fixed_size_binary[4096]: bytes, which Parquet stores unchanged
    reward     float32[1]       float: one number per row
    shmbuffer                   key in the metadata: dtypes, shapes, and the structure of an item

A batch is written from its own memory and read into Arrow's memory, in both cases without a copy;
see `parquet_columns`. In files of other programs, dots in the names of columns separate nested
keys. A folder of part files is one data set.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.errors import FormatError, SchemaMismatchError, ShmBufferError
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.memory import Leaf
from shmbuffer.memory.format.key_names import is_number, require_file_names
from shmbuffer.memory.format.schema import difference_of
from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.saves.parquet_columns import (
    Column,
    arrow,
    flattened,
    leaf_of,
    lengths_of_lists,
    path_of,
)
from shmbuffer.saves.publication import publish_file
from shmbuffer.saves.safe_files import require_plain
from shmbuffer.saves.values import reading
from shmbuffer.saves.work_directory import located
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.tensor import TensorStorage
from shmbuffer.tensors.form import tensor_structure
from shmbuffer.tensors.form.tensor_kit import TENSORS

_KEY = b"shmbuffer"
_BATCH_BYTES = 2**26
"""Maximum number of bytes in a batch of rows that is read or written."""


def write(storage: Any, path: str | os.PathLike[str], compression: str) -> int:
    """Writes all items of a storage to a new file, oldest first; see `ReplayBuffer.to_parquet`.

    Returns the number of items.
    """
    arrow()
    return write_rows(rows_of(storage, path), Path(path), compression)


def write_rows(rows: Rows, path: Path, compression: str) -> int:
    """Writes all rows, oldest first, to a file that appears atomically when it is complete.

    Returns the number of rows.
    """
    pa, pq = arrow()
    columns = [Column(leaf, rows.lanes) for leaf in rows.leaves.leaves]
    require_file_names([column.leaf.path for column in columns], f"{path}: leaf")
    form = {
        "format": 1,
        "structure": rows.leaves.node.to_json(),
        "leaves": [leaf.to_json() for leaf in rows.leaves.leaves],
        "lanes": list(rows.lanes),
    }
    fields = [
        pa.field(column.leaf.name, column.type(pa), nullable=False)
        for column in columns
        if column.count
    ]
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SchemaMismatchError(
            f"{path}: several entries would have the column name {twice[0]!r}, like ('a', 'b') and "
            "'a.b'; rename one of these entries, or save with dumps(). Nothing was written",
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
                column.array(pa, tensor)
                for column, tensor in zip(columns, tensors, strict=True)
                if column.count
            ]
            count += len(tensors[0])
            file.write_batch(pa.record_batch(arrays, schema=schema), row_group_size=2**30)
    return count


@contextmanager
def errors_located(path: Path) -> Iterator[None]:
    """Adds a path to an OSError that has none, and the error number to an OSError of a library.

    For example, Arrow raises an OSError with only the text "error closing file".
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
    """Returns the rows of a storage that is exported to ``path``.

    Raises TypeError if the items are not tensors with the same structure.
    """
    rows: Rows | None = storage.mover() if isinstance(storage, TensorStorage) else None
    if rows is None or rows.leaves.objects:
        raise TypeError(
            f"{path}: only tensors with the same structure in every item can be stored in columns, "
            f"but this {type(storage).__name__} has other items; save it with dumps()"
        )
    return rows


class _Items(NamedTuple):
    """The leaves and the structure of the items in a file."""

    leaves: tuple[Leaf, ...]
    form: dict[str, Any]  # the structure over the leaves, as JSON
    lanes: tuple[int, ...]


class File:
    """The items in a Parquet file, or in a folder of part files.

    Args:
        path: The file, or a folder whose ``*.parquet`` files are one data set, including those in
            subfolders. The files are ordered by name, and numbers in names are compared as numbers.
        rename: The new names of columns of another program, by their names in the file.

    Raises:
        FileNotFoundError: The file does not exist, or the folder contains no part file.
        FormatError: A file is not a Parquet file.
        SchemaMismatchError: A column contains neither numbers nor lists of numbers, has a name that
            an item cannot have, or differs between part files.
        ValueError: ``rename`` contains a column that does not exist.
    """

    def __init__(
        self, path: str | os.PathLike[str], rename: Mapping[str, str] | None = None
    ) -> None:
        arrow()
        path, self._rename = Path(path), dict(rename or {})
        self.files = part_files(path)
        self.rows = 0
        schemas = []
        # In files of other programs, each row of a list column has its own length. The length in
        # the first row must then be that of all rows.
        lengths: dict[str, list[int]] = {}
        for file in self.files:
            part = _open(file)
            if part.metadata.num_rows and not self.rows:
                lengths = lengths_of_lists(file, part)
            self.rows += int(part.metadata.num_rows)
            schemas.append(part.schema_arrow)
        items = self._items_of(self.files[0], schemas[0], lengths)
        for file, schema in zip(self.files[1:], schemas[1:], strict=True):
            other = self._items_of(file, schema, lengths)
            if other != items:
                why = difference_of(items.leaves, other.leaves, self.files[0].name, "this file")
                raise SchemaMismatchError(
                    f"{file}: {why or 'its items have another structure'}; all part files of a "
                    "data set must have the same columns. Convert this file, or move it away"
                )
        self.lanes = items.lanes
        self._leaves = Leaves(
            TENSORS, tensor_structure.from_json(items.form), items.leaves, self.lanes, str(path)
        )
        self._columns = [Column(leaf, self.lanes) for leaf in items.leaves]
        self.chunk = _chunk(self._columns)

    def batches(self, rows: int) -> Iterator[Any]:
        """Yields all items in the order of the file, in batches of at most ``rows`` items.

        The tensors of a batch use Arrow's memory, without a copy.
        """
        pa, _ = arrow()
        for file in self.files:
            first = 0
            for batch in _open(file).iter_batches(rows):
                table = flattened(pa.Table.from_batches([batch]))
                arrays = {
                    self._rename.get(name, name): table[name].combine_chunks()
                    for name in table.column_names
                }
                tensors = [
                    column.tensor(file, arrays, len(batch), first) for column in self._columns
                ]
                yield self._leaves.build(tensors, (len(batch), *self.lanes))
                first += len(batch)

    def _items_of(self, file: Path, schema: Any, lengths: dict[str, list[int]]) -> _Items:
        """Returns the leaves and the structure of the items in a file.

        Args:
            file: The file, for messages.
            schema: The Arrow schema of the file.
            lengths: The lengths of the lists in each column, from the first row of the data set.
        """
        what = f"{file}: column"
        form = (schema.metadata or {}).get(_KEY)
        if form is not None:
            if self._rename:
                raise ValueError(
                    f"{file}: was written by to_parquet(), so its columns cannot be renamed; do "
                    "not pass rename="
                )
            with reading(file):
                known = json.loads(form)
                if known["format"] != 1:
                    raise ValueError(f"format {known['format']!r} is not supported by this version")
                leaves = tuple(map(Leaf.from_json, known["leaves"]))
                lanes = tuple(int(size) for size in known["lanes"])
                paths = [leaf.path for leaf in leaves]
                node = tensor_structure.of_schema(known["structure"], paths, str(file))
                require_file_names(paths, what)
                return _Items(leaves, node.to_json(), lanes)
        columns = list(flattened(schema.empty_table()).schema)
        if unknown := self._rename.keys() - {column.name for column in columns}:
            raise ValueError(
                f"{file}: rename= contains the column {min(unknown)!r}, but the file has "
                f"{', '.join(repr(column.name) for column in columns)}; correct the name"
            )
        names = [self._rename.get(column.name, column.name) for column in columns]
        for name in names:
            if (root := path_of(name)[0]) in OWN_KEYS:
                raise SchemaMismatchError(
                    f"{what} {name!r}: a sample already has an entry {root!r}, which would replace "
                    "the column; load the column under another name, with "
                    f"rename={{{name!r}: 'stored_{name.lstrip('_')}'}}",
                    leaf=name,
                )
        require_file_names(map(path_of, names), what)
        by_path = {
            path_of(name): leaf_of(file, column, path_of(name), lengths.get(column.name, []))
            for name, column in zip(names, columns, strict=True)
        }
        node = tensor_structure.of_schema({"kind": "tensordict"}, list(by_path), str(file))
        return _Items(tuple(by_path[key] for key in node.paths()), node.to_json(), ())


def part_files(path: Path) -> list[Path]:
    """Returns the path of a Parquet file, or the sorted paths of the part files in a folder.

    Raises UnsafePathError for links and FIFOs.
    """
    if not path.is_dir():
        path = resolve_path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file; check the path")
        require_plain(path)
        return [path]
    files = []
    for file in path.rglob("*.parquet"):
        below = file.relative_to(path)
        if any(name.startswith((".", "_")) for name in below.parts) or file.is_dir():
            continue  # by the convention of Spark and Dask, an incomplete file or a list of files
        if partition := next((name for name in below.parts[:-1] if "=" in name), None):
            raise SchemaMismatchError(
                f"{path}: the name of the subfolder {partition!r} is the value of a column that "
                "the part files do not contain; write the column into the files, or load each "
                "subfolder separately"
            )
        require_plain(file)
        files.append(file)
    if not files:
        raise FileNotFoundError(
            f"{path}: there is no file *.parquet in this folder; check the path"
        )
    return sorted(files, key=_sort_key)


def _sort_key(file: Path) -> list[tuple[bool, int, str]]:
    """Returns a sort key by which ``part.10`` comes after ``part.2``."""
    return [
        (is_number(text), int(text) if is_number(text) else 0, text)
        for text in re.split("([0-9]+)", str(file))
    ]


def _open(path: Path) -> Any:
    pa, pq = arrow()
    try:
        return pq.ParquetFile(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise FormatError(f"{path}: not a Parquet file ({error}); check the path") from error


def _chunk(columns: list[Column]) -> int:
    """Returns the number of rows in a batch, so that it has at most `_BATCH_BYTES` bytes."""
    return max(1, min(2**17, _BATCH_BYTES // max(1, sum(column.nbytes for column in columns))))


def in_order_of_age(rows: Rows) -> Iterator[list[torch.Tensor]]:
    """Yields batches of all items, oldest first, each as one tensor ``[n, ...]`` per leaf.

    Items that other processes overwrite before they are read are skipped.
    """
    chunk = _chunk([Column(leaf, rows.lanes) for leaf in rows.leaves.leaves])
    ring, width = rows.ring, rows.ring.width
    slots = ring.live.committed_slots()
    tickets = tickets_at(ring, slots)
    order = np.argsort(tickets, kind="stable")[np.count_nonzero(tickets < 0) :]
    slots, tickets = slots[order], tickets[order]
    for start in range(0, len(slots), chunk):
        part = slots[start : start + chunk]
        elements = (part[:, None] * width + np.arange(width)).reshape(-1)
        tensors, now, _ = rows.read(torch.from_numpy(elements))
        kept = (now.numpy().reshape(-1, width) == tickets[start : start + chunk, None]).all(1)
        shaped = [tensor.view(len(part), *rows.lanes, *tensor.shape[1:]) for tensor in tensors]
        if not kept.all():
            shaped = [tensor[torch.from_numpy(kept)] for tensor in shaped]
        if kept.any():
            yield shaped

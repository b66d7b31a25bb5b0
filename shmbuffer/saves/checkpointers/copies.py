"""Copies a snapshot of the items of a ring into files that are not published yet.

Each leaf has a column ``[slots, *lanes, *shape]`` with the full capacity, which maps a sparse file.
"""

from __future__ import annotations

import math
import mmap
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.system import filesystem
from shmbuffer.saves.checkpointers.snapshots import slots_to_reserve
from shmbuffer.saves.safe_files import create_file, unnamed_file
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_kit import new_column
from shmbuffer.torchrl.compat.storage_files import files_of

if TYPE_CHECKING:  # storages import their checkpointers
    from shmbuffer.storages.movers.tensor_rows import Rows

#: The open file of each leaf that has one, by the index of the leaf.
OpenFiles = dict[int, BinaryIO]


def copy_rows(rows: Rows, folder: Path, *, named: bool) -> tuple[ItemSnapshot, list[Any]]:
    """Copies all items of a ring into files.

    Args:
        rows: The rows of the storage.
        folder: The directory of the files.
        named: True for the names of tensordict's memmap layout, False for files without names.

    Returns:
        The snapshot of the items, and one column per leaf, which is a tensor or `Objects`.

    Raises:
        SpaceError: There is not enough space for the items.
    """
    ring = rows.ring
    columns, files = make_columns(rows.leaves, ring.capacity, folder, named=named)
    try:
        extent = slots_to_reserve(ring)
        needed = {
            at: columns[at].numel() // ring.capacity * extent * columns[at].itemsize for at in files
        }
        for at, file in files.items():
            try:
                os.posix_fallocate(file.fileno(), 0, needed[at])
            except OSError as error:  # without space, a store into the map would kill the process
                free = filesystem.free_bytes(file.fileno())
                raise filesystem.space_error(
                    str(folder), sum(needed.values()), free, why=error.errno or 0
                ) from error
    finally:
        for file in files.values():
            file.close()
    return rows.copy_out(columns), columns


def make_columns(
    leaves: Leaves, slots: int, path: Path, *, named: bool = True
) -> tuple[list[Any], OpenFiles]:
    """Creates a sparse file for each leaf of tensors, and maps it.

    Returns:
        One column per leaf, which is a tensor over the map or `Objects`, and the open files.
    """
    lead = (slots, *leaves.lanes)
    paths = files_of(leaves, lead, path) if named else []
    columns: list[Any] = []
    files: OpenFiles = {}
    with ExitStack() as undo:
        for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
            if at in leaves.objects:
                columns.append(new_column(leaves, at, lead, cpu.DEVICE))
                continue
            new = create_file(paths[at]) if named else unnamed_file(path)
            file = undo.enter_context(new)
            shape = (*lead, *leaf.shape)
            if nbytes := math.prod(shape) * dtype.itemsize:
                files[at] = file
                file.truncate(nbytes)
                columns.append(
                    torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=dtype).view(shape)
                )
            else:
                file.close()
                columns.append(cpu.empty(shape, dtype=dtype))
        undo.pop_all()
    return columns, files

"""Copies of a ring's items, all of one moment, in files that nobody sees yet.

A column maps a sparse file of full capacity: ``[slots, *lanes, *shape]`` of one leaf.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer._native import _core
from shmbuffer.memory import ItemSnapshot
from shmbuffer.memory.system import filesystem
from shmbuffer.replay.compat.storages import files_of
from shmbuffer.replay.form import cpu
from shmbuffer.replay.form.leaves import Leaves

if TYPE_CHECKING:  # storages import their checkpointers
    from shmbuffer.replay.storages.rows import Rows

# Of a ring that is not full: slots beyond its last item that get their room before the copy, for
# what others write meanwhile.
_MARGIN = 4096
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

#: What owns a column's file, by the number of its leaf.
Opened = dict[int, _core.Descriptor]


def copied(rows: Rows, folder: Path, *, named: bool) -> tuple[ItemSnapshot, list[Any]]:
    """Copies all items into files; returns the moment, and a column (tensor, `Objects`) a leaf."""
    ring = rows.ring
    columns, descriptors = make_columns(rows.leaves, ring.capacity, folder, named=named)
    try:
        words = ring.live.words[: min(ring.head, ring.capacity)]
        used = np.flatnonzero(words != 0)  # a copy: numpy looks twice, and words change
        extent = int(used[-1]) + 1 if len(used) else 0
        extent = min(ring.capacity, extent + max(_MARGIN, extent // 8))
        needed = {
            at: columns[at].numel() // ring.capacity * extent * columns[at].itemsize
            for at in descriptors
        }
        for at, descriptor in descriptors.items():
            try:
                os.posix_fallocate(descriptor.fd, 0, needed[at])
            except OSError as error:  # a store for which there is no room would end the process
                free = filesystem.free_bytes(descriptor.fd)
                raise filesystem.space_error(
                    str(folder), sum(needed.values()), free, why=error.errno or 0
                ) from error
    finally:
        for descriptor in descriptors.values():
            descriptor.close()
    return rows.copy_out(columns), columns


def make_columns(
    leaves: Leaves, slots: int, path: Path, *, named: bool = True
) -> tuple[list[Any], Opened]:
    """The sparse files of a storage: a map of each leaf's file (or `Objects`), and their owners."""
    lead = (slots, *leaves.lanes)
    files = files_of(leaves, lead, path) if named else []
    columns: list[Any] = []
    descriptors: Opened = {}
    for at, (leaf, dtype) in enumerate(zip(leaves.leaves, leaves.dtypes, strict=True)):
        if at in leaves.objects:
            columns.append(leaves.column(at, lead, torch.device("cpu")))
            continue
        file = files[at] if named else path / f".shmbuffer-column-{secrets.token_hex(6)}"
        descriptor = _core.Descriptor()
        fd = descriptor.take(os.open, file, _MAKE, 0o666 if named else 0o600)
        if not named:
            os.unlink(file)
        shape = (*lead, *leaf.shape)
        if nbytes := math.prod(shape) * dtype.itemsize:
            descriptors[at] = descriptor
            os.truncate(fd, nbytes)
            columns.append(torch.frombuffer(mmap.mmap(fd, 0), dtype=dtype).view(shape))
        else:
            descriptor.close()
            columns.append(cpu.empty(shape, dtype=dtype))
    return columns, descriptors

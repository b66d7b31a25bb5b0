"""Records in three files, beside ``storage_metadata.json``.

    shmbuffer.records.data          the byte ring of one moment, as it lay there; see `RecordImage`
    shmbuffer.records.npy           int64 [n, 3]: slot, position and bytes of each item, by slot
    shmbuffer.records.dictionary    of zstd; only where the buffer has one

They are written while others go on writing, and never in memory as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shmbuffer._native import _core
from shmbuffer.replay.checkpointers.record_image import RecordImage, copied
from shmbuffer.replay.values import reading

if TYPE_CHECKING:
    from shmbuffer.memory import Moment, Records

_DATA = "shmbuffer.records.data"
_TABLE = "shmbuffer.records.npy"
_DICTIONARY = "shmbuffer.records.dictionary"


def write_records(folder: Path, records: Records, dictionary: bytes | None) -> Moment:
    """Write what a ring holds.

    Args:
        folder: it is there.
        records: the ring.
        dictionary: of zstd, as the buffer has it.

    Returns:
        The moment that was written.

    Raises:
        SpaceError: bytes needed and free.
    """
    target = folder / _DATA
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with _core.Descriptor() as file:
        moment, table = copied(records, file.take(os.open, target, flags, 0o644), str(target))
    np.save(folder / _TABLE, table, allow_pickle=False)
    if dictionary is not None:
        (folder / _DICTIONARY).write_bytes(dictionary)
    return moment


def has_records(folder: Path) -> bool:
    """Whether `write_records` was there."""
    return (folder / _TABLE).exists()


def read_records(folder: Path) -> RecordImage:
    """What `write_records` wrote; its bytes are a map of the file.

    Raises:
        CorruptBufferError: the files are damaged.
    """
    where = folder / _DATA
    with reading(folder / _TABLE):
        table = np.load(folder / _TABLE, allow_pickle=False)
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 3:
            raise ValueError(f"the items are {table.dtype}{list(table.shape)}, not int64[n, 3]")
        if len(table) and (table[0, 0] < 0 or (np.diff(table[:, 0]) < 1).any()):
            raise ValueError("the slots of the items are not in order")
    with reading(where):
        size = where.stat().st_size
        data = np.memmap(where, np.uint8, "r") if size else np.empty(0, np.uint8)
    file = folder / _DICTIONARY
    dictionary = file.read_bytes() if file.exists() else None
    slots, positions, sizes = (np.ascontiguousarray(column) for column in table.T)
    return RecordImage(data, slots, positions, sizes, dictionary, str(where))

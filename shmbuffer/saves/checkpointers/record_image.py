"""The records of a buffer at one moment, as they lay in their ring: in memory, or in files.

``docs/format/saves.md`` has the files. They are written while others go on writing, and are never
in memory as a whole.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer._native import _core
from shmbuffer.memory import ItemSnapshot, RecordBatch, Records
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.format.record_batch import HEADER_BYTES, gather
from shmbuffer.saves.safe_files import create_file, exists, open_file, read_file, write_file
from shmbuffer.saves.values import damaged, read_array, reading, write_array

if TYPE_CHECKING:  # storages import their checkpointers
    from shmbuffer.storages.record_codec import TensorRecordCodec

_DATA = "shmbuffer.records.data"
_TABLE = "shmbuffer.records.npy"
_DICTIONARY = "shmbuffer.records.dictionary"
_PIECE_BYTES = 2**24  # that are read, or written to a ring, at once


@dataclass(frozen=True)
class RecordImage:
    """Records of one moment; the arrays are in the order of slots.

    ``data`` (uint8, or a map of a file) has the record of item i at ``positions[i]``, ``sizes[i]``
    bytes with its header. ``dictionary`` is what zstd needs to read it.
    """

    data: Bytes
    slots: Ints
    positions: Ints
    sizes: Ints
    dictionary: bytes | None = None
    where: str = "these records"

    @classmethod
    def of_table(
        cls, data: Bytes, table: Ints, dictionary: bytes | None, where: str = "these records"
    ) -> RecordImage:
        """From slot, position and bytes of each item, int64[n, 3]."""
        slots, positions, sizes = (np.ascontiguousarray(column) for column in table.T)
        return cls(data, slots, positions, sizes, dictionary, where)

    @classmethod
    def in_memory(
        cls, records: Records, dictionary: bytes | None
    ) -> tuple[RecordImage, ItemSnapshot]:
        """What a ring holds now, and the moment that it is of."""
        with _core.Descriptor() as memory:
            fd = memory.take(os.memfd_create, "shmbuffer-records", os.MFD_CLOEXEC)
            moment, table = _copied(records, fd, "memory")
            data = _mapped(fd, mmap.ACCESS_WRITE)
        return cls.of_table(data, table, dictionary), moment

    @classmethod
    def in_files(cls, folder: Path) -> RecordImage | None:
        """What `write_records` wrote; its bytes are a map of the file. None if it was not there."""
        where = folder / _DATA
        if not exists(folder / _TABLE):
            return None
        with reading(folder / _TABLE):
            table = read_array(folder / _TABLE)
            if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 3:
                found = f"{table.dtype}{list(table.shape)}"
                raise ValueError(f"the items are {found}, not int64[n, 3]")
            if len(table) and (table[0, 0] < 0 or (np.diff(table[:, 0]) < 1).any()):
                raise ValueError("the slots of the items are not in order")
        with reading(where), open_file(where) as fd:
            data = _mapped(fd, mmap.ACCESS_READ)
        file = folder / _DICTIONARY
        dictionary = read_file(file) if exists(file) else None
        return cls.of_table(data, table, dictionary, str(where))

    @classmethod
    def of_state(cls, state: dict[str, Any], slots: Ints) -> RecordImage:
        """What `state_dict` gave."""
        dictionary = state["dictionary"]
        return cls(
            state["data"].numpy(),
            slots,
            state["positions"].numpy(),
            state["sizes"].numpy(),
            None if dictionary is None else dictionary.numpy().tobytes(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the slots, as tensors."""
        dictionary = self.dictionary
        return {
            "data": torch.from_numpy(self.data),
            "positions": torch.from_numpy(self.positions),
            "sizes": torch.from_numpy(self.sizes),
            "dictionary": None
            if dictionary is None
            else torch.frombuffer(bytearray(dictionary), dtype=torch.uint8),
        }

    def __post_init__(self) -> None:
        """CorruptBufferError where a record is not within the data."""
        ends = self.positions + self.sizes
        wrong = (self.positions < 0) | (self.positions % 8 != 0) | (self.sizes < HEADER_BYTES)
        wrong |= (ends > len(self.data)) | (ends < self.positions)
        if wrong.any():
            at = int(wrong.argmax())
            raise damaged(
                self.where,
                f"record {at} is said to have {self.sizes[at]} bytes at {self.positions[at]} of "
                f"{len(self.data)}",
            )

    def __len__(self) -> int:
        return len(self.slots)

    def runs(self, slots: Ints, capacity: int) -> Iterator[Ints]:
        """Rows that follow each other in bytes and in slots, oldest first, some megabytes each."""
        order = np.argsort(self.positions, kind="stable")
        breaks = (slots[order][1:] - slots[order][:-1]) % capacity != 1
        piece = np.cumsum(self.sizes[order]) // _PIECE_BYTES
        yield from np.split(order, np.flatnonzero(breaks | (np.diff(piece) != 0)) + 1)

    def is_in_order(self, tickets: Ints) -> bool:
        """Whether they lie in the order in which they were written."""
        return bool((np.diff(tickets[np.argsort(self.positions, kind="stable")]) > 0).all())

    def batch(self, rows: Ints) -> RecordBatch:
        """Copies some records."""
        addresses = self.data.ctypes.data + self.positions[rows]
        return gather(addresses, np.ascontiguousarray(self.sizes[rows]))

    def pieces(self) -> Iterator[Ints]:
        """All rows in the order of slots, some megabytes at a time."""
        piece = np.cumsum(self.sizes) // _PIECE_BYTES
        yield from np.split(np.arange(len(self)), np.flatnonzero(np.diff(piece)) + 1)

    def items(self, codec: TensorRecordCodec) -> Iterator[list[Any]]:
        """The items in the order of their slots, some megabytes of records at a time."""
        for rows in self.pieces():
            yield codec.decoder.items(self.batch(rows))


def write_records(folder: Path, records: Records, dictionary: bytes | None) -> ItemSnapshot:
    """Write the records of a ring; the moment that was written."""
    target = folder / _DATA
    with create_file(target) as file:
        moment, table = _copied(records, file.fileno(), str(target))
    write_array(folder / _TABLE, table)
    if dictionary is not None:
        write_file(folder / _DICTIONARY, dictionary)
    return moment


def _mapped(fd: int, access: int) -> Bytes:
    """Maps a file as an array, which stays valid after the file is closed."""
    size = os.fstat(fd).st_size
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(fd, size, access=access), np.uint8)


def _copied(records: Records, descriptor: int, where: str) -> tuple[ItemSnapshot, Ints]:
    """Copies a ring's records to a file: the moment; slot, position, bytes of each, int64[n, 3]."""
    moment, extents = records.copy_out(descriptor, where)
    slots = np.flatnonzero(moment.tickets >= 0)
    columns = (slots, extents["position"][slots], extents["bytes"][slots])
    return moment, np.column_stack([column.astype(np.int64) for column in columns])

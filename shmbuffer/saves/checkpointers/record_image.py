"""A snapshot of the records of a buffer, as the bytes of their ring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer._native import _core
from shmbuffer.memory import ItemSnapshot, RecordBatch, Records, Ring
from shmbuffer.memory.format.array_types import Bytes, Ints
from shmbuffer.memory.mapped.record_batch import HEADER_BYTES, gather
from shmbuffer.saves.values import damaged

if TYPE_CHECKING:  # storages import their checkpointers
    from shmbuffer.storages.movers.record_codec import TensorRecordCodec

_PIECE_BYTES = 2**24  # number of bytes to read, or to write to a ring, at once


@dataclass(frozen=True)
class RecordImage:
    """Records of one snapshot. The arrays are ordered by slot.

    The record of item i begins at ``positions[i]`` of ``data`` (uint8) and has ``sizes[i]`` bytes
    including its header. zstd needs ``dictionary`` to decompress the record.
    """

    data: Bytes
    slots: Ints
    positions: Ints
    sizes: Ints
    dictionary: bytes | None = None
    where: str = "these records"

    @classmethod
    def of_ring(
        cls, content: Any, moment: ItemSnapshot, dictionary: bytes | None, where: str
    ) -> RecordImage:
        """Creates the image from a snapshot and the bytes of a ring, mapped twice in a row."""
        assert moment.extents is not None
        slots = np.flatnonzero(moment.tickets >= 0)
        extents, data = moment.extents[slots], np.frombuffer(content, np.uint8)
        tail = np.uint64(moment.byte_tail)
        first = tail % np.uint64(max(1, len(data) // 2))
        positions = (extents["position"] - tail + first).astype(np.int64)
        sizes = extents["bytes"].astype(np.int64)
        return cls(data, slots, positions, sizes, dictionary, where)

    @classmethod
    def in_memory(
        cls, records: Records, dictionary: bytes | None
    ) -> tuple[RecordImage, ItemSnapshot]:
        """Copies the records of a ring; returns the image and its snapshot."""
        with _core.Descriptor() as memory:
            fd = memory.take(os.memfd_create, "shmbuffer-records", os.MFD_CLOEXEC)
            os.ftruncate(fd, records.max_bytes)
            moment = records.copy_out(fd, "memory")
            content = _core.Map(fd, records.max_bytes, twice=True)
        return cls.of_ring(content, moment, dictionary, "these records"), moment

    @classmethod
    def of_save(
        cls, ring: Ring, dictionary: bytes | None, where: str
    ) -> tuple[RecordImage, ItemSnapshot]:
        """Creates the image of a ring that no process writes to, without a copy."""
        assert ring.records is not None
        runtime = ring.seat.control.runtime
        tail, head = (int(runtime[name][0]) for name in ("byte_tail", "byte_head"))
        extents = ring.live.extents.copy()
        moment = moment_of(ring)._replace(extents=extents, byte_tail=tail, byte_head=head)
        return cls.of_ring(ring.records.content, moment, dictionary, where), moment

    @classmethod
    def of_state(cls, state: dict[str, Any], slots: Ints) -> RecordImage:
        """Creates the image from a result of `state_dict`."""
        dictionary = state["dictionary"]
        return cls(
            state["data"].numpy(),
            slots,
            state["positions"].numpy(),
            state["sizes"].numpy(),
            None if dictionary is None else dictionary.numpy().tobytes(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns all attributes except the slots, as tensors."""
        batch, dictionary = self.batch(np.arange(len(self))), self.dictionary
        return {
            "data": torch.from_numpy(batch.data),
            "positions": torch.from_numpy(batch.starts),
            "sizes": torch.from_numpy(batch.sizes),
            "dictionary": None
            if dictionary is None
            else torch.frombuffer(bytearray(dictionary), dtype=torch.uint8),
        }

    def __post_init__(self) -> None:
        """Raises CorruptBufferError if a record is outside of the data."""
        ends = self.positions + self.sizes
        wrong = (self.positions < 0) | (self.positions % 8 != 0) | (self.sizes < HEADER_BYTES)
        wrong |= (ends > len(self.data)) | (ends < self.positions)
        if wrong.any():
            at = int(wrong.argmax())
            raise damaged(
                self.where,
                f"record {at} must have {self.sizes[at]} bytes at {self.positions[at]} of "
                f"{len(self.data)}",
            )

    def __len__(self) -> int:
        return len(self.slots)

    def runs(self, slots: Ints, capacity: int) -> Iterator[Ints]:
        """Yields runs of rows that are consecutive in bytes and slots, oldest first."""
        order = np.argsort(self.positions, kind="stable")
        breaks = (slots[order][1:] - slots[order][:-1]) % capacity != 1
        piece = np.cumsum(self.sizes[order]) // _PIECE_BYTES
        yield from np.split(order, np.flatnonzero(breaks | (np.diff(piece) != 0)) + 1)

    def is_in_order(self, tickets: Ints) -> bool:
        """True if the records are stored in the order in which they were written."""
        return bool((np.diff(tickets[np.argsort(self.positions, kind="stable")]) > 0).all())

    def batch(self, rows: Ints) -> RecordBatch:
        """Copies the selected records."""
        addresses = self.data.ctypes.data + self.positions[rows]
        return gather(addresses, np.ascontiguousarray(self.sizes[rows]))

    def pieces(self) -> Iterator[Ints]:
        """Yields all rows ordered by slot, a few megabytes at a time."""
        piece = np.cumsum(self.sizes) // _PIECE_BYTES
        yield from np.split(np.arange(len(self)), np.flatnonzero(np.diff(piece)) + 1)

    def items(self, codec: TensorRecordCodec) -> Iterator[list[Any]]:
        """Yields the items ordered by slot, a few megabytes of records at a time."""
        for rows in self.pieces():
            yield codec.decoder.items(self.batch(rows))


def moment_of(ring: Ring) -> ItemSnapshot:
    """Returns the counters and slots of a ring that no other process writes to."""
    tickets = ring.live.tickets()
    raw = np.where(np.repeat(tickets < 0, ring.width), np.nan, ring.tree.priorities())
    sources = ring.live.sources.copy()
    return ItemSnapshot(tickets, sources, raw, ring.head, ring.write_count, ring.tree.max_priority)

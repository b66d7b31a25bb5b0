"""A snapshot of the records of a buffer, as the bytes of its byte ring."""

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

_PIECE_BYTES = 2**24  # number of bytes of records that are read or written together


@dataclass(frozen=True)
class RecordImage:
    """The records of one snapshot, ordered by slot.

    The record of item i begins at index ``positions[i]`` of ``data`` (uint8) and has ``sizes[i]``
    bytes including its header. ``dictionary`` is needed to decompress the records; None if they
    were compressed without a dictionary. ``where`` is the path for messages.
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
        """Creates the image from a snapshot and the bytes of its byte ring.

        ``content`` is a map of the byte ring that contains the ring twice in a row, so that no
        record is split at the end of the ring.
        """
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
        """Copies the records of a ring into memory. Returns the image and the snapshot."""
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
        """Creates the image of a ring to which no process writes, without a copy."""
        assert ring.records is not None
        runtime = ring.seat.control.runtime
        tail, head = (int(runtime[name][0]) for name in ("byte_tail", "byte_head"))
        extents = ring.live.extents.copy()
        moment = moment_of(ring)._replace(extents=extents, byte_tail=tail, byte_head=head)
        return cls.of_ring(ring.records.content, moment, dictionary, where), moment

    @classmethod
    def of_state(cls, state: dict[str, Any], slots: Ints) -> RecordImage:
        """Creates the image from a result of `state_dict`, and the slots of the items."""
        dictionary = state["dictionary"]
        return cls(
            state["data"].numpy(),
            slots,
            state["positions"].numpy(),
            state["sizes"].numpy(),
            None if dictionary is None else dictionary.numpy().tobytes(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns all attributes except ``slots`` and ``where``, as tensors."""
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
        """Raises CorruptBufferError if a record is not within the data."""
        ends = self.positions + self.sizes
        wrong = (self.positions < 0) | (self.positions % 8 != 0) | (self.sizes < HEADER_BYTES)
        wrong |= (ends > len(self.data)) | (ends < self.positions)
        if wrong.any():
            at = int(wrong.argmax())
            raise damaged(
                self.where,
                f"record {at} must be within the {len(self.data)} bytes of records, got "
                f"{self.sizes[at]} bytes at position {self.positions[at]}",
            )

    def __len__(self) -> int:
        return len(self.slots)

    def runs(self, slots: Ints, capacity: int) -> Iterator[Ints]:
        """Yields the indices of items in runs, ordered by their positions.

        The items of a run have consecutive slots, modulo ``capacity``, and a few megabytes of
        records. ``slots`` has the new slot of each item.
        """
        order = np.argsort(self.positions, kind="stable")
        breaks = (slots[order][1:] - slots[order][:-1]) % capacity != 1
        piece = np.cumsum(self.sizes[order]) // _PIECE_BYTES
        yield from np.split(order, np.flatnonzero(breaks | (np.diff(piece) != 0)) + 1)

    def is_in_order(self, tickets: Ints) -> bool:
        """True if the records are in the order of the items' tickets."""
        return bool((np.diff(tickets[np.argsort(self.positions, kind="stable")]) > 0).all())

    def batch(self, rows: Ints) -> RecordBatch:
        """Copies the records of the items with the given indices."""
        addresses = self.data.ctypes.data + self.positions[rows]
        return gather(addresses, np.ascontiguousarray(self.sizes[rows]))

    def pieces(self) -> Iterator[Ints]:
        """Yields the indices of all items ordered by slot, for a few megabytes of records each."""
        piece = np.cumsum(self.sizes) // _PIECE_BYTES
        yield from np.split(np.arange(len(self)), np.flatnonzero(np.diff(piece)) + 1)

    def items(self, codec: TensorRecordCodec) -> Iterator[list[Any]]:
        """Yields lists of decoded items, ordered by slot, for a few megabytes of records each."""
        for rows in self.pieces():
            yield codec.decoder.items(self.batch(rows))


def moment_of(ring: Ring) -> ItemSnapshot:
    """Returns the snapshot of a ring to which no other process writes, without extents."""
    tickets = ring.live.tickets()
    raw = np.where(np.repeat(tickets < 0, ring.width), np.nan, ring.tree.priorities())
    sources = ring.live.sources.copy()
    return ItemSnapshot(tickets, sources, raw, ring.head, ring.write_count, ring.tree.max_priority)

"""Reads the contents of a directory as docs/format describes it, without the engine.

Rows have a number in each leaf and records have one in all their bytes, so that a mixture of two
items shows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.memory import Leaf, Schema
from shmbuffer.memory.format import layout
from tests.memory.numbered import number_of
from tests.memory.rows import Rows

CAPACITY = 8
LEAVES = (
    Leaf(("number",), "int64", ()),
    Leaf(("next", "obs"), "uint8", (700,)),  # crosses sectors and pages
    Leaf(("done",), "bool", ()),
)
_FILES = [leaf.file for leaf in LEAVES]
RECORD_BYTES = {"rows": 0, "records": 16384, "short records": 4096}

DICTIONARY = b"what records have in common" * 200

#: A slot and the ticket in it.
Place = tuple[int, int]
WRITING, COMMITTED = 1, 2


@cache
def schema(kind: str) -> Schema:
    if RECORD_BYTES[kind]:
        return Schema((), CAPACITY, (), {"kind": "records"}, RECORD_BYTES[kind])
    return Schema(LEAVES, CAPACITY)


@cache
def _sections(kind: str) -> dict[str, int]:
    return schema(kind).sections


@dataclass(frozen=True)
class Superblock:
    """The valid copy of the superblock, with the fields that are needed here."""

    state: int
    boot: bytes
    epoch: int
    defined: bool
    durable_ticket: int

    @classmethod
    def of(cls, control: bytes) -> Superblock | None:
        """Parses the superblock; returns None if both copies are damaged."""
        pages = [control[:4096], control[4096:8192]]
        whole = [page for page in pages if _is_whole(page)]
        if not whole:
            return None
        page = max(whole, key=lambda page: _u64(page, 16))
        defined = page[96:128] != bytes(32)
        return cls(_u32(page, 64), page[40:56], _u64(page, 56), defined, _u64(page, 152))


@dataclass(frozen=True)
class Runtime:
    """Fields of the runtime page."""

    head: int
    write_count: int
    length: int
    allocated: int

    @classmethod
    def of(cls, control: bytes) -> Runtime:
        counters = struct.unpack_from("<QQQ", control, 8192 + 64)
        return cls(*counters, _u64(control, 8192 + 536))


class Contents:
    """Words, items and priorities in the bytes of a buffer with a schema.

    Attributes:
        words: the 64-bit word of each slot.
        raw: the priority of each slot as it was given.
        mass: the mass of each slot.
    """

    def __init__(self, kind: str, files: Mapping[str, bytes | memoryview]) -> None:
        self._kind = kind
        self._files = files
        where, self._slots = _sections(kind), files[layout.SLOTS]
        self._where = where
        self.words = np.frombuffer(self._slots, "<u8", CAPACITY)
        self.raw = np.frombuffer(self._slots, "<f8", CAPACITY, where["raw"])
        self.mass = np.frombuffer(self._slots, "<f8", CAPACITY, where["mass"])

    @property
    def states(self) -> NDArray[np.uint64]:
        return self.words & np.uint64(3)

    def places(self) -> list[Place]:
        """Returns the slot and ticket of every item."""
        held = (self.states == COMMITTED).nonzero()[0].tolist()
        return [(slot, int(self.words[slot]) >> 2) for slot in held]

    def items(self) -> dict[Place, int]:
        """Returns the number of each item; raises AssertionError if an item is torn."""
        places = self.places()
        if RECORD_BYTES[self._kind]:
            return {place: self._record(*place) for place in places}
        held = [slot for slot, _ in places]
        rows = Rows(LEAVES, len(held))
        for name, leaf, data in zip(_FILES, LEAVES, rows.bytes, strict=True):
            found = np.frombuffer(self._files[name], np.uint8)
            data[:] = found[: CAPACITY * leaf.nbytes].reshape(CAPACITY, -1)[held]
        return dict(zip(places, rows.numbers().tolist(), strict=True))

    def tree_is_exact(self) -> bool:
        """True if the node above the leaves is exactly their sum and their minimum."""
        leaves = np.frombuffer(self._slots, "<f8", 16, self._where["mass"]).tolist()
        total, least = (
            float(np.frombuffer(self._slots, "<f8", 1, self._where[name])[0])
            for name in ("sum1", "min1")
        )
        a, b, c, d = (
            (leaves[i] + leaves[i + 1]) + (leaves[i + 2] + leaves[i + 3]) for i in range(0, 16, 4)
        )
        positive = [leaf for leaf in leaves if leaf > 0]
        return total == ((a + b) + c) + d and least == min(positive, default=0.0)

    def _record(self, slot: int, ticket: int) -> int:
        position, nbytes = struct.unpack_from(
            "<QQ", self._slots, self._where["extents"] + 16 * slot
        )
        ring = bytes(self._files[layout.RECORDS])
        size = len(ring)
        at = position % size
        record = (ring + ring)[at : at + nbytes]
        named = struct.unpack_from("<QQQ", record)
        assert named == (ticket, position, nbytes), f"slot {slot} has the record of {named}"
        try:
            return number_of(memoryview(record)[24:])
        except (AssertionError, struct.error) as error:
            raise AssertionError(f"the record of slot {slot} is torn") from error


@cache
def names_of(kind: str) -> list[str]:
    """Returns the relative paths of the mapped files of a buffer with a schema."""
    return [layout.CONTROL, layout.SLOTS, *([layout.RECORDS] if RECORD_BYTES[kind] else _FILES)]


def done(ledger: bytes | memoryview, places: list[Place]) -> set[int]:
    """Returns tickets that the first consumer has acknowledged, or none without a consumer."""
    parts = _core.parts(CAPACITY)
    (state, floor), at = struct.unpack_from("<I20xQ", ledger, 48), parts["consumers"]
    if state != 1 or len(ledger) < at + parts["each"]:
        return set()
    notes = np.frombuffer(ledger, "<u8", 2 * CAPACITY, at + parts["deliveries"]).reshape(-1, 2)
    noted = {int(ticket) - 1 for ticket, what in notes if ticket and 0 < int(what) >> 53 < 2**10}
    return {ticket for _, ticket in places if ticket in noted or ticket < floor}


def _is_whole(page: bytes) -> bool:
    return page[:6] == b"SHMBUF" and _u32(page, 4092) == _core.crc32c(page[:4092])


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])

"""A second reader of a buffer's directory, written from docs/format with numpy and struct only.

It imports nothing from shmbuffer, so it does not repeat the mistakes of the engine. It reads a
buffer that no process is writing to, and it fails if anything differs from the documentation.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.memory.power_oracle import masses_of

PAGE = 4096
EMPTY, WRITING, COMMITTED, ABORTED = range(4)
READY = 1
#: Position of the head in the control file.
HEAD_AT = 2 * PAGE + 64
#: Number of bytes whose checksums are computed in one check. More would take too long in Python.
SUMMED_BYTES = 16384

_POLYNOMIAL = 0x82F63B78


def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


def _shares(longest: int) -> NDArray[np.uint32]:
    """Returns what each byte value adds to the CRC of a text, by the number of later bytes.

    The CRC of a text is the sum of these shares.
    """
    table = _crc_table()
    shares = np.empty((longest, 256), np.uint32)
    shares[0] = table
    for following in range(1, longest):
        before = shares[following - 1]
        shares[following] = table[before & 255] ^ before >> np.uint32(8)
    return shares


_SHARES = _shares(PAGE)


def crc32c(start: int, data: bytes) -> int:
    """Computes a CRC32C that continues the CRC of the bytes before."""
    for at in range(0, len(data), PAGE):
        start = _crc32c_of_page(start, data[at : at + PAGE])
    return start


def _crc32c_of_page(start: int, data: bytes) -> int:
    text = np.frombuffer(data.ljust(4, b"\0"), np.uint8).copy()
    crc = start ^ 0xFFFFFFFF
    # The CRC so far is treated as part of the text.
    text[:4] ^= np.frombuffer(struct.pack("<I", crc), np.uint8)
    following = np.arange(len(data) - 1, -1, -1)
    shared = int(np.bitwise_xor.reduce(_SHARES[following, text[: len(data)]]))
    return shared ^ (crc >> 8 * len(data) if len(data) < 4 else 0) ^ 0xFFFFFFFF


def _superblock(control: bytes) -> bytes:
    """Returns the newer valid copy of the superblock."""
    valid = []
    for at in (0, PAGE):
        (stored,) = struct.unpack_from("<I", control, at + 4092)
        if crc32c(0, control[at : at + 4092]) == stored:
            valid.append(control[at : at + PAGE])
    assert valid, "no copy of the superblock is valid"
    assert all(copy[:8] == b"SHMBUF\0\1" for copy in valid)
    return max(valid, key=lambda copy: int(struct.unpack_from("<Q", copy, 16)[0]))


@dataclass(frozen=True)
class Entry:
    """A registry entry with the fields that the rules need."""

    live: bool
    incarnation: int
    pid: int
    phase: int
    turn: int
    inserts: int
    aborts: int


class Image:
    """The contents of a directory at one time.

    Attributes:
        capacity, lanes: the dimensions of the ring. `record_bytes` is 0 if items are rows.
        head, write_count, length, rolled_back, evicted, byte_head, byte_tail: the runtime page.
        words, checksums, sources, raw, mass: one value per slot (or per element).
        nodes: the sums and minima of the tree, level by level.
        leaves: the bytes of each leaf, ``[capacity, size]``, in the order of their names.
    """

    def __init__(self, path: Path) -> None:
        private = path / ".shmbuffer"
        control = (private / "control").read_bytes()
        block = _superblock(control)
        self.epoch, self.state = struct.unpack_from("<QI", block, 56)
        self.capacity, self.lanes, leaves, entries = struct.unpack_from("<QQII", block, 72)
        (slots_bytes,) = struct.unpack_from("<Q", block, 128)
        (self.salt,) = struct.unpack_from("<I", block, 220)
        schema = json.loads((private / "schema.json").read_bytes())
        assert (schema["capacity"], len(schema["leaves"])) == (self.capacity, leaves)
        self.record_bytes: int = schema.get("record_bytes", 0)
        at = 2 * PAGE
        self.head, self.write_count, self.length = struct.unpack_from("<QQQ", control, HEAD_AT)
        (runtime_state, self.prioritized) = struct.unpack_from("<II", control, at + 88)
        assert runtime_state == self.state
        self.max_priority, self.alpha, self.eps = struct.unpack_from("<ddd", control, at + 96)
        self.waiters = struct.unpack_from("<I", control, at + 136)[0]
        self.repairs, self.rolled_back = struct.unpack_from("<QQ", control, at + 152)
        self.byte_head, self.byte_tail, self.evicted = struct.unpack_from("<QQQ", control, at + 184)
        self.entries = [_entry(control, 3 * PAGE + 512 * i) for i in range(entries)]
        self._read_slots((private / "slots").read_bytes(), slots_bytes)
        self._schema = schema
        self._path = path

    def _read_slots(self, data: bytes, size: int) -> None:
        assert len(data) == size
        at = 0

        def section(dtype: str, count: int) -> Any:
            nonlocal at
            found = np.frombuffer(data, dtype, count, at)
            at += -(-found.nbytes // 64) * 64
            return found

        elements = self.capacity * self.lanes
        self.words: NDArray[np.uint64] = section("<u8", self.capacity)
        self.checksums = section("<u4", self.capacity)
        self.sources = section("<u8", self.capacity)
        self.raw: NDArray[np.float64] = section("<f8", elements)
        self.mass: NDArray[np.float64] = section("<f8", -(-elements // 16) * 16)
        self.nodes: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        count = elements
        while not self.nodes or count > 1:
            count = -(-count // 16)
            padded = -(-count // 16) * 16
            self.nodes.append((section("<f8", padded), section("<f8", padded)))
        if self.record_bytes:
            self.extents = section("<u8", 2 * self.capacity).reshape(-1, 2)
        assert at == size, f"the sections end at {at}, the file at {size}"

    @property
    def states(self) -> NDArray[np.uint64]:
        return self.words & np.uint64(3)

    @property
    def tickets(self) -> NDArray[np.int64]:
        return (self.words >> np.uint64(2)).astype(np.int64)

    @cached_property
    def committed(self) -> NDArray[np.int64]:
        """Returns the slots that contain an item."""
        return (self.states == COMMITTED).nonzero()[0]

    @cached_property
    def leaves(self) -> list[NDArray[np.uint8]]:
        found = []
        for leaf in self._schema["leaves"]:
            *folders, name = leaf["path"]
            data = np.fromfile(self._path.joinpath(*folders, f"{name}.memmap"), np.uint8)
            found.append(data.reshape(self.capacity, -1))
        return found

    @cached_property
    def ring_bytes(self) -> bytes:
        return (self._path / ".shmbuffer" / "records").read_bytes()

    def record(self, slot: int) -> bytes:
        """Returns the record in a slot with its header; fails if another slot's header is there."""
        position, size = map(int, self.extents[slot])
        assert self.byte_tail <= position
        assert position + size <= self.byte_head
        data = self.ring_bytes
        assert len(data) == self.record_bytes
        first = position % self.record_bytes
        whole = data[first : first + size]
        whole += data[: size - len(whole)]
        ticket, at, said = struct.unpack_from("<QQQ", whole)
        assert (ticket, at, said) == (int(self.words[slot]) >> 2, position, size), f"slot {slot}"
        return whole

    def wrong_checksums(self) -> NDArray[np.int64]:
        """Returns slots whose item does not match its checksum. Large buffers are sampled."""
        wrong, left = [], SUMMED_BYTES
        order = np.roll(self.committed, -(self.head % max(1, len(self.committed))))
        for slot in order.tolist():
            item = self._item(slot)
            left -= len(item)
            if left < 0:
                break
            ticket = struct.pack("<Q", int(self.words[slot]) >> 2)
            if crc32c(crc32c(self.salt, ticket), item) != self.checksums[slot]:
                wrong.append(slot)
        return np.array(wrong, np.int64)

    def _item(self, slot: int) -> bytes:
        if self.record_bytes:
            return self.record(slot)
        return b"".join(leaf[slot].tobytes() for leaf in self.leaves)

    def wrong_leaves(self) -> NDArray[np.int64]:
        """Returns elements whose mass is not exactly that of their priority."""
        expected = np.zeros(len(self.mass))
        if self.prioritized:
            items = (self.committed[:, None] * self.lanes + np.arange(self.lanes)).ravel()
            expected[items] = masses_of(self.raw[items], self.alpha, self.eps)
        wrong: NDArray[np.int64] = (self.mass != expected).nonzero()[0]
        return wrong

    def wrong_nodes(self) -> int:
        """Counts nodes that are not exactly the sum and least positive value of their children."""
        wrong = 0
        sums = least = self.mass
        for level_sums, level_least in self.nodes:
            added = np.zeros(len(level_sums))
            c = sums.reshape(-1, 4, 4)
            quarters = (c[:, :, 0] + c[:, :, 1]) + (c[:, :, 2] + c[:, :, 3])
            total = (quarters[:, 0] + quarters[:, 1]) + quarters[:, 2] + quarters[:, 3]
            added[: len(total)] = total
            positive = np.where(least > 0, least, np.inf).reshape(-1, 16).min(axis=1)
            lowest = np.zeros(len(level_least))
            lowest[: len(positive)] = np.where(positive < np.inf, positive, 0)
            wrong += int(np.count_nonzero((added != level_sums) | (lowest != level_least)))
            sums, least = level_sums, level_least
        return wrong


def _entry(control: bytes, at: int) -> Entry:
    state, _, incarnation, pid = struct.unpack_from("<IIQQ", control, at)
    (phase,) = struct.unpack_from("<I", control, at + 64)
    (turn,) = struct.unpack_from("<Q", control, at + 96)
    inserts, aborts = struct.unpack_from("<QQ", control, at + 120)
    return Entry(state == 1, incarnation, pid, phase, turn, inserts, aborts)

"""CRC32C by the processor's instruction or by table, with equal results."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import shmbuffer
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from tests.kit.rings import ring_of
from tests.memory.rows import Maker, Rows, place, write

NATIVE = Path(shmbuffer.__file__).parent / "_native"


def plain(data: bytes, crc: int = 0) -> int:
    """Computes the checksum by definition: reflected polynomial 0x82F63B78, inverted twice."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),  # from here on RFC 3720, appendix B.4
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "crc"), KNOWN, ids=lambda value: repr(value)[:24])
def test_it_is_the_crc32c_of_rfc_3720(data: bytes, crc: int) -> None:
    assert plain(data) == crc
    assert _core.crc32c(data) == crc


def test_every_length_and_every_alignment_gives_the_same() -> None:
    data = np.random.default_rng(1).bytes(96)
    view = memoryview(data)
    for start in range(9):
        for end in range(start, len(data)):
            assert _core.crc32c(view[start:end]) == plain(data[start:end])


def test_it_chains() -> None:
    data = np.random.default_rng(2).bytes(20_000)
    for cut in (0, 1, 7, 8, 9, 500, 6_144, 20_000):
        assert _core.crc32c(data[cut:], _core.crc32c(data[:cut])) == _core.crc32c(data)


def test_it_takes_any_buffer_and_nothing_else() -> None:
    assert _core.crc32c(bytearray(b"123456789")) == 0xE3069283
    assert _core.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    with pytest.raises(TypeError):
        _core.crc32c("123456789")


PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include "core/crc32c.c"
#define BYTES (12 * 3 * LONG_PIECE)
#define ROWS 11
static unsigned char data[BYTES + 16];
static int agree(size_t at, size_t bytes) {
    return by_table(77, data + at, bytes) == by_instruction(77, data + at, bytes);
}
static int rows_agree(size_t rows, size_t bytes) {
    uint32_t one[ROWS], other[ROWS];
    for (size_t i = 0; i < rows; i++) one[i] = other[i] = (uint32_t)(i * 2654435761u);
    rows_by_table(one, data + 3, rows, bytes);
    rows_by_instruction(other, data + 3, rows, bytes);
    return memcmp(one, other, rows * sizeof *one) == 0;
}
static int moves_agree(size_t bytes) {
    static unsigned char there[4 * 3 * LINE + 8];
    uint32_t one[4] = {1, 2, 3, 4}, other[4] = {1, 2, 3, 4};
    memset(there, 0, sizeof there);
    move_by_table(there, data, bytes, one);
    if (memcmp(there, data, 4 * bytes) || there[4 * bytes]) return 0;
    memset(there, 0, sizeof there);
    move_by_instruction(there, data, bytes, other);
    return !memcmp(there, data, 4 * bytes) && !there[4 * bytes] && !memcmp(one, other, sizeof one);
}
int main(void) {
    shmb_crc32c_init();
    if (shmb_crc32c == by_table) return 2; /* no instruction to compare with */
    for (unsigned i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t at = 0; at < 9; at++)
        for (size_t bytes = 0; bytes < 4 * 3 * SHORT_PIECE + 20; bytes++)
            if (!agree(at, bytes)) return 1;
    for (size_t bytes = 3 * LONG_PIECE - 9; bytes < 3 * LONG_PIECE + 9; bytes++)
        if (!agree(3, bytes)) return 1;
    for (size_t whole = 1; whole < 5; whole++)
        if (!agree(5, whole * 3 * LONG_PIECE + 3 * SHORT_PIECE + whole)) return 1;
    for (size_t rows = 0; rows <= ROWS; rows++)
        for (size_t bytes = 0; bytes < 3 * SHORT_PIECE + 20; bytes++)
            if (!rows_agree(rows, bytes)) return 1;
    for (size_t bytes = 0; bytes <= 3 * LINE; bytes += LINE)
        if (!moves_agree(bytes)) return 1;
    if (!rows_agree(ROWS, 3 * LONG_PIECE + 13)) return 1;
    return by_table(0, "123456789", 9) == 0xE3069283u ? 0 : 1;
}
"""


@pytest.mark.product(few=1)
def test_the_table_and_the_instruction_agree(tmp_path: Path) -> None:
    """The table is compiled separately, because processors without the instruction are rare."""
    if not (NATIVE / "core/crc32c.c").exists():
        pytest.skip("the C sources are not installed")
    (tmp_path / "agree.c").write_text(PROGRAM)
    binary = tmp_path / "agree"
    command = ["gcc", "-std=gnu11", "-O2", f"-I{NATIVE}", "-o", str(binary), "agree.c"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("no compiler")
    status = subprocess.run([binary]).returncode
    if status == 2:
        pytest.skip("this processor has no instruction for it")
    assert status == 0


def expected(ring: Ring, number: int, slot: int, ticket: int) -> int:
    """Computes the checksum of a slot: the salt of the schema, the ticket, then each leaf."""
    crc = _core.crc32c(ticket.to_bytes(8, "little"), _core.crc32c(ring.schema.digest))
    numbers = np.arange(number, number + ring.width)
    for data in Rows.of(ring.schema.leaves, numbers).bytes:
        crc = _core.crc32c(data.tobytes(), crc)
    return crc


def stored(engine: Engine, slot: int) -> int:
    ring = ring_of(engine)
    at = _core.sections(ring.capacity, ring.width)["checksums"] + 4 * slot
    return int.from_bytes(bytes(memoryview(ring.seat.mapped.slots)[at : at + 4]), "little")


@pytest.mark.parametrize("lanes", [(), (3,)])
def test_a_commit_stores_the_checksum_of_ticket_and_payload(
    make: Maker, lanes: tuple[int, ...]
) -> None:
    engine = make(4, lanes)
    ring = ring_of(engine)
    width = ring.width
    write(ring, range(6 * width))
    for slot, ticket in [(0, 4), (1, 5), (2, 2), (3, 3)]:
        assert stored(engine, slot) == expected(ring, ticket * width, slot, ticket)
        assert ring.seat.native.compute_checksum(slot, ticket) == stored(engine, slot)
    place(ring, [1], range(100, 100 + width))  # ticket 9: slot 1 of the lap that begins at 6
    assert stored(engine, 1) == expected(ring, 100, 1, 9)


def test_a_buffer_may_be_made_without_checksums(make: Maker) -> None:
    engine = make(4, checksum=False)
    write(ring_of(engine), range(4))
    assert stored(engine, 2) == 0


def test_a_byte_that_changed_is_found(make: Maker) -> None:
    ring = ring_of(make())
    write(ring, range(8))
    assert ring.seat.native.verify(0, 8) == []
    np.frombuffer(ring.leaf(1), np.uint8)[37 * 5 + 3] ^= 1
    assert ring.seat.native.verify(0, 8) == [5]
    assert ring.seat.native.verify(6, 2) == []
    with pytest.raises(IndexError, match=r"3 slots from 6 on are not within the ring"):
        ring.seat.native.verify(6, 3)


@pytest.mark.full
def test_long_rows_of_a_large_leaf_get_the_same_checksums() -> None:
    """Long rows bypass the cache four at a time; the remaining rows and short rows do not."""
    leaves = (
        Leaf(("short",), "int64", ()),
        Leaf(("long",), "uint8", (4096,)),
        Leaf(("ragged",), "uint8", (4099,)),
        Leaf(("nothing",), "uint8", (0,)),
    )
    capacity = (64 << 20) // 4096
    rng = np.random.default_rng(3)
    with Engine.anonymous(Settings(capacity=capacity, checksum=True)) as engine:
        ring = engine.define(Schema(leaves, capacity))
        for count in (1, 3, 4, 7, 8, capacity - 30, 21, capacity + 5):
            parts = [
                rng.integers(0, 200, (count, *leaf.shape), dtype=leaf.dtype) for leaf in leaves
            ]
            first = ring.write([part.ctypes.data for part in parts], count)
            assert ring.seat.native.verify(0, capacity) == []
            last = (first + count - 1) % capacity
            for at, part in enumerate(parts[:3]):
                held = np.frombuffer(ring.leaf(at), leaves[at].dtype)
                rows = held.reshape(capacity, *leaves[at].shape)
                assert (rows[last] == part[-1]).all()
                assert (rows[(last - 1) % capacity] == part[max(-2, -count)]).all() or count == 1
        np.frombuffer(ring.leaf(1), np.uint8)[4096 * 5 + 9] ^= 1
        assert ring.seat.native.verify(0, capacity) == [5]

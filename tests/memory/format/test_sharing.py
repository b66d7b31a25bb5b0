"""Shared next observations in the ring: which leaves, how much space, and the slot words."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import numpy as np
import pytest

from shmbuffer import CorruptBufferError, SchemaMismatchError, SpaceError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Leaf, Ring, Schema, Settings
from shmbuffer.memory.format.sharing import Sharing, SharingRequest
from shmbuffer.memory.mapped import recorded
from tests.crash.harness import ended, fork
from tests.selection import seeds

LEAVES = (
    Leaf(("obs",), "float64", (2,)),
    Leaf(("next", "obs"), "float64", (2,)),
    Leaf(("large",), "uint8", (3, 50)),
    Leaf(("next", "large"), "uint8", (3, 50)),
    Leaf(("number",), "int64", ()),
)
NEXT = (("next", "obs"), ("next", "large"))


def ring_of(capacity: int, room: int, *, alpha: float | None = None) -> Ring:
    extra = {"share_next": {"keys": [], "room": room}}
    settings = Settings(capacity=capacity, alpha=alpha, extra=extra)
    return Engine.anonymous(settings).define(Schema(LEAVES, capacity))


class Items:
    """A batch of rows (observation, next observation, number)."""

    def __init__(self, rows: list[tuple[float, float, int]]) -> None:
        obs, after = (np.array([row[at] for row in rows], np.float64) for at in (0, 1))
        self.arrays = [
            np.stack([obs, -obs], 1),
            np.stack([after, -after], 1),
            np.repeat((obs * 251 % 256).astype(np.uint8), 150).reshape(-1, 3, 50),
            np.repeat((after * 251 % 256).astype(np.uint8), 150).reshape(-1, 3, 50),
            np.array([row[2] for row in rows], np.int64),
        ]

    @property
    def addresses(self) -> list[int]:
        return [array.ctypes.data for array in self.arrays]

    def require(self, row: int, expected: tuple[float, float, int]) -> None:
        for found, wanted in zip(self.arrays, Items([expected]).arrays, strict=True):
            assert (found[row] == wanted[0]).all()


class Program:
    """Random operations on a ring, beside a dict with the expected content of each slot."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.size = self.random.choice([3, 8, 33])
        self.ring = ring_of(self.size, 2 * self.size + 20, alpha=self.random.choice([None, 0.6]))
        self.there: dict[int, tuple[float, float, int]] = {}
        self.current = [self.random.random() for _ in range(3)]

    def write(self) -> None:
        count = self.random.choice([1, 2, 5, self.size, self.size + 2])
        streams = [self.random.randrange(3) for _ in range(count)]
        rows = []
        for stream in streams:
            follows = self.random.random()
            rows.append((self.current[stream], follows, self.random.randrange(100)))
            self.current[stream] = follows if self.random.random() < 0.8 else self.random.random()
        items = Items(rows)
        first = self.ring.write(items.addresses, count, streams=np.array(streams, np.uint32))
        for row, item in enumerate(rows):
            self.there[(first + row) % self.size] = item

    def place(self) -> None:
        slots = self.random.choices(sorted(self.there), k=self.random.randrange(1, 5))
        rows = [(self.random.random(), self.random.random(), 7) for _ in slots]
        in_place = self.random.random() < 0.5
        self.ring.place(np.array(slots), Items(rows).addresses, in_place=in_place)
        self.there |= dict(zip(slots, rows, strict=True))

    def renumber(self) -> None:
        slots = np.array(self.random.sample(sorted(self.there), 1 + len(self.there) // 3))
        self.ring.claims.claim_slots(slots, in_place=True, keeps=True)
        column = np.frombuffer(self.ring.leaf(4), np.int64).copy()
        live = np.frombuffer(self.ring._leaf_maps[4], np.int64)
        live.flags.writeable = True
        column[slots] = 55
        live[slots] = 55
        self.ring.claims.commit()
        for slot in slots.tolist():
            self.there[slot] = (*self.there[slot][:2], 55)

    def empty(self) -> None:
        self.ring.empty()
        self.there = {}

    def move(self) -> None:
        self.ring.restore(self.ring.head + self.random.randrange(self.size), 5, None)

    def abort(self) -> None:
        count = self.random.randrange(1, self.size + 1)
        first = self.ring.claims.claim(count)
        self.ring.claims.abort()
        for row in range(count):
            self.there.pop((first + row) % self.size, None)

    def require_same(self) -> None:
        found = Items([(0.0, 0.0, 0)] * self.size)
        tickets = np.empty(self.size, np.int64)
        index = np.arange(self.size)
        self.ring.read(index.ctypes.data, self.size, found.addresses, tickets.ctypes.data)
        assert {*np.flatnonzero(tickets >= 0).tolist()} == self.there.keys()
        for slot, item in self.there.items():
            found.require(slot, item)
        copied = Items([(0.0, 0.0, 0)] * self.size)
        moment = self.ring.copy_out(copied.addresses)
        for slot in np.flatnonzero(moment.tickets >= 0).tolist():
            copied.require(slot, self.there[slot])
        if self.there:
            drawn = Items([(0.0, 0.0, 0)] * 40)
            at, of = np.empty(40, np.int64), np.empty(40, np.int64)
            self.ring.sample(
                40, 5, drawn.addresses, at.ctypes.data, of.ctypes.data, prioritized=False
            )
            for row, slot in enumerate(at.tolist()):
                drawn.require(row, self.there[slot])
        assert not any(self.ring.seat.native.check(True, 0, 10**9))
        own = self.ring.live.holds() & (self.ring.live.nexts >= np.uint64(2**63))
        assert self.ring.live.count_own_rows() == int(own.sum())


@pytest.mark.product(few=2)
@pytest.mark.parametrize("seed", seeds(4, 20))
def test_items_are_as_they_were_written_whatever_is_done(seed: int) -> None:
    program = Program(seed)
    deeds = program.write, program.place, program.renumber, program.empty, program.move
    for _ in range(80):
        weights = (8, 2, 2, 1, 1, 1) if program.there else (1, 0, 0, 0, 0, 0)
        program.random.choices((*deeds, program.abort), weights)[0]()
        program.require_same()


def test_a_link_is_made_where_the_bytes_are_the_same_and_nowhere_else() -> None:
    ring = ring_of(10, 10)
    items = Items([(1, 2, 0), (2, 3, 1), (3, 4, 2), (5, 6, 3)])
    items.arrays[3][1, 2, 49] ^= 1
    ring.write(items.addresses, 4)
    assert [int(word) for word in ring.live.nexts[:4] >> np.uint64(63)] == [0, 1, 1, 1]
    assert int(ring.live.nexts[0]) == 1
    assert int(ring.live.nexts[1]) >> 31 & 0x7FFFFFFF == 1, "it says who links to it"


def test_without_room_a_write_is_refused_before_anything_is_marked() -> None:
    ring = ring_of(10, 3)
    ring.write(Items([(k, k + 100, k) for k in range(3)]).addresses, 3)
    before = ring.live.words.copy(), ring.head
    with pytest.raises(
        SpaceError, match="needs 1 own rows for next observations, but too few of the 3"
    ):
        ring.write(Items([(7, 8, 7)]).addresses, 1)
    with pytest.raises(SpaceError, match="place needs 1 own rows for next observations"):
        ring.place(np.array([5]), Items([(7, 8, 7)]).addresses, in_place=False)
    assert (ring.live.words == before[0]).all()
    assert ring.head == before[1]
    ring.empty()
    ring.write(Items([(k, k + 100, k) for k in range(3)]).addresses, 3)


def test_a_write_without_room_waits_while_somebody_else_is_writing(
    fast_path: Path,
) -> None:
    """The space of an open claim may soon be free."""
    extra = {"share_next": {"keys": [], "room": 3}}
    with Engine.open(fast_path, Settings(capacity=10, extra=extra)) as one:
        ring = one.define(Schema(LEAVES, 10))
        ring.write(Items([(1, 2, 0)]).addresses, 1)
        with Engine.open(fast_path, None) as other:
            theirs = other.ring()
            assert theirs is not None
            theirs.claims.claim(2)
            with pytest.raises(TimeoutError, match="is still writing"):
                ring.write(Items([(7, 9, 1)]).addresses, 1, timeout=0.05)
            assert one.seat.native.empty(False, 10**9) == -_core.BLOCKED
            assert one.seat.native.restore(0, 0, 0.0, 10**9) == -_core.BLOCKED
            one.seat.native.stop_waiting(10**9)
            theirs.claims.abort()
            ring.write(Items([(7, 9, 1)]).addresses, 1, timeout=0.05)
            assert ring.length == 2


@pytest.mark.parametrize(
    ("wholes", "leaves", "message"),
    [
        (0, (0, 1, 2), "Ring: leaf 1 has 64 bytes, but its rows need 0"),
        (4, (0, -1, 2), "Ring: 4 own rows were given for 0 leaves"),
        (4, (0, 1, 7), "Ring: leaf 7 cannot be the observation of leaf 1"),
        (4, (0, 1, 1), "Ring: leaf 1 cannot be the observation of leaf 1"),
    ],
)
def test_the_core_takes_leaves_that_belong_together(
    wholes: int, leaves: tuple[int, int, int], message: str
) -> None:
    ring = ring_of(8, 4)
    seat = ring.seat
    assert seat.mapped is not None
    maps = seat.mapped.leaves
    memory = os.memfd_create("slots")
    os.truncate(memory, _core.sections(8, 1, False, wholes)["bytes"])
    columns = [(maps[0], 16), (maps[1], 16, leaves[2]) if leaves[1] >= 0 else (maps[0], 16)]
    at = _core.Map(memory, os.fstat(memory).st_size)
    os.close(memory)
    with pytest.raises(ValueError, match=message):
        _core.Ring(seat.control.map, at, tuple(columns), 8, 1, 0, False, 0, own_rows=wholes)


# Which leaves.


def test_what_is_asked_for_is_found_among_the_leaves() -> None:
    assert SharingRequest().choose_leaves(LEAVES, 4000) == Sharing(NEXT, 200)
    assert SharingRequest(room=7).choose_leaves(LEAVES, 4000) == Sharing(NEXT, 7)
    assert SharingRequest((("next", "obs"),)).choose_leaves(LEAVES, 10) == Sharing(
        (("next", "obs"),), 64
    )


def test_what_cuts_trajectories_and_what_is_small_keeps_its_column() -> None:
    small = [Leaf((*root, "x"), "float32", ()) for root in ((), ("next",))]
    done = [Leaf((*root, "a", "done"), "int64", ()) for root in ((), ("next",))]
    assert SharingRequest().choose_leaves((*LEAVES, *small, *done), 10).paths == NEXT
    assert SharingRequest((("next", "x"),)).choose_leaves((*LEAVES, *small), 10).paths == (
        ("next", "x"),
    )


@pytest.mark.parametrize(
    ("sharing", "lanes", "message"),
    [
        (Sharing((("next", "obs"),), 4), (2,), r"one dimension \(ndim=1\), but this storage has"),
        (Sharing((("next", "obs"),), 0), (), "share_next_room=0 must both be"),
        (Sharing((("next", "obs"),), 2**31), (), "must both be from 1 to 2147483647"),
        (Sharing((("number",),), 4), (), "'number' is not below 'next'"),
        (Sharing((("next", "x"),), 4), (), "needs a leaf 'next.x', which does not exist"),
    ],
)
def test_a_schema_refuses_what_cannot_be(
    sharing: Sharing, lanes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        Schema(LEAVES, 10, lanes, sharing=sharing)


def test_a_schema_is_read_as_it_was_written() -> None:
    schema = Schema(LEAVES, 10, sharing=Sharing(NEXT, 7))
    again = Schema.from_json(schema.to_json(), "here")
    assert again == schema
    assert again.digest == schema.digest
    assert schema.leaf_files[1] == "next/obs+own_rows.memmap"
    assert schema.leaf_bytes == (160, 112, 1500, 1050, 80)
    assert "next" not in schema.meta_files()
    plain = Schema(LEAVES, 10)
    assert b"sharing" not in plain.to_json()
    assert "shared leaves" in str(plain.difference(schema))
    with pytest.raises(CorruptBufferError, match="'sharing' does not name any leaf"):
        Schema.from_json(schema.to_json().replace(b'[["next","obs"],["next","large"]]', b"[]"), "x")


@pytest.mark.parametrize(
    "found", [3, {"keys": []}, {"keys": [[1]], "room": 2}, {"keys": [], "room": 0}]
)
def test_a_record_that_no_buffer_writes_is_refused(found: object) -> None:
    settings = Settings(capacity=10, extra={"share_next": found})
    with pytest.raises(CorruptBufferError, match="share_next"):
        recorded.read_buffer_arguments(settings, "here")


# Beside a writer.


def test_a_next_observation_that_moves_while_it_is_copied_is_copied_again(fast_path: Path) -> None:
    """The reader is between its two leaves while their row is given to another item."""
    extra = {"share_next": {"keys": [], "room": 2}}
    with Engine.open(fast_path, Settings(capacity=10, extra=extra)) as engine:
        ring = engine.define(Schema(LEAVES, 10))
        ring.write(Items([(1, 2, 0)]).addresses, 1)
        told, tell = os.pipe()
        hear, say = os.pipe()

        def body() -> None:
            with Engine.open(fast_path, None) as other:
                theirs = other.ring()
                assert theirs is not None
                out, at = Items([(0.0, 0.0, 0)]), np.zeros(1, np.int64)
                of = at.ctypes.data
                # The sync point is passed once for each leaf. This pause comes after the leaves
                # with a column and the first of the other leaves.
                _core.arm("sample.copy", "pause", after=3, notify_fd=tell, wait_fd=hear)
                theirs.sample(1, 3, out.addresses, of, of, prioritized=False)
                _core.disarm()
                out.require(0, (1, 2, 0))

        pid = fork(body)
        assert os.read(told, 1)
        was = int(ring.live.nexts[0]) & 1
        ring.write(Items([(2, 3, 1)]).addresses, 1)
        ring.write(Items([(3, 9, 2)]).addresses, 1)
        assert int(ring.live.nexts[0]) == 1, "a link"
        assert int(ring.live.holders[was]) == 2, "its row is that of item 2"
        os.write(say, b"x")
        assert ended(pid) == 0
        for fd in (told, tell, hear, say):
            os.close(fd)

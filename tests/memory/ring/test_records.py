"""The byte ring: records are written and evicted in order, and bytes may be short."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import CorruptBufferError, EmptyBufferError, RecordTooLargeError, SchemaMismatchError
from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.memory import Engine, RecordBatch, Records, Ring, Schema, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.mapped.record_batch import HEADER_BYTES, join
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.inspect import inspect
from tests.memory.numbered import number_of, records
from tests.memory.rows import require_sound
from tests.selection import seeds

CAPACITY = 16
BYTES = 8192


def schema(capacity: int = CAPACITY, nbytes: int = BYTES) -> Schema:
    return Schema((), capacity, (), {"kind": "records"}, nbytes)


def settings(capacity: int = CAPACITY, nbytes: int = BYTES, **options: object) -> Settings:
    return Settings(capacity, record_bytes=nbytes, **{"alpha": 0.5, "eps": 0.0, **options})  # type: ignore[arg-type]


def opened(
    path: Path | None, capacity: int = CAPACITY, nbytes: int = BYTES, **options: object
) -> Engine:
    made = settings(capacity, nbytes, **options)
    engine = Engine.anonymous(made) if path is None else Engine.open(path, made)
    engine.define(schema(capacity, nbytes))
    return engine


def parts(engine: Engine) -> tuple[Ring, Records]:
    assert engine.ring() is not None
    assert engine.ring().records is not None
    return engine.ring(), engine.ring().records


@pytest.fixture(params=["anonymous", "files"])
def engine(request: pytest.FixtureRequest, fast_path: Path) -> Iterator[Engine]:
    with opened(None if request.param == "anonymous" else fast_path / "buffer") as made:
        yield made


def contents(ring: Ring) -> dict[int, int]:
    """Returns the number of every item by slot; fails on a torn item."""
    assert ring.records is not None
    drawn = ring.records.read(np.arange(ring.capacity))
    return {
        slot: number_of(drawn.batch.body(slot))
        for slot in np.flatnonzero(drawn.tickets >= 0).tolist()
    }


def slots(*where: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(where, np.int64)


@dataclass
class Oracle:
    """The byte ring as its docstring describes it, in plain Python."""

    capacity: int
    max_bytes: int
    log: deque[tuple[int, int, int]] = field(default_factory=deque)  # ticket, position, stride
    items: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> ticket, number
    ticket: int = 0
    head: int = 0

    @property
    def tail(self) -> int:
        return self.log[0][1] if self.log else self.head

    def is_item(self, ticket: int) -> bool:
        return self.items.get(ticket % self.capacity, (None, 0))[0] == ticket

    def claim(self, rows: list[tuple[int, int, int]]) -> None:
        """Claims rows of (ticket, number, stride) in the order of tickets."""
        for ticket, _, _ in rows:
            self.items.pop(ticket % self.capacity, None)
        while self.head + sum(stride for _, _, stride in rows) - self.tail > self.max_bytes:
            ticket, _, _ = self.log.popleft()
            if self.is_item(ticket):
                del self.items[ticket % self.capacity]
        for _ in range(len(rows) + 64):
            if not self.log or self.is_item(self.log[0][0]):
                break
            self.log.popleft()
        for ticket, number, stride in rows:
            self.items[ticket % self.capacity] = ticket, number
            self.log.append((ticket, self.head, stride))
            self.head += stride

    def write(self, numbers: list[int], strides: list[int]) -> None:
        skipped = max(0, len(numbers) - self.capacity)
        first = self.ticket + skipped
        self.ticket += len(numbers)
        kept = zip(numbers[skipped:], strides[skipped:], strict=True)
        self.claim([(first + at, *row) for at, row in enumerate(kept)])

    def place(self, where: list[int], numbers: list[int], strides: list[int]) -> None:
        n, head = self.capacity, self.ticket
        rows = [
            (head + (slot - head) % n, number, stride)
            for slot, number, stride in zip(where, numbers, strides, strict=True)
        ]
        self.ticket += n
        self.claim(sorted(rows))


def strides(batch: RecordBatch) -> list[int]:
    return [(size + 7) & ~7 for size in batch.sizes.tolist()]


@pytest.mark.product(few=1)
def test_after_any_writes_the_items_equal_those_of_the_oracle(engine: Engine) -> None:
    ring, held = parts(engine)
    oracle, random = Oracle(CAPACITY, BYTES), np.random.default_rng(0)
    for step in range(1500):
        numbers = random.integers(0, 10**6, random.integers(1, 8)).tolist()
        if step % 4:
            batch = records(numbers)
            oracle.write(numbers, strides(batch))
            held.write(batch)
        else:
            where = random.choice(CAPACITY, len(numbers), replace=False)
            batch = records(numbers)
            oracle.place(where.tolist(), numbers, strides(batch))
            held.place(where, batch, in_place=bool(step % 8))
        assert contents(ring) == {slot: number for slot, (_, number) in oracle.items.items()}
        assert held.used == oracle.head - oracle.tail
        assert ring.length == len(oracle.items)
        if step % 100 == 0:
            require_sound(engine)
    assert engine.stats()["evicted"] > 1000


def test_a_new_record_takes_the_bytes_of_the_oldest_ones_and_of_no_others(engine: Engine) -> None:
    ring, held = parts(engine)
    size = BYTES // 8 - HEADER_BYTES
    for number in range(8):
        held.write(join([bytes([number]) * size]))
    assert (held.used, ring.length) == (BYTES, 8)
    held.write(join([b"x" * (size + 1)]))  # one byte more than one of them has
    there = held.read(np.arange(CAPACITY))
    assert np.flatnonzero(there.tickets >= 0).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert bytes(there.batch.body(8)) == b"x" * (size + 1)


def test_slots_may_be_short_as_well_as_bytes(engine: Engine) -> None:
    ring, held = parts(engine)
    for number in range(3 * CAPACITY):
        held.write(join([bytes([number])]))
    assert ring.length == CAPACITY
    assert engine.stats()["evicted"] == 0
    assert held.used == held.live() == CAPACITY * 32


def test_a_record_may_lie_across_the_end_of_the_file(engine: Engine) -> None:
    _, held = parts(engine)
    held.write(join([b"a" * 5000]))
    first = held.write(join([b"b" * 6000]))
    at = first % CAPACITY
    assert int(held.extents["position"][at]) + 6000 > BYTES
    assert bytes(held.read(slots(at)).batch.body(0)) == b"b" * 6000


@pytest.mark.parametrize("body", [BYTES - HEADER_BYTES + 1, 10 * BYTES])
def test_a_record_larger_than_the_ring_is_refused_before_anything_changes(
    engine: Engine, body: int
) -> None:
    ring, held = parts(engine)
    held.write(records(range(5)))
    before = ring.snapshot()
    message = (
        rf"write needs {(body + 31) // 8 * 8} bytes, but the byte ring has only {BYTES}; write"
    )
    with pytest.raises(RecordTooLargeError, match=message) as raised:
        held.write(join([bytes(body)]))
    assert raised.value.max_bytes == BYTES  # type: ignore[attr-defined]
    with pytest.raises(RecordTooLargeError, match=r"larger max_bytes\. Nothing was changed"):
        held.place(slots(3), join([bytes(body)]), in_place=True)
    assert ring.snapshot() == before
    assert contents(ring) == {n: n for n in range(5)}


def test_a_claim_of_more_bytes_than_there_are_is_refused_though_each_record_fits(
    engine: Engine,
) -> None:
    ring, held = parts(engine)
    with pytest.raises(RecordTooLargeError, match="write fewer items at once"):
        held.write(join([bytes(1000)] * 9))
    assert (ring.head, ring.length) == (0, 0)
    held.write(join([bytes(BYTES - HEADER_BYTES)]))
    assert held.used == BYTES


def test_the_last_records_of_a_batch_larger_than_the_ring_stay(engine: Engine) -> None:
    ring, held = parts(engine)
    batch = join([struct.pack("<q", n) for n in range(50)])
    assert held.write(batch, np.arange(1.0, 51.0)) == 0
    there = held.read(np.arange(CAPACITY))
    found = [struct.unpack("<q", there.batch.body(slot))[0] for slot in range(CAPACITY)]
    assert sorted(found) == list(range(34, 50))
    assert [ring.tree.priorities()[slot] for slot in range(CAPACITY)] == [n + 1.0 for n in found]
    assert ring.write_count == 50


def test_an_empty_batch_writes_nothing(engine: Engine) -> None:
    ring, held = parts(engine)
    nothing = join([])
    assert held.write(nothing) == 0
    assert held.place(slots(), nothing, in_place=False).tolist() == []
    assert ring.seat.native.place_records(0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, 0, 0) == 0
    assert held.read(slots()).tickets.tolist() == []
    assert ring.head == 0
    with pytest.raises(EmptyBufferError, match="Cannot sample from an empty storage"):
        held.sample(4, 0, beta=None)


def test_in_place_a_record_keeps_its_priority_and_its_source(engine: Engine) -> None:
    ring, held = parts(engine)
    held.write(records(range(4)), np.array([1.0, 2.0, 3.0, 4.0]))
    sources = ring.live.sources.copy()
    held.place(slots(2, 0), records([70, 71]), in_place=True)
    assert contents(ring) == {0: 71, 1: 1, 2: 70, 3: 3}
    assert ring.tree.priorities()[:4].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (ring.live.sources == sources).all()
    assert ring.write_count == 4
    held.place(slots(1), records([72]), in_place=False)
    assert ring.tree.priorities()[1] == 4.0
    assert ring.write_count == 5
    require_sound(engine)


def test_only_the_items_of_their_tickets_are_replaced(engine: Engine) -> None:
    ring, held = parts(engine)
    held.write(records(range(6)))
    tickets = slots(0, 1, 2)
    held.place(slots(1), records([50]), in_place=True)
    used = held.used
    kept = held.place(slots(2, 1, 0), records([60, 61, 62]), in_place=True, tickets=slots(2, 1, 0))
    assert kept.tolist() == [True, False, True]
    assert contents(ring) == {0: 62, 1: 50, 2: 60, 3: 3, 4: 4, 5: 5}
    assert held.used > used
    again = held.place(slots(0), records([80]), in_place=True, tickets=tickets[:1])
    assert again.tolist() == [False]
    assert contents(ring)[0] == 62
    require_sound(engine)


def test_arguments_that_make_no_sense_are_refused_before_anything_changes(engine: Engine) -> None:
    ring, held = parts(engine)
    held.write(records(range(3)))
    before = ring.snapshot()
    batch = records([7, 8])
    with pytest.raises(ValueError, match="2 records cannot be written to 1 slots"):
        held.place(slots(0), batch, in_place=False)
    with pytest.raises(ValueError, match="slots must be unique"):
        held.place(slots(1, 1), batch, in_place=False)
    with pytest.raises(IndexError, match="index 16 at position 1 is out of range for a buffer of"):
        held.place(slots(1, 16), batch, in_place=False)
    with pytest.raises(IndexError, match="index -1 at position 0"):
        held.read(slots(-1))
    with pytest.raises(ValueError, match=r"priority -1.0 at position 1 is not a number from 0"):
        held.write(batch, np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="1 priorities were given for 2 elements"):
        held.write(batch, np.array([1.0]))
    assert ring.snapshot() == before


@pytest.mark.parametrize(
    ("starts", "sizes", "row"),
    [
        ([4, 104], [40, 40], 0),  # not a multiple of 8
        ([0, 200], [40, 40], 1),  # beyond the end
        ([0, 104], [40, 23], 1),  # shorter than its header
        ([0, 104], [40, 2**62], 1),
        ([0, 120], [40, 40], 1),  # reaches over the end of the batch
        ([0, 104], [-1, 40], 0),
    ],
)
def test_a_batch_that_does_not_lie_within_its_bytes_is_refused(
    engine: Engine, starts: list[int], sizes: list[int], row: int
) -> None:
    ring, held = parts(engine)
    batch = RecordBatch(np.zeros(152, np.uint8), slots(*starts), slots(*sizes))
    with pytest.raises(ValueError, match=rf"record {row} is not within the bytes of the b"):
        held.write(batch)
    assert ring.head == 0


@pytest.mark.parametrize("nbytes", [BYTES, 2**26])  # the longest pieces bypass the cache
@pytest.mark.parametrize("checksum", [True, False])
def test_pieces_outside_of_a_batch_are_written_where_they_belong(
    path: Path, nbytes: int, checksum: bool
) -> None:
    rng = np.random.default_rng(3)
    large = rng.integers(0, 256, (3, 2, nbytes // 16), np.uint8)
    with opened(path, 8, nbytes, checksum=checksum) as engine:
        _, held = parts(engine)
        most = large.shape[2]
        for bytes_of in [(1, 7), (most, 0), (most // 3, most - 1)]:
            inside = rng.integers(0, 256, (3, 64), np.uint8)
            batch = RecordBatch(
                inside.ravel(),
                np.arange(3) * 64,
                np.full(3, 64 + sum(bytes_of)),
                np.array(
                    [
                        [
                            [HEADER_BYTES + 5, address(large[row, 0]), bytes_of[0]],
                            [
                                HEADER_BYTES + 5 + bytes_of[0] + 3,
                                address(large[row, 1]),
                                bytes_of[1],
                            ],
                        ]
                        for row in range(3)
                    ]
                ),
                large,
            )
            cuts = HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + 8
            expected = [
                b"".join(
                    [
                        inside[row, cuts[0] : cuts[1]].tobytes(),
                        large[row, 0, : bytes_of[0]].tobytes(),
                        inside[row, cuts[1] : cuts[2]].tobytes(),
                        large[row, 1, : bytes_of[1]].tobytes(),
                        inside[row, cuts[2] :].tobytes(),
                    ]
                )
                for row in range(3)
            ]
            assert batch.bodies() == expected
            first = held.write(batch)
            written = held.read(np.arange(first, first + 3) % 8)
            assert written.batch.bodies() == expected
            placed = held.place(
                np.array([2, 0, 1]), batch.rows(np.array([2, 0, 1])), in_place=False
            )
            assert placed.all()
            again = held.read(np.arange(3)).batch
            assert again.bodies() == expected
            require_sound(engine)


@pytest.mark.parametrize(
    "outside",
    [
        [23, 8],  # over the header
        [100, 8],  # beyond the end
        [40, 2**62],
        [40, -1],
        [2**62, 8],
    ],
)
def test_a_piece_that_is_not_inside_its_record_is_refused(
    engine: Engine, outside: list[int]
) -> None:
    ring, held = parts(engine)
    offset, size = outside
    pieces = np.array([[[offset, address(np.zeros(8, np.uint8)), size]]])
    batch = RecordBatch(np.zeros(64, np.uint8), slots(0), slots(72), pieces)
    with pytest.raises(ValueError, match=r"record 0 .* within the bytes of the batch"):
        held.write(batch)
    assert ring.head == 0


def test_a_ring_of_records_takes_no_rows_and_the_other_way_round(engine: Engine) -> None:
    ring, _ = parts(engine)
    native = ring.seat.native
    for call in (
        lambda: native.write((), 1, 0, 0, 0),
        lambda: native.place(0, 1, (), 0, False, 0),
        lambda: native.claim(1, 0, 0),
        lambda: native.claim_slots(0, 1, False, 0, 0, 0),
        lambda: native.read(0, 1, (), 0, 0),
        lambda: native.copy_slots(0, 1, (), 0),
        lambda: native.finish_snapshot((), 0, 0, 0, 0),
    ):
        with pytest.raises(
            TypeError, match="for rows of leaves, but the items of this ring are records"
        ):
            call()
    with Engine.anonymous(Settings(4)) as rows:
        plain = rows.define(Schema((), 4))
        assert plain.records is None
        for name, count in (
            ("write_records", 10),
            ("place_records", 13),
            ("sample_records", 13),
            ("read_records", 9),
            ("finish_records_snapshot", 8),
            ("relink", 2),
        ):
            with pytest.raises(TypeError, match=rf"{name}\(\) is for records"):
                getattr(plain.seat.native, name)(*[0] * count)
        with pytest.raises(TypeError, match=r"read_span\(\) is for records"):
            plain.seat.native.read_span(0)


@pytest.mark.parametrize("beta", [None, 0.7])
def test_a_sample_is_the_same_for_the_same_key(engine: Engine, beta: float | None) -> None:
    ring, held = parts(engine)
    held.write(records(range(12)), np.arange(1.0, 13.0))
    one, other = held.sample(200, 5, beta=beta), held.sample(200, 5, beta=beta)
    assert one.index.tolist() == other.index.tolist()
    there = contents(ring)
    assert [number_of(one.batch.body(row)) for row in range(200)] == [
        there[slot] for slot in one.index.tolist()
    ]
    assert (one.tickets == one.index).all()
    if beta is None:
        assert one.weights is None
    else:
        assert one.weights is not None
        mass = ring.tree.mass(one.index)
        np.testing.assert_allclose(one.weights, (mass / ring.tree.p_min) ** -beta, rtol=1e-6)
    assert held.sample(200, 6, beta=beta).index.tolist() != one.index.tolist()


def test_priorities_decide_how_often_a_record_is_drawn(engine: Engine) -> None:
    ring, held = parts(engine)
    held.write(records(range(4)), np.array([0.0, 1.0, 4.0, 9.0]))
    counts = np.bincount(held.sample(60_000, 1, beta=0.4).index, minlength=4)
    np.testing.assert_allclose(counts / 60_000, ring.tree.mass()[:4] / ring.tree.p_sum, atol=0.01)


def test_where_bytes_are_short_every_item_is_drawn_equally_often(fast_path: Path) -> None:
    """Of 100,000 slots, 16 hold an item and are found without trying all."""
    with opened(None, 100_000, 4096, alpha=None) as engine:
        ring, held = parts(engine)
        for _ in range(1000):
            held.write(join([bytes(224)]))
        assert ring.length == 16
        counts = np.bincount(held.sample(16_000, 3, beta=None).index, minlength=1000)
        assert np.flatnonzero(counts).tolist() == list(range(984, 1000))
        assert counts[984:].min() > 850
        held.place(slots(50_000), join([bytes(224)]), in_place=False)
        drawn = set(held.sample(2000, 4, beta=None).index.tolist())
        assert drawn == {*range(985, 1000), 50_000}


def test_memory_for_what_is_read_grows_until_it_fits(engine: Engine) -> None:
    _, held = parts(engine)
    held.write(join([b"s"]))
    held.sample(4, 0, beta=None)
    held.write(join([b"l" * 7000]))
    drawn = held.sample(64, 0, beta=None)
    bodies = {bytes(drawn.batch.body(row)) for row in range(64)}
    assert bodies == {b"s", b"l" * 7000}
    assert (drawn.batch.starts % 8 == 0).all()


def test_a_slot_without_an_item_reads_as_nothing(engine: Engine) -> None:
    _, held = parts(engine)
    held.write(records([1]))
    there = held.read(slots(0, 5))
    assert there.tickets.tolist() == [0, -1]
    assert there.batch.sizes[1] == 0


def test_emptied_bytes_are_used_again(engine: Engine) -> None:
    ring, held = parts(engine)
    held.write(records(range(10)))
    ring.empty()
    assert (ring.length, held.live()) == (0, 0)
    for number in range(200):
        held.write(records([number]))
        assert held.used <= BYTES
    assert engine.stats()["evicted"] < 200
    require_sound(engine)


@pytest.mark.product(few=1)
def test_a_reader_never_gets_a_record_that_is_written_over_meanwhile(engine: Engine) -> None:
    _, held = parts(engine)
    held.write(records(range(8)))
    done = threading.Event()

    def writes() -> None:
        for number in range(0, 6000, 3):
            held.write(records(range(number, number + 3)))
        done.set()

    writer = threading.Thread(target=writes)
    writer.start()
    key = 0
    while not done.is_set():
        for drawn in (
            held.sample(16, key, beta=0.5 if key % 2 else None),
            held.read(np.arange(16)),
        ):
            for row in np.flatnonzero(drawn.tickets >= 0).tolist():
                number_of(drawn.batch.body(row))
        key += 1
    writer.join()
    require_sound(engine)


# In a directory.


@pytest.mark.full
def test_the_bytes_on_disk_do_not_grow_over_ten_laps(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path, 512, 2**17, reserve=False) as engine:
        ring, held = parts(engine)
        random = np.random.default_rng(1)
        seen = []
        while held._seat.native.byte_head < 11 * 2**17:
            sizes = random.integers(100, 900, 16)
            held.write(join([bytes(int(size)) for size in sizes]))
            if held._seat.native.byte_head > 2**17:
                found = inspect(path)
                seen.append((found["bytes"], found["disk_bytes"]))
                extents = held.extents[(ring.live.words & 3) == 2]
                plain = int(((extents["bytes"] + 7) & ~np.uint64(7)).sum())
                assert found["records"]["live_bytes"] == plain
                assert plain <= found["records"]["used_bytes"] <= 2**17
                assert found["records"]["used_bytes"] <= 1.03 * plain
        assert len(seen) > 100
        assert len(set(seen)) == 1
        names = ("control", "slots", "ledger", "records")
        files = [file.stat() for file in path.rglob("*") if file.name in names]
        assert seen[0][0] == sum(file.st_size for file in files)
        json = (path / layout.SCHEMA).stat().st_blocks
        assert seen[0][1] == 512 * (sum(file.st_blocks for file in files) + json)


def test_another_process_reads_what_one_has_written(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as one, Engine.open(path, None) as other:
        _, held = parts(one)
        ring, there = parts(other)
        held.write(records(range(5)))
        assert contents(ring) == {n: n for n in range(5)}
        there.write(records([100]))
        assert contents(parts(one)[0])[5] == 100
        assert other.settings.record_bytes == BYTES


def test_after_the_death_of_all_everything_is_there(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        parts(engine)[1].write(records(range(13)))
        before, priorities = contents(parts(engine)[0]), parts(engine)[0].tree.priorities()
        pid = os.fork()
        if not pid:
            with Engine.open(path, None) as victim:
                os.kill(os.getpid(), 9 if victim.ring() else 1)
        os.waitpid(pid, 0)
    with Engine.open(path, None) as found:
        assert found.report is not None
        assert found.report.reason == "no client alive"
        ring, held = parts(found)
        assert contents(ring) == before
        np.testing.assert_array_equal(ring.tree.priorities(), priorities)
        for number in range(100):
            held.write(records(range(number, number + 2)))
        require_sound(found)


def damaged(path: Path, where: int, mark: bytes = b"\xa5\x5a") -> None:
    with open(path / layout.RECORDS, "r+b") as file:
        file.seek(where % BYTES)
        file.write(mark)


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_a_copy_keeps_what_fits_its_checksum_and_goes_on_for_laps(
    fast_path: Path, seed: int
) -> None:
    """Damage is placed in headers, in bodies, and in data that several records share."""
    path, copy = fast_path / "buffer", fast_path / "copy"
    random = np.random.default_rng(seed)
    with opened(path) as engine:
        ring, held = parts(engine)
        for start in range(0, 90, 3):
            held.write(records(range(start, start + 3)))
        if seed % 2:
            held.place(slots(4, 9), records([500, 501]), in_place=bool(seed % 4 == 1))
        before, extents = contents(ring), held.extents.copy()
        shutil.copytree(path, copy)
    hits = random.integers(0, BYTES, 1 + seed % 5).tolist()
    for hit in hits:
        damaged(copy, hit)
    touched = {
        slot
        for slot in before
        for hit in hits
        for byte in (hit, (hit + 1) % BYTES)
        if (byte - int(extents["position"][slot])) % BYTES < int(extents["bytes"][slot])
    }
    with Engine.open(copy, None) as found:
        assert found.report is not None
        assert (found.report.reason, found.report.checksum_failed) == ("copy", len(touched))
        ring, held = parts(found)
        assert contents(ring) == {s: n for s, n in before.items() if s not in touched}
        require_sound(found)
        for number in range(200):
            held.write(records(range(number, number + 2)))
            assert held.used <= BYTES
        require_sound(found)
        assert len(contents(ring)) > 10


def test_a_record_that_is_nowhere_is_reported_and_refused(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        parts(engine)[1].write(records(range(6)))
    at = schema().sections["extents"]
    for slot, extent in ((1, (2**40, 100)), (2, (0, 23)), (3, (4, 100)), (4, (8, 2**63))):
        with open(path / layout.SLOTS, "r+b") as file:
            file.seek(at + 16 * slot)
            file.write(struct.pack("<QQ", *extent))
    report = check(path)
    assert "4 records are outside the used part of the byte ring" in report.problems
    with Engine.open(path, None) as found:
        assert found.report is not None
        assert found.report.words_refused == 4
        assert sorted(contents(parts(found)[0])) == [0, 5]
        require_sound(found)


def test_check_finds_the_record_whose_bytes_are_wrong(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        _, held = parts(engine)
        held.write(records(range(6)))
        damaged(path, int(held.extents["position"][3]) + 60)
        assert engine.check().problems == ["slot 3: the bytes do not match their checksum"]
    assert check(path).problems == ["slot 3: the bytes do not match their checksum"]


def test_a_missing_or_short_byte_ring_is_an_error(fast_path: Path) -> None:
    path = fast_path / "buffer"
    opened(path).close()
    os.truncate(path / layout.RECORDS, 100)
    with pytest.raises(CorruptBufferError, match=r"records: .*100"):
        Engine.open(path, None)
    os.unlink(path / layout.RECORDS)
    with pytest.raises(CorruptBufferError, match="records: is missing; restore it from a copy"):
        Engine.open(path, None)


def test_removal_takes_the_byte_ring_and_the_dictionary_too(fast_path: Path) -> None:
    path = fast_path / "buffer"
    engine = opened(path)
    engine.seat.publish_dictionary(b"words")
    assert engine.cleanup()
    engine.close()
    assert not path.exists()


def test_a_flush_covers_the_byte_ring(fast_path: Path) -> None:
    with opened(fast_path / "buffer") as engine:
        parts(engine)[1].write(records(range(7)))
        engine.flush()
        assert engine.superblock.durable_ticket == 7


def test_the_header_of_a_record_that_is_gone_leads_over_it(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        _, held = parts(engine)
        held.write(records([1, 2, 3]))
        at = int(held.extents["position"][1])
    damaged(path, at + 16)  # its size
    with Engine.open(path, None) as found:
        assert contents(parts(found)[0]) == {0: 1, 2: 3}
        for number in range(100):
            parts(found)[1].write(records([number]))
            require_sound(found)


def test_a_damaged_size_that_leads_to_a_later_record_loses_no_item_between(
    fast_path: Path,
) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        ring, held = parts(engine)
        size = BYTES // 8 - HEADER_BYTES
        for number in range(8):
            held.write(join([bytes([number]) * size]))
        at = int(held.extents["position"][0])
        damaged(path, at + 16, struct.pack("<Q", 3 * BYTES // 8))
        held.write(join([bytes([8]) * size]))
        assert (held.used, ring.length) == (BYTES, 8)
        there = held.read(np.arange(CAPACITY))
        assert np.flatnonzero(there.tickets >= 0).tolist() == list(range(1, 9))
        require_sound(engine)


def counters(path: Path, **values: int) -> None:
    with open(path / layout.CONTROL, "r+b") as file:
        for name, value in values.items():
            assert layout.RUNTIME.fields is not None
            file.seek(layout.RUNTIME_OFFSET + layout.RUNTIME.fields[name][1])
            file.write(struct.pack("<Q", value))


@pytest.mark.parametrize("there", [0, 3])
@pytest.mark.parametrize(("head", "tail"), [(2**63, 0), (4, 4), (0, 4096), (BYTES + 8, 0)])
def test_an_impossible_head_and_tail_are_recomputed(
    fast_path: Path, there: int, head: int, tail: int
) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        parts(engine)[1].write(records(range(there)))
    counters(path, byte_head=head, byte_tail=tail)
    with Engine.open(path, None) as found:
        ring, held = parts(found)
        held.write(records([77]))
        assert 77 in contents(ring).values()
        assert copied(held, CAPACITY) == contents(ring)
        require_sound(found)


def test_a_recovery_that_dies_before_the_chain_is_rebuilt_is_repeated(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        for number in range(6):
            parts(engine)[1].write(records([number]))
    counters(path, byte_head=2**63)
    if not (pid := os.fork()):
        _core.arm("recover.words")
        Engine.open(path, None)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    with Engine.open(path, None) as found:
        ring, held = parts(found)
        held.write(records([77]))
        assert 77 in contents(ring).values()
        require_sound(found)


def test_priorities_of_an_older_page_draw_no_slot_without_an_item(fast_path: Path) -> None:
    """After a power cut, the runtime page may be older than the priorities."""
    path, copy = fast_path / "buffer", fast_path / "copy"
    with opened(path, alpha=None) as engine:
        ring, held = parts(engine)
        before = (path / layout.CONTROL).read_bytes()
        ring.tree.bind(0.5, 0.0)
        held.write(records(range(9)))
        shutil.copytree(path, copy)
    (copy / layout.CONTROL).write_bytes(before)
    damaged(copy, 100)
    with Engine.open(copy, None) as found:
        ring, held = parts(found)
        there = set(ring.live.committed().tolist())
        assert 0 not in there
        assert set(held.sample(300, 1, beta=0.4).index.tolist()) == there


@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_copy_of_the_superblock_loses_nothing(fast_path: Path, copy: int) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        parts(engine)[1].write(records(range(5)))
    with open(path / layout.CONTROL, "r+b") as file:
        file.seek(copy * layout.SUPERBLOCK_BYTES + 300)
        file.write(b"\xff")
    with Engine.open(path, None) as found:
        assert contents(parts(found)[0]) == {n: n for n in range(5)}


def test_an_impossible_number_of_clients_is_recounted(fast_path: Path) -> None:
    path = fast_path / "buffer"
    with opened(path) as engine:
        parts(engine)[1].write(records(range(5)))
    counters(path, next_incarnation=2**64 - 1)
    with Engine.open(path, None) as found:
        assert contents(parts(found)[0]) == {n: n for n in range(5)}
        assert parts(found)[0].seat.incarnation == 2


def copied(held: Records, capacity: int) -> dict[int, int]:
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), held.max_bytes)
        moment = held.copy_out(file.fileno(), "a file")
        data = 2 * os.pread(file.fileno(), held.max_bytes, 0)
    found = {}
    assert moment.extents is not None
    for slot in np.flatnonzero(moment.tickets >= 0).tolist():
        position, size = (int(moment.extents[name][slot]) for name in ("position", "bytes"))
        start = position % held.max_bytes
        body = memoryview(data)[start + HEADER_BYTES : start + size]
        found[slot] = number_of(body)
    return found


def test_a_copy_of_one_moment_holds_every_record(engine: Engine) -> None:
    ring, held = parts(engine)
    assert copied(held, CAPACITY) == {}
    for start in range(0, 50, 5):
        held.write(records(range(start, start + 5)))
        assert copied(held, CAPACITY) == contents(ring)


@pytest.mark.full
def test_a_copy_that_is_made_while_others_write_is_of_one_moment(fast_path: Path) -> None:
    """All records of batches of three are present, except for those that were evicted first."""
    with opened(fast_path / "buffer", 64, 2**15) as engine:
        _, held = parts(engine)
        done = threading.Event()

        def writes() -> None:
            with Engine.open(fast_path / "buffer", None) as other:
                for start in range(0, 9000, 3):
                    parts(other)[1].write(records(range(start, start + 3)))
            done.set()

        writer = threading.Thread(target=writes)
        writer.start()
        seen = 0
        while not done.is_set() or seen < 3:
            numbers = sorted(copied(held, 64).values())
            seen += 1
            if numbers:
                assert numbers == list(range(numbers[0], numbers[-1] + 1))
                assert numbers[-1] % 3 == 2
        writer.join()


def test_a_copy_that_is_lapped_holds_every_record_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six laps are written during the first piece; then all writers stop."""
    with opened(None, 4096, 2**16) as engine:
        ring, held = parts(engine)
        held.write(records(range(40)))
        pwrite, number = os.pwrite, 0

        def laps(descriptor: int, content: bytes, offset: int) -> int:
            nonlocal number
            written = pwrite(descriptor, content, offset)
            while number < 6 * 2**16 // 400:
                held.write(records(range(number, number + 8)))
                number += 8
            return written

        monkeypatch.setattr(os, "pwrite", laps)
        assert copied(held, 4096) == contents(ring)
        assert number > 900


def test_a_full_disk_is_an_error_with_the_bytes(engine: Engine) -> None:
    from shmbuffer import SpaceError

    _, held = parts(engine)
    held.write(records(range(5)))
    with (
        open("/dev/full", "r+b") as file,
        pytest.raises(SpaceError, match=r"are needed, and .* are free"),
    ):
        held.copy_out(file.fileno(), "the copy")


@pytest.mark.parametrize(
    ("nbytes", "message"),
    [
        (100, "a byte ring must have from 4096"),
        (4097, "in multiples of 4096"),
        (2**60, "a byte ring must have"),
    ],
)
def test_a_byte_ring_of_another_size_cannot_be(nbytes: int, message: str) -> None:
    with pytest.raises(SchemaMismatchError, match=message):
        Schema((), 4, (), {}, nbytes)


def test_the_size_that_is_asked_for_is_rounded_up_to_pages() -> None:
    assert Settings(4, record_bytes=4097).record_bytes == 8192
    with pytest.raises(ValueError, match="bytes, but is -4096"):
        Settings(4, record_bytes=-4096)


def test_records_have_no_lanes_and_no_leaves() -> None:
    with pytest.raises(SchemaMismatchError, match="both a byte ring and leaves or lanes"):
        Schema((), 4, (2,), {}, 4096)


def test_a_schema_of_records_is_read_as_it_was_written() -> None:
    one = schema()
    assert Schema.from_json(one.to_json(), "here") == one
    assert b"record_bytes" not in Schema((), 4).to_json()
    with pytest.raises(CorruptBufferError, match="the schema cannot be read"):
        Schema.from_json(one.to_json().replace(b"8192", b"8193"), "here")
    message = "the byte ring has 8192 bytes, but this write is for a ring of 4096 bytes"
    assert one.difference(schema(nbytes=4096)) == message


def test_a_map_of_the_same_bytes_twice_in_a_row(tmp_path: Path) -> None:
    file = tmp_path / "ring"
    file.write_bytes(bytes(4096))
    with open(file, "r+b") as handle:
        twice = _core.Map(handle.fileno(), 4096, twice=True)
    view = np.frombuffer(twice, np.uint8)
    assert (len(view), twice.nbytes) == (8192, 4096)
    view[4094:4098] = [1, 2, 3, 4]
    assert view[[0, 1, 8190, 8191]].tolist() == [3, 4, 1, 2]
    twice.sync()
    assert file.read_bytes()[:2] == b"\x03\x04"

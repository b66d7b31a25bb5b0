"""Reservations keep space for a rollout from its beginning until its items are committed."""

from __future__ import annotations

import math
import os
import pickle
import re
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferClosedError,
    ConsumingSampler,
    CorruptBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Partial,
    RateLimiter,
    RateLimitTimeout,
    ReplayBuffer,
    ReservationLostError,
    SchemaMismatchError,
    ShmBufferError,
    SpaceError,
    TensorDictReplayBuffer,
    UnsafePathError,
    attach,
)
from shmbuffer._native import _core
from shmbuffer.memory import consumer_version
from shmbuffer.memory.clients import partials
from shmbuffer.memory.clients.partials import PartialFile
from shmbuffer.memory.flow.reservations import Reservations
from shmbuffer.memory.upkeep.inspect import inspect
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.crash.harness import ended, fork
from tests.kit.programs import in_a_tmpfs, needs_root
from tests.kit.rings import engine_of, ring_of

CAPACITY = 16


def steps(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "next": number + 1}, [count])


def texts(first: int, count: int) -> list[TensorDict]:
    """Makes items of different sizes."""
    return [
        TensorDict({"tokens": torch.arange(number + 1), "number": torch.tensor(number)}, [])
        for number in range(first, first + count)
    ]


def numbers(rb: Any) -> list[int]:
    """Returns the numbers of all items in the order of their slots."""
    there = ring_of(rb).live.holds().nonzero()[0].tolist()
    return [int(rb[i]["number"]) for i in there]


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[TensorDictReplayBuffer]:
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows", shared_init=True)
    made = TensorDictReplayBuffer(storage=storage, batch_size=4)
    made.extend(steps(0, 2))
    yield made
    made.close()


@pytest.fixture
def records(tmp_path: Path) -> Iterator[ReplayBuffer]:
    storage = LazyStackStorage(
        CAPACITY, max_bytes=2**16, scratch_dir=tmp_path / "records", shared_init=True
    )
    made = ReplayBuffer(storage=storage, batch_size=1)
    yield made
    made.close()


def queue(rb: Any) -> None:
    rb.rate_limiter = RateLimiter(max_times_sampled=1)


def killed(work: Callable[[], None]) -> None:
    """Runs ``work`` in a process that is then killed."""

    def body() -> None:
        work()
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(body)) == -signal.SIGKILL


def partial_files(rb: Any) -> list[str]:
    folder = Path(rb.storage.scratch_dir) / ".shmbuffer/partials"
    return sorted(os.listdir(folder)) if folder.exists() else []


def reserved(rb: Any) -> int:
    return int(engine_of(rb).stats()["reserved"])


# Space.


def test_items_are_seen_once_they_are_committed(rb: Any) -> None:
    room = rb.reserve(4)
    assert (room.items, room.ended, len(rb), reserved(rb)) == (4, False, 2, 4)
    assert room.commit(steps(10, 4)).tolist() == [2, 3, 4, 5]
    assert (room.ended, reserved(rb), numbers(rb)) == (True, 0, [0, 1, 10, 11, 12, 13])


def test_what_is_reserved_in_a_queue_is_room_for_nobody_else(rb: Any) -> None:
    queue(rb)
    rb.reserve(13).abort()
    room = rb.reserve(10)
    full = (
        "the queue is full: 2 of 16 items are not sampled yet, and 10 are reserved; pid "
        f"{os.getpid()} holds a reservation of 10 items; there is no learner; timed out after "
        "0.05 s, and nothing was changed"
    )
    for name, call in (
        ("extend", lambda: rb.extend(steps(20, 5), timeout=0.05)),
        ("reserve", lambda: rb.reserve(5, timeout=0.05)),
    ):
        with pytest.raises(RateLimitTimeout) as caught:
            call()
        assert str(caught.value) == f"{rb.storage.scratch_dir}: {name} waits: {full}"
    rb.extend(steps(20, 4))
    room.commit(steps(10, 10))
    assert len(rb) == CAPACITY
    rb.sample(4)
    rb.extend(steps(40, 4))


def test_fewer_items_than_reserved_give_the_rest_back(rb: Any) -> None:
    queue(rb)
    room = rb.reserve(14)
    assert len(room.commit(steps(10, 3))) == 3
    rb.extend(steps(20, 11))
    with pytest.raises(RateLimitTimeout):
        rb.extend(steps(50, 1), timeout=0)


def test_a_ratio_counts_what_is_reserved(rb: Any) -> None:
    rb.rate_limiter = RateLimiter(1.0, error_buffer=8, when_no_peer="wait")
    room = rb.reserve(6)
    with pytest.raises(RateLimitTimeout, match=f"pid {os.getpid()} holds a reservation of 6 items"):
        rb.extend(steps(20, 4), timeout=0.05)
    rb.extend(steps(20, 2))
    room.commit(steps(10, 6))
    with pytest.raises(RateLimitTimeout):
        rb.extend(steps(20, 1), timeout=0)


def test_more_items_than_reserved_are_refused_and_the_reservation_stays(rb: Any) -> None:
    room = rb.reserve(3)
    with pytest.raises(
        ValueError, match=r"write needs 4 items, but the reservation has only 3; .*Nothing"
    ):
        room.commit(steps(10, 4))
    assert (len(rb), reserved(rb)) == (2, 3)
    with pytest.raises(SchemaMismatchError):
        room.commit(TensorDict({"number": torch.zeros(2, 7)}, [2]))
    assert reserved(rb) == 3
    room.commit(steps(10, 3))
    assert numbers(rb) == [0, 1, 10, 11, 12]


def test_the_end_of_a_block_gives_back_what_was_not_committed(rb: Any) -> None:
    with rb.reserve(4):
        assert reserved(rb) == 4
    assert reserved(rb) == 0
    with rb.reserve(4) as room:
        room.commit(steps(10, 4))
    with pytest.raises(KeyError), rb.reserve(4):
        raise KeyError
    assert reserved(rb) == 0
    assert len(rb) == 6


def test_a_reservation_that_nobody_refers_to_is_given_back(rb: Any) -> None:
    rb.reserve(4)
    assert reserved(rb) == 0


def test_many_may_be_held_and_each_is_its_own(rb: Any) -> None:
    rooms = [rb.reserve(2) for _ in range(5)]
    assert len({room.id for room in rooms}) == 5
    for k, room in reversed(list(enumerate(rooms))):
        room.commit(steps(10 * k, 2))
    assert numbers(rb) == [0, 1, 40, 41, 30, 31, 20, 21, 10, 11, 0, 1]


@pytest.mark.parametrize("end", ["commit", "abort", "lease", "fork", "close"])
def test_a_reservation_that_is_over_is_not_committed(rb: Any, end: str) -> None:
    room = rb.reserve(2, lease=0.0 if end == "lease" else None)
    problems = {
        "commit": "this reservation was committed",
        "abort": "this reservation was aborted",
        "lease": "this reservation has ended",
        "fork": "this reservation belongs to the parent process",
    }
    if end == "commit":
        room.commit(steps(10, 1))
    elif end == "abort":
        room.abort()
    there = len(rb)
    if end == "close":
        rb.close()
        with pytest.raises(BufferClosedError):
            room.commit(steps(20, 1))
        return

    def commits() -> None:
        with pytest.raises(ReservationLostError) as caught:
            room.commit(steps(20, 1))
        assert problems[end] in str(caught.value)
        assert len(rb) == there

    if end == "fork":
        assert ended(fork(commits)) == 0
        room.commit(steps(10, 2))
    else:
        commits()
        assert reserved(rb) == 0


def test_what_expires_is_free_before_anybody_waits_for_it(rb: Any) -> None:
    queue(rb)
    rb.reserve(14, lease=3600.0)
    room = rb.reserve(14, lease=0.05)
    rb.extend(steps(20, 14), timeout=5)
    with pytest.raises(ReservationLostError):
        room.commit(steps(10, 1))
    assert not room.ended
    room.abort()


@pytest.mark.parametrize("lease", [2.0**33, 1e30, math.inf])
def test_a_lease_of_centuries_ends_with_its_handle(rb: Any, lease: float) -> None:
    rb.reserve(2, lease=lease).commit(steps(10, 2))
    assert numbers(rb) == [0, 1, 10, 11]


def test_a_writer_that_waits_frees_the_room_of_a_killed_process(rb: Any) -> None:
    queue(rb)
    rooms: list[Any] = []
    killed(lambda: rooms.append(rb.reserve(14)))
    rb.extend(steps(20, 14), timeout=30)
    assert reserved(rb) == 0


def test_it_belongs_to_its_handle(rb: Any) -> None:
    room = rb.reserve(2)
    with pytest.raises(TypeError, match=r"call reserve\(\) in the process that calls commit\(\)"):
        pickle.dumps(room)
    assert repr(room) == "Reservation(id=1, items=2, held)"
    room.abort()
    room.abort()
    assert repr(room) == "Reservation(id=1, items=2, was aborted)"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        (
            {"n": 17},
            r"reserve\(17\): the buffer has a capacity of only 16 items; reserve fewer items",
        ),
        ({"n": 2, "bytes": 100}, r"reserve\(bytes=100\): this buffer stores rows of equal size"),
        (
            {"n": 2, "lease": -1.0},
            "lease must be a number of seconds of at least 0, or None, but is -1.0",
        ),
        (
            {"n": 2, "lease": "9"},
            "lease must be a number of seconds of at least 0, or None, but is '9'",
        ),
        ({"n": 2, "version": -1}, "reserve: version must be a number from 0"),
        ({"n": 2, "timeout": -1.0}, "timeout must be a number of seconds of at least 0"),
    ],
)
def test_what_cannot_be_reserved_is_refused(rb: Any, given: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        rb.reserve(**given)
    assert reserved(rb) == 0


def test_only_a_storage_that_processes_can_share_has_reservations() -> None:
    with pytest.raises((RuntimeError, TypeError)):
        ReplayBuffer(storage=ListStorage(8)).reserve(1)


def test_before_the_first_write_nothing_can_be_full(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    rooms = [rb.reserve(3), rb.reserve(3)]
    assert [room.id for room in rooms] == [None, None]
    assert rooms[0].commit(steps(0, 3)).tolist() == [0, 1, 2]
    assert rooms[1].commit(steps(3, 3)).tolist() == [3, 4, 5]
    assert rb.reserve(3).commit(steps(6, 3)).tolist() == [6, 7, 0]


def test_priorities_go_with_the_items(tmp_path: Path) -> None:
    from shmbuffer import PrioritizedSampler

    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer", shared_init=True)
    sampler = PrioritizedSampler(8, alpha=1.0, beta=1.0)
    with TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4) as rb:
        rb.extend(steps(0, 1))
        index = rb.reserve(2).commit(steps(1, 2), priority=torch.tensor([3.0, 0.5]))
        assert sampler._sum_tree[index].tolist() == pytest.approx([3.0, 0.5])


def test_a_consumer_that_lags_counts_what_is_reserved(tmp_path: Path) -> None:
    """Its items stay, the reservation keeps its space, and an acknowledgement frees slots."""
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "buffer", shared_init=True)
    sampler = ConsumingSampler(consumer="learner")
    with TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4) as rb:
        rb.extend(steps(0, 4))
        batch = rb.sample(lease=60.0)
        room = rb.reserve(8)
        rb.extend(steps(10, 4))
        with pytest.raises(RateLimitTimeout, match="learner"):
            rb.extend(steps(20, 1), timeout=0.05)
        with pytest.raises(RateLimitTimeout, match="holds a reservation of 8 items"):
            rb.reserve(1, timeout=0.05)
        room.commit(steps(30, 8))
        rb.ack(batch)
        rb.reserve(4, timeout=5).commit(steps(40, 4))
        assert sorted(numbers(rb)) == [10, 11, 12, 13, *range(30, 38), *range(40, 44)]


# Records.


def test_bytes_of_records_are_held_too(records: Any) -> None:
    queue(records)
    room = records.reserve(2, bytes=60_000)
    with pytest.raises(
        RateLimitTimeout, match=r"bytes do not fit; pid \d+ holds a reservation of 2 items"
    ):
        records.extend([TensorDict({"tokens": torch.zeros(1000)}, [])] * 2, timeout=0.05)
    with pytest.raises(
        ValueError, match=r"write needs [\d,]+ bytes, but the reservation has only 60,000"
    ):
        room.commit([TensorDict({"tokens": torch.zeros(16_000)}, [])])
    room.commit([TensorDict({"tokens": torch.zeros(12_000)}, [])])
    records.extend([TensorDict({"tokens": torch.zeros(1000)}, [])] * 2, timeout=5)


def test_without_bytes_a_commit_of_records_waits_for_them(records: Any) -> None:
    queue(records)
    room = records.reserve(2)
    records.extend([TensorDict({"tokens": torch.zeros(15_000)}, [])])
    with pytest.raises(RateLimitTimeout, match="bytes do not fit"):
        room.commit([TensorDict({"tokens": torch.zeros(4_000)}, [])], timeout=0.05)
    assert reserved(records) == 2
    records.sample()
    room.commit([TensorDict({"tokens": torch.zeros(4_000)}, [])], timeout=5)


# Versions.


def test_items_that_are_too_old_are_refused_and_counted(rb: Any) -> None:
    rb.rate_limiter = RateLimiter(max_staleness=1)
    seat = engine_of(rb).seat
    rooms = [rb.reserve(2, version=0), rb.reserve(4), rb.reserve(2, version=2)]
    consumer_version.store(seat, 3)
    assert rooms[0].commit(steps(10, 2)).tolist() == []
    assert rooms[0].refused == 2
    assert rooms[0].ended
    index = rooms[1].commit(steps(20, 4), version=[3, 1, 2, 0])
    assert (len(index), rooms[1].refused) == (2, 2)
    assert len(rooms[2].commit(steps(30, 2))) == 2
    assert numbers(rb) == [0, 1, 20, 22, 30, 31]
    stats = engine_of(rb).stats()
    assert (stats["refused"], stats["reserved"]) == (4, 0)


@pytest.mark.parametrize(
    ("version", "written"), [(0, 0), ([0, 0, 0], 2), ([0, 0, 1], 3), ([1, 0, 0], 2)]
)
def test_items_of_one_version_are_refused_all_or_none(rb: Any, version: Any, written: int) -> None:
    """A group of which only the last item is too late is not split."""
    rb.rate_limiter = RateLimiter(max_staleness=1, items_per_version=4)
    group = rb.reserve(3)
    rb.reserve(5).commit(steps(10, 5), version=0)
    consumer_version.increment(engine_of(rb).seat)
    rb.reserve(1).commit(steps(20, 1), version=1)
    assert len(group.commit(steps(30, 3), version=version)) == written
    assert group.refused == 3 - written
    assert len(rb) == 2 + 5 + 1 + written


def test_a_version_that_comes_before_the_claim_counts(rb: Any, monkeypatch: Any) -> None:
    rb.rate_limiter = RateLimiter(max_staleness=0)
    seat, extend = engine_of(rb).seat, rb.extend
    tries = []

    def late(data: Any, **given: Any) -> Any:
        """Advances the consumer between the reservation and the claim."""
        tries.append(len(data))
        if len(tries) == 1:
            consumer_version.store(seat, 1)
        return extend(data, **given)

    monkeypatch.setattr(rb, "extend", late)
    room = rb.reserve(3)
    assert len(room.commit(steps(10, 3), version=[0, 1, 1])) == 2
    assert (tries, room.refused, numbers(rb)) == ([3, 2], 1, [0, 1, 11, 12])


@pytest.mark.parametrize("kind", ["list", "dict", "tensor", "tuple"])
def test_rows_are_left_out_of_any_batch(tmp_path: Path, kind: str) -> None:
    data: Any = {
        "list": texts(0, 3),
        "dict": {"a": torch.arange(3), "b": np.arange(3)},
        "tensor": torch.arange(3),
        "tuple": (torch.arange(3), torch.arange(3) * 2),
    }[kind]
    if kind == "list":
        storage: Any = LazyStackStorage(
            8, max_bytes=2**14, scratch_dir=tmp_path / "b", shared_init=True
        )
    else:
        storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "b", shared_init=True)
    with ReplayBuffer(storage=storage, batch_size=2) as rb:
        rb.extend(data)
        rb.rate_limiter = RateLimiter(max_staleness=0)
        consumer_version.store(engine_of(storage).seat, 5)
        room = rb.reserve(3)
        assert len(room.commit(data, version=np.array([5, 4, 6]))) == 2
        found = rb[4]
        last = found["number"] if kind == "list" else found["b"] if kind == "dict" else found
        assert int(last[0] if kind == "tuple" else last) == 2


def test_versions_have_to_fit_the_items(rb: Any) -> None:
    room = rb.reserve(3)
    with pytest.raises(ValueError, match="2 versions for 3 items; pass one for each"):
        room.commit(steps(0, 3), version=[1, 2])
    with pytest.raises(ValueError, match="a version must be an integer of at least 0, got -1"):
        room.commit(steps(0, 3), version=-1)
    assert reserved(rb) == 3


def test_a_reservation_waits_for_the_version_that_allows_it(rb: Any) -> None:
    rb.rate_limiter = RateLimiter(max_staleness=1, items_per_version=3)
    seat = engine_of(rb).seat
    rooms = [rb.reserve(3), rb.reserve(3)]
    with pytest.raises(RateLimitTimeout, match="while learners have version 0"):
        rb.reserve(1, timeout=0.05)
    rooms[0].abort()
    rooms[0] = rb.reserve(3)
    consumer_version.increment(seat)
    rooms.append(rb.reserve(3))
    for k, room in enumerate(rooms):
        room.commit(steps(10 * k, 3))
    with pytest.raises(RateLimitTimeout) as caught:
        rb.extend(steps(50, 1), timeout=0.05)
    assert str(caught.value) == (
        f"{rb.storage.scratch_dir}: extend waits: 1 items are to be written, but only 0 more are "
        "allowed while learners have version 1 (max_staleness=1); there is no learner; timed "
        "out after 0.05 s, and nothing was changed"
    )
    consumer_version.increment(seat)
    rb.extend(steps(50, 3), timeout=5)


# Pieces.


def test_pieces_are_seen_with_the_commit_only_and_in_order(rb: Any) -> None:
    room = rb.reserve(6)
    room.append(steps(10, 2))
    room.append(steps(12, 1))
    assert len(rb) == 2
    assert [piece["number"].tolist() for piece in room.pieces] == [[10, 11], [12]]
    assert (rb.partials(), partial_files(rb)) == ([], ["1"])
    assert room.commit(steps(13, 2)).tolist() == [2, 3, 4, 5, 6]
    assert (numbers(rb), partial_files(rb)) == ([0, 1, 10, 11, 12, 13, 14], [])
    with rb.reserve(2) as room:
        room.append(steps(20, 2))
        room.commit()
    assert numbers(rb)[-2:] == [20, 21]


def test_whole_items_take_the_place_of_their_pieces(records: Any) -> None:
    with records.reserve(1) as room:
        room.append([{"tokens": torch.arange(3)}])
        room.append([{"tokens": torch.arange(3, 5)}])
        tokens = torch.cat([piece[0]["tokens"] for piece in room.pieces])
        room.commit([TensorDict({"tokens": tokens, "number": torch.tensor(1)}, [])], whole=True)
    assert records[0]["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert len(records) == 1


def test_an_abort_drops_the_pieces(rb: Any) -> None:
    room = rb.reserve(4)
    room.append(steps(10, 2))
    room.abort()
    assert (partial_files(rb), rb.partials(), reserved(rb)) == ([], [], 0)
    with pytest.raises(
        TypeError, match="no items were passed or appended; pass the items, or call abort"
    ):
        rb.reserve(2).commit()
    with pytest.raises(ValueError, match="whole=True"):
        rb.reserve(2).commit(whole=True)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("of", ["rows", "records"])
def test_the_rollout_of_a_dead_process_is_gone_on_with_by_one(
    rb: Any, records: Any, of: str
) -> None:
    buffer, make = (rb, steps) if of == "rows" else (records, texts)
    before = numbers(buffer)

    kept = []

    def rolls_out() -> None:
        kept.append(buffer.reserve(5, version=7))
        kept[0].append(make(10, 2))
        kept[0].append(make(12, 1))

    killed(rolls_out)
    found = buffer.partials()
    assert [(one.pieces, one.items, one.reserved, one.version) for one in found] == [(2, 3, 5, 7)]
    assert found[0].pid != os.getpid()
    room = buffer.resume(found[0])
    assert (room.id, room.version, buffer.partials(), reserved(buffer)) == (found[0].id, 7, [], 5)

    def comes_too_late() -> None:
        with pytest.raises(ReservationLostError, match="another process has resumed it"):
            buffer.resume(found[0].id)

    assert ended(fork(comes_too_late)) == 0
    room.append(make(13, 1))
    room.commit(make(14, 1))
    assert numbers(buffer) == [*before, 10, 11, 12, 13, 14]
    assert (buffer.partials(), partial_files(buffer), reserved(buffer)) == ([], [], 0)
    with pytest.raises(ReservationLostError):
        buffer.resume(found[0])


def test_a_piece_that_was_cut_off_counts_as_nothing(rb: Any) -> None:
    room = rb.reserve(5)
    room.append(steps(10, 2))
    room.append(steps(12, 2))
    path = Path(rb.storage.scratch_dir) / ".shmbuffer/partials" / str(room.id)
    size = path.stat().st_size
    number = room.id
    room._let_go()
    for cut in range(1, 40):
        os.truncate(path, size - cut)
        assert [one.items for one in rb.partials()] == [2]
    with rb.resume(number) as again:
        again.append(steps(20, 1))
        assert [piece["number"].tolist() for piece in again.pieces] == [[10, 11], [20]]
        again.commit()
    assert numbers(rb) == [0, 1, 10, 11, 20]


@pytest.mark.parametrize("limit", [0, 40, 70])
def test_an_append_that_found_no_room_can_be_repeated(rb: Any, limit: int) -> None:
    room = rb.reserve(3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(SpaceError):
            room.append(steps(10, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    room.append(steps(10, 1))
    room.commit(steps(11, 1))
    assert (numbers(rb), partial_files(rb)) == ([0, 1, 10, 11], [])


@needs_root
def test_an_append_to_a_full_tmpfs_says_how_much_room_that_has(tmp_path: Path) -> None:
    def run() -> None:
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows", shared_init=True)
        with TensorDictReplayBuffer(storage=storage, batch_size=4) as rb:
            rb.extend(steps(0, 2))
            room = rb.reserve(2)
            room.append(steps(10, 1))
            with (tmp_path / "full").open("wb") as file, pytest.raises(OSError, match="No space"):
                file.write(bytes(16 * 2**20))
            with pytest.raises(SpaceError) as caught:
                room.append(torch.zeros(10**5))
            found = re.fullmatch(
                rf"{tmp_path}/rows/.shmbuffer/partials/1: 40\d{{4}} bytes are needed, and "
                r"(\d+) bytes are free; free some space, make the buffer smaller, or choose "
                "another directory",
                str(caught.value),
            )
            assert found is not None, str(caught.value)
            assert int(found[1]) < 40_000

    in_a_tmpfs(tmp_path, b"size=16m", run)


def test_an_append_that_could_not_be_noted_is_not_committed_twice(
    rb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rolls_out() -> None:
        room = rb.reserve(2)
        with monkeypatch.context() as patched:
            patched.setattr(Reservations, "note_partial", interrupted)
            with pytest.raises(KeyboardInterrupt):
                room.append(steps(10, 1))
        room.append(steps(10, 1))
        _core.arm("reserve.spent")
        room.commit()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    killed(rolls_out)
    assert rb.partials() == []
    assert numbers(rb) == [0, 1, 10]


def test_a_forked_child_removes_no_pieces_of_its_parent(rb: Any) -> None:
    room = rb.reserve(2)
    room.append(steps(10, 1))

    def leaves_the_block() -> None:
        with pytest.raises(ReservationLostError, match="the parent process"):
            _ = room.pieces
        room.abort()

    assert ended(fork(leaves_the_block)) == 0
    assert partial_files(rb) == ["1"]
    room.commit()


def test_pieces_are_for_others_once_the_handle_is_closed(rb: Any) -> None:
    with attach(rb.storage.scratch_dir) as other, other.reserve(2) as room:
        room.append(steps(10, 1))
        other.close()
        (partial,) = rb.partials()
    rb.resume(partial).commit()
    assert numbers(rb) == [0, 1, 10]


def test_a_file_without_a_head_is_nobodys(rb: Any) -> None:
    folder = Path(rb.storage.scratch_dir) / ".shmbuffer/partials"
    folder.mkdir()
    (folder / "5").write_bytes(b"SHMPART")
    (folder / "note").write_bytes(b"of somebody else")
    os.chmod(folder / "5", 0o600)
    assert rb.partials() == []
    assert partial_files(rb) == ["note"]


def test_pieces_need_a_directory_and_items_that_are_known(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    rb.extend(steps(0, 1))
    with pytest.raises(
        ShmBufferError, match="this buffer has no directory; keep the items in your process"
    ):
        rb.reserve(2).append(steps(0, 1))
    assert rb.partials() == []
    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "b", shared_init=True)
    other = TensorDictReplayBuffer(storage=storage, batch_size=2)
    with other, pytest.raises(ShmBufferError, match="this buffer was never written to"):
        other.reserve(2).append(steps(0, 1))


def rollout_of_a_killed_process(records: Any, nbytes: int | None, size: int = 0) -> Partial:
    kept = []

    def rolls_out() -> None:
        kept.append(records.reserve(1, bytes=nbytes))
        kept[0].append([TensorDict({"tokens": torch.zeros(size, dtype=torch.uint8)}, [])])

    killed(rolls_out)
    (found,) = records.partials()
    return found


def reserved_bytes(rb: Any) -> int:
    return int(engine_of(rb).seat.control.runtime["reserved_bytes"][0])


def test_a_resumed_rollout_has_the_bytes_of_the_dead_process(records: Any) -> None:
    queue(records)
    records.extend([TensorDict({"tokens": torch.zeros(10, dtype=torch.uint8)}, [])])
    partial = rollout_of_a_killed_process(records, 40_000, size=100)
    assert (partial.nbytes, 100 < partial.appended_bytes < 300) == (40_000, True)
    room = records.resume(partial)
    assert reserved_bytes(records) == 40_000
    others = [TensorDict({"tokens": torch.zeros(5_000, dtype=torch.uint8)}, [])]
    for _ in range(5):
        records.extend(others, timeout=0.05)
    with pytest.raises(RateLimitTimeout, match="bytes do not fit"):
        records.extend(others, timeout=0.05)
    whole = [TensorDict({"tokens": torch.zeros(39_000, dtype=torch.uint8)}, [])]
    assert len(room.commit(whole, whole=True, timeout=0.05)) == 1


@pytest.mark.parametrize(("nbytes", "least", "most"), [(2_000, 9_000, 9_500), (None, 0, 0)])
def test_a_resumed_rollout_has_room_for_its_pieces_if_bytes_were_reserved(
    records: Any, nbytes: int | None, least: int, most: int
) -> None:
    records.extend([TensorDict({"tokens": torch.zeros(10, dtype=torch.uint8)}, [])])
    room = records.resume(rollout_of_a_killed_process(records, nbytes, size=9_000))
    assert least <= reserved_bytes(records) <= most
    room.commit()
    assert len(records) == 2


def write_partial(rb: Any, number: int, rows: int = 2, nbytes: int = 0, version: int = 3) -> Path:
    """Writes a file with one piece and a head whose checksum is correct."""
    directory = engine_of(rb).seat.backing.directory
    with PartialFile.make(directory, number, rows, nbytes, version) as file:
        file.append(TensorEncoder().encode(steps(20, 1), single=True).body(0), 1)
    return Path(rb.storage.scratch_dir) / f".shmbuffer/partials/{number}"


def sparse(rb: Any, number: int) -> Path:
    """Writes a sparse file of 8 TiB of which the disk holds one page."""
    path, size = write_partial(rb, number), 2**43
    with path.open("r+b") as file:
        file.seek(partials._HEAD.size)
        file.write(struct.pack("<QII", size, 1, 0))
        file.truncate(partials._HEAD.size + 16 + size)
    return path


def named(rb: Any, number: int) -> Path:
    path = write_partial(rb, 1)
    return path.rename(path.with_name(str(number)))


def fifo(rb: Any, number: int) -> Path:
    path = write_partial(rb, number)
    path.unlink()
    os.mkfifo(path, 0o600)
    return path


HOSTILE: dict[str, tuple[Callable[[Any], Path], int, str]] = {
    "items": (
        lambda rb: write_partial(rb, 5, rows=2**63),
        5,
        "9,223,372,036,854,775,808 items are reserved, but the buffer has room for only 16",
    ),
    "no items": (lambda rb: write_partial(rb, 5, rows=0), 5, "0 items are reserved"),
    "bytes": (
        lambda rb: write_partial(rb, 5, nbytes=2**60),
        5,
        "bytes are reserved, but the buffer has room for only 0",
    ),
    "version": (lambda rb: write_partial(rb, 5, version=2**63), 5, "of version 9,223,372,036,"),
    "size": (lambda rb: sparse(rb, 5), 5, "a piece of 8.0 TiB"),
    "number": (lambda rb: named(rb, 10**37), 10**37, "no reservation can have this number"),
    "kind": (lambda rb: fifo(rb, 5), 5, "this is a FIFO, but a regular file was expected"),
}


@pytest.mark.parametrize("kind", [*HOSTILE])
def test_a_file_that_is_no_rollout_of_the_buffer_is_named_and_stops_no_other(
    rb: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, number, problem = HOSTILE[kind]
    path = make(rb)
    room = rb.reserve(2)
    room.append(steps(10, 1))
    room._let_go()
    (found,) = rb.partials()
    assert found.id == room.id
    (message,) = caplog.messages
    caplog.clear()  # log records hold their error, which holds the buffer
    assert message.startswith(f"{path}: ")
    assert problem in message
    with pytest.raises((CorruptBufferError, UnsafePathError)) as caught:
        rb.resume(number)
    assert str(caught.value) == message
    assert inspect(rb.storage.scratch_dir)["partials"] == 2
    assert reserved(rb) == 0
    rb.resume(found).commit()
    assert numbers(rb) == [0, 1, 10]


# Inspection.


def test_who_holds_what_is_shown(rb: Any) -> None:
    rooms = [rb.reserve(3), rb.reserve(2)]
    found = inspect(rb.storage.scratch_dir)
    (holder,) = found["reservations"]
    assert (holder["pid"], holder["reservations"], holder["items"]) == (os.getpid(), 2, 5)
    rooms[0].append(steps(0, 1))
    assert found["counters"]["reserved"] == 5
    assert found["partials"] == 0
    rooms[0]._let_go()
    found = inspect(rb.storage.scratch_dir)
    assert (found["partials"], found["counters"]["reserved"]) == (1, 2)


def test_removal_takes_the_pieces_along(rb: Any) -> None:
    room = rb.reserve(3)
    room.append(steps(0, 1))
    path = Path(rb.storage.scratch_dir)
    engine_of(rb).cleanup()
    assert not (path / ".shmbuffer").exists()

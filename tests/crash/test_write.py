"""A collector is killed at every step of a write; a survivor and a new process check the buffer."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import EmptyBufferError, LockTimeout, RingOverrunError, recover
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring, Schema, Settings
from shmbuffer.memory.format import layout
from shmbuffer.memory.upkeep.check import check
from tests.crash.harness import (
    CAPACITY,
    EVICTIONS,
    KINDS,
    RECORD_POINTS,
    called,
    dies,
    ended,
    fork,
    native_points,
    read_all,
    require_sound,
    require_usable,
    sample,
    schema,
    stopped_at,
    succeeds,
    waits_for_the_mutex_of,
    write,
)
from tests.crash.situations import (
    SITUATIONS,
    fresh,
    is_committed_at,
    killed_at_passings,
    prepare,
    require_whole_or_absent,
)
from tests.kit.rings import path_of, ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

POINTS = native_points("write")
ROW_POINTS = [point for point in POINTS if point not in RECORD_POINTS]
#: Stores within one step of the protocol.
FINE = {
    *("write.kind", "write.first", "write.length", "write.source", "write.raw", "write.priority"),
    *("write.byte_first", "write.max_priority", "write.default", "write.lengthened"),
}
FEW = ("around the end", "placed")
#: All steps of all kinds in every situation, with short records only where evictions matter.
CASES = [
    *(
        (kind, name, point)
        for kind, points in (("rows", ROW_POINTS), ("records", POINTS))
        for name in SITUATIONS
        for point in points
        if point not in EVICTIONS and (name in FEW or point not in FINE)
        if SITUATIONS[name].passes(point)
    ),
    *(
        ("short records", name, point)
        for name in ("one item", "over a full ring", "around the end", "placed")
        for point in (*RECORD_POINTS, "write.copy", "write.commit")
    ),
]


@pytest.mark.parametrize("name", ["around the end", "placed", "in place"])
def test_a_write_passes_the_points_that_its_situation_names(tmp_path: Path, name: str) -> None:
    situation = SITUATIONS[name]
    for point in ROW_POINTS:
        if point in EVICTIONS or (point == "write.mass" and not situation.old):
            continue
        engine = prepare(tmp_path / point, situation, "rows")
        assert dies(tmp_path / point, point, situation.work) == situation.passes(point), point
        engine.close()


@pytest.mark.parametrize(("kind", "name", "point"), CASES)
def test_a_survivor_finds_the_batch_of_a_dead_writer_whole_or_absent(
    tmp_path: Path, kind: str, name: str, point: str
) -> None:
    situation = SITUATIONS[name]

    def look(path: Path, engine: Engine, first: bool) -> None:
        ring = ring_of(engine)
        engine.seat.reap_dead()
        present = require_whole_or_absent(engine, situation)
        assert present == (is_committed_at(point)), f"batch {'present' if present else 'absent'}"
        require_sound(engine)
        assert len(engine.clients()) == 1
        in_a_process = succeeds if first else called
        in_a_process(lambda: fresh(path, situation, expected=present))
        require_usable(ring, 999)
        require_sound(engine)

    killed_at_passings(tmp_path, kind, point, situation, look)


@pytest.mark.product(few=10)
@pytest.mark.parametrize(("kind", "name", "point"), CASES)
def test_a_fresh_process_recovers_after_the_death_of_all(
    tmp_path: Path, kind: str, name: str, point: str
) -> None:
    situation = SITUATIONS[name]

    def look(path: Path, engine: Engine, first: bool) -> None:
        def recovers() -> None:
            with Engine.open(path, None) as found:
                assert found.report is not None
                assert found.report.clients_retired == 1
                present = require_whole_or_absent(found, situation)
                assert present == (is_committed_at(point))
                assert found.report.items == len(read_all(ring_of(found)))
                require_sound(found)
                require_usable(ring_of(found), 999)

        in_a_process = succeeds if first else called
        in_a_process(recovers)

    killed_at_passings(tmp_path, kind, point, situation, look, alone=True)


EVERYWHERE = [
    *(("rows", point) for point in ROW_POINTS if point != "write.mass"),
    *(("records", point) for point in POINTS if point not in ("write.mass", *EVICTIONS)),
]


@pytest.mark.product(few=5)
@pytest.mark.parametrize(("kind", "point"), EVERYWHERE)
def test_a_writer_that_meets_the_slot_of_a_dead_one_goes_on(
    tmp_path: Path, kind: str, point: str
) -> None:
    """No process reaps before the head of the ring reaches the dead writer's slots."""
    situation = SITUATIONS["a batch"]
    engine = prepare(tmp_path / "buffer", situation, kind)
    assert dies(tmp_path / "buffer", point, situation.work)
    ring = ring_of(engine)
    for number in range(200, 200 + 2 * CAPACITY):
        write(ring, [number])
    assert sorted(read_all(ring).values()) == list(range(208, 216))
    engine.seat.reap_dead()
    require_sound(engine)
    engine.close()


HELD = [
    (kind, point)
    for kind, point in [*EVERYWHERE, ("rows", "write.mass"), ("records", "write.mass")]
    if point
    not in ("write.claimed", "write.copy", "write.priority", "write.checksum", "write.done")
]


@pytest.mark.product(few=5)
@pytest.mark.parametrize(("kind", "point"), HELD)
def test_a_waiter_gets_the_mutex_of_a_dead_writer(tmp_path: Path, kind: str, point: str) -> None:
    situation = SITUATIONS["over a full ring"]
    path = tmp_path / "buffer"
    engine = prepare(path, situation, kind)
    waits_for_the_mutex_of(
        path, point, situation.work, lambda waiter: write(ring_of(waiter), [500]) and None
    )
    engine.seat.reap_dead()
    assert 500 in read_all(ring_of(engine)).values()
    require_sound(engine)
    engine.close()


def test_a_stopped_writer_is_not_declared_dead(survivor: Engine) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    with stopped_at(path, "write.claimed", SITUATIONS["one item"].work) as pid:
        for number in range(7):
            write(ring, [number])
        with pytest.raises(
            RingOverrunError, match=rf"waited 0.05 s, because process {pid} \("
        ) as raised:
            write(ring, [7], timeout=0.05)
        assert raised.value.pid == pid  # type: ignore[attr-defined]
        assert sorted(read_all(ring).values()) == list(range(7))
        assert survivor.stats()["waiters"] == 0
    write(ring, [8])
    assert 8 in read_all(ring).values()
    require_sound(survivor)


def test_a_stopped_writer_that_goes_on_commits_its_batch(survivor: Engine) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    pid = fork(lambda: _stops_itself(path))
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    for number in range(7):
        write(ring, [number])
    assert survivor.seat.reap_dead() == 0
    os.kill(pid, signal.SIGCONT)
    assert ended(pid) == 0
    assert sorted(read_all(ring).values()) == [*range(7), 100]
    require_sound(survivor)


def _stops_itself(path: Path) -> None:
    with Engine.open(path, None) as engine:
        _core.arm("write.claimed", "stop")
        write(ring_of(engine), [100])


def write_on(ring: Ring) -> None:
    for number in range(100, 200):
        write(ring, [number], timeout=0.05)


def test_bytes_that_a_stopped_writer_fills_are_not_taken_from_it(tmp_path: Path) -> None:
    """There are enough free slots, but the byte ring is full."""
    path = tmp_path / "buffer"
    large = Settings(capacity=1000, record_bytes=KINDS["short records"])
    with Engine.open(path, large) as engine:
        ring = engine.define(Schema((), 1000, (), {"kind": "records"}, KINDS["short records"]))
        assert ring.records is not None
        victim = stopped_at(path, "write.copy", lambda other: write(ring_of(other), [5]) and None)  # type: ignore[func-returns-value]
        with victim as pid:
            with pytest.raises(RingOverrunError, match=rf"process {pid} .*is still") as raised:
                write_on(ring)
            assert raised.value.pid == pid  # type: ignore[attr-defined]
            there = sorted(read_all(ring).values())
            assert there == list(range(100, 100 + len(there)))
            assert ring.records.used <= KINDS["short records"]
            assert ring.length == len(there) > 3
        for number in range(200, 220):  # the process is dead and not reaped yet
            write(ring, [number])
        assert 219 in read_all(ring).values()
        assert 5 not in read_all(ring).values()
        require_sound(engine)


def test_a_dead_writer_keeps_the_priorities_that_it_gave(survivor: Engine) -> None:
    path = path_of(survivor)
    assert dies(path, "write.committing", lambda engine: write(ring_of(engine), [4, 8]) and None)  # type: ignore[func-returns-value]
    survivor.seat.reap_dead()
    ring = ring_of(survivor)
    assert ring.length == 2
    assert ring.tree.priorities()[:2].tolist() == [5.0, 9.0]
    require_sound(survivor)


def test_a_dead_writer_keeps_the_streams_that_it_gave(survivor: Engine) -> None:
    path, streams = path_of(survivor), np.array([7, 2**24 - 1], np.uint32)
    assert dies(
        path,
        "write.committing",
        lambda engine: write(ring_of(engine), [4, 8], streams=streams) and None,  # type: ignore[func-returns-value]
    )
    survivor.seat.reap_dead()
    ring = ring_of(survivor)
    assert ring.length == 2
    sources = ring.live.sources[:2]
    assert layout.stream_of(sources).tolist() == streams.tolist()
    assert layout.writer_of(sources).tolist() == [survivor.seat.incarnation + 1] * 2
    require_sound(survivor)


@pytest.mark.parametrize("noted", [0, 1])
def test_a_writer_that_dies_while_it_notes_streams_leaves_nothing(
    survivor: Engine, noted: int
) -> None:
    path, streams = path_of(survivor), np.array([7, 8], np.uint32)
    assert dies(
        path,
        "write.source",
        lambda engine: write(ring_of(engine), [4, 8], streams=streams) and None,  # type: ignore[func-returns-value]
        after=noted,
    )
    survivor.seat.reap_dead()
    ring = ring_of(survivor)
    assert read_all(ring) == {}
    require_sound(survivor)
    require_usable(ring, 999)


@pytest.mark.product(few=1)
def test_without_priorities_a_kill_loses_nothing_either(tmp_path: Path, kind: str) -> None:
    for passing, point in enumerate(POINTS if kind == "records" else ROW_POINTS):
        path = tmp_path / str(passing)
        with Engine.open(path, Settings(capacity=CAPACITY, record_bytes=KINDS[kind])) as engine:
            ring = engine.define(schema(kind))
            write(ring, range(6))
            if not dies(path, point, SITUATIONS["around the end"].work):
                assert point in ("write.mass", "write.default", "write.leaf", *EVICTIONS)
                continue
            engine.seat.reap_dead()
            assert set(range(2, 6)) <= set(read_all(ring).values())
            require_sound(engine)


def test_a_sample_waits_while_the_whole_ring_is_being_written(survivor: Engine) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    told, tell = os.pipe()
    hear, say = os.pipe()

    def body() -> None:
        with Engine.open(path, None) as engine:
            _core.arm("write.claimed", "pause", notify_fd=tell, wait_fd=hear)
            write(ring_of(engine), range(CAPACITY))

    writer = fork(body)
    assert os.read(told, 1)
    assert ring.length == 0
    goes_on = threading.Timer(0.05, lambda: os.write(say, b"x"))
    goes_on.start()
    assert set(sample(ring).numbers) <= set(range(CAPACITY))
    assert ended(writer) == 0
    goes_on.join()
    for fd in (told, tell, hear, say):
        os.close(fd)


def test_a_sample_from_a_ring_that_a_dead_writer_holds_says_that_it_is_empty(
    survivor: Engine,
) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    assert dies(path, "write.claimed", SITUATIONS["a batch as large as the ring"].work)
    with pytest.raises(EmptyBufferError, match="Cannot sample from an empty storage; write to it"):
        sample(ring)


def test_recover_reports_what_was_done_for_the_dead_while_others_live(survivor: Engine) -> None:
    path = path_of(survivor)
    write(ring_of(survivor), range(3))
    assert dies(path, "write.copy", SITUATIONS["a batch"].work)
    report = recover(path)
    assert report.reason == "in use"
    assert (report.items, report.rolled_back, report.clients_retired) == (3, 5, 1)
    assert report.duration_ms > 0


def test_a_check_of_a_stopped_buffer_is_no_finding_of_damage(
    survivor: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(survivor)
    monkeypatch.setattr("shmbuffer.memory.upkeep.check.LOCK_TIMEOUT_NS", 50_000_000)
    held = stopped_at(path, "write.locked", SITUATIONS["one item"].work)
    with held, pytest.raises(LockTimeout, match="cannot be checked; continue or end that process"):
        check(path)
    assert check(path).ok

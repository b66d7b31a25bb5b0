"""`inspect` takes no lock, joins no buffer and changes nothing."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import BufferNotFoundError, CorruptBufferError, FormatError, recover
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.clients.locks import InitLock
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep.inspect import _choose_slots, exists, inspect
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, files_of, mutex_held, schema, slot_held, write

SETTINGS = Settings(capacity=8, alpha=0.5, eps=0.0, extra={"class": "ReplayBuffer"})


@pytest.fixture
def path(fast_path: Path) -> Path:
    path = fast_path / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(12), np.arange(12.0))
    return path


FILES = ("control", "slots", "ledger", "schema.json", "number.memmap", "obs.memmap", "done.memmap")


def test_it_tells_everything_as_plain_values(path: Path) -> None:
    with Engine.open(path, None, role="learner") as engine:
        ring_of(engine).claims.claim(1)
        before = files_of(path)
        found = inspect(path)
        assert files_of(path) == before
        superblock = engine.superblock
    assert json.loads(json.dumps(found)) == found
    clients = found.pop("clients")
    recovery = found.pop("recovery")
    assert (recovery["epoch"], recovery["pid"], recovery["items"]) == (1, os.getpid(), 8)
    free = found["filesystem"].pop("free_bytes")
    assert free is None or free > 0
    created = datetime.fromisoformat(found.pop("created"))
    assert abs((datetime.now(UTC) - created).total_seconds()) < 3600
    assert found == {
        "path": str(path),
        "uuid": str(uuid.UUID(bytes=superblock.uuid)),
        "state": "READY",
        "needs_recovery": None,
        "epoch": 1,
        "flags": ["CHECKSUM", "RESERVE", "CREATED_DIRECTORY"],
        "settings": {
            "capacity": 8,
            "ndim": 1,
            "checksum": True,
            "reserve": "all",
            "alpha": 0.5,
            "eps": 0.0,
            "extra": {"class": "ReplayBuffer"},
            "record_bytes": 0,
        },
        "schema": {
            "capacity": 8,
            "lanes": [],
            "leaves": {
                "number": {"dtype": "int64", "shape": [], "bytes": 64},
                "next.obs": {"dtype": "uint8", "shape": [37], "bytes": 296},
                "done": {"dtype": "bool", "shape": [], "bytes": 8},
                "nothing": {"dtype": "float32", "shape": [0], "bytes": 0},
            },
            "structure": {"kind": "tensordict"},
        },
        "counters": {
            "length": 7,
            "elements": 8,
            "write_count": 12,
            "head": 13,
            "prioritized": 1,
            "alpha": 0.5,
            "eps": 0.0,
            "max_priority": 11.0,
            **dict.fromkeys(layout.COUNTERS, 0),
            "inserts": 8,
            "waiters": 0,
            "repairs": 0,
            "rolled_back": 0,
            "rolled_forward": 0,
            "reaped": 0,
            "loaded": 0,
            "evicted": 0,
            "lock_waits": 0,
            "samples_per_insert": 0.0,
            "error_buffer": 0.0,
            "samples_ahead": 0.0,
            "min_size": 0,
            "max_times_sampled": 0,
            "queued": 0,
            "limited": 0,
            "consumer_version": 0,
            "refused": 0,
            "reserved": 0,
        },
        "disk_bytes": 512 * sum(f.stat().st_blocks for f in path.rglob("*") if f.name in FILES),
        "memory_bytes": found["memory_bytes"],
        "unwritten_bytes": found["unwritten_bytes"],
        "filesystem": {"in_memory": found["unwritten_bytes"] is None},
        "weights": None,
        "records": None,
        "sharing": None,
        "mutex": None,
        "bytes": 143360 + (path / layout.SLOTS).stat().st_size + 4096 + 64 + 296 + 8,
        "owner": {"pid": os.getpid(), "state": "running"},
        "durable_ticket": 0,
        "waits": [],
        "consumers": [],
        "reservations": [],
        "partials": 0,
    }
    assert [(one["role"], one["phase"], one["alive"], one["pid"]) for one in clients] == [
        ("learner", "PAYLOAD", True, os.getpid())
    ]
    assert clients[0]["claimed"] == {"first": 12, "count": 1}
    assert (clients[0]["queue_position"], clients[0]["mutex"]) == (None, False)
    assert clients[0]["memory_bytes"] > 0


def test_a_dead_directory_says_that_it_needs_recovery(path: Path) -> None:
    before = files_of(path)
    found = inspect(path)
    assert found["needs_recovery"] == "no client alive"
    assert found["clients"] == []
    assert found["counters"]["length"] == 8
    assert files_of(path) == before


def test_the_dead_are_shown_as_dead(path: Path) -> None:
    with Engine.open(path, None):

        def work(parent: Parent) -> None:
            with Engine.open(path, None):
                parent.pause()

        with child(work) as other:
            other.reached()
            other.kill()
        found = inspect(path)
    assert [client["alive"] for client in found["clients"]] == [True, False]
    assert found["clients"][1]["state"] == "dead"
    assert found["needs_recovery"] is None


def test_lanes_are_counted_as_elements(fast_path: Path) -> None:
    path = fast_path / "wide"
    with Engine.open(path, Settings(capacity=12)) as engine:
        write(engine.define(schema(4, (3,))), range(6))
        found = inspect(path)
    assert found["schema"]["lanes"] == [3]
    assert (found["counters"]["length"], found["counters"]["elements"]) == (6, 12)


def test_a_buffer_may_have_no_schema_yet(fast_path: Path) -> None:
    path = fast_path / "fresh"
    with Engine.open(path, SETTINGS):
        found = inspect(path)
    assert (found["schema"], found["state"], found["bytes"]) == (None, "NO_SCHEMA", 143360)
    assert (found["counters"]["length"], found["counters"]["elements"]) == (0, 8)


def test_it_waits_for_nobody(path: Path) -> None:
    with Directory.open(path) as directory, InitLock(directory, 0):
        assert inspect(path)["counters"]["length"] == 8


def test_there_has_to_be_a_buffer(fast_path: Path) -> None:
    with pytest.raises(BufferNotFoundError, match="there is no buffer here; check the path"):
        inspect(fast_path)
    assert not exists(fast_path)
    assert not exists(fast_path / "nowhere")


def test_whether_there_is_one_is_seen_from_outside(path: Path) -> None:
    assert exists(path)
    assert exists(str(path))


def test_damaged_numbers_are_not_shown(path: Path) -> None:
    with (path / layout.SCHEMA).open("wb") as file:
        file.write(b"{}")
    with pytest.raises(CorruptBufferError, match="schema cannot be read"):
        inspect(path)
    with (path / layout.CONTROL).open("r+b") as file:
        file.write(bytes(8192))
    with pytest.raises(FormatError):
        inspect(path)


def test_inspecting_needs_no_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(tmp_path / "buffer", Settings(capacity=4)):
        pass
    opened: list[int] = []
    real = os.open

    def watched(path: str, flags: int, *args: int, **options: int) -> int:
        opened.append(flags)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", watched)
    assert inspect(tmp_path / "buffer")["state"] == "NO_SCHEMA"
    assert opened
    assert not any(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flags in opened)


def test_the_last_recovery_says_what_it_found(path: Path) -> None:
    assert inspect(path)["recovery"] is None
    with Engine.open(path, None) as engine:
        ring_of(engine)

        def work(parent: Parent) -> None:
            with Engine.open(path, None) as mine:
                ring_of(mine).claims.claim(2)
                parent.pause()

        with child(work) as other:
            other.reached()
            engine.close()
            other.kill()
    report = recover(path)
    found = inspect(path)["recovery"]
    assert abs(found.pop("at_s") - time.time()) < 3600
    assert found == {
        **{name: value for name, value in report.to_json().items() if name != "path"},
        "duration_ms": pytest.approx(report.duration_ms),
        "pid": os.getpid(),
    }
    assert (found["epoch"], found["rolled_back"], found["clients_retired"]) == (2, 2, 1)


def test_a_recovery_by_a_version_that_keeps_no_record_is_not_told(path: Path) -> None:
    recover(path)
    assert inspect(path)["recovery"] is not None
    with Directory.open(path) as directory, directory.open_file(layout.CONTROL) as file:
        control = Control(_core.Map(file.fd, layout.CONTROL_BYTES), str(path))
        control.write(replace(control.superblock(), epoch=control.superblock().epoch + 1))
    assert (inspect(path)["epoch"], inspect(path)["recovery"]) == (2, None)


def test_a_damaged_record_of_a_recovery_is_not_told(path: Path) -> None:
    recover(path)
    with (path / layout.CONTROL).open("r+b") as file:
        file.seek(layout.RECOVERY_OFFSET + 50)
        file.write(b"x")
    assert inspect(path)["recovery"] is None


def test_the_holder_of_the_mutex_is_named(path: Path) -> None:
    with Engine.open(path, None) as engine:
        assert inspect(path)["mutex"] is None
        with mutex_held(engine) as holder:
            found = inspect(path)
            assert found["mutex"] == {"tid": holder.pid, "pid": holder.pid}
            mine = {client["pid"]: client["mutex"] for client in found["clients"]}
            assert mine == {os.getpid(): False, holder.pid: True}


def test_a_waiter_for_a_slot_says_for_how_long(path: Path) -> None:
    with Engine.open(path, None) as engine:
        write(ring_of(engine), range(8))
        with slot_held(engine) as holder:

            def work(parent: Parent) -> None:
                engine.seat.rejoin()
                parent.pause_at("wait.turn")
                write(ring_of(engine), range(8))

            with child(work) as waiter:
                waiter.reached()
                clients = {client["pid"]: client for client in inspect(path)["clients"]}
                waiting = clients[waiter.pid]
                assert (waiting["queue_position"], waiting["queued_s"] >= 0) == (1, True)
                assert clients[holder.pid]["queue_position"] is None
                assert clients[holder.pid]["claimed"] == {"first": 20, "count": 1}
                waiter.kill()


def test_expensive_numbers_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    with Engine.open(tmp_path / "records", Settings(capacity=8, record_bytes=65536)) as engine:
        engine.define(Schema((), 8, (), {"kind": "tensordict"}, record_bytes=65536))
        assert inspect(engine.path)["records"]["live_bytes"] == 0
        assert inspect(engine.path, live_bytes=False)["records"]["live_bytes"] is None


def test_of_a_large_ring_runs_of_slots_are_choose_slots() -> None:
    assert _choose_slots(5).tolist() == [0, 1, 2, 3, 4]
    looked = _choose_slots(10**7 + 13)
    assert len(np.unique(looked)) == len(looked) == 1 << 14
    assert looked.min() == 0
    assert 0.99e7 < looked.max() < 10**7 + 13

"""What is in there? A look that takes no lock, joins nothing and changes nothing."""

from __future__ import annotations

import json
import os
import uuid
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.errors import BufferNotFoundError, CorruptBufferError, FormatError
from shmbuffer.memory import Engine, Settings, layout
from shmbuffer.memory.inspect import exists, inspect
from shmbuffer.memory.locks import InitLock
from shmbuffer.memory.region import Directory
from tests.memory.rows import Parent, child, files_of, ring_of, schema, write

SETTINGS = Settings(capacity=8, alpha=0.5, eps=0.0, extra={"class": "ReplayBuffer"})


@pytest.fixture
def path(fast_path: Path) -> Path:
    path = fast_path / "buffer"
    with Engine.open(path, SETTINGS) as engine:
        write(engine.define(schema()), range(12), np.arange(12.0))
    return path


FILES = ("control", "slots", "schema.json", "number.memmap", "obs.memmap", "done.memmap")


def test_it_tells_everything_as_plain_values(path: Path) -> None:
    with Engine.open(path, None, role="learner") as engine:
        ring_of(engine).claim(1)
        before = files_of(path)
        found = inspect(path)
        assert files_of(path) == before
        superblock = engine.superblock
    assert json.loads(json.dumps(found)) == found
    clients = found.pop("clients")
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
            "reserve": True,
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
            "evicted": 0,
            "samples_per_insert": 0.0,
            "error_buffer": 0.0,
            "samples_ahead": 0.0,
            "min_size": 0,
            "max_times_sampled": 0,
            "queued": 0,
            "limited": 0,
        },
        "disk_bytes": 512 * sum(f.stat().st_blocks for f in path.rglob("*") if f.name in FILES),
        "records": None,
        "bytes": 77824 + (path / layout.SLOTS).stat().st_size + 64 + 296 + 8,
        "owner": {"pid": os.getpid(), "state": "running"},
        "durable_ticket": 0,
        "waits": [],
    }
    assert [(one["role"], one["phase"], one["alive"], one["pid"]) for one in clients] == [
        ("learner", "PAYLOAD", True, os.getpid())
    ]


def test_a_dead_directory_says_that_it_needs_recovery(path: Path) -> None:
    before = files_of(path)
    found = inspect(path)
    assert found["needs_recovery"] == "nobody alive"
    assert found["clients"] == []
    assert found["counters"]["length"] == 8
    assert files_of(path) == before


def test_the_dead_are_shown_as_dead(path: Path) -> None:
    with Engine.open(path, None):

        def work(parent: Parent) -> None:
            Engine.open(path, None)
            parent.pause()

        with child(work) as other:
            other.reached()
            other.kill()
        found = inspect(path)
    assert [client["alive"] for client in found["clients"]] == [True, False]
    assert found["clients"][1]["state"] == "gone"
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
    assert (found["schema"], found["state"], found["bytes"]) == (None, "NO_SCHEMA", 77824)
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


def test_what_is_damaged_is_not_shown(path: Path) -> None:
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

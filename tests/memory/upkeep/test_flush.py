"""The barrier syncs leaves, then slots, then the superblock that records it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import DurabilityError
from shmbuffer.memory import Engine, Settings
from tests.kit.rings import ring_of
from tests.memory.rows import Maker, Parent, child, contents, files_of, place, schema, write


class Synced:
    """A map that records when it is synced, or whose sync fails."""

    def __init__(self, mapping: Any, name: str, log: list[str], fails: int = 0) -> None:
        self._map = mapping
        self._name = name
        self._log = log
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._map, name)

    def sync(self) -> None:
        self._log.append(self._name)
        if self.fails:
            raise OSError(self.fails, os.strerror(self.fails))
        self._map.sync()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def engine(make_files: Maker, log: list[str]) -> Engine:
    """Makes a buffer whose maps are recorded."""
    engine = make_files(alpha=1.0)
    write(ring_of(engine), range(5))
    assert engine.seat.mapped is not None
    slots, leaves, _ = engine.seat.mapped[1:]
    names = [leaf.name for leaf in ring_of(engine).schema.leaves]
    watched = [Synced(leaf, name, log) for name, leaf in zip(names, leaves, strict=True)]
    mapped = engine.seat.mapped._replace(slots=Synced(slots, "slots", log), leaves=watched)  # type: ignore[arg-type]
    engine.seat.mapped = mapped
    return engine


def test_the_leaves_come_first_and_then_the_slots(engine: Engine, log: list[str]) -> None:
    engine.flush()
    assert log == ["number", "next.obs", "done", "nothing", "slots"]


def test_the_superblock_names_the_ticket_and_the_epoch(engine: Engine) -> None:
    assert engine.superblock.durable_ticket == 0
    engine.flush()
    assert (engine.superblock.durable_ticket, engine.superblock.durable_epoch) == (5, 0)
    write(ring_of(engine), range(7))
    place(ring_of(engine), [3], [3])
    assert engine.superblock.durable_ticket == 5
    engine.flush()
    assert engine.superblock.durable_ticket == ring_of(engine).head == 20


def test_an_item_being_written_is_not_covered(engine: Engine, make_files: Maker) -> None:
    other = make_files.second(engine)
    ring_of(other).claims.claim(2)
    write(ring_of(engine), [7])
    engine.flush()
    assert engine.superblock.durable_ticket == 5
    ring_of(other).claims.abort()
    engine.flush()
    assert engine.superblock.durable_ticket == 8


def test_a_barrier_is_what_another_process_reads(engine: Engine, make_files: Maker) -> None:
    engine.flush()
    assert make_files.second(engine).superblock.durable_ticket == 5


def test_writers_go_on_meanwhile(engine: Engine, log: list[str]) -> None:
    ring = ring_of(engine)
    write_ended: list[int] = []

    class Slow(Synced):
        def sync(self) -> None:
            thread = threading.Thread(target=lambda: write_ended.append(write(ring, [9])))
            thread.start()
            thread.join()

    assert engine.seat.mapped is not None
    _, leaves, _ = engine.seat.mapped[1:]
    leaves[1] = Slow(leaves[1], "slow", log)  # type: ignore[call-overload]
    engine.flush()
    assert write_ended == [5]
    assert engine.superblock.durable_ticket == 5, "as it was when the barrier began"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("which", ["number", "done", "slots"])
def test_a_sync_that_fails_is_an_error_and_is_not_forgotten(
    engine: Engine, log: list[str], which: str, number: int
) -> None:
    """The kernel may have dropped the pages, so a later sync that succeeds proves nothing."""
    engine.flush()
    write(ring_of(engine), [5])
    assert engine.seat.mapped is not None
    slots, leaves, _ = engine.seat.mapped[1:]
    failing: Any = {"number": leaves[0], "done": leaves[2], "slots": slots}[which]
    failing.fails = number
    with pytest.raises(
        DurabilityError,
        match=rf"^{engine.path}: a sync failed \({os.strerror(number)}\); the data in "
        r"memory are usable, but may never reach this disk; copy the buffer to another "
        r"disk$",
    ) as caught:
        engine.flush()
    assert isinstance(caught.value, OSError)
    assert engine.superblock.durable_ticket == 5
    failing.fails = 0
    log.clear()
    with pytest.raises(DurabilityError, match="a sync failed"):
        engine.flush()
    assert log == []
    assert engine.superblock.durable_ticket == 5
    write(ring_of(engine), [6])
    assert len(contents(ring_of(engine))) == 7, "in memory everything goes on"


def test_a_control_file_that_cannot_be_synced_is_an_error_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, mapping: Any) -> None:
            self._map = mapping

        def __getattr__(self, name: str) -> Any:
            return getattr(self._map, name)

        def sync(self) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(engine.seat.control, "map", Failing(engine.seat.control.map))
    with pytest.raises(DurabilityError, match="Input/output error"):
        engine.flush()


def test_without_a_schema_there_is_nothing_to_sync(make: Maker) -> None:
    engine = make.undefined()
    engine.flush()
    assert engine.superblock.durable_ticket == 0


def test_anonymous_memory_has_no_disk() -> None:
    with Engine.anonymous(Settings(capacity=8)) as engine:
        write(engine.define(schema()), [1])
        engine.flush()
        assert engine.superblock.durable_ticket == 0


@pytest.mark.parametrize(
    "point", ["flush.locked", "flush.leaf", "flush.slots", "flush.superblock", "flush.synced"]
)
def test_a_barrier_that_died_leaves_the_one_before_or_its_own(fast_path: Path, point: str) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8)) as engine:
        write(engine.define(schema()), range(3))
        engine.flush()
        write(ring_of(engine), range(3, 6))

        def work(parent: Parent) -> None:
            from shmbuffer._native import _core

            mine = Engine.open(path, None)
            _core.arm(point)
            mine.flush()

        with child(work) as victim:
            assert victim.end() == -9
        done = point in ("flush.superblock", "flush.synced")
        assert engine.superblock.durable_ticket == (6 if done else 3)
        engine.flush()
        assert engine.superblock.durable_ticket == 6
        assert contents(ring_of(engine)) == {n: n for n in range(6)}


def test_it_changes_nothing_but_the_superblock(make_files: Maker) -> None:
    engine = make_files(alpha=1.0)
    write(ring_of(engine), range(5))
    assert engine.path is not None
    before = files_of(engine.path)
    engine.flush()
    after = files_of(engine.path)
    control = ".shmbuffer/control"
    assert {name for name in after if after[name] != before[name]} == {control}
    touched = slice(8192 + 448, 8192 + 456)  # the time: see `restored`
    for files in (before, after):
        files[control] = files[control][: touched.start] + bytes(8) + files[control][touched.stop :]
    assert after[control][8192:] == before[control][8192:]

"""Buffers that are opened, joined and removed concurrently, as in reports of other projects.

Each test is named after the repository and number of a report, and asserts the expected behaviour.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from shmbuffer import BufferClosedError, BufferNotFoundError
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.clients.locks import InitLock
from shmbuffer.memory.directory.files import Files
from tests.field.conftest import SETTINGS
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Parent,
    child,
    contents,
    files_of,
    read,
    sample,
    schema,
    succeeds,
    write,
)


def test_iceoryx2_1718_a_close_of_another_descriptor_keeps_the_lock(engine: Engine) -> None:
    """A record lock ends when any descriptor of its file is closed in the process, even a copy."""
    path = engine.path
    assert path is not None
    for name in files_of(path):
        if (path / name).is_file():
            with (path / name).open("rb") as file:
                file.read()
            with (path / name).open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    shutil.copytree(path, path.with_name("copy"))

    def look() -> None:
        with Engine.open(path, None) as other:
            assert [client.alive for client in other.clients()] == [True, True]
            assert other.report is None

    succeeds(look)


@pytest.mark.parametrize("settings", [None, SETTINGS], ids=["attached to", "made"])
def test_iceoryx2_1578_a_buffer_that_is_removed_while_it_is_opened_is_a_missing_one(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings | None
) -> None:
    """A lock was taken on a file that another process had just removed: corrupted state."""
    lock, removed = Files.lock, []

    def late(files: Files, timeout: float, **options: bool) -> InitLock:
        if not removed:
            removed.append(1)
            monkeypatch.undo()
            assert engine.cleanup()
        return lock(files, timeout, **options)

    monkeypatch.setattr(Files, "lock", late)
    if settings is None:
        with pytest.raises(BufferNotFoundError):
            Engine.open(path, settings)
        assert not path.exists(), "nothing was made where there was nothing"
    else:
        with Engine.open(path, settings) as another:
            assert another.ring() is None, "a new one"
    assert removed


@pytest.mark.full
@pytest.mark.slow
def test_iceoryx2_1578_an_open_during_removals_gets_a_whole_buffer_or_none(
    path: Path,
) -> None:
    def make_and_remove(parent: Parent) -> None:
        parent.tell_him()
        for number in range(40):
            with Engine.open(path, SETTINGS) as engine:
                write(engine.define(schema()), [number])
                engine.cleanup()

    with child(make_and_remove) as maker:
        maker.reached()
        while not os.waitid(os.P_PID, maker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            try:
                with Engine.open(path, None) as engine:
                    assert engine.superblock.epoch == 0, "nobody died"
                    if engine.ring() is not None:
                        _, tickets = read(engine.ring(), range(8))
                        assert (tickets >= 0).sum() <= 1
            except (BufferNotFoundError, BufferClosedError):
                continue
        assert maker.end() == 0
    assert not path.exists()


def test_iceoryx2_1252_a_cleanup_leaves_no_file(path: Path) -> None:
    with Engine.open(path, SETTINGS) as engine, Engine.open(path, None) as second:
        write(engine.define(schema()), range(8))
        write(ring_of(second), [8])
        second.flush()
        assert engine.cleanup()
    assert os.listdir(path.parent) == []


def test_iceoryx2_1670_a_reader_goes_on_reading_after_the_files_are_removed(
    engine: Engine, ring: Ring
) -> None:
    """Files were truncated before their removal, and a reader of the memory died from SIGBUS."""

    def remove(parent: Parent) -> None:
        with Engine.open(engine.path, None) as other:  # type: ignore[arg-type]
            parent.pause()
            other.cleanup()

    def read_on(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()
        assert contents(ring) == {i: i for i in range(8)}
        assert len(sample(ring, 8, prioritized=True).numbers) == 8

    with child(remove) as remover, child(read_on) as reader:
        remover.reached()
        reader.reached()
        remover.go()
        assert remover.end() == 0
        reader.go()
        assert reader.end() == 0


@pytest.mark.full
def test_iceoryx2_1650_processes_that_join_at_once_get_places_of_their_own(
    engine: Engine,
) -> None:
    def join(parent: Parent) -> None:
        parent.pause()
        with Engine.open(engine.path, None):  # type: ignore[arg-type]
            parent.pause()

    with ExitStack() as stack:
        joiners = [stack.enter_context(child(join)) for _ in range(8)]
        for joiner in joiners:
            joiner.reached()
        for joiner in joiners:
            joiner.go()
        for joiner in joiners:
            joiner.reached()
        clients = engine.clients()
        assert sorted(client.pid for client in clients[1:]) == sorted(j.pid for j in joiners)
        assert sorted(client.incarnation for client in clients) == [*range(1, 10)]
        for joiner in joiners:
            joiner.go()
        assert [joiner.end() for joiner in joiners] == [0] * 8


@pytest.mark.crash
@pytest.mark.slow
def test_its_7969_iceoryx2_1356_1699_what_is_seen_committed_is_there(
    engine: Engine, ring: Ring
) -> None:
    """Without a barrier, a reader saw that a write was complete before it saw the data."""

    def keep_writing(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        while True:
            first = ring.write_count
            write(ring, range(first, first + 3))

    with child(keep_writing) as writer:
        writer.reached()
        for _ in range(1500):
            numbers, tickets = read(ring, range(8))
            there = tickets >= 0
            assert (numbers[there] == tickets[there]).all()
        writer.kill()
    write(ring, range(8), timeout=5.0)

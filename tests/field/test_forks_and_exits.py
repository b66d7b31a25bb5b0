"""Forks that share too much and exits that clean up too much, as other projects report.

Each test is named after the repository and number of a report, and asserts the expected behaviour.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shmbuffer import BufferInUseError
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.directory.anonymous import Anonymous
from shmbuffer.service.run_directory import hold_lock
from tests.field.conftest import SETTINGS
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, contents, require_sound, succeeds, write


def test_filelock_634_653_a_forked_child_that_ends_releases_no_lock_of_its_parent(
    engine: Engine, path: Path
) -> None:
    """The copy of a lock object in a child unlocked the parent's file."""

    def end(parent: Parent) -> None:
        lock.close()
        engine.close()

    lock = hold_lock(path)
    with child(end) as forked:
        assert forked.end() == 0

    def look() -> None:
        with pytest.raises(BufferInUseError, match=f"{os.getppid()} is already the coordinator"):
            hold_lock(path)
        with Engine.open(path, None) as other:
            assert [client.alive for client in other.clients()] == [True, True]

    succeeds(look)
    lock.close()


TEMPORARY = """
import multiprocessing, sys
from pathlib import Path
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.cleanup import temporary_directory
from tests.memory.rows import contents, schema, write
from tests.kit.rings import ring_of

def work():
    write(ring_of(engine), [8])

path = temporary_directory()
engine = Engine.open(path, Settings(capacity=8), temporary=True)
write(engine.define(schema()), range(8))
for _ in range(2):
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
print(path, len(contents(engine.ring())), (path / ".shmbuffer" / "control").exists(), flush=True)
input()
"""


@pytest.mark.full
def test_cpython_83856_114279_the_exit_of_a_forked_child_cleans_nothing_up(tmp_path: Path) -> None:
    """By design, atexit functions also run in children of multiprocessing."""
    with Program.python(TEMPORARY, TMPDIR=str(tmp_path)) as owner:
        path, items, there = owner.line().split()
        assert (items, there) == ("8", "True")
        owner.tell()
        assert owner.end()[0] == 0
    assert not Path(path).exists(), "its owner does"


@pytest.mark.full
@pytest.mark.slow
def test_cpython_84559_a_fork_in_a_threaded_process_leaves_no_lock_held(
    engine: Engine, ring: Ring
) -> None:
    """A lock that another thread holds during the fork is held forever in the child."""
    end = threading.Event()

    def keep_writing() -> None:
        while not end.is_set():
            write(ring, range(4), timeout=30.0)
            engine.stats()

    threads = [threading.Thread(target=keep_writing) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
            succeeds(lambda number=number: write(ring, [number], timeout=30.0))
    finally:
        end.set()
        for thread in threads:
            thread.join()
    engine.seat.reap_dead()
    assert len(contents(ring)) == 8
    require_sound(engine)


def test_filelock_634_a_child_forked_while_anonymous_memory_is_joined_keeps_no_lock() -> None:
    """In the second backing file, the child must not hold the lock that its parent released."""
    with Engine.anonymous(SETTINGS) as engine:
        backing = engine.seat.backing
        assert isinstance(backing, Anonymous)
        lock = backing.lock(5.0)
        lock.__enter__()
        with child(lambda parent: parent.pause()) as forked:
            forked.reached()
            lock.__exit__(None, None, None)
            with backing.lock(0.0):
                pass
            forked.go()
            assert forked.end() == 0


@pytest.mark.crash
def test_filelock_634_a_child_forked_while_its_parent_joins_does_not_outlive_it_as_a_lock() -> None:
    """The parent is killed while it holds the lock, and its child survives."""
    with Engine.anonymous(SETTINGS) as engine:
        backing = engine.seat.backing
        assert isinstance(backing, Anonymous)

        def lock_and_fork(parent: Parent) -> None:
            with backing.lock(5.0):
                if os.fork() == 0:
                    parent.tell_him()
                    os.read(parent.hear, 1)
                    os._exit(0)
                os.waitpid(-1, 0)

        with child(lock_and_fork) as holder:
            holder.reached()
            holder.kill()
            with backing.lock(0.0):
                pass
            holder.go()


def test_two_handles_that_were_forked_stay_apart(engine: Engine, ring: Ring) -> None:
    with Engine.open(engine.path, None) as second:  # type: ignore[arg-type]

        def use_both() -> None:
            write(ring, [10])
            write(ring_of(second), [11])
            assert [client.incarnation for client in engine.clients()] == [1, 2, 3, 4]

        succeeds(use_both)
        assert engine.seat.reap_dead() == 2

"""Forks in C, process pools and daemons: each process has an entry of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmbuffer.memory import Engine
from tests.crash.harness import ended
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, contents, require_sound, sample, write

FORKED_IN_C = """
import ctypes, os, sys
from pathlib import Path
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.cleanup import temporary_directory
from tests.memory.rows import contents, schema, write
from tests.kit.rings import ring_of

path = temporary_directory()
engine = Engine.open(path, Settings(capacity=8), temporary=True)
write(engine.define(schema()), range(8))
pid = ctypes.PyDLL(None).fork()
if pid == 0:
    sys.exit()  # with atexit, and with handles of its parent
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(path, [client.pid for client in engine.clients()] == [os.getpid()], flush=True)
write(engine.ring(), [8])
input()
"""


def forked_in_c(work: Callable[[], object]) -> int:
    """Runs ``work`` in a child of fork(2), where no function of `os.register_at_fork` ran."""
    pid = int(ctypes.PyDLL(None).fork())
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: write(ring_of(engine), [8]),
        lambda engine: sample(ring_of(engine), 4, prioritized=True),
        lambda engine: engine.stats(),
        lambda engine: engine.flush(),
    ],
    ids=["write", "sample", "stats", "flush"],
)
def test_a_child_of_a_fork_in_c_is_no_double_of_its_parent(
    engine: Engine, use: Callable[[Engine], object]
) -> None:
    ring_of(engine).claims.claim(1)

    def work() -> None:
        use(engine)
        engine.close()

    assert ended(forked_in_c(work)) == 0
    ring_of(engine).claims.abort()
    assert engine.seat.registry.live() == [(0, 1)], "its own entry, and still there"
    require_sound(engine)


def test_a_child_of_a_fork_in_c_removes_nothing_at_its_end(tmp_path: Path) -> None:
    with Program.python(FORKED_IN_C, TMPDIR=str(tmp_path)) as owner:
        path, alone = owner.line().split()
        assert alone == "True"
        assert Path(path, ".shmbuffer", "control").exists()
        owner.tell()
        assert owner.end()[0] == 0
    assert not Path(path).exists()


@pytest.mark.crash
def test_a_copy_of_its_lock_in_a_child_of_a_fork_in_c_makes_nobody_immortal(
    engine: Engine,
) -> None:
    """Within a pid namespace, the pid is better evidence than the lock."""

    def stay(parent: Parent) -> None:
        engine.seat.rejoin()
        ring_of(engine).claims.claim(2)
        grandchild = forked_in_c(lambda: (parent.tell_him(), os.read(parent.hear, 1)))
        os.waitpid(grandchild, 0)

    with child(stay) as client:
        client.reached()
        client.kill()
        write(ring_of(engine), range(10, 18), timeout=5.0)
        client.go()
    assert len(engine.clients()) == 1


_shared: Engine | None = None


def use_what_was_inherited(number: int) -> int:
    assert _shared is not None
    write(ring_of(_shared), [number])
    return ring_of(_shared).seat.incarnation


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_workers_of_a_pool_inherit_a_handle_and_have_places_of_their_own(engine: Engine) -> None:
    global _shared
    _shared = engine
    context: Any = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        incarnations = set(pool.map(use_what_was_inherited, range(60), chunksize=1))
        assert 1 not in incarnations
        assert {client.incarnation for client in engine.clients()} == {1, *incarnations}
        pool.terminate()
        pool.join()
    _shared = None
    assert engine.seat.reap_dead() == len(incarnations)
    assert ring_of(engine).write_count == 68
    require_sound(engine)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_process_that_is_ended_in_its_work_leaves_whole_items(engine: Engine, end: str) -> None:
    def work(connection: Any) -> None:
        write(ring_of(engine), [8])
        connection.send(None)
        while True:
            write(ring_of(engine), range(4))

    context: Any = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with here, there:
        process = context.Process(target=work, args=(there,))
        process.start()
        here.recv()
        getattr(process, end)()
        process.join()
        assert process.exitcode == -(signal.SIGTERM if end == "terminate" else signal.SIGKILL)
        process.close()
    write(ring_of(engine), range(8), timeout=5.0)
    assert sorted(contents(ring_of(engine)).values()) == [*range(8)]
    engine.seat.reap_dead()
    assert len(engine.clients()) == 1
    require_sound(engine)


def test_a_daemon_goes_on_when_those_who_made_it_have_ended(engine: Engine) -> None:
    """Fork, setsid, fork: the classic way to detach from a terminal."""
    source = """
import os, sys
from shmbuffer.memory import Engine
from tests.memory.rows import write
from tests.kit.rings import ring_of

engine = Engine.open(sys.argv[1], None)
ring_of(engine).claims.claim(1)
if os.fork():
    os.wait()
    sys.exit()
os.setsid()
if os.fork():
    os._exit(0)
write(ring_of(engine), [20], timeout=10.0)
print(os.getpid(), flush=True)
input()
"""
    with Program.python(source, engine.path) as first:
        daemon = int(first.line())
        first.wait()
        assert [client.pid for client in engine.clients()] == [os.getpid(), daemon]
        write(ring_of(engine), range(21, 28), timeout=10.0)
        first.tell()
    assert sorted(contents(ring_of(engine)).values())[-8:] == [*range(20, 28)]

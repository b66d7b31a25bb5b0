"""Threads and processes use one buffer at once, and a process loads two copies of the library."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shmbuffer
from shmbuffer.memory import Engine
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, contents, require_sound, sample, write

ROUNDS = 60


def in_threads(works: list[Callable[[], None]]) -> None:
    """Runs each function in a thread, and raises the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.slow
def test_four_threads_in_each_of_three_processes_share_a_buffer(engine: Engine) -> None:
    ring = ring_of(engine)

    def put() -> None:
        for number in range(ROUNDS):
            write(ring, range(number, number + 3), timeout=30.0)

    def draw() -> None:
        for key in range(ROUNDS):
            drawn = sample(ring, 4, key=key, prioritized=True)  # fails on a torn row
            ring.update(drawn.index, np.full(4, 1.0 + key), drawn.tickets)

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()
        in_threads([put, put, draw, draw])

    with child(work) as first, child(work) as second:
        for other in (first, second):
            other.reached()
        for other in (first, second):
            other.go()
        in_threads([put, put, draw, draw])
        assert (first.end(), second.end()) == (0, 0)
    engine.seat.reap_dead()
    assert ring.write_count == 8 + 3 * 2 * 3 * ROUNDS
    stats = engine.stats()
    assert (stats["rolled_back"], stats["repairs"]) == (0, 0)
    assert len(contents(ring)) == 8
    require_sound(engine)


TWO_COPIES = """
import importlib, os, sys

def loaded(folder):
    for name in [name for name in sys.modules if name.partition(".")[0] == "shmbuffer"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    memory = importlib.import_module("shmbuffer.memory")
    core = importlib.import_module("shmbuffer._native._core")
    sys.path.remove(folder)
    return memory.Engine, core

path, here, copy = sys.argv[1:]
(Other, other_core), (Mine, my_core) = loaded(copy), loaded(here)
assert my_core.__file__ != other_core.__file__
first, second = Mine.open(path, None), Other.open(path, None)
assert len(first.clients()) == 3
first.ring().claims.claim(2)
second.ring().claims.claim(2)
second.ring().claims.commit()
first.ring().claims.commit()
other_core.arm("write.locked", "kill")  # of one copy: the other one passes it
first.ring().claims.claim(1)
first.ring().claims.abort()
first.close()
print(os.getpid(), flush=True)
input()
"""


@pytest.mark.crash
def test_two_copies_of_the_library_in_one_process_have_places_of_their_own(
    engine: Engine, tmp_path: Path
) -> None:
    """A copy that closes must not release the other one's locks, above all its liveness lock."""
    package = Path(shmbuffer.__file__).parent
    shutil.copytree(package, tmp_path / "shmbuffer")
    with Program.python(TWO_COPIES, engine.path, package.parent, tmp_path) as both:
        assert int(both.line()) == both.pid
        assert [client.pid for client in engine.clients()] == [engine.clients()[0].pid, both.pid]
        assert [client.alive for client in engine.clients()] == [True, True]
        assert engine.seat.reap_dead() == 0
        assert ring_of(engine).write_count == 12
        both.tell()
        assert both.end() == (0, "", "")
    assert len(engine.clients()) == 1
    require_sound(engine)

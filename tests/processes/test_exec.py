"""A client that becomes another program (execve) is dead, although its pid is still in use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shmbuffer import RingOverrunError
from shmbuffer.memory import Engine
from shmbuffer.memory.system import identity
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.memory.rows import contents, require_sound, write

BEGIN = """
import os, sys
from shmbuffer.memory import Engine
from tests.memory.rows import write
from tests.kit.rings import ring_of

def become(source, *arguments):
    os.execv(sys.executable, [sys.executable, "-c", source, *arguments])

SLEEPER = "print(flush=True); input()"
"""

FILLING = """
engine = Engine.open(sys.argv[1], None)
ring_of(engine).claims.claim(2)
become(SLEEPER)
"""


@contextmanager
def became(engine: Engine, source: str) -> Iterator[Program]:
    """Starts a client that runs ``source`` and then becomes a program that waits for a line."""
    with Program.python(BEGIN + source, engine.path) as client:
        client.line()
        yield client


def test_the_slots_that_it_was_filling_are_free_again(engine: Engine) -> None:
    with became(
        engine,
        "engine = Engine.open(sys.argv[1], None)\nring_of(engine).claims.claim(2)\nbecome(SLEEPER)",
    ):
        assert [client.alive for client in engine.clients()] == [True, False]
        write(ring_of(engine), range(10, 18), timeout=1.0)
        assert len(engine.clients()) == 1
    assert sorted(contents(ring_of(engine)).values()) == [*range(10, 18)]
    require_sound(engine)


def test_a_program_that_executes_itself_again_joins_as_a_new_client(engine: Engine) -> None:
    source = """
AGAIN = '''
import sys
from shmbuffer.memory import Engine
from tests.memory.rows import write
from tests.kit.rings import ring_of
engine = Engine.open(sys.argv[1], None)
write(ring_of(engine), range(20, 28), timeout=1.0)
print(len(engine.clients()), flush=True)
input()
'''
engine = Engine.open(sys.argv[1], None)
ring_of(engine).claims.claim(2)
become(AGAIN, sys.argv[1])
"""
    with Program.python(BEGIN + source, engine.path) as client:
        assert client.line() == "2"
        assert [one.incarnation for one in engine.clients()] == [1, 3]
        assert [one.alive for one in engine.clients()] == [True, True]
    assert sorted(contents(ring_of(engine)).values()) == [*range(20, 28)]


def test_a_buffer_whose_last_client_became_another_program_is_recovered(engine: Engine) -> None:
    path = engine.path
    source = (
        "engine = Engine.open(sys.argv[1], None)\nring_of(engine).claims.claim(2)\nbecome(SLEEPER)"
    )
    with became(engine, source):
        engine.close()
        with Engine.open(path, None) as again:  # type: ignore[arg-type]
            assert again.report is not None
            assert again.superblock.epoch == 1
            assert contents(ring_of(again)) == {i: i for i in range(2, 8)}


def test_a_program_that_closes_descriptors_that_are_not_its_own_stays_alive(engine: Engine) -> None:
    """The lock is gone, but the process still maps the buffer and fills its slots."""
    source = """
engine = Engine.open(sys.argv[1], None)
ring = ring_of(engine)
ring.claims.claim(2)
os.closerange(3, 1000)
print(flush=True)
input()
ring.claims.abort()
print(flush=True)
input()
"""
    with Program.python(BEGIN + source, engine.path) as client:
        client.line()
        assert [one.alive for one in engine.clients()] == [True, True]
        with pytest.raises(RingOverrunError, match=f"process {client.pid}"):
            write(ring_of(engine), range(10, 18), timeout=0.2)
        client.tell()
        client.line()
        write(ring_of(engine), range(10, 18), timeout=5.0)


def test_a_process_that_closed_its_own_lock_knows_that_it_lives(fast_path: Path) -> None:
    source = """
from shmbuffer.memory import Settings
from tests.memory.rows import schema
engine = Engine.open(sys.argv[1], Settings(capacity=8))
write(engine.define(schema()), range(8))
os.closerange(3, 1000)
print(len(Engine.open(sys.argv[1], None).clients()), flush=True)
"""
    with Program.python(BEGIN + source, fast_path / "buffer") as client:
        assert client.line() == "2"


@pytest.mark.parametrize("what_maps", ["", "0-1 rw-s 0 00:01 7 /x\n"])
def test_what_proc_does_not_show_is_taken_for_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what_maps: str
) -> None:
    monkeypatch.setattr(identity, "_PROC", tmp_path)
    assert identity.maps(1, 7)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "maps").write_text(what_maps)
    assert identity.maps(1, 7) == bool(what_maps)


def test_another_program_inherits_no_descriptor_of_a_buffer(engine: Engine) -> None:
    source = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in range(3, 64) \
        if os.path.exists(f'/proc/self/fd/{n}')), sep='\\n')"
    output = subprocess.run(
        [sys.executable, "-c", source], close_fds=False, check=True, capture_output=True, text=True
    ).stdout
    assert str(engine.path) not in output
    assert "memfd:shmbuffer" not in output

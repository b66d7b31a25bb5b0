"""At every step a process may be terminated, stopped and continued, or replaced by exec.

The default run uses one of these events at each step, and `--full` uses all of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.deeds import DEEDS, begins, is_done, prepare, require_done_or_not, writes
from tests.crash.harness import ended, fork, read_all, require_usable, schema, settings, write
from tests.kit.rings import ring_of

pytestmark = pytest.mark.crash

DEED = pytest.mark.parametrize("deed", [deed for deed in DEEDS if deed != "reap"])


def at(path: Path, deed: str, point: str, action: str, then: Callable[[Engine], None]) -> int:
    """Starts a process with an event at the point; ``then`` runs if the process goes on."""
    work = begins(path, deed)

    def body() -> None:
        engine = Engine.open(path, None)
        _core.arm(point, action)
        try:
            work(engine)
        except KeyboardInterrupt:
            assert action == "int"
        then(engine)
        engine.close()

    return fork(body)


def never(engine: Engine) -> None:
    raise AssertionError("the process went on")


def goes_on(engine: Engine) -> None:
    """Checks that an interrupted process can use its handle as before."""
    ring = ring_of(engine)
    ticket = write(ring, [777])
    assert read_all(ring)[ticket % ring.capacity] == 777


#: The events. By default each one happens at every fourth point, with different offsets.
ENDS = ("term", "exec", "int", "stop")


def each_point(
    tmp_path: Path, deed: str, end: str, full: bool, look: Callable[[Path, Engine, str], None]
) -> None:
    points = DEEDS[deed][1]
    for number, point in enumerate(points if full else points[ENDS.index(end) :: len(ENDS)]):
        path = tmp_path / str(number)
        with prepare(path) as survivor:
            look(path, survivor, point)


@pytest.mark.product(few=1)
@DEED
def test_sigterm_is_a_death_where_nobody_catches_it(tmp_path: Path, deed: str, full: bool) -> None:
    def look(path: Path, survivor: Engine, point: str) -> None:
        assert ended(at(path, deed, point, "term", never)) == -signal.SIGTERM
        survivor.seat.reap_dead()
        require_done_or_not(survivor, deed, is_done(deed, point))
        assert len(survivor.clients()) == 1

    each_point(tmp_path, deed, "term", full, look)


@pytest.mark.product(few=1)
@DEED
def test_a_process_that_executes_another_program_counts_as_dead(
    tmp_path: Path, deed: str, full: bool
) -> None:
    def look(path: Path, survivor: Engine, point: str) -> None:
        assert ended(at(path, deed, point, "exec", never)) == 0
        survivor.seat.reap_dead()
        require_done_or_not(survivor, deed, is_done(deed, point))
        assert len(survivor.clients()) == 1

    each_point(tmp_path, deed, "exec", full, look)


@pytest.mark.product(few=2)
@DEED
def test_an_interrupt_comes_before_or_after_a_deed_and_the_handle_stays_usable(
    tmp_path: Path, deed: str, full: bool
) -> None:
    def look(path: Path, survivor: Engine, point: str) -> None:
        assert ended(at(path, deed, point, "int", goes_on)) == 0
        there = set(read_all(ring_of(survivor)).values())
        assert 777 in there
        assert there & {100, 101, 102} in (set(), {100, 101, 102})
        assert survivor.check().ok
        assert len(survivor.clients()) == 1
        require_usable(ring_of(survivor), 999)

    each_point(tmp_path, deed, "int", full, look)


@pytest.mark.product(few=1)
@DEED
def test_a_stopped_process_does_the_rest_when_it_is_continued(
    tmp_path: Path, deed: str, full: bool
) -> None:
    def look(path: Path, survivor: Engine, point: str) -> None:
        pid = at(path, deed, point, "stop", lambda engine: None)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        os.kill(pid, signal.SIGCONT)
        assert ended(pid) == 0
        require_done_or_not(survivor, deed, done=True)
        assert survivor.stats()["repairs"] == 0

    each_point(tmp_path, deed, "stop", full, look)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_the_owner_of_a_temporary_buffer_removes_it_at_whatever_point_the_signal_comes(
    tmp_path: Path, number: signal.Signals
) -> None:
    action = {signal.SIGTERM: "term", signal.SIGINT: "int"}[number]
    path = tmp_path / "buffer"

    for point in DEEDS["write"][1]:

        def body(point: str = point) -> None:
            signal.signal(number, signal.SIG_DFL)
            with Engine.open(path, settings("rows"), temporary=True) as engine:
                write(engine.define(schema()), range(11))
                _core.arm(point, action)
                writes(engine)

        assert ended(fork(body)) == -number
        assert not path.exists(), f"the signal at {point} left the buffer"

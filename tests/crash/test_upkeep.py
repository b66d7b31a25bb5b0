"""Processes that repair are killed too: emptying, reaping, repair, recovery, leaving, barrier."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import (
    arm_and_open,
    dies,
    ended,
    fork,
    native_points,
    python_points,
    read_all,
    require_sound,
    require_usable,
    schema,
    settings,
    stopped_at,
    victim,
    write,
)
from tests.kit.rings import path_of, ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]


#: Points of a reaper that rolls forward.
FORWARD = ("reap.default", "reap.length")


@pytest.mark.parametrize("point", native_points("empty"))
def test_emptying_is_done_or_not_done(survivor: Engine, point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(11))
    items = read_all(ring)
    assert dies(path, point, lambda engine: ring_of(engine).empty())
    survivor.seat.reap_dead()
    if point in ("empty.locked", "empty.first", "empty.span", "empty.noted"):
        assert read_all(ring) == items
        assert ring.write_count == 11
    else:
        assert read_all(ring) == {}
        assert (ring.write_count, ring.cursor, ring.length) == (0, 0, 0)
    require_sound(survivor)
    require_usable(ring, 999)


@pytest.mark.parametrize("point", native_points("restore"))
def test_a_position_that_is_set_is_set_step_by_step(survivor: Engine, point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(11))
    items = read_all(ring)
    assert dies(path, point, lambda engine: ring_of(engine).restore(1, 500, 9.0))
    survivor.seat.reap_dead()
    assert read_all(ring) == items
    assert ring.cursor == 1
    assert ring.write_count == (11 if point == "restore.head" else 500)
    require_sound(survivor)
    require_usable(ring, 999)


def test_a_copy_that_dies_under_the_mutex_leaves_nothing(survivor: Engine) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(11))
    items = read_all(ring)
    assert dies(path, "copy.snapshot", _copy)
    survivor.seat.reap_dead()
    assert read_all(ring) == items
    require_sound(survivor)
    require_usable(ring, 999)


def _copy(engine: Engine) -> None:
    ring = ring_of(engine)
    if ring.records is not None:
        with tempfile.TemporaryFile() as file:
            ring.records.copy_out(file.fileno(), "a file")
    rows = [bytearray(max(1, ring.elements * leaf.nbytes)) for leaf in ring.schema.leaves]
    ring.copy_out([ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows])


@pytest.mark.parametrize("write_point", ["write.mark", "write.copy"])
@pytest.mark.parametrize("point", [each for each in native_points("reap") if each not in FORWARD])
def test_a_reaper_that_dies_is_followed_by_another(
    survivor: Engine, point: str, write_point: str
) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(6))
    victim(path, write_point)
    # A joiner reaps the dead before it takes an entry, so the second victim arms before it joins.
    killed = ended(fork(lambda: _arm_and_join(path, point))) == -signal.SIGKILL
    # The next process that locks repairs after a death in the mutex, so the reaper only frees the
    # entry.
    assert killed or (write_point, point) == ("write.mark", "reap.parents")
    survivor.seat.reap_dead()
    there = set(read_all(ring).values())
    assert there >= {2, 3, 4, 5}
    assert not there & {100, 101, 102, 103}
    assert len(survivor.clients()) == 1
    require_sound(survivor)
    require_usable(ring, 999)


def _arm_and_join(path: Path, point: str) -> None:
    _core.arm(point)
    with Engine.open(path, None) as engine:
        engine.seat.reap_dead()


@pytest.mark.parametrize(
    "write_point", ["write.marking", "write.mark", "write.committing", "write.commit"]
)
@pytest.mark.parametrize(
    "point",
    [*native_points("repair"), "reap.leaf", "reap.word", "reap.head", "reap.count"],
)
def test_a_repair_that_dies_is_repeated(survivor: Engine, point: str, write_point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(6))
    victim(path, write_point, after=1 if write_point in ("write.mark", "write.commit") else 0)
    killed = ended(fork(lambda: _arm_and_join(path, point))) == -signal.SIGKILL
    assert killed or (write_point, point[:5]) == ("write.marking", "reap.")
    survivor.seat.reap_dead()
    there = set(read_all(ring).values())
    if write_point in ("write.committing", "write.commit"):
        assert there == {100, 101, 102, 103, 2, 3, 4, 5}
        assert ring.write_count == 10
    else:
        assert not there & {100, 101, 102, 103}
        assert ring.write_count == 6
    require_sound(survivor)
    require_usable(ring, 999)


@pytest.mark.parametrize("point", native_points("leave"))
def test_leaving_half_way_is_as_good_as_dying(survivor: Engine, point: str) -> None:
    path = path_of(survivor)
    write(ring_of(survivor), range(5))
    assert dies(path, point, lambda engine: engine.close())
    survivor.seat.reap_dead()
    assert len(survivor.clients()) == 1
    assert sorted(read_all(ring_of(survivor)).values()) == list(range(5))
    require_sound(survivor)


def test_an_entry_is_free_only_after_the_mutex_is(survivor: Engine) -> None:
    """Otherwise a process that finds no client alive could recreate a mutex that is in use."""
    path = path_of(survivor)
    with stopped_at(path, "leave.claim", lambda engine: engine.close()):
        assert len(survivor.seat.registry.live()) == 2
        assert _core.mutex_owner(survivor.seat.control.map) != 0
    survivor.seat.reap_dead()
    with stopped_at(path, "leave.freed", lambda engine: engine.close()):
        assert len(survivor.seat.registry.live()) == 1
        assert _core.mutex_owner(survivor.seat.control.map) == 0
    require_sound(survivor)


@pytest.mark.parametrize("point", python_points("join"))
def test_a_client_that_dies_while_joining_leaves_room(survivor: Engine, point: str) -> None:
    path = path_of(survivor)
    assert ended(fork(lambda: arm_and_open(path, point, 0))) == -signal.SIGKILL
    with Engine.open(path, None) as other:
        assert len(other.clients()) == 2
        require_usable(ring_of(other), 7)
    require_sound(survivor)


@pytest.mark.parametrize("point", python_points("draw"))
def test_what_a_dead_client_drew_from_is_forgotten_with_its_entry(
    survivor: Engine, point: str
) -> None:
    path = path_of(survivor)

    def draws(engine: Engine) -> None:
        engine.seat.registry.note_first_draw(engine.seat.entry, 77)

    assert dies(path, point, draws)
    assert survivor.seat.registry.note_first_draw(survivor.seat.entry, 77) == []
    survivor.seat.reap_dead()
    with Engine.open(path, None) as other:
        said = survivor.seat.control.entries["first_draw"]
        assert said[other.seat.entry] == 0
        assert said[survivor.seat.entry] == 77
    require_sound(survivor)


@pytest.mark.parametrize("point", [*python_points("flush"), "superblock.half", "superblock.stored"])
def test_a_barrier_that_dies_loses_nothing(survivor: Engine, point: str) -> None:
    path = path_of(survivor)
    write(ring_of(survivor), range(5))
    assert dies(path, point, lambda engine: engine.flush())
    survivor.flush()
    assert survivor.superblock.durable_ticket == 5
    require_sound(survivor)
    require_usable(ring_of(survivor), 9)


@pytest.mark.parametrize("kind", ["rows"])  # records are claimed and filled in one call
def test_an_abort_that_dies_is_finished_by_a_reaper(survivor: Engine) -> None:
    ring, path = ring_of(survivor), path_of(survivor)
    write(ring, range(6))

    def aborts(engine: Engine) -> None:
        ring_of(engine).claims.claim(3)
        ring_of(engine).claims.abort()

    for point in native_points("abort"):
        assert dies(path, point, aborts)
        survivor.seat.reap_dead()
        require_sound(survivor)
    require_usable(ring, 999)


@pytest.mark.parametrize("point", native_points("wait"))
def test_a_waiter_that_dies_gives_its_turn_back(survivor: Engine, point: str) -> None:
    ring, path = ring_of(survivor), path_of(survivor)

    def waits(engine: Engine) -> None:
        write(ring_of(engine), range(8), timeout=0.5)

    with stopped_at(path, "write.claimed", lambda engine: write(ring_of(engine), [1]) and None):  # type: ignore[func-returns-value]
        if point == "wait.forfeit":
            # Two writers are in the queue. The first is stopped, so the second takes its position.
            with stopped_at(path, "wait.turn", waits):
                pass
            pid = fork(lambda: _waits_behind(path, point))
        else:
            pid = fork(lambda: _waits_behind(path, point))
        ended(pid)
    survivor.seat.reap_dead()
    assert survivor.stats()["waiters"] == 0
    require_sound(survivor)
    require_usable(ring, 999)


def _waits_behind(path: Path, point: str) -> None:
    with Engine.open(path, None) as engine:
        _core.arm(point)
        write(ring_of(engine), range(8), timeout=0.5)


def test_a_process_that_ends_without_closing_leaves_the_registry(survivor: Engine) -> None:
    code = f"from shmbuffer.memory import Engine; e = Engine.open({str(survivor.path)!r}, None)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(survivor.clients()) == 1


def test_a_handle_that_is_forgotten_leaves_the_registry(survivor: Engine) -> None:
    other = Engine.open(path_of(survivor), None)
    assert len(survivor.clients()) == 2
    del other
    gc.collect()
    assert len(survivor.clients()) == 1


@pytest.mark.parametrize("point", ["reap.word", "reap.count", "reap.parents"])
def test_bytes_of_a_dead_writer_may_be_passed_before_it_is_reaped_to_the_end(
    tmp_path: Path, point: str
) -> None:
    path = tmp_path / "buffer"
    told, tell = os.pipe()
    hear, say = os.pipe()
    with Engine.open(path, settings("short records")) as engine:
        ring = engine.define(schema("short records"))

        def reap() -> None:
            reaper = Engine.open(path, None)
            os.write(tell, b".")
            os.read(hear, 1)
            _core.arm(point)
            reaper.seat.reap_dead()

        pid = fork(reap)
        os.read(told, 1)
        assert dies(path, "write.copy", lambda victim: write(ring_of(victim), [100, 101]))
        os.write(say, b".")
        assert ended(pid) == -signal.SIGKILL
        for number in range(40):
            write(ring, [number])
            tail, quiet, head = ring.seat.native.read_span(10**10)
            assert tail <= quiet <= head
    for descriptor in (told, tell, hear, say):
        os.close(descriptor)

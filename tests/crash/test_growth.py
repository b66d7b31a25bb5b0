"""A writer is killed at every step of allocating space for its slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from shmbuffer.memory.directory import growth
from tests.crash.harness import (
    SETTINGS,
    dies,
    each_death,
    each_recovery,
    ended,
    fork,
    place,
    python_points,
    read_all,
    require_sound,
    require_usable,
    schema,
    stopped_at,
    write,
)
from tests.kit.rings import ring_of

pytestmark = [pytest.mark.crash, pytest.mark.product]

#: Two of the eight slots of the ring have space, and each growth step adds two.
STEP = 2
WRITTEN = {0: 0, 1: 1}
BATCH = {2: 100, 3: 101, 4: 102}
POINTS = [*python_points("grow"), "space.taken", "space.dated"]
PASSINGS = range(8)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "STEP_BYTES", STEP * sum(schema().bytes_of_slots(1)))


@contextmanager
def begun(path: Path) -> Iterator[Engine]:
    with Engine.open(path, replace(SETTINGS, reserve="steps")) as engine:
        write(engine.define(schema()), range(2))
        assert allocated(engine) == STEP
        yield engine


def allocated(engine: Engine) -> int:
    return int(engine.seat.control.runtime["allocated"][0])


def writes(engine: Engine) -> None:
    write(ring_of(engine), BATCH.values())


def places(engine: Engine) -> None:
    place(ring_of(engine), [6, 3], [106, 103], in_place=False)


def reserves(engine: Engine) -> None:
    ring_of(engine).reservations.reserve(5)


DEEDS = {"write": writes, "place": places, "reserve": reserves}


def require_all_slots_usable(engine: Engine) -> None:
    """Checks that no item of the victim is present, and writes every slot in turn."""
    ring = ring_of(engine)
    require_sound(engine)
    assert read_all(ring) == WRITTEN
    for number in range(200, 206):
        write(ring, [number])
        assert allocated(engine) >= min(ring.head, ring.capacity)
    assert read_all(ring) == {**WRITTEN, **{k - 198: k for k in range(200, 206)}}
    require_sound(engine)
    require_usable(ring, 999)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_survivor_takes_the_space_that_a_dead_writer_was_taking(
    tmp_path: Path, point: str, deed: str
) -> None:
    def kill(path: Path, passing: int) -> bool:
        return dies(path, point, DEEDS[deed], after=passing)

    for survivor in each_death(tmp_path, begun, kill, PASSINGS):
        survivor.seat.reap_dead()
        require_all_slots_usable(survivor)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_fresh_process_takes_it_after_the_death_of_all(
    tmp_path: Path, point: str, deed: str
) -> None:
    def kill(path: Path, passing: int) -> bool:
        return dies(path, point, DEEDS[deed], after=passing)

    for found in each_recovery(tmp_path, begun, kill, PASSINGS):
        assert found.report is not None
        assert found.report.reason == "no client alive"
        require_all_slots_usable(found)


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_waits_for_a_dead_one_takes_the_space_itself(
    tmp_path: Path, point: str
) -> None:
    path = tmp_path / "buffer"
    started, start = os.pipe()

    def waits() -> None:
        with Engine.open(path, None) as engine:
            os.write(start, b"x")
            write(ring_of(engine), BATCH.values())

    with begun(path) as survivor:
        with stopped_at(path, point, writes):
            waiter = fork(waits)
            assert os.read(started, 1) == b"x"
            with Engine.open(path, None) as joining:  # does not wait for the lock
                assert read_all(ring_of(joining)).items() >= WRITTEN.items()
        assert ended(waiter) == 0
        survivor.seat.reap_dead()
        assert read_all(ring_of(survivor)) == {**WRITTEN, **BATCH}
        require_usable(ring_of(survivor), 999)
    os.close(started)
    os.close(start)


@pytest.mark.parametrize("point", ["space.taken", "space.released", "space.dated"])
def test_a_writer_that_dies_giving_space_back_takes_nothing_along(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file of the growth step does not fit on the disk any more."""
    allocate, calls = os.posix_fallocate, []

    def one_fits(fd: int, start: int, nbytes: int) -> None:
        calls.append(nbytes)
        if len(calls) % 3:
            allocate(fd, start, nbytes)
        else:
            raise OSError(28, os.strerror(28))

    def works(engine: Engine) -> None:
        monkeypatch.setattr(os, "posix_fallocate", one_fits)
        writes(engine)

    path = tmp_path / "buffer"
    with begun(path) as survivor:
        assert dies(path, point, works)
        survivor.seat.reap_dead()
        require_all_slots_usable(survivor)


@pytest.mark.parametrize("point", POINTS)
def test_an_interrupt_while_space_is_taken_leaves_no_lock_and_the_handle_usable(
    tmp_path: Path, point: str
) -> None:
    path = tmp_path / "buffer"

    def work() -> None:
        with Engine.open(path, None) as engine:
            _core.arm(point, "int")
            with pytest.raises(KeyboardInterrupt):
                writes(engine)
            _core.disarm()
            require_all_slots_usable(engine)

    with begun(path):
        pass
    assert ended(fork(work)) == 0

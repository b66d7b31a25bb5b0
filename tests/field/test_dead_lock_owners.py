"""Locks whose owner has died or stopped, or has destroyed the lock, as other projects report.

Each test is named after the repository and number of a report, and asserts the expected behaviour.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import LockTimeout, UnsupportedPlatformError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.opening import require_platform
from shmbuffer.memory.system.region import Directory
from tests.field.conftest import SETTINGS
from tests.kit.rings import ring_of
from tests.memory.rows import (
    Parent,
    child,
    contents,
    lock_timeout,
    mutex_held,
    require_sound,
    sample,
    slot_held,
    until_it_sleeps,
    write,
)

ROUNDS = 30


@pytest.mark.crash
def test_heimdal_1090_closing_while_another_writes_keeps_the_lock(
    engine: Engine, ring: Ring
) -> None:
    """LMDB destroyed its shared mutex when a process closed it last: EINVAL for all others."""

    def come_and_go(parent: Parent) -> None:
        parent.tell_him()
        for number in range(ROUNDS):
            with Engine.open(engine.path, None) as mine:  # type: ignore[arg-type]
                write(ring_of(mine), [number])

    with child(come_and_go) as visitor:
        visitor.reached()
        for number in range(20 * ROUNDS):
            write(ring, [number])
        assert visitor.end() == 0
    assert ring.write_count == 8 + 21 * ROUNDS


def test_fapolicyd_413_an_open_client_goes_on_when_all_others_have_closed(
    engine: Engine, ring: Ring
) -> None:
    """After the same bug, a daemon that kept its handle could no longer write."""
    for handle in [Engine.open(engine.path, None) for _ in range(3)]:  # type: ignore[arg-type]
        write(ring_of(handle), [1])
        handle.close()
    write(ring, [2])
    assert len(sample(ring, 4, prioritized=True).numbers) == 4
    require_sound(engine)


@pytest.mark.crash
def test_cocoindex_2424_an_owner_that_is_parked_is_named(
    engine: Engine, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living but stopped owner blocked all later transactions without any message."""
    with mutex_held(engine) as owner:
        owner.stop()
        with monkeypatch.context() as patch:
            lock_timeout(patch, 60_000_000)
            with pytest.raises(LockTimeout, match=rf"{owner.pid} \(stopped\)"):
                write(ring, [8])
        os.kill(owner.pid, signal.SIGCONT)
        owner.go()
        assert owner.end() == 0
    write(ring, [8])
    require_sound(engine)


@pytest.mark.crash
def test_iceoryx_325_survivors_of_a_killed_process_take_its_lock(
    engine: Engine, ring: Ring
) -> None:
    """A shared mutex of a killed application stayed locked forever."""
    for number in range(3):
        with mutex_held(engine) as owner:
            owner.kill()
        write(ring, [number])
    assert int(engine.seat.control.runtime["repairs"][0]) == 3
    require_sound(engine)


@pytest.mark.crash
def test_iceoryx_2193_2260_the_death_of_an_owner_ends_nobody_else(
    engine: Engine, ring: Ring
) -> None:
    """The daemon ended itself with "owner died", and all applications ended with it."""

    def wait_for_it(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        write(ring, [8], timeout=30.0)

    with mutex_held(engine) as owner, child(wait_for_it) as first, child(wait_for_it) as second:
        for waiter in (first, second):
            waiter.reached()
            until_it_sleeps(waiter)
        owner.kill()
        assert (first.end(), second.end()) == (0, 0)
    assert ring.write_count == 10
    require_sound(engine)


@pytest.mark.crash
def test_birdnet_73_killed_ring_holder(engine: Engine, ring: Ring) -> None:
    """A worker died with a slot of the ring buffer, and no other worker could pass it."""
    with slot_held(engine) as worker:
        worker.kill()
    write(ring, range(8, 16), timeout=5.0)
    assert sorted(contents(ring).values()) == [*range(8, 16)]


@pytest.mark.crash
def test_lightrag_3413_a_worker_that_dies_in_the_first_initialisation_blocks_nobody(
    path: Path,
) -> None:
    """A lock of multiprocessing has no owner, so no process releases it for a dead one."""

    def initialise(parent: Parent) -> None:
        parent.pause_at("create.formatted")
        Engine.open(path, SETTINGS)

    with child(initialise) as worker:
        worker.reached()
        worker.kill()
    with Engine.open(path, SETTINGS, timeout=5.0) as engine:
        assert engine.ring() is None


@pytest.mark.crash
def test_loky_360_a_worker_that_dies_while_it_reads_blocks_no_other(
    engine: Engine, ring: Ring
) -> None:
    """Workers of a pool waited for the lock of a queue whose reader had been killed."""

    def read(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at("sample.drawn")
        sample(ring, 4, prioritized=True)

    with child(read) as worker:
        worker.reached()
        worker.kill()
    assert len(sample(ring, 4, prioritized=True).numbers) == 4
    require_sound(engine)


@pytest.mark.full
@pytest.mark.crash
def test_hami_core_248_sixteen_waiters_go_on_at_once(engine: Engine, ring: Ring) -> None:
    """Sixteen processes waited for a killed process's semaphore until they timed out."""

    def wait_for_it(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        ring.update(np.arange(1), np.ones(1))

    with mutex_held(engine) as owner, ExitStack() as stack:
        waiters = [stack.enter_context(child(wait_for_it)) for _ in range(16)]
        for waiter in waiters:
            waiter.reached()
            until_it_sleeps(waiter)
        owner.kill()
        assert [waiter.end() for waiter in waiters] == [0] * 16
    assert engine.seat.reap_dead() == 17


@pytest.mark.crash
def test_coreclr_6015_an_owner_that_dies_in_the_repair_leaves_a_lock_that_can_be_repaired(
    engine: Engine, ring: Ring
) -> None:
    """A C library reported such a lock as unrecoverable rather than as owned by a dead process."""

    def repair(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at("repair.parents")
        parent.tell_him()
        write(ring, [8])

    with mutex_held(engine) as owner, child(repair) as heir:
        heir.reached()
        owner.kill()
        heir.reached()
        heir.kill()
    write(ring, [9])
    require_sound(engine)


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
def test_glibc_bz_20973_no_waiter_is_left_asleep_when_owner_after_owner_dies(
    engine: Engine, ring: Ring
) -> None:
    """The wake-up call that a dead owner owed was lost between two waiters."""

    def take_it_and_die(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        _core.arm("update.raw", "kill")
        ring.update(np.arange(1), np.ones(1))

    for _ in range(4):
        with mutex_held(engine) as owner, ExitStack() as stack:
            waiters = [stack.enter_context(child(take_it_and_die)) for _ in range(4)]
            for waiter in waiters:
                waiter.reached()
                until_it_sleeps(waiter)
            owner.kill()
            assert [waiter.end() for waiter in waiters] == [-signal.SIGKILL] * 4
        write(ring, [8])
        engine.seat.reap_dead()
    require_sound(engine)


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
def test_glibc_bz_20985_a_kill_at_any_instruction_of_an_unlock_blocks_nobody(
    engine: Engine, ring: Ring
) -> None:
    """A kill between two steps of the unlock left the lock without an owner."""

    def lock_and_unlock(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.tell_him()
        index, one = np.arange(1), np.ones(1)
        while True:
            ring.update(index, one)

    for number in range(40):
        with child(lock_and_unlock) as other:
            other.reached()
            for _ in range(number):
                ring.update(np.arange(1), np.ones(1))
            other.kill()
        write(ring, [number], timeout=30.0)
    require_sound(engine)


@pytest.mark.parametrize("report", ["realm_core_1429", "yugabyte_db_33482"])
def test_a_system_without_robust_locks_is_refused_and_not_tried(report: str) -> None:
    """On Apple systems the lock of a dead process is never released."""
    with pytest.raises(UnsupportedPlatformError, match="may not be released when the process"):
        require_platform(lambda: 0)


@pytest.mark.crash
def test_realm_core_2434_2552_all_who_wait_for_a_file_lock_get_it(
    engine: Engine, path: Path
) -> None:
    """Only one of several processes that waited for a shared lock was woken."""

    def join(parent: Parent) -> None:
        parent.tell_him()
        with Engine.open(path, None, timeout=30.0):
            pass

    with ExitStack() as stack:
        with Directory.open(path) as directory, Files(directory).lock(5.0):
            waiters = [stack.enter_context(child(join)) for _ in range(6)]
            for waiter in waiters:
                waiter.reached()
        assert [waiter.end() for waiter in waiters] == [0] * 6

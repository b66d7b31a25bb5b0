"""The attributes of the ring's mutex."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from shmbuffer import LockTimeout
from tests.kit.rings import ring_of
from tests.memory.rows import Maker, contents, lock_timeout, mutex_held, require_sound, write


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    lock_timeout(monkeypatch, 60_000_000)


@pytest.mark.usefixtures("_impatient")
def test_the_mutex_of_a_dead_owner_goes_to_the_next_caller(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(8))
    with mutex_held(engine) as holder:
        holder.kill()
    write(ring, [8])
    assert engine.stats()["repairs"] == 1
    write(ring, [9])
    assert contents(ring) == {0: 8, 1: 9, **{n: n for n in range(2, 8)}}
    require_sound(engine)


@pytest.mark.usefixtures("_impatient")
def test_an_owner_in_another_container_may_have_the_number_of_our_thread(make: Maker) -> None:
    """Each pid namespace numbers its own threads, so an equal number is not a deadlock."""
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(3))
    futex = np.frombuffer(engine.seat.control.runtime["mutex"], np.uint32)
    futex.flags.writeable = True
    futex[0] = threading.get_native_id()
    with pytest.raises(LockTimeout) as caught:
        write(ring, [3])
    error: Any = caught.value
    assert error.tid == threading.get_native_id()
    futex[0] = 0
    write(ring, [3])
    assert contents(ring) == {n: n for n in range(4)}
    require_sound(engine)


@pytest.mark.usefixtures("_impatient")
def test_sleeps_for_the_mutex_are_counted(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring = ring_of(engine)
    write(ring, range(3))
    assert engine.stats()["lock_waits"] == 0
    with mutex_held(engine):
        for _ in range(2):
            with pytest.raises(LockTimeout):
                write(ring, [3])
    assert engine.stats()["lock_waits"] == 2

"""Limits of writes and samples in one ring: what counts, what the dead leave, who waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter, RateLimitTimeout
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.flow import waiting
from shmbuffer.memory.flow.waiting import PASSES_ONCE
from shmbuffer.memory.format.layout import Side, Why
from shmbuffer.memory.system import deadline
from tests.kit.rings import ring_of
from tests.memory.rows import Parent, child, schema, write

LIMITER = RateLimiter(2, error_buffer=8, when_no_peer="wait")


@pytest.fixture
def engine(fast_path: Path) -> Iterator[Engine]:
    """Eight slots, empty, two samples for each insert."""
    with Engine.open(fast_path / "buffer", Settings(capacity=8)) as engine:
        engine.define(schema())
        engine.set_limiter(LIMITER)
        yield engine


def pending(engine: Engine) -> tuple[int, int]:
    runtime = engine.seat.control.runtime[0]
    return int(runtime["pending"]), int(runtime["limited"])


def ahead(ring: Ring) -> float:
    return ring.admission.rate_status().ahead


def test_a_write_that_waited_for_samples_has_its_full_time_for_a_slot(
    engine: Engine, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 5 s that a write waits for a slot, none goes while it waits for the other side."""
    late = [0.0]

    class Clock:
        def __getattr__(self, name: str) -> object:
            return getattr(time, name)

        def monotonic(self) -> float:
            return time.monotonic() + late[0]

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause()
        parent.pause_at("write.claimed")
        write(ring_of(engine), range(8))

    for module in (deadline, waiting):
        monkeypatch.setattr(module, "time", Clock())
    write(ring, range(5))
    with child(work) as other:
        other.reached()

        def lifted(*_: object) -> None:
            late[0] += 100  # that it has waited by now
            engine.set_limiter(None)
            other.go()
            other.reached()

        blocked = waiting.Calls._wait_for_blocker

        def goes_on(*args: object) -> object:
            seen = blocked(*args)  # type: ignore[arg-type]
            other.go()
            other.end()
            return seen

        monkeypatch.setattr(waiting.Waiting, "wait", lifted)
        monkeypatch.setattr(waiting.Calls, "_wait_for_blocker", goes_on)
        write(ring, range(8))
    assert ring.write_count == 5 + 8 + 8


def test_a_sample_that_passes_counts_for_nothing_also_if_it_fails(ring: Ring) -> None:
    write(ring, range(1))
    assert ring.admission.admit(8) == 8
    assert ahead(ring) == -8
    ring.admission.cancel(8)
    assert ahead(ring) == 0
    assert ring.admission.admit(8) == 8
    ring.seat.native.bypass(PASSES_ONCE)
    assert ring.admission.admit(8) == 0
    ring.admission.cancel(0)
    ring.admission.cancel(8)  # of the draw before: this thread's last one was not counted
    assert ahead(ring) == -8


def test_a_stopped_client_that_could_go_on_is_waited_for(
    engine: Engine, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still says that it waits, but no bigger buffer would help."""
    monkeypatch.setattr(waiting, "LOOK_S", 0.0)

    def work(_: Parent) -> None:
        engine.seat.rejoin()
        write(ring_of(engine), range(5))
        write(ring_of(engine), range(1))

    with child(work) as other:
        entries = engine.seat.control.entries
        while not (entries["waits_for"] == Side.SAMPLES).any():
            time.sleep(0.001)
        other.stop()
        ring.admission.admit(12)
        says = rf"pid {other.pid} \(stopped\), last inserted"
        with pytest.raises(RateLimitTimeout, match=says), deadline.within(0.2):
            ring.admission.admit(6)
        assert (ring.admission.rate_status().why(Side.SAMPLES, 1), ahead(ring)) == (None, -4)


def test_the_registry_says_what_a_client_waits_for(engine: Engine, ring: Ring) -> None:
    write(ring, range(5))
    mine = engine.seat.control.entries[engine.seat.entry]
    with pytest.raises(RateLimitTimeout), deadline.within(0):
        write(ring, np.arange(3))
    assert (mine["waits_for"], mine["inserts_wanted"], mine["waits_why"]) == (0, 3, Why.AHEAD)
    says = "5 items are there, 7 have to be"
    with pytest.raises(RateLimitTimeout, match=says), deadline.within(0):
        ring.admission.admit(1, 7)
    assert (mine["waits_for"], mine["samples_wanted"], mine["waits_why"]) == (0, 7, Why.FEW)
    assert pending(engine) == (0, 0)

"""Ctrl-C in a call that is granted something frees the grant for others.

A grant is a consumer's lease of a sample or the space of a reservation. See
tests/crash/interrupts.py.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import attach
from tests.crash.interrupts import Deed, Interrupter, interrupt, walk
from tests.kit.rings import engine_of
from tests.replay.test_waiting_consumers import SAMPLERS, SIZE, learner, units

Begun = tuple[Callable[[], object], Callable[[], object]]


@contextmanager
def sampled(path: Path, kind: str) -> Iterator[Begun]:
    """Begins a sample under an endless lease in a buffer with two batches."""
    with learner(path, kind) as rb, learner(path, kind) as other:
        rb.extend(units(0, 4))
        assert rb.can_sample()  # opens the consumer
        delivered: list[Any] = []

        def act() -> None:
            delivered.append(rb.sample(lease=float("inf")))

        def works() -> None:
            if delivered:
                return  # the interrupt came in a finalizer, where CPython only reports it
            (consumer,) = rb.consumers()
            assert not [lease for lease in consumer.leases if lease.ends_in_s]
            for lease in (60.0, 60.0):
                assert len(other.sample(lease=lease, timeout=50)) == 2 * SIZE

        yield act, works
        engine_of(rb).cleanup()


@contextmanager
def reserved(path: Path, kind: str) -> Iterator[Begun]:
    """Begins to reserve space for new items or a dead process's items, or drops a reservation."""
    with learner(path, "consuming") as rb:
        rb.extend(units(0, 1))
        if kind == "resume":
            with attach(path) as dead:
                dead.reserve(3).append(units(1, 1))
        engine = engine_of(rb)

        def works() -> None:
            assert int(engine.stats()["reserved"]) == 0
            assert len(rb.partials()) == (kind != "reserve")

        kept: list[Any] = []

        def act() -> None:
            kept.append(rb.resume(rb.partials()[0]) if kind == "resume" else rb.reserve(3))

        if kind == "dropped":
            act()
            kept[0].append(units(1, 1))
        yield kept.clear if kind == "dropped" else act, works
        kept.clear()
        engine.cleanup()


#: Points after the delivery: returns of Python functions, where CPython does not check for signals.
RETURNS = {"reserve": 1, "resume": 1, "dropped": 0, **dict.fromkeys(SAMPLERS, 6)}


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SAMPLERS, "reserve", "resume", "dropped"])
def test_what_an_interrupted_call_was_granted_is_free(kind: str, fast_path: Path) -> None:
    numbers = itertools.count()
    of = sampled if kind in SAMPLERS else reserved

    def begin() -> AbstractContextManager[Begun]:
        return of(fast_path / str(next(numbers)), kind)

    with begin() as (act, _):  # creates caches that are made once, such as those of torch
        act()
    with begin() as (act, _), Interrupter() as counted:
        act()
    del act, _
    gc.collect()
    places = range(len(counted.places) - RETURNS[kind])
    assert len(places) > 10
    for number in (*places[::9], *places[-20:]):
        interrupt(Deed(kind, begin), number)


def test_what_is_written_after_an_interrupted_commit_is_not_of_the_reservation(
    fast_path: Path,
) -> None:
    numbers = itertools.count()

    @contextmanager
    def begin() -> Iterator[Begun]:
        with learner(fast_path / str(next(numbers)), "consuming") as rb:
            rb.extend(units(0, 1))
            reservation = rb.reserve(2 * SIZE)

            def works() -> None:
                reservation.abort()
                rb.extend(units(2, 1))

            yield lambda: reservation.commit(units(1, 1)), works
            engine_of(rb).cleanup()

    assert walk(Deed("commit", begin), stride=10_000, all_of="memory/flow/reservations.py") > 3

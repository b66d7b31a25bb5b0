"""Reservations of one ring: what they count, and what a claim consumes and leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter, ReservationLostError, ShmBufferError
from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.flow.holders import Holder, describe_holders, holders, table_of
from shmbuffer.memory.format.ledger import RESERVATIONS, ReservationState
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import goes, read_all, require_sound, schema, settings, write
from tests.kit.rings import path_of, ring_of

LONG_NS = 5 * 10**9


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine.open(tmp_path / "buffer", replace(settings("rows"), alpha=None)) as made:
        made.define(schema())
        yield made


@pytest.fixture
def ring(engine: Engine) -> Ring:
    return ring_of(engine)


def counted(engine: Engine) -> tuple[int, int]:
    runtime = engine.seat.control.runtime[0]
    return int(runtime["reserved"]), int(runtime["pending"])


def test_a_claim_takes_the_reservation_over_and_an_abort_gives_it_back(
    engine: Engine, ring: Ring
) -> None:
    name = ring.reservations.reserve(4)
    with ring.reservations.hold(name):
        ring.claims.claim(2)
        assert counted(engine) == (0, 2)
        ring.claims.abort()
        assert counted(engine) == (4, 0)
        write(ring, [1, 2, 3])
    assert counted(engine) == (0, 0)
    assert sorted(read_all(ring).values()) == [1, 2, 3]
    require_sound(engine)


def test_a_commit_that_is_refused_leaves_the_reservation(engine: Engine, ring: Ring) -> None:
    name = ring.reservations.reserve(2)
    with ring.reservations.hold(name):
        ring.claims.claim(2)
        with pytest.raises(ValueError, match="priority"):
            ring.claims.commit(np.array([1.0, -1.0]))
        assert counted(engine) == (2, 0)
        write(ring, [1, 2])
    assert counted(engine) == (0, 0)


def test_a_write_in_place_is_made_from_no_reservation(engine: Engine, ring: Ring) -> None:
    write(ring, [1, 2])
    name = ring.reservations.reserve(2)
    with ring.reservations.hold(name):
        ring.claims.claim_slots(np.array([0]), in_place=True)
        ring.claims.abort()
        assert counted(engine) == (2, 0)
    assert ring.reservations.give_back(name)
    assert not ring.reservations.give_back(name)


def test_only_the_first_write_is_made_from_it(engine: Engine, ring: Ring) -> None:
    engine.set_limiter(None)
    with ring.reservations.hold(ring.reservations.reserve(2)):
        write(ring, [1])
        write(ring, [2, 3, 4])
    assert len(read_all(ring)) == 4


def test_another_handle_cannot_write_from_it(engine: Engine, ring: Ring) -> None:
    name = ring.reservations.reserve(2)
    with Engine.open(path_of(engine), None) as other:
        its = ring_of(other)
        with pytest.raises(ReservationLostError), its.reservations.hold(name):
            write(its, [1])
        assert not its.reservations.give_back(name)
    assert counted(engine) == (2, 0)


def test_a_reservation_for_named_slots_is_taken_over_too(tmp_path: Path) -> None:
    with Engine.open(tmp_path / "placed", settings("rows")) as engine:
        ring = engine.define(schema())
        with ring.reservations.hold(ring.reservations.reserve(3)):
            ring.claims.claim_slots(np.array([5, 2]), in_place=False)
            assert counted(engine) == (0, 2)
            ring.claims.abort()
        assert counted(engine) == (3, 0)


def test_time_ends_the_soonest_first(engine: Engine, ring: Ring) -> None:
    engine.set_limiter(RateLimiter(max_times_sampled=1))
    names = [ring.reservations.reserve(2, seconds=seconds) for seconds in (3600.0, 0.02, 1800.0)]
    assert counted(engine) == (6, 0)
    time.sleep(0.03)
    assert goes(lambda: write(ring, [1, 2]))
    assert goes(lambda: write(ring, [3, 4]))
    assert not goes(lambda: write(ring, [5]))
    assert counted(engine) == (4, 0)
    assert [ring.reservations.give_back(name) for name in names] == [True, False, True]


def test_all_may_be_used_and_not_one_more(engine: Engine, ring: Ring) -> None:
    names = [ring.reservations.reserve(1) for _ in range(RESERVATIONS)]
    assert len(set(names)) == RESERVATIONS
    with pytest.raises(ShmBufferError, match=r"all 4,096 reservations are in use; commit or abort"):
        ring.reservations.reserve(1)
    ring.reservations.give_back(names[1000])
    ring.reservations.reserve(1)
    assert counted(engine) == (RESERVATIONS, 0)


def test_pieces_are_known_by_their_number(engine: Engine, ring: Ring) -> None:
    name = ring.reservations.reserve(2, number=40)
    with pytest.raises(ReservationLostError):
        ring.reservations.reserve(2, number=40)
    with ring.reservations.hold(name):
        write(ring, [1])
    assert ring.reservations.list_committed() == [40]
    with pytest.raises(ReservationLostError):
        ring.reservations.reserve(2, number=40)
    assert ring.reservations.is_done(40, forget=True)
    assert not ring.reservations.is_done(40)
    assert ring.reservations.reserve(1) // RESERVATIONS == 41, "a number is never used twice"


def test_a_check_sees_counts_and_states_that_do_not_fit(engine: Engine, ring: Ring) -> None:
    ring.reservations.reserve(3)
    engine.seat.control.runtime["reserved"] = 5
    report = engine.check()
    assert report.problems == ["1 counts of reserved space differ from the reservations"]
    engine.seat.control.runtime["reserved"] = 3
    table = table_of(engine.seat)
    table["state"][7] = 9
    assert not engine.check().ok
    table["state"][7] = ReservationState.UNRESERVED
    require_sound(engine)


def test_a_ring_that_nobody_reserves_in_has_no_table(engine: Engine) -> None:
    assert len(table_of(engine.seat)) == 0
    found = inspect(path_of(engine))
    assert (found["reservations"], found["partials"]) == ([], 0)
    assert engine.seat.native.cancel_reservation(RESERVATIONS + 3, LONG_NS) == -_core.NO_RESERVATION
    assert engine.seat.native.reserve(1, 0, 2**64 - 1, 0, 0, LONG_NS) == -_core.ALL_RESERVED


def test_holders_are_told_from_the_one_with_the_most(engine: Engine, ring: Ring) -> None:
    with Engine.open(path_of(engine), None) as other:
        its = ring_of(other)
        its.reservations.reserve(5)
        for rows in (1, 1):
            ring.reservations.reserve(rows)
        found = holders(table_of(engine.seat), engine.seat.control.entries)
        assert [(one.items, one.reservations) for one in found] == [(5, 1), (2, 2)]
        assert found[0].entry == other.seat.entry
    some = [Holder(at, 10 + at, 1 + at, 1000 * (3 - at), 0, 1.0) for at in range(3)]
    assert describe_holders([]) == ""
    assert describe_holders(some[:1]) == "pid 10 holds a reservation of 3,000 items"
    assert describe_holders(some[1:]) == (
        "pid 11 holds 2 reservations of 2,000 items, and another process 1,000"
    )
    assert describe_holders(some) == (
        "pid 10 holds a reservation of 3,000 items, and 2 other processes 3,000"
    )

"""A waiting client is woken, goes on if the error buffer allows it, or gets an error."""

from __future__ import annotations

import itertools

import pytest

from tests.model.flow import Flow, explore

SMALL = list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 5), (1, 2, 3)))
"""Batch sizes of a writer and of a sampler, min_size, and samples per insert."""


@pytest.mark.product(few=20)
@pytest.mark.parametrize(("write", "draw", "min_size", "ratio"), SMALL)
def test_an_error_buffer_that_is_said_to_be_enough_is(
    write: int, draw: int, min_size: int, ratio: int
) -> None:
    """The bound is exactly (w * samples_per_insert + s) / 2; below it, both sides may deadlock."""
    flow = Flow(ratio, 0, min_size, (write,), (draw,))
    found = explore(flow._replace(buffer=flow.enough))
    assert (found.lost, len(found.deadlocks), len(found.stuck)) == (0, 0, 0)
    less = explore(flow._replace(buffer=flow.enough - 1))
    assert less.lost == 0
    assert less.deadlocks <= less.stuck
    ended = {state for state in less.stuck if not list(flow.steps(state))}
    assert ended <= less.deadlocks


def test_with_a_smaller_error_buffer_both_sides_may_wait_for_ever() -> None:
    deadlocks = 0
    for write, draw, min_size, ratio in SMALL:
        flow = Flow(ratio, 0, min_size, (write,), (draw,))
        deadlocks += bool(explore(flow._replace(buffer=flow.enough - 2)).deadlocks)
    assert deadlocks >= 20


MANY = [
    Flow(1, 0, 2, (1, 2), (2,)),
    Flow(2, 0, 1, (1,), (2, 3)),
    Flow(2, 0, 3, (1, 2), (1, 3)),
    Flow(1, 0, 4, (3, 3), (2, 1)),
]


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("flow", "deaths"),
    [
        *itertools.product(MANY, [0]),
        *itertools.product(MANY[:2], [1, 2]),
        *(pytest.param(flow, 1, marks=pytest.mark.full) for flow in MANY[2:]),
    ],
)
def test_several_clients_go_on_also_where_some_of_them_die(flow: Flow, deaths: int) -> None:
    """At least one client of each side lives. A side that is alone passes, waits or raises."""
    found = explore(flow._replace(buffer=flow.enough, deaths=deaths))
    assert not found.deadlocks
    if deaths == 0:
        assert found.lost == 0
        assert not found.stuck
    sides = [{client.side for client in state.clients if client.at != 4} for state in found.stuck]
    assert all(len(there) == 1 for there in sides)
    assert found.states > 50


@pytest.mark.parametrize("rule", ["registered without the mutex", "draws wake nobody"])
def test_a_wake_up_that_is_lost_is_found(rule: str) -> None:
    flow = Flow(1, 0, 1, (1,), (1,), broken=frozenset({rule}))
    found = explore(flow._replace(buffer=flow.enough))
    assert found.lost > 0
    assert found.stuck


def test_inserts_that_wait_below_min_size_are_found() -> None:
    flow = Flow(1, 0, 5, (4,), (1,), broken=frozenset({"inserts wait though there are too few"}))
    assert explore(flow._replace(buffer=flow.enough)).stuck


def test_dead_claims_that_are_not_reaped_are_found() -> None:
    flow = Flow(1, 0, 1, (2, 2), (1,), 1, frozenset({"the dead are not reaped"}))
    found = explore(flow._replace(buffer=flow.enough))
    assert any(len({c.side for c in state.clients if c.at != 4}) == 2 for state in found.stuck)


HOLDERS = [
    Flow(1, 0, 1, (1, 2), (2,), reserving=True),
    Flow(2, 0, 1, (1,), (2, 3), reserving=True),
    Flow(1, 0, 1, (2, 2), (1,), reserving=True),
]


@pytest.mark.product(few=2)
@pytest.mark.parametrize(("flow", "deaths"), list(itertools.product(HOLDERS, [0, 1])))
def test_writers_that_reserve_go_on_and_never_go_too_far(flow: Flow, deaths: int) -> None:
    """Reservations count, a commit is not checked again, and a death frees its reservations."""
    found = explore(flow._replace(buffer=flow.enough, deaths=deaths))
    assert not found.deadlocks
    assert found.over == 0
    if deaths == 0:
        assert found.lost == 0
        assert not found.stuck
    sides = [{client.side for client in state.clients if client.at != 4} for state in found.stuck]
    assert all(len(there) == 1 for there in sides)
    assert found.states > 50


@pytest.mark.parametrize(
    ("rule", "deaths"),
    [
        ("what is reserved is not counted", 0),
        ("give back wakes nobody", 0),
        ("the dead are not reaped", 1),
    ],
)
def test_a_broken_rule_of_reservations_is_found(rule: str, deaths: int) -> None:
    flow = HOLDERS[2]._replace(broken=frozenset({rule}), deaths=deaths)
    found = explore(flow._replace(buffer=flow.enough))
    both = [s for s in found.stuck if len({c.side for c in s.clients if c.at != 4}) == 2]
    assert found.over or found.lost or both

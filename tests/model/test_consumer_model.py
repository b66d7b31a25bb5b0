"""Each consumer has each item acknowledged once, although clients die and leases run out."""

from __future__ import annotations

import pytest

from tests.crash.harness import native_points
from tests.model.consuming import NOT_MODELLED, Consuming, explore
from tests.model.state import ViolationError

pytestmark = pytest.mark.slow

SMALL = {
    "a lease runs out before the ack": Consuming(2, 3, 1, ((0, 1), (0, 2)), ends=1),
    "a client dies at any store": Consuming(2, 2, 1, ((0, 1), (0, 2)), deaths=1),
    "one dies, and who repairs dies": Consuming(2, 2, 1, ((0, 2), (0, 1)), deaths=2),
    "two writers, of whom one may die": Consuming(2, 3, 2, ((0, 2),), deaths=1),
    "each item twice": Consuming(2, 3, 1, ((0, 2),), times=2, deaths=1, ends=1),
    "items are given back": Consuming(2, 2, 1, ((0, 2), (0, 1)), ends=1, gives_back=True),
}
BY_THE_MINUTE = pytest.mark.full
LARGE = {
    "one dies, and a lease runs out": Consuming(2, 2, 1, ((0, 2), (0, 1)), deaths=1, ends=1),
    "two consumers": Consuming(2, 3, 1, ((0, 2), (1, 1)), ends=1),
    "a ring of three slots": Consuming(3, 3, 1, ((0, 2), (0, 2)), ends=2),
    "two consumers, of whose clients one dies": Consuming(2, 3, 1, ((0, 2), (1, 1)), deaths=1),
    "two laps, and two deaths": Consuming(2, 4, 1, ((0, 2), (0, 2)), deaths=2),
    "two laps, two writers": Consuming(2, 4, 2, ((0, 2), (0, 1)), deaths=1),
    "a client dies, a lease runs out": Consuming(2, 4, 1, ((0, 1), (0, 2)), deaths=1, ends=1),
    "three clients": Consuming(2, 2, 1, ((0, 1), (0, 1), (0, 1)), deaths=1, ends=1),
}


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(one, id=name) for name, one in SMALL.items()),
        *(pytest.param(one, id=name, marks=BY_THE_MINUTE) for name, one in LARGE.items()),
    ],
)
def test_an_item_is_done_once_and_none_is_skipped_or_written_over(scenario: Consuming) -> None:
    found = explore(scenario)
    assert found.wedged == 0
    assert found.states > 400


ONE = Consuming(2, 3, 1, ((0, 2),), deaths=1)
TWO = Consuming(2, 2, 1, ((0, 2), (0, 1)), deaths=1)
#: The rules that are switched off, the scenario, and the message of the search, or None if some
#: item is never done.
BROKEN = {
    "a late ack is taken": (TWO._replace(ends=1), "acknowledged by one who has lost it"),
    "writers do not ask": (ONE, "not acknowledged is written over"),
    "what the dead held stays theirs": (TWO, None),
    "leases are not counted again": (TWO, None),
    "next before the items": (TWO, None),
    "the ticket before what is noted": (Consuming(1, 2, 1, ((0, 1), (0, 1)), deaths=1), None),
    "an ack wakes nobody": (ONE._replace(deaths=0), None),
}


#: The rules with the shortest searches.
FAST = ("writers do not ask", "an ack wakes nobody", "what the dead held stays theirs")


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule in FAST else BY_THE_MINUTE) for rule in BROKEN]
)
def test_a_rule_that_is_missing_is_noticed(rule: str) -> None:
    scenario, told = BROKEN[rule]
    assert explore(scenario).wedged == 0
    broken = scenario._replace(broken=frozenset({rule}))
    if told is None:
        assert explore(broken).wedged > 0
    else:
        with pytest.raises(ViolationError, match=told):
            explore(broken)


def test_each_store_of_a_consumer_is_one_of_the_model() -> None:
    gives = explore(SMALL["items are given back"]).points
    dies = explore(SMALL["a client dies at any store"]).points
    assert {*gives, *dies, *NOT_MODELLED} == set(native_points("consume"))

"""Learners never use an item that is too old, and neither refusals nor deaths stop them."""

from __future__ import annotations

import pytest

from tests.model.ages import Ages, explore

SMALL = [
    Ages(0, 1, 2),
    Ages(1, 1, 3, last=6),
    Ages(1, 2, 2),
    Ages(2, 1, 2),
    Ages(0, 2, 2, deaths=1),
    Ages(1, 1, 3, last=5, deaths=1),
    Ages(1, 1, 2, last=3, deaths=2),
    Ages(1, 2, 2, last=3, deaths=1),
    Ages(1, 1, 2, learners=2),
    Ages(1, 1, 2, learners=2, deaths=1),
]


@pytest.mark.product(few=2)
@pytest.mark.parametrize("ages", SMALL)
def test_every_run_comes_to_the_last_version_with_items_that_are_young(ages: Ages) -> None:
    """Items reach the allowed age and no more, with one exception.

    The exception is an item that a learner held when it died beside other learners.
    """
    found = explore(ages)
    assert (found.early, found.circles) == (0, 0)
    assert found.staleness == ages.staleness
    assert found.states > 30


@pytest.mark.parametrize("learners", [1, pytest.param(2, marks=pytest.mark.full)])
def test_learners_that_publish_first_go_on_whoever_of_them_dies(learners: int) -> None:
    """Items that wait are older by the number of versions that were published without items."""
    found = explore(Ages(0, 1, 2, learners, deaths=1, publishes_first=True))
    assert (found.early, found.circles) == (0, 0)
    assert found.staleness <= learners + 1


def test_with_several_learners_who_dies_behind_its_ack_may_leave_the_others_waiting() -> None:
    """The others do not know that a version is missing until its successor publishes."""
    assert explore(Ages(0, 1, 2, learners=2, deaths=1)).early > 0


@pytest.mark.parametrize(
    ("rule", "ages"),
    [
        ("the turn is not looked at", Ages(1, 1, 2)),
        ("what the dead acknowledged is waited for", Ages(0, 1, 2, deaths=1)),
    ],
)
def test_a_rule_of_ages_that_is_missing_is_noticed(rule: str, ages: Ages) -> None:
    found = explore(ages._replace(broken=frozenset({rule})))
    assert found.early or found.staleness > ages.staleness

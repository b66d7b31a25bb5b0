from __future__ import annotations

import random

import pytest

from tests.model.campaign import campaign, random_scenario, walk
from tests.model.protocol import explore
from tests.model.state import DRAW, SAMPLE, Scenario, ring, update
from tests.torture.command import following

pytestmark = pytest.mark.slow


def test_a_campaign_searches_and_walks_the_scenario_of_its_seed_first() -> None:
    said: list[str] = []
    figures = campaign(0, 1, said.append)
    assert figures == campaign(0, 1, said.append)
    assert figures["scenarios"] == figures["searched_to_the_end"] == 1
    assert figures["walks"] == 200
    assert len(said) == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_scenarios_are_sound(seed: int) -> None:
    rng = random.Random(following(seed))
    outcome = explore(random_scenario(rng, clients=3, calls=2), limit=30_000)
    assert not outcome.broken_rule, str(outcome)
    large = random_scenario(rng, clients=6, calls=3)
    for _ in range(20):
        walk(large, rng)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("no second look", "no torn, invented or uncommitted row is returned"),
        ("goal at claim", "write_count never falls"),
        ("stale update", "a leaf is positive only if its word is COMMITTED"),
    ],
)
def test_a_walk_notices_that_a_rule_is_missing(rule: str, broken: str) -> None:
    scenario = Scenario(
        3,
        ((ring(2), ring(2)), (ring(1), ring(3)), (DRAW, update(3), SAMPLE)),
        written=2,
        broken=frozenset({rule}),
    )
    rng = random.Random(1)

    def walks() -> None:
        for _ in range(1000):
            walk(scenario, rng)

    with pytest.raises(AssertionError, match=broken) as caught:
        walks()
    assert str(caught.value).count(": write.") > 1, "the trace is missing"


def test_a_search_with_a_limit_says_that_it_did_not_come_to_the_end() -> None:
    scenario = Scenario(2, ((ring(1),), (ring(1),)), written=1)
    assert explore(scenario).complete
    outcome = explore(scenario, limit=100)
    assert not outcome.complete
    assert not outcome.broken_rule
    assert 100 < outcome.states < 200

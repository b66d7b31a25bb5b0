"""No process writes to a slot without space, whichever process dies while it allocates."""

from __future__ import annotations

import pytest

from tests.crash.harness import python_points
from tests.model.growth import Growing, explore
from tests.model.state import ViolationError

SCENARIOS = {
    "one writer": Growing(8, 16, 2, 3, (3,)),
    "two writers, one dies": Growing(6, 12, 2, 1, (3, 3), deaths=1),
    "two writers, and both die": Growing(5, 10, 2, 1, (3, 3), deaths=2),
    "three writers": Growing(6, 12, 2, 1, (2, 2, 2), deaths=1),
    "too little space": Growing(8, 11, 3, 2, (3, 3), deaths=1),
    "all die, and the machine is restarted": Growing(6, 12, 2, 1, (2, 2), deaths=3, restarts=1),
    "restarted with too little space": Growing(8, 10, 3, 2, (2, 1), deaths=3, restarts=2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_slot_that_is_written_has_its_space(name: str) -> None:
    found = explore(SCENARIOS[name])
    assert found.states > 10
    assert (found.full > 0) == ("too little" in name)


#: The rules that are switched off, the scenario, and the message of the search.
BROKEN = {
    "a claim does not ask": ("one writer", "written that has no space"),
    "allocated comes last": ("one writer", "count as allocated that have no space"),
    "two may take space at once": ("too little space", "allocated"),
    "what is written is kept": ("too little space", "no space"),
    "space is taken again": ("all die, and the machine is restarted", "no space"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_that_is_missing_is_noticed(rule: str) -> None:
    name, told = BROKEN[rule]
    with pytest.raises(ViolationError, match=told):
        explore(SCENARIOS[name]._replace(broken=frozenset({rule})))


def test_each_step_of_a_growth_is_one_of_the_model() -> None:
    passed = frozenset().union(*(explore(one).points for one in SCENARIOS.values()))
    assert passed == {*python_points("grow"), "space.taken", "space.released"}

"""An exhaustive search of the slot protocol: no state breaks a rule, and each rule is needed."""

from __future__ import annotations

from functools import cache

import pytest

from shmbuffer._native import _core
from tests.model.protocol import Outcome, explore
from tests.model.state import (
    ATTACH,
    DRAW,
    JOIN,
    LEAVE,
    LOOK,
    MODEL_STEPS,
    NOT_MODELLED,
    REAP,
    RECOVER,
    SAMPLE,
    STEPS,
    WITHIN,
    Scenario,
    empty,
    in_place,
    placed,
    ring,
    update,
)

pytestmark = pytest.mark.slow

# Unless a scenario says otherwise, one process may die after any step, and another one in the reap,
# repair or recovery that follows.
SCENARIOS = {
    "two ring writers, a learner and a reaper": Scenario(
        2, ((ring(1),), (ring(2),), (SAMPLE,), (REAP,)), written=2
    ),
    "batches around the end of the ring": Scenario(
        3, ((ring(2),), (ring(2, 1),), (SAMPLE,)), written=2
    ),
    "two claims are open at once": Scenario(
        3, ((ring(2),), (ring(1),), (DRAW, update(3))), written=1
    ),
    "a batch larger than the ring": Scenario(2, ((ring(3),), (ring(1),), (SAMPLE,)), written=1),
    "writers who write again": Scenario(2, ((ring(1), ring(1)), (ring(2), ring(1))), written=2),
    "a learner gives back priorities": Scenario(
        2, ((ring(1, 1),), (ring(1),), (SAMPLE, update(3))), written=2
    ),
    "two learners give back priorities": Scenario(
        2, ((ring(1),), (DRAW, update(3), SAMPLE), (DRAW, update(4))), written=1
    ),
    "a placed write over a lap": Scenario(
        3, ((placed(1),), (ring(2, 1),), (SAMPLE, update(3))), written=3
    ),
    "an in-place write over a lap": Scenario(
        3, ((in_place(0, 2),), (ring(2),), (DRAW, update(3))), written=2
    ),
    "an in-place write where nothing is": Scenario(
        2, ((in_place(0, 1),), (ring(2),), (SAMPLE,)), written=1
    ),
    "emptied while others write": Scenario(
        3, ((ring(1), empty()), (ring(2, 1),), (SAMPLE,)), written=2
    ),
    "emptied during an in-place write": Scenario(
        2, ((in_place(1),), (empty(), ring(1)), (DRAW, update(3))), written=2
    ),
    "emptied twice, once with the count kept": Scenario(
        3, ((empty(), ring(1)), (empty(keep_count=True),), (ring(1),)), written=2
    ),
    "writes that fail": Scenario(
        2, ((ring(2), ring(1)), (ring(1, 1),), (DRAW, update(3))), written=2, errors=True
    ),
    "three writers wait for each other": Scenario(
        2, ((ring(2),), (ring(1),), (in_place(0),)), written=2, forfeits=False
    ),
    "turns are forfeited and writers give up": Scenario(
        2, ((ring(2),), (ring(1),), (placed(1),)), written=2, timeouts=True
    ),
    "a writer is stopped in the copy": Scenario(
        2, ((ring(1),), (ring(2),), (SAMPLE,)), written=2, stop="copying", timeouts=True
    ),
    "a waiting writer is stopped": Scenario(
        2, ((ring(2),), (ring(1),), (ring(1),)), written=2, stop="waiting", crashes=0
    ),
    "the kernel is slow to show a death": Scenario(
        2, ((ring(1),), (ring(2),), (DRAW,), (REAP,)), written=2, slow_death=True
    ),
    "two deaths, anywhere": Scenario(
        2, ((ring(1),), (ring(2),), (DRAW, update(3))), written=2, crashes=2
    ),
    "all die, and one recovers": Scenario(
        2, ((ring(2),), (ring(1, 1),), (RECOVER, ring(1), SAMPLE)), written=2, kills=1
    ),
    "all die around an update, and one recovers": Scenario(
        2, ((ring(1),), (DRAW, update(3)), (RECOVER, in_place(0))), written=2, kills=1
    ),
    "all die around an emptying, and one recovers": Scenario(
        3, ((empty(),), (in_place(0, 1),), (RECOVER, ring(2))), written=2, kills=1
    ),
    "newcomers find out whether to recover": Scenario(
        2,
        ((ring(1),), (DRAW,), (ATTACH, DRAW), (ATTACH, DRAW)),
        written=2,
        kills=1,
        slow_death=True,
    ),
    "a newcomer takes the entry of a dead client": Scenario(
        2, ((ring(2),), (SAMPLE,), (REAP,), (JOIN, ring(1))), written=2
    ),
    "the last client leaves while another comes": Scenario(
        2, ((ring(2), LEAVE), (ATTACH, ring(1))), written=2, kills=1, every_order=True
    ),
    "an onlooker takes the mutex while the last client leaves": Scenario(
        2, ((DRAW, LEAVE), (LOOK,), (ATTACH, ring(1))), written=1, every_order=True
    ),
}

# Only `--full` searches these. Other scenarios have the same steps with fewer processes or writes.
WIDE = {
    "two ring writers, a learner and a reaper",
    "a learner gives back priorities",
    "emptied while others write",
    "turns are forfeited and writers give up",
}

# A scenario in which each missing rule is noticed, and what the missing rule breaks.
TWO_WRITERS = Scenario(2, ((ring(2),), (ring(1),)), written=1)
TWO_OPEN_CLAIMS = Scenario(3, ((ring(2),), (ring(1),)), written=1)
WRITER_AND_LEARNER = Scenario(2, ((ring(1),), (SAMPLE,)), written=2)
UPDATES = Scenario(2, ((DRAW, update(3)), (DRAW, update(4))), written=2)
EMPTYINGS = Scenario(3, ((empty(),), (empty(),)), written=2)
QUEUE = Scenario(2, ((ring(2),), (ring(1),), (ring(1),)), written=2, crashes=0)
DEATH_IN_QUEUE = QUEUE._replace(crashes=1, again=0, forfeits=False)
RECOVERY = Scenario(
    2, ((ring(2, 3),), (DRAW, update(4)), (RECOVER, ring(1), SAMPLE)), written=2, kills=1
)
NEWCOMER = Scenario(2, ((DRAW,), (REAP,), (REAP,), (JOIN,)), written=1, again=0, every_order=True)

TORN = "no torn, invented or uncommitted row is returned"
WHOLE_ROW = "a committed row is whole"
WHOLE_BATCH = "a dead writer's batch is whole or absent"
ACKNOWLEDGED = "an acknowledged item is there"
PRIORITY = "an item has the priority it was given"
MASS = "a leaf is positive only if its word is COMMITTED"
LENGTH = "length is the number of committed slots"
COVERED = "a WRITING slot is covered by one claim"
COUNTS = "write_count counts what was written"
COUNT_FALLS = "write_count never falls, but by empty()"
ONCE = "a ticket is used once"
BELOW_HEAD = "tickets are below head"
OWN_SLOTS = "a living writer keeps its slots"
OWN_ENTRY = "a living client keeps its entry"
MUTEX = "the mutex is unlocked by its holder only"
PHASES = "only IDLE and PAYLOAD are seen without the mutex"
EMPTIED = "after empty() the ring begins at slot 0"
PASSED = "an item goes when the head has passed it"
OVERTAKEN = "nobody overtakes an earlier turn"
ENDS = "every survivor comes to an end"

MUTANTS = {
    "commit before payload": (WRITER_AND_LEARNER, WHOLE_ROW),
    "no WRITING mark": (WRITER_AND_LEARNER, PRIORITY),
    "no second look": (WRITER_AND_LEARNER, TORN),
    "leaf kept at claim": (WRITER_AND_LEARNER, MASS),
    "told before the commit": (TWO_WRITERS, ACKNOWLEDGED),
    "dead writer's slots committed": (
        Scenario(2, ((ring(1),), (ring(1),)), written=1),
        WHOLE_ROW,
    ),
    "committing rolled back": (TWO_WRITERS, WHOLE_BATCH),
    "claim after marks": (TWO_WRITERS, COVERED),
    "living writer's slot taken": (TWO_WRITERS, OWN_SLOTS),
    "goal at claim": (TWO_OPEN_CLAIMS, COUNT_FALLS),
    "count added": (TWO_WRITERS, COUNTS),
    "head not repaired": (TWO_WRITERS, BELOW_HEAD),
    "claim after head": (TWO_WRITERS._replace(written=2), PASSED),
    "unmarked items stay": (TWO_WRITERS._replace(written=2), PASSED),
    "count not repaired": (TWO_WRITERS, COUNTS),
    "repair leaves claims": (TWO_WRITERS, PHASES),
    "repair ends payload claims": (TWO_WRITERS, OWN_SLOTS),
    "length not counted again": (TWO_WRITERS, LENGTH),
    "tree not rebuilt": (UPDATES, PRIORITY),
    "leaves not rebuilt": (UPDATES, PRIORITY),
    "stale update": (Scenario(2, ((ring(1),), (DRAW, update(3))), written=2), MASS),
    "default marker kept": (
        Scenario(2, ((ring(1),), (DRAW, update(3)), (DRAW,)), written=1),
        PRIORITY,
    ),
    "stale priority kept in place": (
        Scenario(2, ((ring(2),), (in_place(0),)), written=2),
        PRIORITY,
    ),
    "placed claim of one ticket": (Scenario(3, ((placed(2),), (ring(3),)), written=3), BELOW_HEAD),
    "emptying undone": (EMPTYINGS, EMPTIED),
    "goal of empty() not noted": (
        Scenario(2, ((empty(keep_count=True),), (DRAW,)), written=1),
        COUNTS,
    ),
    "empty() takes slots being written": (
        Scenario(2, ((empty(),), (ring(1),)), written=1),
        OWN_SLOTS,
    ),
    "no turns": (QUEUE, OVERTAKEN),
    "turn not forfeited": (QUEUE._replace(stop="waiting"), ENDS),
    "no deadline": (TWO_WRITERS._replace(stop="copying", timeouts=True), ENDS),
    "waiting writer holds marks": (
        Scenario(2, ((ring(1),), (in_place(0, 1),), (in_place(1, 0),)), written=1, crashes=0),
        ENDS,
    ),
    "incarnation not compared again": (
        Scenario(2, ((ring(1),), (REAP,), (ring(1),), (JOIN, ring(1))), written=2),
        OWN_ENTRY,
    ),
    "entry freed first": (Scenario(2, ((ring(2),), (REAP,), (DRAW,)), written=1), COVERED),
    "dead entry overwritten": (
        Scenario(2, ((ring(1),), (SAMPLE,), (JOIN, SAMPLE)), written=2),
        COVERED,
    ),
    "recovery does not reap": (RECOVERY, COVERED),
    "READY first": (RECOVERY, PRIORITY),
    "joined before READY": (
        SCENARIOS["newcomers find out whether to recover"],
        OWN_ENTRY,
    ),
    "entry freed under the mutex": (
        Scenario(2, ((DRAW, LEAVE), (RECOVER, ring(1))), written=2, every_order=True),
        MUTEX,
    ),
    "onlooker holds nothing": (
        Scenario(2, ((DRAW, LEAVE), (LOOK,), (RECOVER,)), written=1, every_order=True),
        MUTEX,
    ),
}

# Of each pair of rules one is enough: either may be missing, but not both.
PAIRS = {
    "an entry is taken under the mutex, or a free one is not reaped": (
        "entry taken without the mutex",
        "free entry reaped",
        NEWCOMER,
        OWN_ENTRY,
    ),
}


search = cache(explore)


def without(scenario: Scenario, *rules: str) -> Outcome:
    return search(scenario._replace(broken=frozenset(rules)))


@pytest.fixture
def names(full: bool) -> list[str]:
    return [name for name in SCENARIOS if full or name not in WIDE]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in WIDE else ()) for name in SCENARIOS],
)
def test_no_rule_is_broken_in_any_state(name: str) -> None:
    outcome = search(SCENARIOS[name])
    assert not outcome.broken_rule, str(outcome)


def test_at_least_200_000_states_are_visited(names: list[str]) -> None:
    assert sum(search(SCENARIOS[name]).states for name in names) >= 200_000


def test_every_crash_point_is_reached_and_a_death_is_tried_there(names: list[str]) -> None:
    found = [search(SCENARIOS[name]) for name in names]
    taken = frozenset[str]().union(*(one.taken for one in found))
    died_after = frozenset[str]().union(*(one.died_after for one in found))
    assert set(STEPS) | set(MODEL_STEPS) <= taken
    assert set(STEPS) <= died_after


def test_every_crash_point_of_the_core_has_its_place_in_the_model() -> None:
    """A new crash point must be a step, lie within a step, or be listed as not modelled."""
    steps, points = {*STEPS, *MODEL_STEPS}, set(_core.crash_points())
    within = {point for finer in WITHIN.values() for point in finer}
    assert points == (points & steps) | within | set(NOT_MODELLED)
    assert not steps & within
    assert not (steps | within) & set(NOT_MODELLED)
    assert set(WITHIN) <= steps
    core = {step.split(".")[0] for step in points & steps}
    only_here = {step for step in STEPS if step.split(".")[0] in core} - points
    assert only_here == {"wait.sleep", "wait.timeout"}


@pytest.mark.parametrize("rule", MUTANTS)
def test_the_search_notices_that_a_rule_is_missing(rule: str) -> None:
    scenario, broken = MUTANTS[rule]
    outcome = without(scenario, rule)
    assert outcome.broken_rule == broken, str(outcome)
    assert outcome.trace


@pytest.mark.full
@pytest.mark.parametrize("rule", MUTANTS)
def test_with_the_rule_the_same_scenario_is_sound(rule: str) -> None:
    scenario, _ = MUTANTS[rule]
    outcome = search(scenario)
    assert not outcome.broken_rule, str(outcome)


@pytest.mark.parametrize("pair", PAIRS)
def test_either_of_two_rules_is_enough_but_not_neither(pair: str) -> None:
    one, other, scenario, broken = PAIRS[pair]
    for rule in (one, other):
        outcome = without(scenario, rule)
        assert not outcome.broken_rule, str(outcome)
    outcome = without(scenario, one, other)
    assert outcome.broken_rule == broken, str(outcome)


def test_a_head_that_is_not_repaired_leaves_an_emptied_ring_in_the_middle() -> None:
    outcome = without(EMPTYINGS, "head not repaired")
    assert outcome.broken_rule == EMPTIED, str(outcome)


def test_the_head_may_move_after_the_marks_as_it_is_repaired() -> None:
    outcome = without(TWO_WRITERS, "head after marks")
    assert not outcome.broken_rule, str(outcome)
    assert outcome.states != search(TWO_WRITERS).states
    assert without(TWO_WRITERS, "head after marks", "head not repaired").broken_rule == ONCE


def test_the_turn_of_a_dead_waiter_is_reaped_or_forfeited() -> None:
    assert without(DEATH_IN_QUEUE, "dead turn not reaped").broken_rule == ENDS
    forfeited = without(DEATH_IN_QUEUE._replace(forfeits=True), "dead turn not reaped")
    assert not forfeited.broken_rule, str(forfeited)


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(2, ((ring(1),), (ring(2),), (SAMPLE,)), written=1),
        Scenario(2, ((in_place(0, 1),), (DRAW, update(3)), (REAP,)), written=2),
        Scenario(3, ((empty(),), (ring(2),), (DRAW,)), written=2),
        Scenario(2, ((ring(1),), (DRAW,), (ATTACH, ring(1))), written=2, kills=1),
    ],
    ids=["ring writers", "in place", "emptying", "recovery"],
)
def test_while_the_mutex_is_held_the_order_of_others_does_not_matter(scenario: Scenario) -> None:
    reduced = search(scenario)
    every = search(scenario._replace(every_order=True))
    assert every.transitions > reduced.transitions
    assert every.unlocked == reduced.unlocked
    assert not every.broken_rule


def test_a_trace_tells_who_did_what_until_the_rule_broke() -> None:
    outcome = without(WRITER_AND_LEARNER, "no second look")
    assert outcome.trace[0] == "sample 1: sample.locked"
    assert "ring 0: write.copy" in outcome.trace
    assert outcome.trace[-1] == "sample 1: (SAMPLE_VALIDATE)"

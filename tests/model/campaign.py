"""Random scenarios of the model: exhaustive searches of small ones, random walks in large ones.

    python -m tests.model.campaign --seconds 60 --seed 1

A search visits every state of its scenario, up to a limit on their number. A walk takes random
steps until every process has reached its end, and checks every state on its way.
"""

from __future__ import annotations

import random
import sys

from tests.model.protocol import Model, describe, explore
from tests.model.state import (
    ATTACH,
    DRAW,
    LEAVE,
    LOOK,
    REAP,
    RECOVER,
    SAMPLE,
    Op,
    Scenario,
    ViolationError,
    empty,
    in_place,
    placed,
    ring,
    update,
)
from tests.torture.command import Figures, Say, main, repeatable, seeds

#: Largest number of states in a search, which take 1 GB of memory at most.
SEARCH_STATES = 1_000_000
#: Largest number of steps in a walk. Nearly all walks take less than a thousand.
WALK_STEPS = 100_000
WALKS_A_SCENARIO = 200


def writer(rng: random.Random, capacity: int, calls: int) -> tuple[Op, ...]:
    def call() -> Op:
        kind = rng.choices(("ring", "placed", "in place", "empty"), (6, 2, 2, 1))[0]
        if kind == "ring":
            priority = rng.choice(((), (rng.randint(1, 4),)))
            return ring(rng.randint(1, capacity + 1), *priority)
        if kind == "empty":
            return empty(keep_count=rng.random() < 0.5)
        slots = rng.sample(range(capacity), rng.randint(1, capacity))
        return placed(*slots) if kind == "placed" else in_place(*slots)

    return tuple(call() for _ in range(calls))


def learner(rng: random.Random, calls: int) -> tuple[Op, ...]:
    pairs = ((rng.choice((SAMPLE, DRAW)), update(rng.randint(1, 4))) for _ in range(calls))
    return tuple(call for pair in pairs for call in pair)[: rng.randint(1, 2 * calls)]


def random_scenario(rng: random.Random, *, clients: int, calls: int) -> Scenario:
    """Draws a scenario in which at least two writers share the ring."""
    capacity = rng.choice((2, 3))

    def how_many() -> int:
        return rng.randint(1, calls)

    programs = [writer(rng, capacity, how_many()) for _ in range(2)]
    kills = rng.choice((0, 0, 1))
    for _ in range(rng.randint(0, clients - 2)):
        kind = rng.choice(("writer", "learner", "reaper", "newcomer", "onlooker"))
        if kind == "writer":
            programs.append(writer(rng, capacity, how_many()))
        elif kind == "learner":
            programs.append(learner(rng, how_many()))
        elif kind == "reaper":
            programs.append((REAP,))
        elif kind == "onlooker":
            programs.append((LOOK,))
        else:
            work = writer(rng, capacity, how_many()) if rng.random() < 0.5 else learner(rng, 1)
            programs.append((rng.choice((ATTACH, RECOVER)) if kills else ATTACH, *work))
    if rng.random() < 0.2:
        programs[1] = (*programs[1], LEAVE)
    stop = rng.choice(("", "", "", "copying", "waiting"))
    return Scenario(
        capacity,
        tuple(programs),
        written=rng.randint(0, capacity),
        crashes=rng.randint(0, 2),
        again=rng.randint(0, 1),
        kills=kills,
        stop=stop,
        timeouts=stop == "copying" or rng.random() < 0.2,
        forfeits=stop == "waiting" or rng.random() < 0.8,
        errors=rng.random() < 0.2,
        slow_death=rng.random() < 0.3,
    )


def walk(scenario: Scenario, rng: random.Random) -> int:
    """Takes random steps until every process has reached its end; returns their number."""
    model = Model(scenario)
    state = model.first_state()
    trace: list[str] = []
    try:
        for steps in range(WALK_STEPS):
            successors = list(model.successors(state))
            if not successors:
                assert model.rests(state), _told("somebody stands still for ever", scenario, trace)
                return steps
            b, label, after = rng.choice(successors)
            trace.append(describe(model, b, label))
            state = bytes(after)
            model.mover = 0
            model.check(state)
            if model.rests(state):
                return steps + 1
    except ViolationError as violation:
        raise AssertionError(_told(str(violation), scenario, trace)) from violation
    raise AssertionError(_told("the walk does not end", scenario, trace))


def _told(rule: str, scenario: Scenario, trace: list[str]) -> str:
    return "\n  ".join((f"{rule}: {scenario}", *trace[-200:]))


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Searches and walks random scenarios for about ``seconds`` seconds."""
    figures: Figures = dict.fromkeys(
        ("scenarios", "searched_to_the_end", "states", "transitions", "walks", "steps"), 0
    )
    for one in seeds(seed, seconds):
        with repeatable(__spec__.name, one):
            rng = random.Random(one)
            scenario = random_scenario(rng, clients=3, calls=2)
            outcome = explore(scenario, limit=SEARCH_STATES)
            assert not outcome.broken_rule, f"{outcome}\n{scenario}"
            figures["scenarios"] += 1
            figures["searched_to_the_end"] += outcome.complete
            figures["states"] += outcome.states
            figures["transitions"] += outcome.transitions
            large = random_scenario(rng, clients=6, calls=3)
            for _ in range(WALKS_A_SCENARIO):
                figures["walks"] += 1
                figures["steps"] += walk(large, rng)
        say(f"model: seed {one}, {figures['states']:,} states, {figures['steps']:,} steps")
    return figures


if __name__ == "__main__":
    sys.exit(main(campaign))

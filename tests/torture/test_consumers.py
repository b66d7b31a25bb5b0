"""Learners are killed at random, and each item is done once or the rules report it."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from shmbuffer.memory.format.ledger import LeasedItems
from tests.torture.deliveries import Account, Deliveries
from tests.torture.history import History
from tests.torture.items import keys_of
from tests.torture.programs import figures_of

ITEMS = 4


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 9))]
)
def test_no_item_is_lost_or_consumed_twice_when_any_process_is_killed(seed: int) -> None:
    figures = figures_of("tests.torture.consumers", seed)
    assert figures["kills"] >= 120
    assert figures["items_checked"] > 100
    assert figures["redeliveries"] > 100
    assert figures["late_acks"] > 0
    assert figures["keys_read"] > 0


def told(folder: Path, *course: str, times: int = 1) -> list[str]:
    """Returns the rules that a course breaks; each step is a learner and a letter.

    The letters are t(ake), T (take without a time limit), a(cknowledge), r(eturn) and k(ey). A
    suffix `!` marks a refused acknowledgement or a wrong key, and `?` an acknowledgement without an
    outcome.
    """
    accounts = {who: Account(folder, ord(who), ord(who)) for who in {one[0] for one in course}}
    tickets, leases = np.arange(ITEMS), dict.fromkeys(accounts, 0)
    for number, (who, what, *bad) in enumerate(course, 1):
        own = accounts[who]
        if what in "tT":
            leases[who] = number
        taken = LeasedItems(tickets, tickets, leases[who])
        if what in "tT":
            own.took(0, taken, time.monotonic_ns(), 1e-9 if what == "t" else math.inf)
        elif what == "a":
            own.acknowledging(0, taken)
            if bad != ["?"]:
                own.acknowledged(0, taken, np.full(ITEMS, not bad))
        elif what == "r":
            own.gave_back(0, taken)
        elif what == "k":
            own.keys(0, taken, keys_of(1, 1 if bad else 0, ITEMS))
    for own in accounts.values():
        own.__exit__()
    batches = np.zeros(1, History.BATCH)
    batches["key"], batches["count"] = keys_of(1, 0, 1), ITEMS
    found = Deliveries(Account.read(folder), batches, (times,)).violations()
    return sorted({one[:2] for one in found})


@pytest.mark.parametrize(
    ("course", "broken"),
    [
        ("xT xa", []),
        ("xT", ["D1"]),
        ("xT xa!", ["D1"]),
        ("xT xa?", []),
        ("xT yT ya", []),  # x wrote nothing more, so it may have been dead
        ("xT yT ya xa!", ["D4"]),
        ("xt yT ya xa!", []),
        ("xT xr yT ya xa!", []),
        ("xt yT xa ya", ["D2"]),
        ("xT xa yT", ["D3"]),
        ("xT xa? yT ya", []),
        ("xT xk xa", []),
        ("xT xk! xa", ["D5"]),
        ("xT xa xa", []),  # a second acknowledgement counts as the first
    ],
)
def test_a_course_of_deliveries_is_judged(course: str, broken: list[str], tmp_path: Path) -> None:
    assert told(tmp_path, *course.split()) == broken


@pytest.mark.parametrize(
    ("course", "broken"),
    [("xT xa yT ya", []), ("xT xa", ["D1"]), ("xT xa xT xa xT xa", ["D2", "D3"])],
)
def test_an_item_that_is_wanted_twice_is_done_twice(
    course: str, broken: list[str], tmp_path: Path
) -> None:
    assert told(tmp_path, *course.split(), times=2) == broken


def test_an_item_that_nobody_was_given_is_missed(tmp_path: Path) -> None:
    batches = np.zeros(1, History.BATCH)
    batches["count"] = 1
    found = Deliveries(Account.read(tmp_path), batches, (1, 1)).violations()
    assert found == [f"D1: consumer {one} was never given 0" for one in (0, 1)]

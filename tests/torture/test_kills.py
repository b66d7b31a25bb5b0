"""Processes of the C core are killed at random, and no acknowledged item is lost.

Each round has at least 250 kills, among forks, interrupts, restored copies and containers. With
`--full` there are eight rounds, with 2,000 kills in total.
"""

from __future__ import annotations

import pytest

from tests.torture.programs import figures_of

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 9))]
)
def test_no_rule_is_broken_when_any_process_is_killed(seed: int) -> None:
    figures = figures_of("tests.torture.kills", seed)
    assert figures["kills"] >= 250
    assert figures["recoveries"] > 1
    assert figures["logged_writes"] > figures["logged_open_writes"]
    assert figures["items_checked"] > 0
    assert figures["logged_samples"] > 0
    assert figures["logged_updates"] > 0
    assert figures["logged_forks"] > 0
    assert figures["logged_interrupts"] > 0
    assert figures["copies"] > 0
    assert figures["restores"] > 0
    assert figures["namespaces_killed"] > 0 or "rounds_without_containers" in figures

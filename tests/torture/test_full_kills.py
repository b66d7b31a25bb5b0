"""Processes with torch are killed at random, with rows, compressed and ragged records."""

from __future__ import annotations

import pytest

from tests.torture.programs import figures_of

pytestmark = [pytest.mark.crash, pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(600)]


def test_no_rule_is_broken_when_any_process_of_a_user_is_killed() -> None:
    figures = figures_of("tests.torture.full_kills", 1)
    assert figures["rounds"] == 3
    assert figures["kills"] >= 100
    assert figures["recoveries"] > 3
    assert figures["logged_writes"] > figures["logged_open_writes"]
    assert figures["items_checked"] > 0
    assert figures["logged_samples"] > 0
    assert figures["logged_updates"] > 0
    assert figures["logged_forks"] > 0
    assert figures["logged_interrupts"] > 0
    assert figures["restores"] > 0
    assert figures["namespaces_killed"] > 0 or "rounds_without_containers" in figures

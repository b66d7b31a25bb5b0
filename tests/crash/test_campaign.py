"""A campaign is repeated by its seed, and a failure has the command that repeats it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.crash import campaign as module
from tests.crash.campaign import SORTS, campaign, run

pytestmark = pytest.mark.crash


def test_a_campaign_counts_its_kills() -> None:
    said: list[str] = []
    figures = campaign(0, 7, said.append)
    assert figures["rounds"] == 1
    assert figures["kills"] > 0
    assert said[-1] == f"1 rounds, {figures['kills']} kills, seed 7"


@pytest.mark.full
def test_the_same_seed_kills_the_same() -> None:
    one, other = Counter[str](), Counter[str]()
    run(11, one)
    run(11, other)
    assert one == other


def test_a_failure_tells_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path, draw: object) -> int:
        raise AssertionError("an item is lost")

    monkeypatch.setattr(module, "SORTS", [("writers", fails)])
    with pytest.raises(AssertionError, match=r"seed 5 \(writers\): an item is lost; .* --seed 5$"):
        campaign(60, 5, print)


def test_every_sort_of_round_is_drawn() -> None:
    draws = {module.random.Random(seed).choice(SORTS)[0] for seed in range(100)}
    assert draws == {name for name, _ in SORTS}

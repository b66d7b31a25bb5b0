"""Memory and files do not grow while processes come and go, and growth is reported."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.torture import items
from tests.torture.arena import Actor
from tests.torture.history import History, Log
from tests.torture.slopes import Slope
from tests.torture.soak import soak


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
def test_survivors_do_not_grow_while_others_are_killed(tmp_path: Path) -> None:
    said: list[str] = []
    figures = soak(tmp_path, 0, 1, said.append, kill_every_s=0.1)
    assert figures["kills"] >= 10
    assert figures["looks"] > 0
    assert any(line.startswith("soak: descriptors of learner: ") for line in said)


@pytest.mark.crash
@pytest.mark.slow
def test_a_survivor_that_grows_is_noticed(tmp_path: Path) -> None:
    deaths = tmp_path / "logs" / "0.calls"

    def leaks_with_every_death(actor: Actor) -> None:
        known = 0
        while actor.goes_on():
            size = deaths.stat().st_size
            if size != known:
                os.open(os.devnull, os.O_RDONLY)
            known = size

    def leave_unsaid(line: str) -> None:
        pass

    roles = {"coordinator": leaks_with_every_death}
    with pytest.raises(AssertionError, match="it grows: descriptors of coordinator"):
        soak(tmp_path, 0, 1, leave_unsaid, kill_every_s=0.01, more_roles=roles)


def test_growth_is_distinguished_from_noise() -> None:
    rng = np.random.default_rng(1)
    times = np.arange(200.0).tolist()
    noise = rng.normal(100, 5, 200)
    for slope in (0.0, 0.1, -0.1):
        line = Slope.of("rss", times, (noise + slope * np.arange(200)).tolist())
        assert line.lowest < slope < line.highest
        assert np.sign(line.grown()) == np.sign(slope)
    assert Slope.of("threads", times, [3.0] * 200).grown() == 0


def test_a_line_is_told_with_its_interval() -> None:
    line = Slope.of("maps", [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])
    assert str(line) == "maps: 2.5 on average, +3600 an hour (+3600 to +3600)"
    with pytest.raises(AssertionError, match="three points"):
        Slope.of("maps", [0.0, 1.0], [1.0, 1.0])


def test_entries_left_out_of_the_logs_are_counted(tmp_path: Path) -> None:
    with Log(tmp_path, 1, items.who_of(1, 1)) as log:
        for first in range(0, 40, 4):
            log.invoked(first, 4)
            log.written(first, 4, first)
            log.seen(0, first + 4, first + 4)
        log.invoked(40, 3)
        keys = items.keys_of(log.who, 0, 2)
        log.updating(keys, np.array([3, 30]), items.priority(keys))
        History.read(tmp_path).forget(tmp_path, 22)
        log.invoked(43, 2)
        log.written(43, 2, 40)
    history = History.read(tmp_path)
    assert history.batches["ticket"].tolist() == [20, 24, 28, 32, 36, 40]
    assert (history.forgotten_written, history.forgotten_open) == (20, 3)
    assert history.updates["ticket"].tolist() == [30]
    assert history.seen["a"].tolist() == [40]

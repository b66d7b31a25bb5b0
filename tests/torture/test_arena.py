"""Who hangs, ends by itself or is not killed has failed, and it is said who and where."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.torture import arena as arena_module
from tests.torture.arena import Actor, Arena
from tests.torture.history import History
from tests.torture.kills import audited

pytestmark = pytest.mark.crash


def works(actor: Actor) -> None:
    first = 0
    while actor.goes_on():
        actor.log.invoked(first, 1)
        first += 1


def fails(actor: Actor) -> None:
    raise ValueError("this one is expected")


def test_everybody_stands_still_and_goes_on(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"worker": works}, ["worker"] * 3, 1) as arena:
        arena.fill()
        counts = []
        for _ in range(3):
            arena.still()
            counts.append(len(History.read(arena.logs).batches))
            assert len(History.read(arena.logs).batches) == counts[-1]
            arena.go()
        assert counts[0] <= counts[1] <= counts[2]
        assert arena.kill(arena.chairs) == 3
        assert len(History.read(arena.logs).batches) >= counts[-1]


def test_who_is_told_to_end_ends_one_way_or_the_other(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"worker": works}, ["worker"] * 4, 2) as arena:
        arena.fill()
        arena.still()
        arena.go()
        died = arena.kill(arena.chairs, signal.SIGTERM)
        assert 0 < died < 4, "some have a handler, some have none"


def test_who_hangs_is_named_with_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "PATIENCE_S", 0.0)
    hear, tell = os.pipe()

    def hangs(actor: Actor) -> None:
        os.write(tell, b".")
        signal.pause()

    roles = {"worker": works, "sleeper": hangs}
    with Arena(tmp_path / "logs", roles, ["worker", "sleeper"], 1) as arena, os.fdopen(hear, "rb"):
        arena.fill()
        os.close(tell)
        assert os.read(hear, 1) == b"."  # else it may not have come to its body
        with pytest.raises(AssertionError, match=r"H10: somebody hangs(.|\n)* in hangs"):
            arena.still()


def test_who_ends_by_itself_has_failed(tmp_path: Path) -> None:
    roles = {"worker": works, "failure": fails}
    with Arena(tmp_path / "logs", roles, ["worker", "failure"], 1) as arena:
        arena.fill()
        with pytest.raises(AssertionError, match="failure 2 ended by itself with 70"):
            arena.still()
        assert [chair.pid > 0 for chair in arena.chairs] == [True, False]


def test_who_ended_before_it_was_killed_has_failed(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"failure": fails}, ["failure"], 1) as arena:
        arena.fill()
        os.waitid(os.P_PID, arena.chairs[0].pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(AssertionError, match="failure 1 ended: 70"):
            arena.kill(arena.chairs)


def test_an_audit_tells_its_figures_or_fails() -> None:
    assert audited(lambda: {"items": 3}) == {"items": 3}
    with pytest.raises(AssertionError, match="the audit failed with 70"):
        audited(lambda: {"items": 1 // 0})


def test_a_stopped_process_goes_on(tmp_path: Path) -> None:
    with Arena(tmp_path / "logs", {"worker": works}, ["worker"], 1) as arena:
        arena.fill()
        arena.still()
        arena.go()
        arena.stop(arena.chairs[0], 0.0)
        arena.still()
        assert len(History.read(arena.logs).batches)


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    def draws(actor: Actor) -> None:
        while actor.goes_on():
            actor.log.seen(0, int(actor.rng.integers(2**40)), 0)

    drawn = []
    for name in "ab":
        with Arena(tmp_path / name, {"one": draws}, ["one"], 7) as arena:
            arena.fill()
            arena.still()
            arena.go()
            arena.still()
            drawn.append(History.read(arena.logs).seen["a"])
    shorter = min(map(len, drawn))
    assert np.array_equal(drawn[0][:shorter], drawn[1][:shorter])

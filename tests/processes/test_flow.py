"""Flow control between processes that die, stop and come back, one step at a time.

The ratio is computed from the operations that both sides report. No step depends on timing.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shmbuffer import (
    LazyMemmapStorage,
    RateLimiter,
    RateLimitError,
    RateLimitTimeout,
    TensorDictReplayBuffer,
)
from shmbuffer.cli import main
from shmbuffer.memory.upkeep.inspect import inspect
from tests.processes.players import Player, until, waits

RATIO, SLACK, MIN_SIZE, CAPACITY = 4, 8, 2, 64
AGO = r"\d+ (ms|s)"


class Stage:
    """A buffer, and players that join and leave."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._players = ExitStack()
        self.everybody: list[Player] = []
        self.next_number = 0

    def make(self, limiter: RateLimiter, capacity: int = CAPACITY) -> None:
        storage = LazyMemmapStorage(capacity, scratch_dir=self.path, shared_init=True)
        TensorDictReplayBuffer(storage=storage, rate_limiter=limiter).storage.close()

    def player(self) -> Player:
        self.everybody.append(self._players.enter_context(Player(self.path)))
        return self.everybody[-1]

    def extend(self, collector: Player, count: int = 1, **kwargs: object) -> None:
        """Orders a collector to write, without waiting for the result; see `Player.tell`."""
        collector.tell("extend", self.next_number, count, **kwargs)
        self.next_number += count

    def extended(self, collector: Player, count: int = 1) -> None:
        self.extend(collector, count)
        assert collector.answer().error is None

    def until_limited(self, collector: Player, count: int = 1) -> None:
        """Writes until the limiter makes the collector wait in the last order."""
        while True:
            self.extend(collector, count)
            if not until(lambda: self._comes_back_or_waits(collector)):
                return
            assert collector.answer().error is None

    def sampled_until_limited(self, learner: Player, count: int = 4) -> None:
        while True:
            learner.tell("sample", count)
            if not until(lambda: self._comes_back_or_waits(learner)):
                return
            assert learner.answer().error is None

    def _comes_back_or_waits(self, player: Player) -> bool | None:
        if player.heard():
            return True
        return False if any(one.pid == player.pid for one in waits(self.path)) else None

    def close(self) -> None:
        self._players.close()


@pytest.fixture
def stage(fast_path: Path) -> Iterator[Stage]:
    stage = Stage(fast_path / "buffer")
    yield stage
    stage.close()


def limiter(**changes: object) -> RateLimiter:
    return RateLimiter(RATIO, min_size=MIN_SIZE, error_buffer=SLACK).changed(**changes)


def balance(inserted: int, drawn: int) -> int:
    """Returns the balance of the items that the programs have written and drawn."""
    return (inserted - MIN_SIZE) * RATIO - drawn


def done(players: list[Player]) -> int:
    return sum(len(player.did) for player in players)


def says(text: str, pattern: str) -> None:
    assert re.fullmatch(pattern, text), text


@pytest.mark.full
def test_a_run_keeps_its_ratio_when_any_side_speeds_up_dies_or_returns(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.make(limiter(when_no_peer="wait"))
    collector, learner = stage.player(), stage.player()
    collectors, learners = [collector], [learner]

    def within() -> int:
        ahead = balance(done(collectors), done(learners))
        assert abs(ahead) <= SLACK
        assert inspect(stage.path)["counters"]["samples_ahead"] == ahead
        return ahead

    # Before there are any items, the learner waits and reports this.
    learner.tell("sample", 4)
    says(
        learner.waits(),
        "sample waits: the buffer has 0 items, but 2 are needed; there is no collector",
    )
    stage.extended(collector, 2)
    assert learner.answer().error is None
    assert within() == -4

    # A fast collector, and a learner that does nothing
    stage.until_limited(collector)
    text = (
        rf"extend waits: 4 samples per insert are required, "
        rf"but so far there were 1\.33; the only learner, pid "
        rf"{learner.pid}, last sampled {AGO} ago"
    )
    says(collector.waits(), text)
    assert within() == 8
    learner.done("sample", 4)
    assert collector.answer().error is None
    assert within() == 8
    error = collector.refused("extend", 1000, 1, timeout=0.05)
    assert isinstance(error, RateLimitTimeout)
    assert error.pids == [learner.pid]
    says(
        str(error),
        rf"{stage.path}: extend waits: 4 samples per insert are required, "
        rf"but so far there were 2; the only learner, pid "
        rf"{learner.pid}, last sampled {AGO} ago; timed out after 0\.05 s, and nothing was changed",
    )

    # The opposite: a fast learner, and a collector that does nothing
    stage.sampled_until_limited(learner)
    says(
        learner.waits(),
        rf"sample waits: 4 samples per insert are required, "
        rf"but so far there were 6; the only collector, pid "
        rf"{collector.pid}, last inserted {AGO} ago",
    )
    assert within() == -8
    stage.extended(collector)
    assert learner.answer().error is None
    assert within() == -8
    error = learner.refused("sample", 4, timeout=0.05)
    assert error.pids == [collector.pid]
    says(
        str(error),
        rf"{stage.path}: sample waits: 4 samples per insert are required, "
        rf"but so far there were 5\.6; the only collector, "
        rf"pid {collector.pid}, last inserted {AGO} ago; "
        rf"timed out after 0\.05 s, and nothing was changed",
    )

    # The learner is killed while the collector waits for it, and another one takes its place.
    stage.until_limited(collector)
    within()
    learner.kill()
    until(lambda: "there is no learner" in collector.waits() or None)
    learner = stage.player()
    learners.append(learner)
    assert collector.waits().endswith("there is no learner")  # the learner has not sampled yet
    learner.done("sample", 4)
    assert collector.answer().error is None
    within()

    # The collector is stopped. It is alive, and the learner reports its state.
    stage.sampled_until_limited(learner)
    collector.stop()
    until(lambda: "stopped" in learner.waits() or None)
    says(
        learner.waits(),
        rf"sample waits: 4 samples per insert are required, "
        rf"but so far there were {'[0-9.]+'}; the only collector, pid "
        rf"{collector.pid} \(stopped\), last inserted {AGO} ago",
    )
    collector.signal(signal.SIGCONT)
    stage.extended(collector)
    assert learner.answer().error is None
    within()

    # The collector is killed in the middle of a write, which does not count.
    stage.sampled_until_limited(learner)
    ahead = within()
    stage.next_number += 1
    collector.tell("extend and stop", stage.next_number, 1, "write.claimed")
    collector.stopped()
    assert phases(stage)[collector.pid] == "PAYLOAD"
    collector.kill()
    until(lambda: collector.pid not in phases(stage) or None)
    assert within() == ahead
    says(
        until(lambda: ((text := learner.waits()).endswith("no collector") and text) or None),
        r"sample waits: 4 samples per insert are required, "
        r"but so far there were [0-9.]+; there is no collector",
    )
    collector = stage.player()
    collectors.append(collector)
    stage.extended(collector)
    assert learner.answer().error is None
    within()

    # All processes are killed. The limiter and the balance stay.
    ahead = within()
    for player in (collector, learner):
        player.kill()
    collector, learner = stage.player(), stage.player()
    collectors.append(collector)
    learners.append(learner)
    assert within() == ahead
    assert inspect(stage.path)["counters"]["limited"] == 0
    stage.sampled_until_limited(learner)
    within()

    # Both sides wait, one after the other, when the rate is changed.
    assert main(["set", str(stage.path), "samples_per_insert=2"]) == 0
    assert "samples_per_insert" in capsys.readouterr().out
    assert learner.answer().error is None
    stage.until_limited(collector)
    assert main(["set", str(stage.path), "samples_per_insert=off"]) == 0
    assert collector.answer().error is None
    assert waits(stage.path) == []


def phases(stage: Stage) -> dict[int, str]:
    """Returns the phase of every client by its pid."""
    return {one["pid"]: one["phase"] for one in inspect(stage.path)["clients"]}


@pytest.mark.product(few=2)
@pytest.mark.parametrize("alone", ["pass", "wait", "error"])
@pytest.mark.parametrize("killed", ["learner", "collector"])
def test_a_side_that_is_killed_is_waited_for_passed_by_or_an_error(
    stage: Stage, alone: str, killed: str
) -> None:
    stage.make(limiter(when_no_peer=alone))
    collector, learner = stage.player(), stage.player()
    stage.extended(collector, 2)
    learner.done("sample", 4)
    waiting, dying = (collector, learner) if killed == "learner" else (learner, collector)
    waiting.done("constants", ALONE_S=0.0, WARNING_INTERVAL_S=0.2)

    def until_limited() -> None:
        if killed == "learner":
            stage.until_limited(collector)
        else:
            stage.sampled_until_limited(learner)

    until_limited()
    seen = waiting.waits().split(";")[0]
    ahead = balance(len(collector.did), len(learner.did))
    noun = killed
    text = f"{stage.path}: {seen}; there is no {noun}"
    dying.kill()
    if alone == "wait":
        until(lambda: waiting.waits() == f"{seen}; there is no {noun}" or None)
    else:
        answer = waiting.answer()
        if alone == "error":
            assert isinstance(answer.error, RateLimitError)
            assert str(answer.error) == f"{text}, and when_no_peer is 'error'; nothing was changed"
            assert answer.error.pids == []
        else:
            assert answer.error is None
            assert answer.said[-1] == f"{text}; the call continues uncounted (when_no_peer='pass')"
            for _ in range(20):
                if killed == "learner":
                    stage.extended(collector)
                else:
                    learner.done("sample", 4)
    assert inspect(stage.path)["counters"]["samples_ahead"] == ahead

    other = stage.player()  # takes the place of the dead learner, with the same ratio
    if killed == "learner":
        other.done("sample", 4)
    else:
        stage.extended(other)
    if alone == "wait":
        answer = waiting.answer()
        assert answer.error is None
        assert text in {said.split(" (for ")[0] for said in answer.said}
    until_limited()
    did = "sampled" if killed == "learner" else "inserted"
    assert f"the only {killed}, pid {other.pid}, last {did}" in waiting.waits()
    now = inspect(stage.path)["counters"]["samples_ahead"]
    assert now == (SLACK if killed == "learner" else -SLACK)


@pytest.mark.parametrize("side", ["extend", "sample", "sample, before anything is there"])
def test_an_interrupt_ends_a_wait_and_nothing_of_it_stays(stage: Stage, side: str) -> None:
    stage.make(limiter(when_no_peer="wait"))
    player = stage.player()
    if side == "extend":
        stage.until_limited(player)
    else:
        if side == "sample":
            stage.extended(player, 2)
        stage.sampled_until_limited(player)
    player.signal(signal.SIGINT)
    assert isinstance(player.answer().error, KeyboardInterrupt)
    assert waits(stage.path) == []
    assert player.done("standing") == [0, 0, 0]
    assert inspect(stage.path)["counters"]["limited"] == 0


def test_a_fork_while_a_thread_waits_is_another_client(stage: Stage) -> None:
    stage.make(limiter(when_no_peer="wait"))
    collector, learner = stage.player(), stage.player()
    stage.extended(collector, 2)
    learner.done("sample", 4)
    for _ in range(3):
        stage.extended(collector)
    collector.tell("fork beside a waiting thread", stage.next_number)
    until(lambda: len(waits(stage.path)) == 2 or None)
    (mine,) = (one for one in waits(stage.path) if one.pid == collector.pid)
    (child,) = (one for one in waits(stage.path) if one.pid != collector.pid)
    for one in (mine, child):
        assert f"the only learner, pid {learner.pid}," in one.text
    learner.done("sample", 4)
    learner.done("sample", 4)
    assert collector.answer() == ([stage.next_number], None, [])
    assert inspect(stage.path)["counters"]["write_count"] == 7
    assert waits(stage.path) == []
    assert inspect(stage.path)["counters"]["limited"] == 0

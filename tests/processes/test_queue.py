"""A queue between processes: items come out in order, as often as allowed, after any death."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmbuffer import RateLimiter, RateLimitError, attach
from shmbuffer.memory.upkeep.inspect import inspect
from tests.processes.players import waits
from tests.processes.test_flow import AGO, Stage, says

CAPACITY = 8
POINTS = ("write.locked", "flow.promised", "write.claimed", "write.copy", "write.committing")
LATE_POINTS = ("write.commit", "write.count", "flow.settled", "write.done")


@pytest.fixture
def stage(fast_path: Path) -> Iterator[Stage]:
    stage = Stage(fast_path / "buffer")
    stage.make(RateLimiter(max_times_sampled=1), CAPACITY)
    yield stage
    stage.close()


def queued(stage: Stage) -> int:
    queued: int = inspect(stage.path)["counters"]["queued"]
    return queued


@pytest.mark.product(few=1)
@pytest.mark.parametrize("seed", range(3))
def test_every_item_comes_out_once_and_in_order_while_collectors_are_killed(
    stage: Stage, seed: int
) -> None:
    random_one = random.Random(seed)
    collectors, learner = [stage.player() for _ in range(3)], stage.player()
    begun: list[list[int]] = []  # batches, in the order in which they were begun
    sure: list[int] = []  # batches that were reported as written
    for step in range(24):
        at = random_one.randrange(3)
        first, count = 10 * step, random_one.randint(1, 3)
        begun.append(list(range(first, first + count)))
        if random_one.random() < 0.4:
            point = random_one.choice(POINTS + LATE_POINTS)
            collectors[at].tell("extend and die", first, count, point)
            collectors[at].died()
            collectors[at] = stage.player()
        else:
            sure += collectors[at].done("extend", first, count)
        while queued(stage) + 3 > CAPACITY:
            left = queued(stage)
            answer = learner.do("sample", 1, timeout=0)
            # The items that remain are those of the dead process.
            assert answer.error is None or queued(stage) < left
    while learner.do("sample", 1, timeout=0).error is None:
        pass
    assert learner.did == sorted(set(learner.did))
    whole = [batch for batch in begun if set(batch) & set(learner.did)]
    assert learner.did == [number for batch in whole for number in batch]
    assert set(sure) <= set(learner.did)


def test_a_full_queue_holds_writers_back(stage: Stage) -> None:
    collector, learner = stage.player(), stage.player()
    collector.done("extend", 0, 8)
    collector.tell("extend", 8, 2)
    says(
        collector.waits(),
        "extend waits: the queue is full: 8 of 8 items are not sampled yet; there is no learner",
    )
    assert learner.done("sample", 1) == [0]
    says(
        collector.waits(),
        "extend waits: the queue is full: 7 of 8 items are not sampled yet; the only learner, pid "
        rf"{learner.pid}, last sampled {AGO} ago",
    )
    assert learner.done("sample", 1) == [1]
    assert collector.answer().error is None
    assert learner.done("sample", 8) == [2, 3, 4, 5, 6, 7, 8, 9]
    learner.tell("sample", 2)
    says(
        learner.waits(),
        "sample waits: the queue has 0 items left, but 2 are needed; the only collector, pid "
        rf"{collector.pid}, last inserted {AGO} ago",
    )
    collector.done("extend", 10, 1)
    assert "has 1 items left, but 2 are needed" in learner.waits()
    collector.done("extend", 11, 1)
    assert learner.answer().numbers == [10, 11]


def test_several_learners_share_the_items(fast_path: Path) -> None:
    stage = Stage(fast_path / "thrice")
    stage.make(RateLimiter(max_times_sampled=3), CAPACITY)
    try:
        collector, one, two = stage.player(), stage.player(), stage.player()
        collector.done("extend", 0, 2)
        assert one.done("sample", 2) == [0, 0]
        assert two.done("sample", 3) == [0, 1, 1]
        one.tell("sample", 2)
        assert "has 1 items left, but 2 are needed" in one.waits()
        two.tell("sample", 2)
        two.waits()
        collector.done("extend", 2, 1)
        assert sorted(one.answer().numbers + two.answer().numbers) == [1, 2, 2, 2]
    finally:
        stage.close()


def test_a_batch_too_large_for_the_queue_is_refused_at_once(stage: Stage) -> None:
    player = stage.player()
    error = player.refused("extend", 0, 9)
    assert str(error) == (
        f"{stage.path}: a batch of 9 items does not fit into a queue of 8 items; write "
        "fewer items at once"
    )
    player.done("extend", 0, 8)
    error = player.refused("sample", 9)
    assert str(error) == (
        f"{stage.path}: a queue of 8 items can never return 9 items at once; sample "
        "fewer items at once"
    )
    assert isinstance(error, RateLimitError)
    assert player.done("sample", 8) == list(range(8))


def test_emptying_lets_both_sides_go_on(stage: Stage) -> None:
    collector, learner = stage.player(), stage.player()
    collector.done("extend", 0, 8)
    collector.tell("extend", 8, 4)
    collector.waits()
    with attach(stage.path) as buffer:
        buffer.empty()
    assert collector.answer().error is None
    learner.tell("sample", 5)
    learner.waits()
    with attach(stage.path) as buffer:
        buffer.empty()
    collector.done("extend", 12, 5)
    assert learner.answer().numbers == [12, 13, 14, 15, 16]


def test_a_queue_that_is_full_of_gaps_says_that_less_can_come_out(stage: Stage) -> None:
    """Otherwise the learner would wait for writers that wait for the learner."""
    collector, learner = stage.player(), stage.player()
    collector.done("extend", 0, 2)
    dying = stage.player()
    dying.tell("extend and die", 2, 1, "write.claimed")
    dying.died()
    collector.done("extend", 3, 5)
    collector.tell("extend", 8, 1)
    collector.waits()
    error = learner.refused("sample", 8)
    assert str(error) == (
        f"{stage.path}: this queue of 8 items cannot return 8 items, because it is full and "
        "some of its slots belong to writers that died; sample fewer items at once, or make "
        "the queue larger than a batch plus the items that dead writers may leave"
    )
    assert learner.done("sample", 7) == [0, 1, 3, 4, 5, 6, 7]
    assert collector.answer().error is None
    assert learner.done("sample", 1) == [8]


def test_a_stopped_writer_is_named_by_the_client_that_waits_for_its_items(stage: Stage) -> None:
    slow, collector, learner = stage.player(), stage.player(), stage.player()
    slow.tell("extend and stop", 0, 2, "write.claimed")
    slow.stopped()
    collector.done("extend", 2, 2)
    learner.tell("sample", 2)
    says(
        learner.waits(),
        "sample waits: the next items of the queue are still being written; pid "
        rf"{slow.pid} \(stopped\) writes them",
    )
    slow.signal(signal.SIGCONT)
    assert slow.answer().error is None
    assert learner.answer().numbers == [0, 1]
    assert learner.done("sample", 2) == [2, 3]


def test_a_learner_that_is_stopped_while_it_reads_holds_writers_back_and_is_named(
    stage: Stage,
) -> None:
    collector, slow, learner = stage.player(), stage.player(), stage.player()
    collector.done("extend", 0, 8)
    slow.tell("sample and stop while reading", 2)
    slow.stopped()
    assert learner.done("sample", 6) == [2, 3, 4, 5, 6, 7]
    collector.tell("extend", 8, 1)
    says(
        collector.waits(),
        "extend waits: items that were taken out of the queue are still being read; pid "
        rf"{slow.pid} \(stopped\) reads them",
    )
    slow.kill()
    assert collector.answer().error is None
    assert waits(stage.path) == []
    collector.done("extend", 9, 2)
    assert learner.done("sample", 3) == [8, 9, 10]

"""A coordinator sets the rate limiter of its processes, and changes it at run time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import BufferClosedError, Coordinator, RateLimiter, attach
from shmbuffer.memory.upkeep.inspect import inspect
from tests.processes.players import Player, until, waits

LIMITER = RateLimiter(4.0, error_buffer=8.0, when_no_peer="wait")


def test_a_coordinator_sets_the_limiter_of_its_directory(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=16, alpha=None, rate_limiter=LIMITER) as coordinator:
        assert coordinator.rate_limiter == LIMITER
        with attach(scratch_dir) as buffer:
            assert buffer.rate_limiter == LIMITER


def test_a_limiter_of_numbers_of_numpy_is_set(scratch_dir: Path) -> None:
    numbers = {"min_size": np.int64(3), "max_staleness": np.int64(1)}
    limiter = RateLimiter(**numbers, items_per_version=np.int32(8))  # type: ignore[arg-type]
    with Coordinator(scratch_dir, capacity=16, alpha=None, rate_limiter=limiter) as coordinator:
        assert limiter.has_same_limits(coordinator.rate_limiter)


def test_the_next_coordinator_leaves_the_balance_as_it_is(scratch_dir: Path) -> None:
    # with defaults, which are numbers when they are read back
    limiter = RateLimiter(4, min_size=10)
    with Coordinator(scratch_dir, capacity=64, alpha=None, rate_limiter=limiter):
        with Player(scratch_dir) as player:
            player.done("extend", 0, 11)
            player.done("sample", 3)
        assert inspect(scratch_dir)["counters"]["samples_ahead"] == 1
    for given in (limiter, None):
        with Coordinator(scratch_dir, on_existing="recover", rate_limiter=given) as coordinator:
            assert inspect(scratch_dir)["counters"]["samples_ahead"] == 1
            assert limiter.has_same_limits(coordinator.rate_limiter)


def test_a_limiter_of_an_earlier_run_is_reported_at_the_start(
    scratch_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Coordinator(scratch_dir, capacity=16, rate_limiter=LIMITER).close()
    Coordinator(scratch_dir, on_existing="recover", rate_limiter=LIMITER).close()
    assert caplog.messages == []
    Coordinator(scratch_dir, on_existing="recover").close()
    (said,) = caplog.messages
    assert said.startswith(f"{scratch_dir}: the buffer keeps its rate limiter")
    for part in (
        "samples_per_insert=4.0, ",
        "when_no_peer='wait'",
        "rate_limiter=",
        "set_rate(None)",
    ):
        assert part in said
    with Coordinator(scratch_dir, on_existing="recover") as coordinator:
        coordinator.set_rate(None)
    caplog.clear()
    Coordinator(scratch_dir, on_existing="recover").close()
    assert caplog.messages == []


def test_a_new_rate_lets_everybody_go_on_at_once(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=64, alpha=None, rate_limiter=LIMITER) as coordinator,
        Player(scratch_dir) as collector,
        Player(scratch_dir) as learner,
    ):
        collector.done("extend", 0, 3)
        collector.tell("extend", 3, 1)
        collector.waits()
        learner.tell("sample", 4, min_size=5)
        learner.waits()
        assert coordinator.set_rate(error_buffer=30) == LIMITER.changed(error_buffer=30.0)
        assert collector.answer().error is None
        collector.done("extend", 4, 1)
        assert learner.answer().error is None
        learner.tell("sample", 40)
        learner.waits()
        assert coordinator.set_rate(None) is None
        assert len(learner.answer().numbers) == 40
        assert waits(scratch_dir) == []


def test_a_rate_may_become_a_queue(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=4, alpha=None) as coordinator,
        Player(scratch_dir) as player,
    ):
        player.done("extend", 0, 6)
        coordinator.set_rate(max_times_sampled=1)
        assert player.done("sample", 3) == [2, 3, 4]
        coordinator.set_rate(RateLimiter(max_times_sampled=2))
        player.done("extend", 6, 1)
        assert player.done("sample", 4) == [5, 5, 6, 6]


def test_a_call_without_a_change_is_refused(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=16) as coordinator:
        text = r"^set_rate\(\) needs a RateLimiter or None, or keyword arguments to change the "
        text += "current one$"
        with pytest.raises(TypeError, match=text):
            coordinator.set_rate()
        with pytest.raises(TypeError, match=text):
            coordinator.set_rate(LIMITER, min_size=3)
        with pytest.raises(ValueError, match="this buffer has priorities"):
            coordinator.set_rate(max_times_sampled=1)
        with pytest.raises(TypeError, match="often"):
            coordinator.set_rate(often=1)
        assert coordinator.rate_limiter is None
    with pytest.raises(BufferClosedError):
        coordinator.set_rate(None)


def test_a_learner_that_a_coordinator_has_spawned_is_no_collector(scratch_dir: Path) -> None:
    """The registry lists it as a collector, but its calls show that it is a learner."""
    with (
        Coordinator(scratch_dir, capacity=64, alpha=None, rate_limiter=LIMITER),
        attach(scratch_dir, role="collector") as learner,
        Player(scratch_dir) as collector,
        Player(scratch_dir) as other,
    ):
        collector.done("extend", 0, 3)
        learner.sample(4)
        other.tell("sample", 13)
        assert f"the only collector, pid {collector.pid}," in other.waits()


def test_threads_that_wait_do_not_keep_a_coordinator_from_closing(scratch_dir: Path) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            coordinator.buffer.sample(1)
        except BaseException as error:
            raised.append(error)

    with Coordinator(scratch_dir, capacity=16, alpha=None, rate_limiter=LIMITER) as coordinator:
        waiting = threading.Thread(target=wait)
        coordinator.buffer  # noqa: B018 - made by this thread
        waiting.start()
        until(lambda: waits(scratch_dir) or None)
    waiting.join(30)
    assert [type(error) for error in raised] == [BufferClosedError]

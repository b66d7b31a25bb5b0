"""A sample that no living collector can satisfy raises an error in every process."""

from __future__ import annotations

import logging
import re
import signal
from pathlib import Path

import pytest

from shmbuffer import CollectorsDiedError, Coordinator, RateLimiter, RateLimitTimeout, attach
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.flow import sides
from tests.kit.programs import Program
from tests.service import targets
from tests.service.conftest import Reports

QUEUE = RateLimiter(max_times_sampled=1)
LEARN = """
import sys
from shmbuffer import attach
from shmbuffer.errors import CollectorsDiedError
with attach(sys.argv[1], role="learner") as rb:
    print("attached", flush=True)
    try:
        rb.sample(4, min_size=4)
    except CollectorsDiedError as error:
        print(error.collectors)
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "ALONE_S", 0.0)


@pytest.mark.parametrize("limiter", [None, QUEUE], ids=["min_size", "queue"])
def test_a_sample_names_the_collectors_that_have_all_died(
    scratch_dir: Path, limiter: RateLimiter | None
) -> None:
    with Coordinator(scratch_dir, capacity=8, alpha=None, rate_limiter=limiter) as coordinator:
        coordinator.spawn(targets.raise_an_error, 2, name="collect")
        coordinator.spawn(targets.die)
        with pytest.raises(CollectorsDiedError) as caught:
            coordinator.buffer.sample(4, min_size=4)
    error = "ValueError: bug in my environment"
    assert caught.value.collectors == [  # type: ignore[attr-defined]
        ("collect-0", 1, error),
        ("collect-1", 1, error),
        ("die-0", -signal.SIGKILL, ""),
    ]
    assert str(caught.value) == (
        f"{scratch_dir}: sample waits: the buffer has 0 items, but 4 are needed; there is no "
        f"collector, and no dead collector is restarted: collect-0 ended with exit code 1 "
        f"({error}), collect-1 ended with exit code 1 ({error}), die-0 was killed by SIGKILL; "
        "nothing was changed. Start collectors again, or use RateLimiter(when_no_peer='wait') to "
        "wait for new ones"
    )


def test_a_learner_in_another_process_learns_it_too(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=8) as coordinator,
        Program.python(LEARN, scratch_dir) as learner,
    ):
        assert learner.line() == "attached"
        coordinator.spawn(targets.raise_an_error)
        assert learner.line() == "[('raise_an_error-0', 1, 'ValueError: bug in my environment')]"
        assert learner.end()[0] == 0


@pytest.mark.parametrize("why", ["wait", "restart", "client", "returned", "before"])
def test_a_sample_waits_where_a_write_may_come(
    scratch_dir: Path, why: str, reports: Reports
) -> None:
    if why == "before":
        with Coordinator(scratch_dir, capacity=8) as coordinator:
            coordinator.spawn(targets.raise_an_error)
            coordinator.join()
    with Coordinator(scratch_dir, capacity=8, on_existing="recover") as coordinator:
        if why == "wait":
            coordinator.set_rate(RateLimiter(min_size=4, when_no_peer="wait"))
        if why == "returned":
            coordinator.spawn(targets.return_at_once)
        elif why != "before":
            coordinator.spawn(targets.raise_an_error, restart=why == "restart")
            coordinator.wait_for_deaths(1)
        if why != "restart":
            coordinator.join()
        client = Engine.open(scratch_dir, None) if why == "client" else None
        with pytest.raises(RateLimitTimeout, match="nothing was changed"):
            coordinator.buffer.sample(4, min_size=4, timeout=0.5)
        if client is not None:
            client.close()
            with pytest.raises(CollectorsDiedError):
                coordinator.buffer.sample(4, min_size=4)


def test_collectors_that_have_not_attached_yet_are_counted(
    scratch_dir: Path, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        coordinator.spawn(targets.stay_away, 2, reports.out)
        for _ in range(2):
            reports.next()
        with (
            caplog.at_level(logging.WARNING, "shmbuffer.flow"),
            pytest.raises(RateLimitTimeout) as caught,
        ):
            coordinator.buffer.sample(4, min_size=4, timeout=0.2)
        told = r"2 collectors were started \d+ m?s ago and have not attached yet"
        assert re.search(f"4 are needed; {told}; timed out after 0.2 s", str(caught.value))
        assert re.search(told, caplog.text)
        coordinator.spawn(targets.stay, 1, reports.out)
        reports.next()
        with pytest.raises(RateLimitTimeout, match="the only collector, pid"):
            coordinator.buffer.sample(4, min_size=4, timeout=0.2)


def test_a_new_run_forgets_the_deaths_of_the_one_before(scratch_dir: Path) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        coordinator.spawn(targets.raise_an_error)
        coordinator.join()
    with (
        attach(scratch_dir, role="learner") as rb,
        pytest.raises(RateLimitTimeout, match="there is no collector; timed out after"),
    ):
        rb.sample(4, min_size=4, timeout=0.2)

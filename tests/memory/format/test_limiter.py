"""Settings of a limiter: valid values, changes, and reading them back unchanged."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import RateLimiter
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.format.layout import Alone, Limit
from shmbuffer.memory.format.limiter import read
from tests.memory.rows import Maker, Parent, child, schema

NO_NUMBER = "samples_per_insert must be a number above 0, but is "


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        *(({"samples_per_insert": bad}, f"{NO_NUMBER}{bad!r}") for bad in (0, -1, True, "4")),
        ({"samples_per_insert": math.inf}, f"{NO_NUMBER}inf"),
        ({"samples_per_insert": math.nan}, f"{NO_NUMBER}nan"),
        ({"min_size": 0}, "min_size must be a whole number of at least 1, but is 0"),
        ({"min_size": 1.5}, "min_size must be a whole number of at least 1, but is 1.5"),
        (
            {"max_times_sampled": 0},
            "max_times_sampled must be a whole number of at least 1, but is 0",
        ),
        (
            {"error_buffer": 3},
            "error_buffer has no effect without samples_per_insert, because it is the tolerance"
            " of that ratio; pass both",
        ),
        (
            {"samples_per_insert": 4, "error_buffer": 3},
            "error_buffer must be at least max(1, samples_per_insert) = 4, but is 3; with a "
            "smaller one, writers and samplers would block each other",
        ),
        *(
            (
                {"when_no_peer": bad},
                f"when_no_peer must be 'pass', 'wait' or 'error', but is {bad!r}",
            )
            for bad in ("PASS", "never", 1)
        ),
        ({"max_staleness": -1}, "max_staleness must be a whole number of at least 0, but is -1"),
        ({"max_staleness": 1.5}, "max_staleness must be a whole number of at least 0, but is 1.5"),
        (
            {"max_staleness": 1, "items_per_version": 0},
            "items_per_version must be a whole number of at least 1, but is 0",
        ),
        (
            {"items_per_version": 8},
            "items_per_version has no effect without max_staleness; pass both",
        ),
        (
            {"max_times_sampled": 1, "when_no_peer": "pass"},
            "when_no_peer='pass' would overwrite items of a queue that have not been sampled; "
            "use 'wait' or 'error', or leave out max_times_sampled",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        RateLimiter(**arguments)


@pytest.mark.parametrize(
    ("limiter", "tolerance"),
    [
        (RateLimiter(), 0),
        (RateLimiter(0.25), 1),
        (RateLimiter(4), 4),
        (RateLimiter(4, min_size=1000), 400),
        (RateLimiter(4, min_size=1000, error_buffer=5), 5),
    ],
)
def test_the_error_buffer_is_a_tenth_of_the_first_items_or_as_little_as_may_be(
    limiter: RateLimiter, tolerance: float
) -> None:
    assert limiter.tolerance == tolerance


def test_a_queue_waits_where_nobody_is_and_a_ratio_passes() -> None:
    assert (RateLimiter(4).alone, RateLimiter(4).limits) == (Alone.PASS, Limit.RATIO)
    queue = RateLimiter(max_times_sampled=1)
    assert (queue.alone, queue.limits) == (Alone.QUEUE, Limit.QUEUE)
    assert RateLimiter(4, when_no_peer="error").alone == Alone.ERROR
    ages = RateLimiter(max_staleness=2, items_per_version=4)
    assert (ages.alone, ages.limits) == (Alone.PASS, Limit.AGES)


def test_a_change_leaves_the_rest_as_it_is() -> None:
    limiter = RateLimiter(4, min_size=10, error_buffer=20, when_no_peer="wait")
    assert limiter.changed(samples_per_insert=8) == RateLimiter(
        8, min_size=10, error_buffer=20, when_no_peer="wait"
    )
    assert limiter.changed(samples_per_insert=30).tolerance == 30  # 20 would be too small
    assert limiter.changed(samples_per_insert=None) == RateLimiter(min_size=10, when_no_peer="wait")
    assert RateLimiter(4, when_no_peer="pass").changed(max_times_sampled=2).alone == Alone.QUEUE
    with pytest.raises(TypeError, match="often"):
        limiter.changed(often=1)
    with pytest.raises(ValueError, match="min_size"):
        limiter.changed(min_size=-1)


def test_defaults_equal_the_same_values_given_explicitly() -> None:
    given = RateLimiter(4.0, min_size=1000, error_buffer=400.0, when_no_peer="pass")
    assert RateLimiter(4, min_size=1000) != given
    assert RateLimiter(4, min_size=1000).has_same_limits(given)
    assert not RateLimiter(4, min_size=1000).has_same_limits(None)
    assert not RateLimiter(4, min_size=1000).has_same_limits(given.changed(min_size=999))


@pytest.mark.product(few=4)
@pytest.mark.parametrize("defined", [False, True])
@pytest.mark.parametrize(
    "limiter",
    [
        RateLimiter(0.1, min_size=3, error_buffer=1.5, when_no_peer="error"),
        RateLimiter(4.0, error_buffer=4.0, when_no_peer="wait"),
        RateLimiter(max_times_sampled=3, when_no_peer="wait"),
        RateLimiter(2.0, error_buffer=8.0, max_times_sampled=2, when_no_peer="error"),
        RateLimiter(min_size=8, when_no_peer="pass"),
        RateLimiter(2.0, error_buffer=2.0, max_staleness=0, items_per_version=7),
        RateLimiter(max_staleness=2, items_per_version=4),
        RateLimiter(max_staleness=3),
        None,
    ],
)
def test_it_is_read_back_by_any_process_and_after_all_have_left(
    limiter: RateLimiter | None, defined: bool, fast_path: Path
) -> None:
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8)) as engine:
        if defined:
            engine.define(schema())
        engine.set_limiter(RateLimiter(7))
        engine.set_limiter(limiter)
        assert is_same(engine.limiter, limiter)
        with Engine.open(path, None) as other:
            assert is_same(other.limiter, limiter)
    with Engine.open(path, None) as again:
        assert is_same(again.limiter, limiter)
        if not defined:
            again.define(schema())
            assert is_same(again.limiter, limiter)


def is_same(found: RateLimiter | None, given: RateLimiter | None) -> bool:
    return found is given if given is None else given.has_same_limits(found)


def test_a_copy_of_two_settings_is_not_taken_for_one(fast_path: Path) -> None:
    """Another process keeps setting one of two limiters; a torn copy would be a third one."""
    settings = [
        RateLimiter(2, error_buffer=20, when_no_peer="wait"),
        RateLimiter(4, error_buffer=40, when_no_peer="error"),
    ]
    with Engine.open(fast_path, Settings(8)) as engine:
        engine.define(schema(8))
        engine.set_limiter(settings[0])

        def alternate(_: Parent) -> None:
            for number in itertools.count():
                engine.set_limiter(settings[number % 2])

        with child(alternate):
            for _ in range(5000):
                assert read(engine.seat.control.runtime[0]) in settings


def test_it_has_to_fit_the_buffer(make: Maker) -> None:
    engine = make(8)
    with pytest.raises(ValueError, match="min_size is 9, but the buffer has room for only 8 items"):
        engine.set_limiter(RateLimiter(4, min_size=9))
    prioritized = make(8, alpha=1.0)
    with pytest.raises(ValueError, match="this buffer has priorities; create it without"):
        prioritized.set_limiter(RateLimiter(max_times_sampled=1))
    assert (engine.limiter, prioritized.limiter) == (None, None)


def test_a_change_while_a_queue_is_full_keeps_what_was_handed_out(make: Maker) -> None:
    engine = make(8)
    ring = engine.ring()
    assert ring is not None
    engine.set_limiter(RateLimiter(max_times_sampled=2))
    assert ring.admission.is_queue
    engine.set_limiter(RateLimiter(max_times_sampled=3))
    assert (ring.admission.rate_status().queued, ring.admission.rate_status().left) == (0, 0)
    engine.set_limiter(None)
    assert not ring.admission.limits

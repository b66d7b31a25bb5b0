"""Batches are made by the caller or ahead, by a measured rule that changes no draw or save."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from shmbuffer.buffers.data_path.hand_over import HandOver
from tests.kit.items import numbered
from tests.replay.resuming import CASES, SAVED_AT, Case, Loop

DEPTH = 3
AT_ONCE, THREADS = True, False
MICRO, MILLI = 1_000, 1_000_000


class Forced(HandOver):
    """A rule that returns the given ways in turn, one for each call."""

    def __init__(self, *ways: bool) -> None:
        self._ways: Iterator[bool] = cycle(ways)
        super().__init__(DEPTH)
        self.at_once = next(self._ways)

    def restart(self) -> None:
        """Continues with the next way."""

    def took(self, nanoseconds: int, orders: int, period: int) -> None:
        """Advances to the next way."""
        self.at_once = next(self._ways)


def mixed() -> Forced:
    rng = random.Random(5)
    return Forced(*(rng.random() < 0.5 for _ in range(50)))


WAYS = {"at once": lambda: Forced(AT_ONCE), "threads": lambda: Forced(THREADS), "mixed": mixed}


def force(rb: ReplayBuffer, way: str) -> None:
    assert rb._parts.prefetcher is not None
    rb._parts.prefetcher.hand_over = WAYS[way]()


def buffer(way: str | None, sampler: Any = None, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64),
        sampler=sampler,
        batch_size=4,
        prefetch=None if way is None else DEPTH,
        generator=torch.Generator().manual_seed(3),
        **options,
    )
    if way is not None:
        force(rb, way)
    rb.extend(numbered(0, 40))
    return rb


def drawn(rb: ReplayBuffer, count: int) -> list[list[int]]:
    return [rb.sample()["number"].tolist() for _ in range(count)]


# -- the rule ---------------------------------------------------------------------------------


def run(
    rule: HandOver, at_once: int, threads: int, calls: int, work: tuple[int, int] = (0, 0)
) -> list[bool]:
    """Returns the way chosen for each of ``calls`` calls, whose durations depend on the way.

    ``work`` is the time between the calls, at once and with threads.
    """
    ways = []
    for _ in range(calls):
        ways.append(rule.at_once)
        took = at_once if rule.at_once else threads
        rule.took(took, 1, took + work[not rule.at_once])
    return ways


@pytest.mark.parametrize(
    ("at_once", "threads", "best"),
    [
        (40 * MICRO, 180 * MICRO, AT_ONCE),
        (200 * MICRO, 180 * MICRO, AT_ONCE),  # the saving is too small
        (700 * MICRO, 180 * MICRO, THREADS),
        (20 * MILLI, 300 * MICRO, THREADS),
    ],
)
def test_the_way_that_costs_the_caller_less_is_taken(
    at_once: int, threads: int, best: bool
) -> None:
    rule = HandOver(DEPTH)
    first = run(rule, at_once, threads, 30)
    assert first[0] is THREADS, "the first call orders several batches"
    assert set(first) == {AT_ONCE, THREADS}
    ways = run(rule, at_once, threads, 20_000)
    assert ways.count(best) > 0.985 * len(ways)
    assert ways.count(not best) > 0, "it is measured again now and then"


@pytest.mark.parametrize(
    ("work", "best"),
    [
        ((2 * MILLI, 3 * MILLI), AT_ONCE),  # threads slow down the work by more than they save
        ((20 * MILLI, 20 * MILLI), THREADS),
    ],
)
def test_threads_that_make_a_step_longer_are_not_used(work: tuple[int, int], best: bool) -> None:
    rule = HandOver(DEPTH)
    run(rule, 900 * MICRO, 300 * MICRO, 400, work)
    ways = run(rule, 900 * MICRO, 300 * MICRO, 20_000, work)
    assert ways.count(best) > 0.985 * len(ways)


@pytest.mark.parametrize(
    ("at_once", "threads"), [(40 * MICRO, 180 * MICRO), (40 * MICRO, 5 * MILLI)]
)
def test_measuring_the_slower_way_again_takes_little_of_the_time(
    at_once: int, threads: int
) -> None:
    rule = HandOver(DEPTH)
    run(rule, at_once, threads, 400)
    ways = run(rule, at_once, threads, 200_000)
    assert ways.count(THREADS) > 0
    assert ways.count(THREADS) * threads < 0.03 * len(ways) * at_once


def test_the_rule_says_what_it_has_measured() -> None:
    rule = HandOver(DEPTH)
    assert str(rule) == "by threads, until both modes are measured"
    run(rule, 35 * MICRO, 180 * MICRO, 30)
    assert str(rule) == "at once: 35 µs per batch at once, 180 µs per hand-over to a thread"
    rule.restart()
    run(rule, 20 * MILLI, 250_500, 30)
    assert str(rule) == "by threads: 20 ms per batch at once, 250 µs per hand-over to a thread"


@pytest.mark.parametrize("was", [AT_ONCE, THREADS])
def test_a_way_that_becomes_slow_is_left_soon(was: bool) -> None:
    rule = HandOver(DEPTH)
    fast, other, slow = 100 * MICRO, 500 * MICRO, 900 * MICRO
    run(rule, *((fast, other) if was is AT_ONCE else (other, fast)), 20_000)
    changed = (slow, other) if was is AT_ONCE else (other, slow)
    assert run(rule, *changed, 70)[-1] is not was


def test_calls_that_order_nothing_or_several_batches_count_by_the_batch() -> None:
    """With passes of four batches, one call orders all of them."""
    rule = HandOver(DEPTH)
    for _ in range(200):
        for orders in (4, 0, 0, 0):
            spent = 40 * MICRO * orders if rule.at_once else 100 * MICRO * orders
            rule.took(spent or MICRO, orders, spent or MICRO)
    assert str(rule) == "at once: 40 µs per batch at once, 100 µs per hand-over to a thread"


def test_a_plan_says_where_batches_are_made_and_measures_again_when_it_changes() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=4, prefetch=DEPTH)
    rb.extend(numbered(0, 40))
    until = "    prefetched: by threads, until both modes are measured"
    assert until in repr(rb.plan).splitlines()
    changes = [
        lambda: rb.append_transform(lambda data: data),
        lambda: rb.set_sampler(SamplerWithoutReplacement()),
        lambda: rb.load_state_dict(rb.state_dict()),
    ]
    for change in changes:
        for _ in range(30):
            rb.sample()
        assert "per hand-over to a thread" in repr(rb.plan)
        change()
        assert until in repr(rb.plan).splitlines()
    rb.close()


# -- draws and saves --------------------------------------------------------------------------


def saved_files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and "storage" not in file.parts
    }


def assert_same(found: list[dict[str, torch.Tensor]], expected: Any) -> None:
    assert len(found) == len(expected)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys(), step
        for key, value in one.items():
            assert value.dtype is other[key].dtype, (step, key)
            assert torch.equal(value, other[key]), (step, key)


@pytest.mark.product(few=6)
@pytest.mark.parametrize("setup", [case for case in CASES if case.prefetch], ids=lambda c: c.name)
def test_every_way_draws_and_saves_the_same_and_is_resumed_by_any(
    setup: Case, tmp_path: Path
) -> None:
    runs, saves = {}, {}
    for way in WAYS:
        (tmp_path / way).mkdir()
        loop = Loop(setup, tmp_path / way)
        force(loop.rb, way)
        loop.begin()
        steps = [loop.next() for _ in range(SAVED_AT)]
        loop.save(tmp_path / way / "save")
        runs[way] = [*steps, *loop.rest()]
        saves[way] = saved_files(tmp_path / way / "save")
        loop.close()
    expected = runs.pop("threads")
    for found in runs.values():
        assert_same(found, expected)
    assert saves["at once"] == saves["threads"] == saves["mixed"]
    for way, saved_by in (("at once", "threads"), ("threads", "at once"), ("mixed", "mixed")):
        (tmp_path / way / "again").mkdir()
        loop = Loop(setup, tmp_path / way / "again")
        force(loop.rb, way)
        loop.load(tmp_path / saved_by / "save")
        assert_same(loop.rest(), expected[SAVED_AT:])
        loop.close()


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(64, 0.7, 0.9)])
@pytest.mark.parametrize("way", WAYS)
def test_a_state_is_that_of_the_last_delivered_batch(way: str, sampler: Any) -> None:
    plain, rb = buffer(None, sampler()), buffer(way, sampler())
    assert drawn(plain, 7) == drawn(rb, 7)
    expected, state = plain.state_dict()["_rng"], rb.state_dict()["_rng"]
    assert torch.equal(state[0], expected[0])
    assert drawn(plain, 5) == drawn(rb, 5)
    rb.close()


@pytest.mark.parametrize("way", WAYS)
def test_two_parts_draw_the_same_in_every_way(way: str) -> None:
    found = []
    for prefetch in (None, DEPTH):
        data = TensorDictReplayBuffer(storage=LazyTensorStorage(40))
        data.extend(numbered(0, 40))
        rb = OfflineToOnlineReplayBuffer(
            data,
            online_capacity=64,
            offline_fraction=0.5,
            batch_size=8,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(3),
        )
        rb.extend(numbered(100, 40))
        if prefetch:
            force(rb, way)
        found.append(drawn(rb, 12))
        rb.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("way", WAYS)
def test_index_and_weights_are_in_a_sample_only_if_they_are_wanted(way: str) -> None:
    rb = buffer(way, PrioritizedSampler(64, 0.7, 0.9))
    for _ in range(10):
        data, info = rb.sample(return_info=True)
        assert torch.equal(data["index"], info["index"])
        assert torch.equal(data["_weight"], info["_weight"])
        data, info = rb.sample(return_info=True, include_info=False)
        assert list(data.keys()) == list(numbered(0, 1).keys())
        assert torch.equal(data["number"], info["index"])
    rb.close()


@pytest.mark.parametrize(("way", "names"), [("at once", "MainThread"), ("threads", "shmbuffer-")])
def test_batches_are_made_and_transformed_where_the_way_says(way: str, names: str) -> None:
    threads: list[str] = []
    rb = buffer(way, transform=lambda x: threads.append(threading.current_thread().name) or x)
    drawn(rb, 10)
    rb.synchronize()
    assert len(threads) == 10 + DEPTH
    assert all(name.startswith(names) for name in threads)
    rb.close()


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_raised_when_its_batch_is_due(way: str) -> None:
    def fail_at_first(data: TensorDict) -> TensorDict:
        if (data["number"] == doomed).all():
            raise ZeroDivisionError("in the transform")
        return data

    expected = drawn(buffer(None), 8)
    doomed = torch.tensor(expected[5])
    rb = buffer(way, transform=fail_at_first)
    assert drawn(rb, 5) == expected[:5]
    with pytest.raises(ZeroDivisionError, match="in the transform"):
        rb.sample()
    assert drawn(rb, 2) == expected[6:]
    rb.close()


def test_an_interrupt_takes_back_the_draw_of_its_batch() -> None:
    interrupts = [True]

    def interrupt(data: TensorDict) -> TensorDict:
        if (data["number"] == doomed).all() and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return data

    expected = drawn(buffer(None), 8)
    doomed = torch.tensor(expected[5])
    rb = buffer("at once", transform=interrupt)
    assert drawn(rb, 2) == expected[:2]
    with pytest.raises(KeyboardInterrupt):
        rb.sample()  # makes the sixth batch
    assert drawn(rb, 6) == expected[2:]


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_does_not_have_the_modes_of_the_call_that_ordered_it(way: str) -> None:
    scale = torch.ones(1, requires_grad=True)
    rb = buffer(way, transform=lambda data: data.set("scaled", data["number"] * scale))
    with torch.inference_mode():
        rb.sample()
    for _ in range(DEPTH):
        batch = rb.sample()
        assert not batch["number"].is_inference()
        assert batch["scaled"].requires_grad
    rb.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_seen_by_the_batches_that_are_ordered_after_it(way: str) -> None:
    rb = buffer(way, writer=TensorDictRoundRobinWriter(track_generations=True))
    rb.sample()
    index = torch.arange(40)
    patch = {"number": torch.full((40,), 99)}
    future = rb.submit_update_if_present(index=index, generation=index, patch=patch)
    batches = drawn(rb, DEPTH + 2)
    assert future.result().updated.all()
    assert all(99 not in batch for batch in batches[:DEPTH])
    assert all(set(batch) == {99} for batch in batches[DEPTH:])
    rb.close()

"""Consumed items compared with TorchRL: how often, until when, and what comes after them."""

# Every step is called immediately, so the loop variables in it have the values of its round.
# ruff: noqa: B023

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from tests.compat.family import ours, theirs
from tests.compat.trace import Scenario, Step, assert_the_same, batch

LEN, ORDER, STATE = (f"{one} of what is consumed" for one in ("len", "order", "state"))
WAYS = ("argument", "sampler", "both")
STORAGES = ("LazyTensorStorage", "LazyMemmapStorage")


def buffer(family: Any, times: int, way: str = "argument", size: int = 12, **more: Any) -> Any:
    options: dict[str, Any] = {"storage": family.LazyTensorStorage(size), **more}
    if way != "sampler":
        options["consume_after_n_samples"] = times
    if way != "argument":
        options["sampler"] = family.ConsumingSampler(times)
    return family.TensorDictReplayBuffer(**options)


def ids(sample: TensorDict) -> list[int]:
    """Returns the sorted ids of a sample, because TorchRL's order is random."""
    found: list[int] = sample["id"].tolist()
    return sorted(found)


def each_item_so_often(family: Any, step: Step) -> None:
    for times in (1, 2, 3):
        for way in WAYS:
            for name in STORAGES:
                rb = buffer(family, times, way, storage=getattr(family, name)(12))
                of = f"{way} {times} {name}"
                step(f"{of} sample of nothing", lambda: rb.sample(4))
                step(f"{of} extend", lambda: rb.extend(batch(0, 6)))
                step(f"{of} len before", lambda: len(rb))
                step(f"{of} all can be sampled", lambda: rb.can_sample(6))
                for again in range(times):
                    step(f"{of} pass {again}", lambda: ids(rb.sample(6)))
                step(f"{of} all are gone", lambda: rb.sample(4))
                step(f"{of} still", lambda: rb.sample(1))
                step(f"{of} none can be sampled", lambda: rb.can_sample(1))
                step(f"{of} len after", lambda: len(rb))
                step(f"{of} extend again", lambda: len(rb.extend(batch(10, 13))))
                step(f"{of} add", lambda: rb.add(batch(13, 14)[0]) is not None)
                for again in range(times):
                    step(f"{of} new, pass {again}", lambda: ids(rb.sample(100)))
                step(f"{of} all are gone again", lambda: rb.sample(4))


def a_part_and_what_is_written_meanwhile(family: Any, step: Step) -> None:
    rb = buffer(family, 1)
    rb.extend(batch(0, 6))
    step("no item twice in a batch", lambda: len(set(ids(rb.sample(4)))))
    rb.extend(batch(6, 8))
    step("the rest and the new", lambda: len(set(ids(rb.sample(100)))))
    step("that was all", lambda: rb.sample(4))
    rb.extend(batch(8, 18))
    step("a short batch at the end", lambda: [len(rb.sample(7)), len(rb.sample(7))])


def iterated_over(family: Any, step: Step) -> None:
    for times in (1, 2):
        rb = buffer(family, times, batch_size=4)
        step(f"{times}: of nothing", lambda: list(rb))
        rb.extend(batch(0, 8))
        step(f"{times}: all", lambda: sorted(one for each in rb for one in ids(each)))
        step(f"{times}: of what is gone", lambda: list(rb))


def emptied(family: Any, step: Step) -> None:
    for times in (1, 2):
        rb = buffer(family, times)
        rb.extend(batch(0, 6))
        rb.sample(3)
        rb.empty()
        step(f"{times}: nothing is there", lambda: rb.sample(4))
        rb.extend(batch(20, 24))
        for again in range(times):
            step(f"{times}: new, pass {again}", lambda: ids(rb.sample(10)))
        step(f"{times}: gone", lambda: rb.sample(4))


def another_sampler(family: Any, step: Step) -> None:
    rb = family.TensorDictReplayBuffer(storage=family.LazyTensorStorage(8))
    rb.extend(batch(0, 4))
    rb.set_sampler(family.ConsumingSampler())
    step("once", lambda: ids(rb.sample(4)))
    step("no more", lambda: rb.sample(4))


def what_does_not_go_together(family: Any, step: Step) -> None:
    for count in (0, -1, True, 1.5, "2"):
        step(f"after {count!r}", lambda count=count: buffer(family, count))
        step(f"sampler of {count!r}", lambda count=count: family.ConsumingSampler(count))
    step("count", lambda: family.ConsumingSampler(max_sample_count=7).max_sample_count)
    plain = {"storage": family.LazyTensorStorage(4)}
    once = family.ConsumingSampler()
    both = {**plain, "sampler": once, "consume_after_n_samples": 2}
    step("two counts", lambda: family.TensorDictReplayBuffer(**both))
    ahead = {**plain, "consume_after_n_samples": 1, "prefetch": 2}
    step("prefetch", lambda: family.TensorDictReplayBuffer(**ahead))
    other = {**plain, "sampler": family.SamplerWithoutReplacement(), "consume_after_n_samples": 1}
    step("another sampler", lambda: family.TensorDictReplayBuffer(**other))
    lanes = {**plain, "storage": family.LazyTensorStorage(4, ndim=2)}
    step("dimensions", lambda: family.TensorDictReplayBuffer(**lanes, consume_after_n_samples=1))


def what_differs(family: Any, step: Step) -> None:
    rb = buffer(family, 1, size=8)
    rb.extend(batch(0, 8))
    step("in which order", lambda: rb.sample(5)["id"].tolist())
    step("len is what is left", lambda: len(rb))
    step("over what was not sampled", lambda: len(rb.extend(batch(8, 14))))


def loaded(family: Any, step: Step) -> None:
    rb, other = buffer(family, 1), buffer(family, 1)
    rb.extend(batch(0, 6))
    rb.sample(4)
    step("load", lambda: other.load_state_dict(rb.state_dict()))
    step("how many are left", lambda: len(other.sample(100)))
    step("and then", lambda: other.sample(4))


SCENARIOS = [
    Scenario(
        each_item_so_often,
        {
            f"{way} {n} {name} len after": LEN
            for way in WAYS
            for n in (1, 2, 3)
            for name in STORAGES
        },
    ),
    Scenario(a_part_and_what_is_written_meanwhile),
    Scenario(iterated_over),
    Scenario(emptied),
    Scenario(another_sampler),
    Scenario(what_does_not_go_together),
    Scenario(
        what_differs,
        {
            "in which order": ORDER,
            "len is what is left": LEN,
            "over what was not sampled": ORDER,
        },
    ),
    Scenario(loaded, {"how many are left": STATE}),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_items_are_consumed_as_by_torchrl(scenario: Scenario) -> None:
    assert_the_same(scenario)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_any_course_delivers_each_item_so_often(times: int, seed: int) -> None:
    for family in (ours, theirs):
        chance, rb, written, given = random.Random(seed), buffer(family, times, size=64), 0, {}
        for _ in range(40):
            if chance.random() < 0.4 and written - len(_done(given, times)) < 48:
                count = chance.choice([1, 2, 7])
                rb.extend(batch(written, written + count))
                written += count
            elif len(_done(given, times)) < written:
                wanted = chance.choice([1, 3, 8])
                found = ids(rb.sample(wanted))
                assert len(set(found)) == len(found) <= wanted
                for one in found:
                    given[one] = given.get(one, 0) + 1
        while len(_done(given, times)) < written:
            for one in ids(rb.sample(8)):
                given[one] = given.get(one, 0) + 1
        assert given == dict.fromkeys(range(written), times)
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            rb.sample(4)


def _done(given: dict[int, int], times: int) -> set[int]:
    return {one for one, count in given.items() if count == times}


@pytest.mark.parametrize("times", [1, 2])
def test_a_save_has_how_often_each_item_is_to_come(times: int, tmp_path: Path) -> None:
    left = []
    for number, family in enumerate((ours, theirs)):
        rb, other = buffer(family, times), buffer(family, times)
        rb.extend(batch(0, 6))
        for _ in range(times):
            rb.sample(6)
        rb.extend(batch(6, 10))
        rb.dumps(tmp_path / str(number))
        other.loads(tmp_path / str(number))
        left.append([ids(other.sample(100)) for _ in range(times)])
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            other.sample(4)
    assert left[0] == left[1]

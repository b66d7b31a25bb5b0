"""Sampling: the form, number and order of items, seeds, and the end of an iteration."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.replay.conformance import STORAGES, Maker, assert_are_steps, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)


ORDERED = ("round robin", "tensordict round robin")
every_case = pytest.mark.parametrize("maker", cases(), indirect=True, ids=str)
every_case_but_one_writer = pytest.mark.parametrize(
    "maker", cases(writers=("tensordict round robin", "max value")), indirect=True, ids=str
)
every_sampler = pytest.mark.parametrize(
    "maker",
    cases(("list", "memory", "directory"), writers=("tensordict round robin",)),
    indirect=True,
    ids=str,
)
every_storage = pytest.mark.parametrize(
    "maker", cases(samplers=("random",), writers=("round robin",)), indirect=True, ids=str
)
without_replacement = pytest.mark.parametrize(
    "maker",
    cases(samplers=("without replacement",), writers=("round robin",)),
    indirect=True,
    ids=str,
)
prefetching = pytest.mark.parametrize("prefetch", [None, 3])


# -- what comes back ------------------------------------------------------------------------------


@every_case
@prefetching
def test_a_sample_is_made_of_items_and_says_where_they_are(
    maker: Maker, prefetch: int | None
) -> None:
    rb = maker.buffer(12, prefetch=prefetch)
    rb.extend(steps(0, 16))
    for _ in range(4):
        sample = rb.sample()
        # The last batch of a pass over slices may be a short one.
        assert len(sample) == 4 or maker.case.sampler == "slices without replacement"
        assert_are_steps(sample, slices=maker.case.draws_slices)
        assert sample["index"].dtype is torch.int64
        assert numbers(sample) == numbers(rb[sample["index"]])


@every_case_but_one_writer
def test_a_sample_has_the_entries_of_the_data_and_those_of_its_sampler(maker: Maker) -> None:
    rb = maker.buffer(12)
    rb.extend(steps(0, 12))
    keys = set(rb.sample().keys(include_nested=True, leaves_only=True))
    own = keys - set(steps(0, 1).keys(include_nested=True, leaves_only=True))
    expected = {"index"}
    if "prioritized" in maker.case.sampler:
        expected |= {"_weight", "priority_weight"}
    if maker.case.draws_slices:
        expected |= {("next", "terminated")}
    if maker.case.shared:
        expected |= {"index_generation"}
    assert own == expected


@every_case_but_one_writer
def test_return_info_gives_index_and_weights_next_to_the_data(maker: Maker) -> None:
    rb = maker.buffer(12, cls="ReplayBuffer")
    rb.extend(steps(0, 12))
    data, info = rb.sample(return_info=True)
    assert numbers(rb[info["index"]]) == numbers(data)
    assert ("priority_weight" in info) == ("prioritized" in maker.case.sampler)
    plain = rb.sample()
    assert_are_steps(plain)
    assert "index" not in plain.keys()  # noqa: SIM118


@every_case_but_one_writer
def test_a_sample_is_a_copy(maker: Maker) -> None:
    rb = maker.buffer(12)
    rb.extend(steps(0, 12))
    sample = rb.sample()
    sample["obs"] += 100
    sample["next", "obs"].zero_()
    assert_are_steps(rb[:], list(range(12)) if maker.case.in_order else None)


@every_sampler
def test_every_item_is_reached(maker: Maker) -> None:
    rb = maker.buffer(12, batch_size=12)
    rb.extend(steps(0, 12))
    seen = {number for _ in range(60) for number in numbers(rb.sample())}
    assert seen == set(range(12))


@every_sampler
def test_an_overwritten_item_is_never_sampled(maker: Maker) -> None:
    rb = maker.buffer(8, batch_size=8)
    rb.extend(steps(0, 8))
    rb.sample()
    rb.extend(steps(8, 12))
    seen = {number for _ in range(40) for number in numbers(rb.sample())}
    assert seen == set(range(4, 12))


@every_storage
def test_uniform_means_uniform(maker: Maker) -> None:
    rb = maker.buffer(8, batch_size=500)
    rb.extend(steps(0, 12).select("id"))
    counts: Counter[int] = Counter()
    for _ in range(8):
        counts.update(numbers(rb.sample()))
    # 4000 draws of 8 items: each is expected 500 times, with a standard deviation of 21.
    assert set(counts) == set(range(4, 12))
    assert all(380 < count < 620 for count in counts.values())


# -- how many -------------------------------------------------------------------------------------


@every_storage
def test_the_batch_size_of_the_call_wins_with_a_warning(maker: Maker) -> None:
    rb = maker.buffer(12, batch_size=4)
    rb.extend(steps(0, 12))
    with pytest.warns(UserWarning, match="using 7"):
        assert len(rb.sample(7)) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rb.sample(4)) == 4
        assert len(rb.sample()) == 4


@every_storage
def test_any_integer_says_how_many(maker: Maker) -> None:
    rb = maker.buffer(12, batch_size=np.int64(4))
    rb.extend(steps(0, 12))
    assert rb.batch_size == 4
    assert len(rb.sample()) == len(rb.sample(np.int64(4))) == len(rb.sample(torch.tensor(4))) == 4
    for wrong in (4.0, "4"):
        with pytest.raises(
            TypeError, match=rf"batch_size must be a number of items \(an int\), got {wrong!r}"
        ):
            rb.sample(wrong)


@every_storage
def test_without_a_batch_size_there_is_no_sample_and_no_iteration(maker: Maker) -> None:
    rb = maker.buffer(12, batch_size=None)
    rb.extend(steps(0, 12))
    assert rb.batch_size is None
    with pytest.raises(RuntimeError, match="batch"):
        rb.sample()
    with pytest.raises(RuntimeError, match="batch"):
        for _ in rb:
            pass
    assert len(rb.sample(5)) == 5


@every_storage
def test_more_than_there_is_can_be_sampled_with_replacement(maker: Maker) -> None:
    rb = maker.buffer(12, batch_size=30)
    rb.extend(steps(0, 2))
    assert set(numbers(rb.sample())) == {0, 1}


# -- iteration ------------------------------------------------------------------------------------


@every_storage
@prefetching
def test_iteration_over_a_random_sampler_goes_on_as_long_as_one_wants(
    maker: Maker, prefetch: int | None
) -> None:
    rb = maker.buffer(12, batch_size=3, prefetch=prefetch)
    rb.extend(steps(0, 12))
    for count, batch in enumerate(rb, 1):
        assert_are_steps(batch)
        assert len(batch) == 3
        if count == 20:
            break
    assert count == 20


@without_replacement
@prefetching
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_without_replacement_is_every_item_once(
    maker: Maker, prefetch: int | None, drop_last: bool
) -> None:
    rb = maker.buffer(
        10, batch_size=3, prefetch=prefetch, sampler=SamplerWithoutReplacement(drop_last=drop_last)
    )
    rb.extend(steps(0, 10))
    sizes = [3, 3, 3] if drop_last else [3, 3, 3, 1]
    passes = []
    for _ in range(3):
        batches = [numbers(batch) for batch in rb]
        assert [len(batch) for batch in batches] == sizes
        drawn = [number for batch in batches for number in batch]
        assert len(set(drawn)) == sum(sizes)
        assert set(drawn) <= set(range(10))
        passes.append(drawn)
    assert passes[0] != passes[1]


@without_replacement
def test_without_shuffling_a_pass_goes_in_storage_order(maker: Maker) -> None:
    rb = maker.buffer(10, batch_size=4, sampler=SamplerWithoutReplacement(shuffle=False))
    rb.extend(steps(0, 10))
    for _ in range(2):
        assert [numbers(batch) for batch in rb] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [numbers(rb.sample()) for _ in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [0, 1, 2, 3],
    ]


@without_replacement
@prefetching
def test_sampling_goes_round_pass_after_pass(maker: Maker, prefetch: int | None) -> None:
    rb = maker.buffer(10, batch_size=5, prefetch=prefetch)
    rb.extend(steps(0, 10))
    for _ in range(5):
        assert sorted(numbers(rb.sample()) + numbers(rb.sample())) == list(range(10))


@without_replacement
@prefetching
def test_iteration_can_be_interrupted_and_restarted(maker: Maker, prefetch: int | None) -> None:
    rb = maker.buffer(10, batch_size=3, prefetch=prefetch)
    rb.extend(steps(0, 10))
    rest = [numbers(batch) for batch in rb]
    assert len(rest) == 4
    for batch in rb:
        assert len(batch) == 3
        break
    rest = [numbers(batch) for batch in rb]
    assert [len(batch) for batch in rest] == [3, 3, 1]  # the rest of the pass
    assert [len(batch) for batch in rb] == [3, 3, 3, 1]


@without_replacement
def test_items_written_during_a_pass_are_part_of_the_next(maker: Maker) -> None:
    rb = maker.buffer(10, batch_size=2)
    rb.extend(steps(0, 4))
    assert sorted(number for batch in rb for number in numbers(batch)) == [0, 1, 2, 3]
    rb.extend(steps(4, 6))
    assert sorted(number for batch in rb for number in numbers(batch)) == [0, 1, 2, 3, 4, 5]


def test_drop_last_without_a_batch_size_is_refused_at_construction() -> None:
    for cls in (ReplayBuffer, TensorDictReplayBuffer):
        with pytest.raises(ValueError, match=r"batch|drop_last"):
            cls(storage=ListStorage(10), sampler=SamplerWithoutReplacement(drop_last=True))


def test_prefetch_needs_a_batch_size() -> None:
    with pytest.raises(ValueError, match="batch"):
        ReplayBuffer(storage=ListStorage(10), prefetch=3)


def test_next_draws_one_batch_after_another_and_returns_none_at_the_end() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=6
    )
    rb.extend(steps(0, 10))
    for _ in range(2):
        first, second = rb.next(), rb.next()
        assert sorted(numbers(first) + numbers(second)) == list(range(10))
        assert rb.next() is None


def test_a_random_sampler_without_replacement_is_the_other_sampler() -> None:
    sampler = RandomSampler(replacement=False)
    assert type(sampler) is SamplerWithoutReplacement
    sampler = RandomSampler(replacement=False, shuffle=False, drop_last=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=4)
    rb.extend(torch.arange(10))
    assert [batch.tolist() for batch in rb] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- seeds ----------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@every_sampler
@prefetching
def test_the_same_seed_draws_the_same_batches(maker: Maker, prefetch: int | None) -> None:
    def drawn(name: str, seed: int) -> list[list[int]]:
        rb = maker.buffer(12, name=name, generator=seeded(seed), prefetch=prefetch)
        rb.extend(steps(0, 12))
        return [numbers(rb.sample()) for _ in range(6)]

    first = drawn("a", 1)
    torch.rand(3)  # the default generator has no effect
    assert drawn("b", 1) == first
    assert drawn("c", 2) != first


@every_sampler
def test_without_a_generator_torchs_seed_decides(maker: Maker) -> None:
    rb = maker.buffer(12)
    rb.extend(steps(0, 12))

    def drawn(seed: int) -> list[int]:
        sampler = maker.sampler(12)
        rb.set_sampler(sampler)
        torch.manual_seed(seed)
        return [number for _ in range(6) for number in numbers(rb.sample())]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


@every_storage
def test_set_rng_replaces_the_generator(maker: Maker) -> None:
    rb = maker.buffer(12)
    rb.extend(steps(0, 12))
    rb.set_rng(seeded(3))
    first = [numbers(rb.sample()) for _ in range(3)]
    rb.set_rng(seeded(3))
    assert [numbers(rb.sample()) for _ in range(3)] == first


@pytest.mark.product(few=3)
@pytest.mark.parametrize("storage", STORAGES)
def test_prefetching_changes_no_batch(storage: str, tmp_path: Path) -> None:
    for number, case in enumerate(cases((storage,), writers=("round robin",))):
        made = Maker(case, tmp_path / str(number))
        drawn: list[Any] = []
        for prefetch in (None, 1, 4):
            rb = made.buffer(12, name=str(prefetch), generator=seeded(1), prefetch=prefetch)
            rb.extend(steps(0, 12))
            drawn.append([numbers(rb.sample()) for _ in range(7)])
        assert drawn[0] == drawn[1] == drawn[2], str(case)
        made.close()


# -- a sample can be taken ------------------------------------------------------------------------


@every_storage
def test_a_collate_fn_gets_what_the_storage_gives_and_makes_the_batch(maker: Maker) -> None:
    given = []

    def collate(data: Any) -> Any:
        given.append(data)
        return torch.stack(list(data)) if isinstance(data, list) else data.clone()

    rb = maker.buffer(12, cls="ReplayBuffer", collate_fn=collate, batch_size=5)
    rb.extend(steps(0, 12))
    sample = rb.sample()
    assert len(given) == 1
    assert_are_steps(sample)
    assert_are_steps(rb[2:5], [2, 3, 4])
    assert len(given) == 2

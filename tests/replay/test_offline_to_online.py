"""A data set and collected items: exact shares, a common index, and one fraction for all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    PriorityUpdate,
    RateLimiter,
    RateLimitTimeout,
    ReadOnlyStorage,
    ReplayBuffer,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    load_dataset,
    prefill_replay_buffer,
)

DATA, CAPACITY = 40, 100
COLLECTED = 1000  # collected items have numbers from here on


def items(numbers: range) -> TensorDict:
    number = torch.tensor(numbers)
    step = TensorDict({"reward": number[:, None].float()}, [len(number)])
    return TensorDict({"obs": number[:, None].float(), "next": step}, [len(number)])


def collected(count: int) -> TensorDict:
    return items(range(COLLECTED, COLLECTED + count))


def data_set(sampler: Any = None) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(DATA), sampler=sampler)
    rb.extend(items(range(DATA)))
    return rb


def prioritized(capacity: int, **options: Any) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, 1.0, 1.0, eps=0.0, **options)


def mixed(fraction: float = 0.25, batch_size: int = 16, **options: Any) -> Any:
    offline = options.pop("offline", None)
    offline = data_set() if offline is None else offline
    if "online_storage" not in options:
        options["online_capacity"] = CAPACITY
    return OfflineToOnlineReplayBuffer(
        offline, offline_fraction=fraction, batch_size=batch_size, **options
    )


def number(sample: TensorDict) -> torch.Tensor:
    return sample["obs"][:, 0].long()


def of_data(sample: TensorDict) -> int:
    return int((number(sample) < COLLECTED).sum())


@pytest.fixture(params=["memory", "directory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Makes the storage of the online buffer."""
    if request.param == "memory":
        return lambda: LazyTensorStorage(CAPACITY)
    return lambda: LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "on", shared_init=True)


# -- exact shares ----------------------------------------------------------------------------------


@pytest.mark.product(few=16)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 15, 256])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_a_sample_has_round_of_fraction_times_count_rows_of_the_data_set(
    fraction: float, count: int, storage: Callable[[], Any]
) -> None:
    rb = mixed(fraction, count, online_storage=storage())
    rb.extend(collected(30))
    for _ in range(3):
        sample = rb.sample()
        assert len(sample) == count
        assert of_data(sample) == round(fraction * count)
        assert (number(sample)[: round(fraction * count)] < COLLECTED).all()


def test_the_rows_of_a_part_are_drawn_uniformly_from_it() -> None:
    rb = mixed(0.5, 2000)
    rb.extend(collected(10))
    offline, online = number(rb.sample()).view(2, 1000)
    for drawn, first, count in ((offline, 0, DATA), (online, COLLECTED, 10)):
        seen = torch.bincount(drawn - first, minlength=count).double()
        expected = 1000 / count
        # A chi-squared value is below its mean + 6 sigma with a probability of 99.99 %.
        chi = ((seen - expected) ** 2 / expected).sum()
        assert chi < (count - 1) + 6 * (2 * (count - 1)) ** 0.5


def test_without_a_collected_item_all_rows_are_of_the_data_set() -> None:
    rb = mixed()
    assert of_data(rb.sample()) == 16
    rb.extend(collected(1))
    assert of_data(rb.sample()) == 4
    rb.empty()
    assert of_data(rb.sample()) == 16
    assert len(rb) == DATA


def test_with_a_fraction_of_0_all_rows_are_collected() -> None:
    rb = mixed()
    rb.extend(collected(3))
    rb.anneal(5, 5)
    assert of_data(rb.sample()) == 0


def test_a_pass_of_a_part_that_ends_within_a_batch_keeps_the_shares() -> None:
    rb = mixed(
        0.5,
        14,
        offline=data_set(SamplerWithoutReplacement()),
        online_sampler=SamplerWithoutReplacement(),
    )
    rb.extend(collected(11))
    offline, online = [], []
    for _ in range(40):
        sample = rb.sample()
        assert of_data(sample) == 7
        offline += number(sample)[:7].tolist()
        online += number(sample)[7:].tolist()
    assert [offline.count(one) for one in range(DATA)] == [7] * DATA
    of_passes = online[: 25 * 11]
    assert all(of_passes.count(COLLECTED + one) == 25 for one in range(11))


def test_other_samplers_draw_in_the_same_shares() -> None:
    rb = mixed(0.25, prefetch=2)
    rb.extend(collected(50))
    rb.sample()
    old = rb.set_sampler(SamplerEnsemble(prioritized(CAPACITY), prioritized(DATA)))
    assert [type(old[at]).__name__ for at in range(2)] == ["RandomSampler", "RandomSampler"]
    rb.offline_buffer.update_priority(torch.arange(DATA), torch.eye(DATA)[3])
    rb.online_buffer.update_priority(torch.arange(50), torch.eye(50)[7])
    assert number(rb.sample()).tolist() == [3] * 4 + [COLLECTED + 7] * 12
    rb.close()


def test_a_transform_sees_the_rows_of_both_parts() -> None:
    seen: list[int] = []

    def note(sample: TensorDict) -> TensorDict:
        seen.append(len(sample))
        return sample

    rb = mixed(transform=note)
    rb.extend(collected(3))
    rb.sample()
    assert seen == [16]


def test_learners_of_one_seed_draw_differently_from_both_parts(tmp_path: Path) -> None:
    items(range(DATA)).memmap(tmp_path / "data")
    samples = []
    for rank in (0, 1, 1):
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "on", shared_init=True)
        rb = mixed(0.5, offline=load_dataset(tmp_path / "data"), online_storage=storage, rank=rank)
        if not rank:
            rb.extend(collected(30))
        torch.manual_seed(5)
        samples.append(number(rb.sample()).view(2, 8).tolist())
    first, second, third = samples
    assert second == third
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.product(few=1)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_seed_decides_the_draws_in_both_parts(prefetch: int) -> None:
    def drawn(seed: int) -> list[list[int]]:
        rb = mixed(generator=torch.Generator().manual_seed(seed), prefetch=prefetch)
        rb.extend(collected(30))
        return [number(rb.sample()).tolist() for _ in range(5)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_batches_that_are_made_ahead_have_the_shares_and_the_index() -> None:
    rb = mixed(prefetch=4, online_sampler=prioritized(CAPACITY))
    rb.extend(collected(30))
    for _ in range(10):
        sample = rb.sample()
        assert of_data(sample) == 4
        assert torch.equal(number(rb[sample["index"]]), number(sample))
        assert rb.update_tensordict_priority(sample.set("td_error", torch.ones(16))).applied == 12


# -- the fraction ----------------------------------------------------------------------------------


def test_it_falls_as_a_straight_line_to_0() -> None:
    rb = mixed(0.8)
    found = []
    for step in (0, 1, 5, 10, 11, 0):
        rb.anneal(step, 10)
        found.append(rb.offline_fraction)
    assert found == [0.8, 0.8 * 0.9, 0.4, 0.0, 0.0, 0.8]


@pytest.mark.parametrize(("step", "total"), [(0, 0), (-1, 5)])
def test_a_place_that_is_not_on_the_line_is_refused(step: int, total: int) -> None:
    rb = mixed()
    with pytest.raises(ValueError, match=f"got step={step} and total_steps={total}"):
        rb.anneal(step, total)
    assert rb.offline_fraction == 0.25


def test_all_handles_of_a_shared_part_have_what_one_of_them_says(tmp_path: Path) -> None:
    def handle(fraction: float = 0.5) -> Any:
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "on", shared_init=True)
        return mixed(fraction, online_storage=storage)

    one, other = handle(), handle()
    one.extend(collected(5))
    one.anneal(3, 4)
    assert (other.offline_fraction, of_data(other.sample())) == (0.125, 2)
    assert handle().offline_fraction == 0.125
    with pytest.raises(ValueError, match=r"handle set offline_fraction=0\.5"):
        handle(0.6)


def test_a_list_of_this_process_has_a_fraction_of_its_own() -> None:
    rb = mixed(0.5, online_storage=ListStorage(10))
    rb.extend(list(collected(4)))
    rb.anneal(1, 2)
    assert of_data(rb.sample()) == 4


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2, float("nan")])
def test_a_fraction_without_both_parts_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        mixed(fraction)


# -- one index -------------------------------------------------------------------------------------


def test_an_index_names_the_part_and_the_place(storage: Callable[[], Any]) -> None:
    rb = mixed(batch_size=200, online_storage=storage())
    assert rb.extend(collected(10)).tolist() == list(range(10))
    assert rb.add(items(range(7, 8))[0]) == 10
    sample = rb.sample()
    where = sample["index"]
    assert torch.equal(number(rb[where]), number(sample))
    assert (where[:50] >= CAPACITY).all()
    assert torch.equal(where[:50] - CAPACITY, number(sample)[:50])
    assert (where[50:] < 11).all()


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        (slice(0, 3), [1000, 1001, 1002]),
        (slice(8, CAPACITY + 2), [1008, 1009, 0, 1]),
        (slice(CAPACITY + 2, None, 20), [2, 22]),
        (slice(CAPACITY, 8, -1), [0, 1009]),
        ([CAPACITY + 5, 3, -1], [5, 1003, 39]),
        (torch.tensor([2, CAPACITY]), [1002, 0]),
        (slice(50, 60), []),
    ],
)
def test_items_are_read_by_index_in_its_order(index: Any, numbers: list[int]) -> None:
    rb = mixed()
    rb.extend(collected(10))
    assert number(rb[index]).tolist() == numbers


def test_all_items_are_both_parts() -> None:
    rb = mixed()
    rb.extend(collected(10))
    assert len(rb) == len(rb[:]) == 10 + DATA
    assert int(rb[3]["obs"]) == 1003
    assert int(rb[CAPACITY + 3]["obs"]) == int(rb[-37]["obs"]) == 3
    assert rb["next", "reward"].shape == (10 + DATA, 1)
    with pytest.raises(IndexError):
        rb[50]


def test_priorities_go_to_the_part_that_an_index_names(storage: Callable[[], Any]) -> None:
    rb = mixed(
        0.5,
        400,
        offline=data_set(prioritized(DATA)),
        online_storage=storage(),
        online_sampler=prioritized(CAPACITY),
    )
    rb.extend(collected(30))
    all_of_them = torch.cat([torch.arange(30), CAPACITY + torch.arange(DATA)])
    assert rb.update_priority(all_of_them, torch.zeros(30 + DATA)) == PriorityUpdate(70, 0)
    assert rb.update_priority([4, CAPACITY + 9, 5], [1.0, 2.0, 3.0]) == PriorityUpdate(3, 0)
    sample = rb.sample()
    assert number(sample)[:200].unique().tolist() == [9]
    assert number(sample)[200:].unique().tolist() == [1004, 1005]
    weights = torch.where(number(sample) == 1005, 1 / 3, 1.0)
    assert torch.equal(sample["_weight"], weights)
    assert torch.equal(sample["priority_weight"], weights)


def test_a_collected_item_comes_as_often_as_its_priority_says() -> None:
    rb = mixed(0.25, 4000, online_sampler=prioritized(CAPACITY))
    rb.extend(collected(0))
    rb.extend(collected(3).set("td_error", torch.tensor([1.0, 3.0, 0.0])))
    drawn = number(rb.sample())[1000:]
    share = int((drawn == COLLECTED + 1).sum()) / 3000
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 3000) ** 0.5
    assert COLLECTED + 2 not in drawn


def test_rows_without_priorities_weigh_1_beside_those_with() -> None:
    rb = mixed(0.5, 100, online_sampler=prioritized(CAPACITY))
    rb.update_priority(rb.extend(collected(2)), torch.tensor([1.0, 4.0]))
    sample = rb.sample()
    weights = torch.where(number(sample) == COLLECTED + 1, 0.25, 1.0)
    assert torch.equal(sample["_weight"], weights)
    assert "_weight" not in mixed().sample().keys()  # noqa: SIM118


def test_the_priorities_of_a_sample_go_back_with_it(storage: Callable[[], Any]) -> None:
    rb = mixed(
        0.5,
        64,
        offline=data_set(prioritized(DATA)),
        online_storage=storage(),
        online_sampler=prioritized(CAPACITY),
    )
    rb.extend(collected(30))
    zeros = torch.cat([torch.arange(30), CAPACITY + torch.arange(DATA)])
    rb.update_priority(zeros, 0.0)
    sample = rb[torch.tensor([3, CAPACITY + 3])]
    sample["index"] = torch.tensor([3, CAPACITY + 3])
    sample["td_error"] = torch.tensor([[1.0], [2.0]])
    assert rb.update_tensordict_priority(sample) == PriorityUpdate(2, 0)
    assert rb.update_priority(sample) == PriorityUpdate(2, 0)
    assert sorted(number(rb.sample()).unique().tolist()) == [3, 1003]


def test_late_priorities_leave_a_collected_item_alone_that_was_written_over(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "on", shared_init=True)
    rb = mixed(
        0.5,
        8,
        offline=data_set(prioritized(DATA)),
        online_storage=storage,
        online_sampler=prioritized(4),
    )
    rb.extend(collected(4))
    sample = rb.sample()
    assert torch.equal(sample["index_generation"][:4] + 4, sample["index"][:4])
    assert torch.equal(sample["index_generation"][4:], sample["index"][4:])
    rb.extend(collected(4))
    assert rb.update_tensordict_priority(sample.set("td_error", torch.ones(8))) == (4, 4)


def test_what_a_sample_changes_is_changed_in_the_online_part_alone(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "on", shared_init=True)
    rb = mixed(0.5, 8, online_storage=storage)
    rb.extend(collected(4))
    sample = rb.sample()
    result = rb.update_if_present(
        index=sample["index"],
        generation=sample["index_generation"],
        patch=TensorDict({("next", "reward"): torch.full((8, 1), -5.0)}, [8]),
    )
    assert result.updated.tolist() == [False] * 4 + [True] * 4
    assert (rb[sample["index"][4:]]["next", "reward"] == -5).all()
    assert (rb.offline_buffer[:]["next", "reward"] >= 0).all()


def test_marked_items_get_the_default_priority_of_their_part() -> None:
    rb = mixed(
        offline=data_set(prioritized(DATA)), online_sampler=prioritized(CAPACITY), fraction=0.5
    )
    rb.extend(collected(3))
    rb.update_priority(torch.arange(3), 0.0)
    rb.update_priority(CAPACITY + torch.arange(DATA), 0.0)
    rb.mark_update(torch.tensor([2, CAPACITY + 7]))
    assert number(rb.sample()).unique().tolist() == [7, 1002]


# -- what is refused, and what waits ---------------------------------------------------------------


def test_items_of_other_forms_are_named_with_the_part_that_has_them() -> None:
    rb = mixed()
    rb.extend(collected(3).set("log_prob", torch.zeros(3)))
    with pytest.raises(RuntimeError, match=r"only the online part has \['log_prob'\]"):
        rb.sample()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "either online_storage or online_capacity"),
        (
            {"online_capacity": 3, "online_storage": LazyTensorStorage(3)},
            "either online_storage or online_capacity",
        ),
        (
            {"online_storage": LazyTensorStorage(6, ndim=2)},
            "the online part must .* ndim=2",
        ),
        ({"online_storage": ListStorage()}, "storage of the online part must .* ListStorage"),
        (
            {"online_capacity": 3, "root": "/tmp"},
            "'root' is only supported for a data set that is loaded by name",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OfflineToOnlineReplayBuffer(data_set(), **options)


def test_a_data_set_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="got list; for a data set of TorchRL, pass the directory"):
        OfflineToOnlineReplayBuffer([1, 2], online_capacity=3)


@pytest.mark.parametrize("name", ["d4rl:hopper", "hopper", "/data/hopper"])
def test_a_name_of_no_source_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)}.* must begin with one of minari:, parquet:"
    ):
        OfflineToOnlineReplayBuffer(name, online_capacity=3, batch_size=4)


def test_a_name_needs_a_batch_size() -> None:
    with pytest.raises(ValueError, match="batch_size is required"):
        OfflineToOnlineReplayBuffer("minari:none", online_capacity=3)


def test_an_item_of_the_data_set_cannot_be_changed() -> None:
    rb = mixed()
    with pytest.raises(RuntimeError):
        rb[CAPACITY] = items(range(1))[0]


def test_an_empty_data_set_says_so() -> None:
    rb = mixed(offline=TensorDictReplayBuffer(storage=LazyTensorStorage(3)))
    with pytest.raises(EmptyBufferError):
        rb.sample()


def test_samples_wait_for_the_limiter_of_the_online_part_and_count_their_rows() -> None:
    rb = mixed(0.5, 8)
    rb.online_buffer.rate_limiter = RateLimiter(min_size=6)
    rb.extend(collected(4))
    with pytest.raises(RateLimitTimeout):
        rb.sample(timeout=0)
    before = rb.online_buffer.stats()["items_sampled"]
    rb.extend(collected(2))
    assert of_data(rb.sample(timeout=0)) == 4
    assert rb.online_buffer.stats()["items_sampled"] - before == 4


def test_a_sample_waits_for_so_many_collected_items() -> None:
    rb = mixed(0.5, 8)
    rb.extend(collected(3))
    with pytest.raises(RateLimitTimeout):
        rb.sample(min_size=4, timeout=0)
    rb.extend(collected(1))
    assert of_data(rb.sample(min_size=4, timeout=0)) == 4


# -- saves -----------------------------------------------------------------------------------------


def everything(path: Path, prefetch: int = 0) -> Any:
    items(range(DATA)).memmap(path / "data") if not (path / "data").exists() else None
    offline = TensorDictReplayBuffer(
        storage=ReadOnlyStorage(path / "data"),
        sampler=prioritized(DATA),
        writer=ImmutableDatasetWriter(),
    )
    return mixed(
        0.5,
        offline=offline,
        online_sampler=prioritized(CAPACITY),
        generator=torch.Generator().manual_seed(3),
        prefetch=prefetch,
    )


@pytest.mark.product(few=2)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("how", ["directory", "state"])
def test_after_a_save_both_parts_go_on_as_they_were(
    tmp_path: Path, how: str, prefetch: int
) -> None:
    rb, other = everything(tmp_path, prefetch), everything(tmp_path, prefetch)
    rb.extend(collected(30))
    rb.update_priority([3, CAPACITY + 4], [50.0, 70.0])
    rb.anneal(1, 4)
    rb.sample()
    if how == "directory":
        rb.dumps(tmp_path / "save", extra={"step": 7})
        assert other.loads(tmp_path / "save") == {"step": 7}
        saved = tmp_path / "save" / "storage" / "1"
        assert {file.name for file in saved.rglob("*")}.isdisjoint({"observation.memmap", "obs"})
        assert (saved / "shmbuffer.data_set.json").is_file()
    else:
        other.load_state_dict(rb.state_dict())
    assert other.offline_fraction == 0.375
    assert (other[:] == rb[:]).all()
    for _ in range(5):
        mine, theirs = rb.sample(), other.sample()
        assert torch.equal(mine["index"], theirs["index"])
        assert torch.equal(mine["_weight"], theirs["_weight"])


def test_a_save_of_another_data_set_is_refused(tmp_path: Path) -> None:
    rb = everything(tmp_path)
    rb.extend(collected(3))
    rb.dumps(tmp_path / "save")
    file = tmp_path / "save" / "storage" / "1" / "shmbuffer.data_set.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "slots": 41}))
    with pytest.raises(ValueError, match="into a storage with the same data set"):
        everything(tmp_path).loads(tmp_path / "save")


def test_stats_tell_the_parts_apart() -> None:
    rb = mixed()
    rb.extend(collected(10))
    found = rb.stats()
    assert (found["size"], found["offline_size"], found["online_size"]) == (50, 40, 10)
    assert found["offline_fraction"] == 0.25
    assert "offline_fraction=0.250, online_size=10" in repr(rb)


def test_a_directory_is_opened_for_reading(tmp_path: Path) -> None:
    items(range(DATA)).memmap(tmp_path / "data")
    rb = OfflineToOnlineReplayBuffer(tmp_path / "data", online_capacity=5, batch_size=4)
    assert isinstance(rb.offline_buffer.storage, ReadOnlyStorage)
    assert isinstance(load_dataset(tmp_path / "data").writer, ImmutableDatasetWriter)
    assert of_data(rb.sample()) == 4


# -- prefill ---------------------------------------------------------------------------------------


@pytest.mark.product(few=6)
@pytest.mark.parametrize("chunk_size", [1, 7, 40, 1000])
@pytest.mark.parametrize("count", [None, 0, 1, 13, 40, 99])
def test_each_of_the_first_items_is_copied_once_in_order(
    count: int | None, chunk_size: int
) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    assert prefill_replay_buffer(rb, data_set(), count, chunk_size) is rb
    wanted = DATA if count is None else min(count, DATA)
    assert len(rb) == wanted
    assert not wanted or number(rb[:]).tolist() == list(range(wanted))


def test_places_without_an_item_are_left_out_of_the_copy() -> None:
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(DATA))
    source.storage.set([1, 4, 30, 31], items(range(4)))
    rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(9)), source, 3, 2)
    assert number(rb[:]).tolist() == [0, 1, 2]


def test_a_directory_is_copied_by_its_path(tmp_path: Path) -> None:
    items(range(DATA)).memmap(tmp_path / "data")
    rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(50)), tmp_path / "data")
    assert number(rb[:]).tolist() == list(range(DATA))


def test_lanes_are_copied_as_items() -> None:
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    source.extend(items(range(12)).reshape(3, 4))
    rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(20)), source, 10, 2)
    assert len(rb) == 10
    assert len(number(rb[:]).unique()) == 10


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        prefill_replay_buffer(ReplayBuffer(), data_set(), chunk_size=0)

"""Each item once in a pass: the course of a pass, its end and resumption, and concurrent writes."""

from __future__ import annotations

import pickle
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from shmbuffer.samplers.permutation import FEWEST
from tests.kit.rings import ring_of
from tests.replay.test_samplers import TwoMethods

pytestmark = pytest.mark.product(few=4)


def buffer(storage: Any, batch_size: int = 3, *, items: int = 10, **options: Any) -> ReplayBuffer:
    """Makes a buffer with the items 0, 1, 2, ..."""
    sampler = SamplerWithoutReplacement(**options)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    rb.extend(torch.arange(items))
    return rb


def batches(rb: ReplayBuffer) -> list[list[int]]:
    return [batch.tolist() for batch in rb]


def sizes(rb: ReplayBuffer) -> list[int]:
    return [len(batch) for batch in rb]


def flat(found: list[list[int]]) -> list[int]:
    return [item for batch in found for item in batch]


# -- a pass ----------------------------------------------------------------------------------------


def test_ten_items_by_three_are_three_batches_and_one_item(make: Any) -> None:
    rb = buffer(make(10))
    for _ in range(3):  # an iteration can be restarted
        found = batches(rb)
        assert [len(batch) for batch in found] == [3, 3, 3, 1]
        assert sorted(flat(found)) == list(range(10))


def test_with_drop_last_the_short_batch_is_left_out(make: Any) -> None:
    rb = buffer(make(10), drop_last=True)
    left_out = set()
    for _ in range(20):
        found = batches(rb)
        assert [len(batch) for batch in found] == [3, 3, 3]
        assert len(set(flat(found))) == 9
        left_out |= set(range(10)) - set(flat(found))
    assert len(left_out) > 3  # not the same item each time


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_number_that_divides_leaves_nothing_over(make: Any, drop_last: bool) -> None:
    rb = buffer(make(10), 5, drop_last=drop_last)
    assert [sizes(rb), sizes(rb)] == [[5, 5], [5, 5]]


def test_sample_goes_on_where_the_pass_is_and_begins_the_next_one(make: Any) -> None:
    rb = buffer(make(10))
    ran_out, found = [], []
    for _ in range(8):
        found.append(rb.sample().tolist())
        ran_out.append(rb.sampler.ran_out)
    assert ran_out == [False, False, False, True] * 2
    for one_pass in (found[:4], found[4:]):
        assert sorted(flat(one_pass)) == list(range(10))
    assert found[:4] != found[4:]


def test_a_pass_that_was_left_in_the_middle_goes_on(make: Any) -> None:
    rb = buffer(make(10))
    seen: list[int] = []
    for batch in rb:
        seen += batch.tolist()
        if len(seen) == 6:
            break
    rest = batches(rb)
    assert [len(batch) for batch in rest] == [3, 1]
    assert sorted(seen + flat(rest)) == list(range(10))
    assert sizes(rb) == [3, 3, 3, 1]


def test_a_batch_larger_than_the_storage_is_everything_once(make: Any) -> None:
    rb = buffer(make(10), 64)
    assert sorted(rb.sample().tolist()) == list(range(10))
    assert rb.sampler.ran_out
    assert sizes(rb) == [10]


def test_with_drop_last_too_few_items_are_an_error_and_more_items_mend_it(make: Any) -> None:
    rb = buffer(make(10), 4, items=3, drop_last=True)
    message = r"The batch size \(4\) is greater than the storage capacity in use \(3 items\)"
    with pytest.raises(ValueError, match=message) as caught:
        rb.sample()
    assert "drop_last=False" in str(caught.value)
    with pytest.raises(ValueError, match=message):
        next(iter(rb))
    rb.extend(torch.arange(3, 9))
    assert sizes(rb) == [4, 4]


def test_with_drop_last_no_batch_is_short_whatever_sizes_are_asked_for(make: Any) -> None:
    storage = make(10)
    buffer(storage)
    sampler = SamplerWithoutReplacement(drop_last=True)
    for size in (3, 8, 2, 10, 7, 4, 9, 1):
        index, _ = sampler.sample(storage, size)
        assert len(set(index.tolist())) == size


def test_a_refused_draw_leaves_the_pass_as_it_was(make: Any) -> None:
    storage = make(10)
    buffer(storage)
    sampler = SamplerWithoutReplacement(drop_last=True)
    first = sampler.sample(storage, 4)[0].tolist()
    with pytest.raises(ValueError, match="batch size"):
        sampler.sample(storage, 11)
    assert not set(first) & set(sampler.sample(storage, 4)[0].tolist())


def test_a_batch_of_nothing_takes_nothing(make: Any) -> None:
    storage = make(10)
    sampler = SamplerWithoutReplacement(shuffle=False)
    with pytest.raises(EmptyBufferError):
        sampler.sample(storage, 0)
    buffer(storage)
    assert sampler.sample(storage, 4)[0].tolist() == [0, 1, 2, 3]
    index, _ = sampler.sample(storage, 0)
    assert (index.shape, index.dtype) == ((0,), torch.int64)
    assert sampler.sample(storage, 4)[0].tolist() == [4, 5, 6, 7]


def test_an_index_is_the_callers_to_change(make: Any) -> None:
    storage = make(10)
    buffer(storage)
    sampler = SamplerWithoutReplacement(shuffle=False)
    position = sampler._position()
    sampler.sample(storage, 5)[0].zero_()
    sampler._rewind(position)
    assert sampler.sample(storage, 10)[0].tolist() == list(range(10))


@pytest.mark.product(few=1)
def test_iteration_ahead_of_the_caller_is_one_pass_too(make: Any) -> None:
    rb = ReplayBuffer(
        storage=make(10), sampler=SamplerWithoutReplacement(), batch_size=3, prefetch=3
    )
    rb.extend(torch.arange(10))
    for _ in range(3):
        found = batches(rb)
        assert [len(batch) for batch in found] == [3, 3, 3, 1]
        assert sorted(flat(found)) == list(range(10))


def test_drop_last_needs_a_buffer_that_knows_its_batch_size() -> None:
    with pytest.raises(ValueError, match="drop_last=True"):
        ReplayBuffer(storage=ListStorage(5), sampler=SamplerWithoutReplacement(drop_last=True))
    ReplayBuffer(storage=ListStorage(5), sampler=SamplerWithoutReplacement())


# -- the order -------------------------------------------------------------------------------------


def test_without_shuffling_the_order_is_that_of_the_storage(make: Any) -> None:
    rb = buffer(make(10), shuffle=False)
    assert batches(rb) == batches(rb) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    rb.extend(torch.arange(10, 12))  # overwrites the oldest items
    assert batches(rb) == [[10, 11, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_every_order_is_as_likely_as_any_other() -> None:
    rb = buffer(LazyTensorStorage(3), items=3)
    counts = Counter(tuple(rb.sample().tolist()) for _ in range(3000))
    assert len(counts) == 6
    chi_square = sum((count - 500) ** 2 / 500 for count in counts.values())
    assert chi_square < 20.5  # 5 degrees of freedom: 1 in 1000


def test_a_generator_decides_the_order_and_leaves_torchs_own_alone(make: Any) -> None:
    rb = buffer(make(10))
    rb.generator = torch.Generator().manual_seed(1)
    torch.manual_seed(3)
    first = [batches(rb), batches(rb)]
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), expected)
    rb.generator = torch.Generator().manual_seed(1)
    assert [batches(rb), batches(rb)] == first
    assert first[0] != first[1]


def test_torch_manual_seed_decides_the_order(make: Any) -> None:
    rb = buffer(make(10))
    torch.manual_seed(5)
    first = batches(rb)
    torch.manual_seed(5)
    assert batches(rb) == first


def test_only_a_new_pass_takes_random_numbers(make: Any) -> None:
    rb = buffer(make(100), 7, items=100)
    rb.generator = torch.Generator().manual_seed(1)
    rb.sample()
    state = rb.generator.get_state()
    while not rb.sampler.ran_out:
        rb.sample()
        assert torch.equal(rb.generator.get_state(), state)
    rb.sample()
    assert not torch.equal(rb.generator.get_state(), state)


# -- what is written in the middle of a pass -------------------------------------------------------


def test_a_storage_that_grows_begins_a_new_pass_with_everything(make: Any) -> None:
    rb = buffer(make(20))
    rb.sample()
    rb.extend(torch.arange(10, 15))
    found = batches(rb)
    assert [len(batch) for batch in found] == [3] * 5
    assert sorted(flat(found)) == list(range(15))
    rb.sample()
    rb.add(torch.tensor(15))
    assert sorted(flat(batches(rb))) == list(range(16))


def test_items_written_between_two_passes_are_part_of_the_next(make: Any) -> None:
    rb = buffer(make(20))
    batches(rb)
    rb.extend(torch.arange(10, 12))
    assert sorted(flat(batches(rb))) == list(range(12))


def test_a_place_that_is_written_over_is_drawn_once_with_what_it_holds_then(make: Any) -> None:
    rb = buffer(make(10), shuffle=False)
    assert rb.sample().tolist() == [0, 1, 2]
    rb.extend(torch.arange(10, 15))  # slots 0 to 4, three of which were already drawn
    assert batches(rb) == [[13, 14, 5], [6, 7, 8], [9]]
    assert batches(rb) == [[10, 11, 12], [13, 14, 5], [6, 7, 8], [9]]


def test_items_of_another_handle_join_at_the_next_pass(directory: Any) -> None:
    rb = buffer(directory(20))
    other = ReplayBuffer(storage=directory(20))
    seen = rb.sample().tolist()
    for item in range(10, 14):
        other.add(torch.tensor(item))
        if not rb.sampler.ran_out:
            seen += rb.sample().tolist()
    assert sorted(seen) == list(range(10))
    assert sorted(flat(batches(rb))) == list(range(14))


def test_a_write_through_another_buffer_on_the_storage_begins_a_new_pass(make_private: Any) -> None:
    storage = make_private(20)
    rb, other = buffer(storage), ReplayBuffer(storage=storage)
    rb.sample()
    other.extend(torch.arange(10, 12))
    assert sorted(flat(batches(rb))) == list(range(12))


def test_after_empty_there_is_nothing_and_then_a_new_pass(make: Any) -> None:
    rb = buffer(make(10))
    rb.sample()
    rb.empty()
    assert not rb.sampler.ran_out
    with pytest.raises(EmptyBufferError) as caught:
        rb.sample()
    assert isinstance(caught.value, RuntimeError)
    rb.extend(torch.arange(4))
    found = batches(rb)
    assert [len(batch) for batch in found] == [3, 1]
    assert sorted(flat(found)) == list(range(4))


def test_a_storage_that_another_handle_has_emptied_begins_a_new_pass(directory: Any) -> None:
    rb, other = buffer(directory(10), shuffle=False), ReplayBuffer(storage=directory(10))
    assert rb.sample().tolist() == [0, 1, 2]
    other.empty()
    with pytest.raises(EmptyBufferError):
        rb.sample()
    other.extend(torch.arange(20, 24))
    assert batches(rb) == [[20, 21, 22], [23]]
    rb.sample()
    other.empty()
    other.extend(torch.arange(30, 33))
    assert batches(rb) == [[30, 31, 32]]


def test_a_place_whose_write_failed_is_left_out(make: Any) -> None:
    storage = make(10)
    rb = buffer(storage, shuffle=False)
    assert rb.sample().tolist() == [0, 1, 2]
    ring_of(storage).claims.claim(5)
    ring_of(storage).claims.abort()
    assert batches(rb) == [[5, 6, 7], [8, 9]]
    assert batches(rb) == [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize(("items", "batch_size"), [(64, 7), (FEWEST, 1000)])
def test_a_pass_has_each_place_at_most_once_while_others_write_over_everything(
    directory: Any, items: int, batch_size: int
) -> None:
    rb = buffer(directory(items), batch_size, items=items)
    other, done = ReplayBuffer(storage=directory(items)), threading.Event()
    count = max(5, items // 100)
    # Without a limit, a writer may overwrite every choice of one sample.
    allowed = threading.Semaphore(3)

    def write() -> None:
        item = items
        while allowed.acquire() and not done.is_set():
            other.extend(torch.arange(item, item + count))
            item += count

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            seen: list[int] = []
            while True:
                data, info = rb.sample(return_info=True)
                allowed.release(3)
                # each item is in the slot that its number gives
                assert (data % items == info["index"]).all()
                assert torch.equal(data, info["index_generation"])
                seen += info["index"].tolist()
                if rb.sampler.ran_out:
                    break
            assert len(set(seen)) == len(seen)
    finally:
        done.set()
        allowed.release()
        writer.join()
    assert other.write_count > 2 * items  # every item was overwritten more than once
    assert sorted(set(flat(batches(rb)))) == sorted(rb[:].tolist())


class Looks(np.ndarray[Any, Any]):
    """Slot words of a ring that count how many of them are read."""

    counted = 0

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        Looks.counted += np.size(found)
        return np.asarray(found)


def work(rb: ReplayBuffer, calls: int) -> tuple[int, int]:
    """Returns the most slots that one sample reads, and the most bytes that numpy allocates."""
    live, looks, taken = ring_of(rb.storage).live, [], []
    live.words = live.words.view(Looks)
    for call in range(calls):
        rb.extend(torch.arange(10 * call, 10 * call + 10))
        Looks.counted = 0
        tracemalloc.start()
        try:
            rb.sample()
            taken.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        looks.append(Looks.counted)
    live.words = np.asarray(live.words)
    return max(looks), max(taken)


@pytest.mark.product(few=3)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("state", ["full", "growing", "one slot is being written"])
def test_a_draw_after_a_write_does_not_look_at_the_whole_storage(
    directory: Any, state: str, shuffle: bool
) -> None:
    capacity = 1_000_000
    items = capacity // 2 if state == "growing" else capacity
    rb = buffer(directory(capacity), 50_000, items=items, shuffle=shuffle)
    if state == "one slot is being written":
        other = directory(capacity)
        ring_of(other).claims.claim(1)
    looks, taken = work(rb, 45)  # two passes
    assert looks <= 3 * 50_000
    assert taken < 5_000_000  # a table of the order would take eight million bytes


def test_after_an_emptying_a_pass_looks_at_the_slots_that_are_in_use_again() -> None:
    rb = buffer(LazyTensorStorage(1_000_000), 100, items=1_000_000)
    rb.empty()
    rb.extend(torch.arange(5000))
    looks, taken = work(rb, 5)
    assert looks < 20_000
    assert taken < 1_000_000


def test_an_order_that_is_not_in_a_table_resumes_exactly(tmp_path: Path) -> None:
    def made() -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(2 * FEWEST),
            sampler=SamplerWithoutReplacement(),
            batch_size=1000,
            prefetch=2,
            generator=torch.Generator().manual_seed(5),
        )

    rb, other, third = made(), made(), made()
    rb.extend(torch.arange(FEWEST))
    first = [rb.sample().tolist() for _ in range(3)]
    rb.dumps(tmp_path / "save")
    state = rb.state_dict()
    rest = batches(rb)
    assert sorted(flat(first) + flat(rest)) == list(range(FEWEST))
    other.loads(tmp_path / "save")
    assert batches(other) == rest
    third.load_state_dict(state)
    assert batches(third) == rest
    expected = batches(rb)  # the order of the next pass is drawn from the generator
    assert batches(other) == batches(third) == expected != rest
    for one in (rb, other, third):
        one.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_item_that_is_evicted_is_left_out_and_the_pass_goes_on(
    tmp_path: Path, shuffle: bool
) -> None:
    storage = LazyStackStorage(
        1000, scratch_dir=tmp_path / "buffer", shared_init=True, max_bytes=2**15
    )
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.generator = torch.Generator().manual_seed(2)

    def write(first: int, count: int) -> None:
        for item in range(first, first + count):
            rb.add(TensorDict({"item": torch.full((16,), item)}, []))

    write(0, 300)
    assert len(rb) < 300  # the oldest items were evicted
    for item in range(300, 340):
        write(item, 1)
    for _ in range(3):
        seen, held = [], set(rb[:]["item"][:, 0].tolist())
        while True:
            seen += rb.sample(return_info=True)[1]["index"].tolist()
            if rb.sampler.ran_out:
                break
            write(item := item + 1, 1)
        assert len(set(seen)) == len(seen)
        kept = held & set(rb[:]["item"][:, 0].tolist())
        assert {one % 1000 for one in kept} <= set(seen)
    rb.empty()
    write(2000, 3)
    assert sorted(rb.sample()["item"][:, 0].tolist()) == [2000, 2001, 2002]
    rb.close()


def test_another_storage_begins_a_new_pass(make: Any) -> None:
    rb = buffer(make(20), items=20)
    rb.sample()
    smaller = make(6)
    smaller.set(range(6), torch.arange(6))
    rb.set_storage(smaller)
    assert sorted(flat(batches(rb))) == list(range(6))
    rb.sample()
    same_size = make(6)
    same_size.set(range(6), torch.arange(6))
    rb.set_storage(same_size)
    assert sorted(flat(batches(rb))) == list(range(6))


# -- storages --------------------------------------------------------------------------------------


def test_places_without_an_item_are_never_drawn(make: Any) -> None:
    storage = make(100)
    storage.set([98, 3, 50], torch.tensor([98, 3, 50]))
    sampler = SamplerWithoutReplacement(shuffle=False)
    assert sampler.sample(storage, 2)[0].tolist() == [3, 50]
    assert sampler.sample(storage, 2)[0].tolist() == [98]
    assert sampler.ran_out


def test_every_element_of_several_dimensions_comes_once_with_its_coordinates(make: Any) -> None:
    storage = make(24, ndim=2)
    sampler = SamplerWithoutReplacement()
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=5)
    rb.extend(TensorDict({"a": torch.arange(12).reshape(4, 3)}, [4, 3]))
    assert len(rb) == 12
    found, places = [], []
    for batch in rb:
        assert batch["index"].shape == (*batch.batch_size, 2)
        found.append(batch["a"].tolist())
        places += [tuple(index) for index in batch["index"].tolist()]
    assert [len(batch) for batch in found] == [5, 5, 2]
    assert sorted(flat(found)) == list(range(12))
    assert len(set(places)) == 12
    index, _ = sampler.sample(storage, 4)
    assert isinstance(index, tuple)
    assert [part.shape for part in index] == [(4,), (4,)]


@pytest.mark.parametrize(
    "storage",
    [
        lambda: ListStorage(10),
        lambda: TensorStorage(torch.zeros(10, dtype=torch.int64)),
        lambda: TwoMethods(10),
    ],
)
def test_every_kind_of_storage_has_passes(storage: Any) -> None:
    rb = buffer(storage())
    for _ in range(2):
        found = batches(rb)
        assert [len(batch) for batch in found] == [3, 3, 3, 1]
        assert sorted(flat(found)) == list(range(10))


def test_a_users_storage_that_changes_its_length_begins_a_new_pass() -> None:
    storage = TwoMethods(10)
    storage.set(torch.arange(6), torch.arange(6))
    sampler = SamplerWithoutReplacement()
    first = sampler.sample(storage, 4)[0]
    second = sampler.sample(storage, 4)[0]
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(6))
    sampler.sample(storage, 4)
    storage.set(6, torch.tensor(6))
    assert sorted(sampler.sample(storage, 9)[0].tolist()) == list(range(7))
    sampler.sample(storage, 2)
    del storage.items[6], storage.items[5]
    assert sorted(sampler.sample(storage, 9)[0].tolist()) == list(range(5))
    storage.items.clear()
    with pytest.raises(EmptyBufferError):
        sampler.sample(storage, 1)


def test_where_the_storage_is_shared_a_sample_has_the_tickets_of_its_items(directory: Any) -> None:
    rb = buffer(directory(10))
    rb.extend(torch.arange(10, 13))
    data, info = rb.sample(return_info=True)
    assert torch.equal(info["index_generation"], data)
    private = buffer(LazyTensorStorage(10))
    assert set(private.sample(return_info=True)[1]) == {"index"}


def test_rows_that_changed_before_they_were_read_are_read_again(directory: Any) -> None:
    storage = directory(10)
    rb = buffer(storage, shuffle=False)
    sampler = rb.sampler
    index, info = sampler.sample(storage, 3)
    assert info["index_generation"].tolist() == [0, 1, 2]
    ReplayBuffer(storage=directory(10)).extend(torch.arange(10, 12))
    again, info = sampler._again(storage, index)
    assert again.tolist() == [0, 1, 2]
    assert info["index_generation"].tolist() == [10, 11, 2]
    assert batches(rb) == [[3, 4, 5], [6, 7, 8], [9]]
    sampler.sample(storage, 3)
    ring_of(storage).claims.claim(1)
    ring_of(storage).claims.abort()
    again, info = sampler._again(storage, torch.tensor([1, 2, 3]))
    assert again.tolist() == [1, 3]
    assert info["index_generation"].tolist() == [11, 3]


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_resumes_in_the_middle_exactly(make: Any, drop_last: bool) -> None:
    rb = buffer(make(10), drop_last=drop_last)
    seen = [rb.sample().tolist(), rb.sample().tolist()]
    state = rb.sampler.state_dict()
    assert set(state) == {"len_storage", "_sample_list", "drop_last", "_ran_out"}
    assert (state["len_storage"], state["drop_last"], state["_ran_out"]) == (10, drop_last, False)
    assert rb.sampler.len_storage == 10
    rest = batches(rb)
    other = buffer(make(10), drop_last=not drop_last)
    other.sample()
    other.sampler.load_state_dict(state)
    assert batches(other) == rest
    assert len(set(flat(seen + rest))) == (9 if drop_last else 10)


def test_the_state_of_a_buffer_holds_its_pass(make: Any) -> None:
    rb = buffer(make(10))
    rb.sample()
    state = rb.state_dict()
    rest = batches(rb)
    other = ReplayBuffer(storage=make(10), sampler=SamplerWithoutReplacement(), batch_size=3)
    other.load_state_dict(state)
    assert batches(other) == rest
    assert sizes(other) == [3, 3, 3, 1]


def test_between_two_passes_the_state_says_so(make: Any) -> None:
    rb = buffer(make(10))
    batches(rb)
    state = rb.sampler.state_dict()
    assert state["_sample_list"] is None
    assert state["_ran_out"]
    other = buffer(make(10))
    other.sample()
    other.sampler.load_state_dict(state)
    assert other.sampler.ran_out
    assert sizes(other) == [3, 3, 3, 1]


def test_a_state_of_another_number_of_items_begins_a_new_pass(make: Any) -> None:
    rb = buffer(make(10))
    rb.sample()
    for items in (4, 12):
        other = buffer(make(12), items=items)
        other.sampler.load_state_dict(rb.sampler.state_dict())
        assert sorted(flat(batches(other))) == list(range(items))


def test_a_state_of_torchrl_is_read(make: Any) -> None:
    rb = buffer(make(10))
    rb.sampler.load_state_dict(
        {
            "len_storage": torch.tensor(10),
            "_sample_list": torch.tensor([4, 7, 1, 0]),
            "drop_last": torch.tensor(False),
            "_ran_out": torch.tensor(False),
        }
    )
    assert batches(rb) == [[4, 7, 1], [0]]
    assert rb.sampler.drop_last is False


def test_draws_can_be_taken_back(make: Any) -> None:
    rb = buffer(make(10))
    sampler, storage = rb.sampler, rb.storage
    sampler.sample(storage, 3)
    position = sampler._position()
    rest = [sampler.sample(storage, 3)[0].tolist() for _ in range(3)]
    assert sampler.ran_out
    sampler._rewind(position)
    assert not sampler.ran_out
    assert [sampler.sample(storage, 3)[0].tolist() for _ in range(3)] == rest


# -- what it says of itself ------------------------------------------------------------------------


def test_the_repr_says_how_much_of_the_pass_was_sampled(make: Any) -> None:
    rb = buffer(make(10))
    assert repr(rb.sampler) == "SamplerWithoutReplacement( 0.0000% sampled)"
    rb.sample()
    assert repr(rb.sampler) == "SamplerWithoutReplacement( 30.0000% sampled)"
    batches(rb)
    assert repr(rb.sampler) == "SamplerWithoutReplacement( 100.0000% sampled)"
    rb.empty()
    assert repr(rb.sampler) == "SamplerWithoutReplacement( 0.0000% sampled)"


def test_a_random_sampler_without_replacement_is_this_one(make: Any) -> None:
    sampler: Any = RandomSampler(replacement=False)
    assert type(sampler) is SamplerWithoutReplacement
    assert (sampler.drop_last, sampler.shuffle) == (False, True)
    sampler = RandomSampler(replacement=False, drop_last=True, shuffle=False)
    assert (sampler.drop_last, sampler.shuffle) == (True, False)
    rb = ReplayBuffer(storage=make(10), sampler=sampler, batch_size=4)
    rb.extend(torch.arange(10))
    assert batches(rb) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert type(RandomSampler(replacement=True)) is RandomSampler
    with pytest.raises(TypeError, match=r"drop_last.*replacement=False"):
        RandomSampler(drop_last=True)
    with pytest.raises(TypeError, match="unexpected"):
        RandomSampler(replacement=False, alpha=1.0)


def test_a_class_derived_from_the_random_sampler_has_arguments_of_its_own(make: Any) -> None:
    class Offset(RandomSampler):
        def __init__(self, offset: int, *, label: str = "") -> None:
            super().__init__()
            self.offset, self.label = offset, label

    for sampler in (Offset(0, label="x"), pickle.loads(pickle.dumps(RandomSampler()))):
        assert isinstance(sampler, RandomSampler)
        rb = ReplayBuffer(storage=make(10), sampler=sampler)
        rb.extend(torch.arange(10))
        assert len(rb.sample(4)) == 4
    with pytest.raises(TypeError, match="Without has no variant without replacement"):
        type("Without", (RandomSampler,), {})(replacement=False)


def test_a_sampler_is_sent_to_another_process_with_its_pass(directory: Any) -> None:
    rb = buffer(directory(10))
    rb.sample()
    other = pickle.loads(pickle.dumps(rb))
    assert batches(other) == batches(rb)
    other.close()


def test_the_draws_of_a_million_items_are_each_item_once() -> None:
    count = 1_000_000
    storage = LazyTensorStorage(count)
    storage.set(range(count), torch.arange(count))
    sampler = SamplerWithoutReplacement()
    seen = np.zeros(count, np.int64)
    while not sampler.ran_out:
        seen[sampler.sample(storage, 4096)[0].numpy()] += 1
    assert (seen == 1).all()

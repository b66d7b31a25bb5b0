"""Prefetched batches are the same, in the same order, and never one too many."""

from __future__ import annotations

import os
import pickle
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from tests.kit.items import numbered
from tests.kit.rings import engine_of


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rb: ReplayBuffer, count: int) -> list[list[int]]:
    return [rb.sample()["number"].tolist() for _ in range(count)]


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    "sampler", [RandomSampler, lambda: PrioritizedSampler(20, 0.7, 0.9), SamplerWithoutReplacement]
)
def test_the_same_seed_draws_the_same_batches_with_and_without(make: Any, sampler: Any) -> None:
    batches = []
    for prefetch in (None, 1, 4):
        rb = TensorDictReplayBuffer(
            storage=make(20),
            sampler=sampler(),
            batch_size=3,
            prefetch=prefetch,
            generator=seeded(),
        )
        rb.extend(numbered(0, 20))
        batches.append(drawn(rb, 20))
        rb.close()
    if sampler is SamplerWithoutReplacement:
        assert batches[0] == batches[1] == batches[2]
    else:  # drawing alone uses the same key as the native call that draws and gathers
        assert batches[0] == batches[1] == batches[2]


@pytest.mark.product(few=4)
@pytest.mark.parametrize("prefetch", [1, 3, 8])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 3, 1]), (True, [3, 3, 3])])
def test_an_iteration_is_exactly_one_pass(
    make: Any, prefetch: int, drop_last: bool, sizes: list[int]
) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(10),
        sampler=SamplerWithoutReplacement(drop_last=drop_last),
        batch_size=3,
        prefetch=prefetch,
    )
    rb.extend(numbered(0, 10))
    for _ in range(4):
        batches = [batch["number"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == sizes
        seen = list(chain(*batches))
        assert len(set(seen)) == len(seen) == sum(sizes)


def test_items_written_after_a_pass_are_in_the_next_one() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=3,
    )
    rb.extend(numbered(0, 10))
    assert sorted(chain(*(batch["number"].tolist() for batch in rb))) == list(range(10))
    rb.extend(numbered(10, 10))
    assert sorted(chain(*(batch["number"].tolist() for batch in rb))) == list(range(20))


def test_it_needs_to_know_the_batch_size() -> None:
    with pytest.raises(ValueError, match="prefetch=3 needs"):
        ReplayBuffer(storage=LazyTensorStorage(4), prefetch=3)
    rb = ReplayBuffer(storage=LazyTensorStorage(4), prefetch=3, batch_size=2)
    rb.extend(torch.arange(4))
    with pytest.warns(UserWarning, match="differs from the buffer's batch_size=2") as warned:
        assert len(rb.sample(3)) == 3
    assert warned[0].filename == __file__
    assert len(rb.sample()) == 2
    assert rb.stats()["prefetch_queue_size"] == 3


def test_an_error_in_a_transform_reaches_the_caller_and_the_next_batch_comes() -> None:
    calls = iter(range(100))

    def fail_once(data: Any) -> Any:
        if next(calls) == 2:
            raise ZeroDivisionError("in the transform")
        return data

    rb = ReplayBuffer(storage=LazyTensorStorage(4), prefetch=1, batch_size=2, transform=fail_once)
    rb.extend(torch.arange(4))
    outcomes = []
    for _ in range(6):
        try:
            outcomes.append(len(rb.sample()))
        except ZeroDivisionError:
            outcomes.append(-1)
    assert sorted(outcomes) == [-1, 2, 2, 2, 2, 2]


def test_after_emptying_nothing_old_is_delivered(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(10), prefetch=3, batch_size=4)
    with pytest.raises(EmptyBufferError):
        rb.sample()
    rb.extend(numbered(0, 10))
    drawn(rb, 3)
    rb.empty()
    assert rb.stats()["prefetch_queue_size"] == 0
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.extend(numbered(50, 5))
    assert all(min(batch) >= 50 for batch in drawn(rb, 10))


def test_batches_that_were_never_delivered_are_drawn_again() -> None:
    def buffer(prefetch: int | None) -> TensorDictReplayBuffer:
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(12),
            sampler=SamplerWithoutReplacement(),
            batch_size=3,
            prefetch=prefetch,
            generator=seeded(),
        )
        rb.extend(numbered(0, 12))
        return rb

    plain, ahead = buffer(None), buffer(4)
    for rb in (plain, ahead):
        rb.sample()
        rb.state_dict()  # the state of the delivered batches
    assert drawn(plain, 11) == drawn(ahead, 11)
    saved = ahead.state_dict()
    rest = drawn(ahead, 6)
    other = buffer(4)
    other.load_state_dict(saved)
    assert drawn(other, 6) == rest


def test_another_sampler_or_storage_is_used_at_once() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), prefetch=3, batch_size=4)
    rb.extend(numbered(0, 10))
    rb.sample()
    other = LazyTensorStorage(10)
    other.set(range(4), numbered(70, 4))
    rb.set_storage(other)
    assert all(min(batch) >= 70 for batch in drawn(rb, 5))
    rb.set_sampler(SamplerWithoutReplacement())
    assert sorted(drawn(rb, 1)[0]) == [70, 71, 72, 73]


def test_it_goes_together_with_sharing(tmp_path: Path) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyMemmapStorage(64, scratch_dir=tmp_path / "buffer", shared_init=True),
        batch_size=16,
        prefetch=4,
        shared=True,
    )
    rb.extend(numbered(0, 64))
    stop = threading.Event()

    def collect() -> None:
        with attach(tmp_path / "buffer") as collector:
            first = 64
            while not stop.wait(0.001):  # otherwise the writer may lap the ring each time it runs
                collector.extend(numbered(first, 7))
                first += 7

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for _ in range(100):
            sample = rb.sample()
            assert torch.equal(sample["number"], sample["index_generation"]), (
                "a row of another item"
            )
            assert torch.equal(sample["number"] % 64, sample["index"])
            sample["td_error"] = torch.rand(16)
            rb.update_tensordict_priority(sample)
    finally:
        stop.set()
        thread.join()
    assert engine_of(rb).check().ok
    rb.close()


def test_a_batch_that_waited_is_of_items_that_were_there_and_says_so(tmp_path: Path) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer", shared_init=True),
        batch_size=4,
        prefetch=1,
    )
    rb.extend(numbered(0, 8))
    rb.sample()  # the next batch is ordered with it
    assert rb._parts.prefetcher is not None
    rb._parts.prefetcher.settle()
    rb.extend(numbered(100, 8))  # overwrites all of them
    late = rb.sample()
    assert (late["number"] < 8).all()
    assert torch.equal(late["number"], late["index_generation"])
    late["td_error"] = torch.rand(4)
    assert rb.update_tensordict_priority(late) == (0, 4)
    rb.close()


@pytest.mark.full
def test_several_threads_may_sample() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SamplerWithoutReplacement(),
        batch_size=1,
        prefetch=4,
    )
    rb.extend(numbered(0, 40))
    seen: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: seen.extend(rb.sample()["number"].item() for _ in range(10))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(40))


def test_a_buffer_that_prefetches_can_be_pickled(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer", shared_init=True),
        batch_size=4,
        prefetch=2,
    )
    rb.extend(numbered(0, 10))
    rb.sample()
    other = pickle.loads(pickle.dumps(rb))
    assert len(other.sample()) == 4
    assert other.stats()["prefetch_queue_size"] == 2
    other.close()
    rb.close()


def test_the_child_of_a_fork_makes_its_own() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2)
    rb.extend(numbered(0, 10))
    rb.sample()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if len(rb.sample()) == 4 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(rb.sample()) == 4


def test_the_child_of_a_fork_waits_for_nothing_of_its_parents() -> None:
    going, hold = threading.Event(), threading.Event()

    def slow(data: Any) -> Any:
        going.set()
        hold.wait(30)
        return data

    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), batch_size=4, prefetch=2, transform=slow
    )
    rb.extend(numbered(0, 10))
    thread = threading.Thread(target=rb.sample)
    thread.start()
    assert going.wait(30)  # batches are being made, and the child must not wait for them
    pid = os.fork()
    if pid == 0:
        hold.set()
        status = 1
        try:
            torch.set_num_threads(1)
            rb.empty()
            rb.extend(numbered(50, 4))
            status = 0 if min(rb.sample()["number"].tolist()) >= 50 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hold.set()
    thread.join()
    rb.close()


def test_lists_prefetch_too() -> None:
    rb = ReplayBuffer(
        storage=ListStorage(10),
        batch_size=3,
        prefetch=3,
        sampler=SamplerWithoutReplacement(shuffle=False),
        collate_fn=list,
    )
    rb.extend(["a", "b", "c", "d"])
    assert list(rb) == [["a", "b", "c"], ["d"]]
    assert rb.next() == ["a", "b", "c"]
    assert rb.next() == ["d"]
    assert rb.next() is None
    assert rb.next() == ["a", "b", "c"]


class OneAtATime(Sampler):
    """Chooses overwritten items a few times, and checks that one thread calls it at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.inside = 0
        self.met = 0

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self.inside += 1
        self.met += self.inside > 1
        time.sleep(0.005)
        self.asked += 1
        index = torch.arange(batch_size)
        tickets = index + (1000 if self.asked % 3 else 0)
        self.inside -= 1
        return index, {"index_generation": tickets}


def test_a_sampler_is_asked_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """A worker draws again if an item was overwritten, while the caller draws the next batch."""
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer", shared_init=True)
    sampler = OneAtATime()
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, prefetch=3)
    rb.extend(torch.arange(10))
    for _ in range(12):
        assert rb.sample().tolist() == [0, 1, 2, 3]
    rb.close()
    assert sampler.asked > 24
    assert sampler.met == 0


@pytest.mark.parametrize(("depth", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_a_number_of_batches_ahead_that_cannot_be_is_named(
    depth: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=f"prefetch .*got {depth}"):
        ReplayBuffer(storage=LazyTensorStorage(4), prefetch=depth, batch_size=2)

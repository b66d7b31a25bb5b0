"""The parts of a buffer: exchanged at any time, or written by users; and the buffer's repr."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorDictReplayBuffer,
    TensorStorage,
    Writer,
)
from tests.replay.conformance import Maker, assert_are_steps, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)


every_storage = pytest.mark.parametrize(
    "maker", cases(samplers=("random",), writers=("round robin",)), indirect=True, ids=str
)
every_sampler = pytest.mark.parametrize(
    "maker",
    cases(("list", "memory", "directory"), writers=("round robin",)),
    indirect=True,
    ids=str,
)


# -- exchanging -----------------------------------------------------------------------------------


@every_storage
def test_set_storage_returns_the_former_one_and_goes_on_with_the_new_one(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    before, after = rb.storage, maker.storage(20, name="after")
    assert rb.set_storage(after) is before
    assert rb.storage is after
    assert len(rb) == 0
    rb.extend(steps(10, 15))
    assert numbers(rb[:]) == [10, 11, 12, 13, 14]
    assert set(numbers(rb.sample())) <= {10, 11, 12, 13, 14}
    assert len(before) == 4
    assert rb.set_storage(before) is after
    assert numbers(rb[:]) == [0, 1, 2, 3]


@every_sampler
def test_set_sampler_returns_the_former_one_and_draws_from_the_items(maker: Maker) -> None:
    rb = maker.buffer(12, sampler=RandomSampler())
    rb.extend(steps(0, 12))
    before, after = rb.sampler, maker.sampler(12)
    assert rb.set_sampler(after) is before
    assert rb.sampler is after
    assert_are_steps(rb.sample(), slices=maker.case.draws_slices)
    rb.extend(steps(12, 16))
    seen = {number for _ in range(80) for number in numbers(rb.sample())}
    assert seen == set(range(4, 16))


@every_storage
def test_set_writer_returns_the_former_one_and_writes_on(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 4))
    before, after = rb.writer, RoundRobinWriter()
    assert rb.set_writer(after) is before
    assert rb.writer is after
    rb.set_writer(before)
    rb.extend(steps(4, 6))
    assert numbers(rb[:]) == [0, 1, 2, 3, 4, 5]


@every_storage
def test_an_immutable_dataset_refuses_to_be_written(maker: Maker) -> None:
    rb = maker.buffer(10)
    rb.extend(steps(0, 8))
    rb.set_writer(ImmutableDatasetWriter())
    for write in (
        lambda: rb.extend(steps(8, 9)),
        lambda: rb.add(steps(8, 9)[0]),
        lambda: rb.empty(),
    ):
        with pytest.raises(RuntimeError, match=r"[Ii]mmutable|data ?set"):
            write()
    assert numbers(rb[:]) == list(range(8))
    assert_are_steps(rb.sample())


# -- parts written by users -----------------------------------------------------------------------


class Latest(Sampler):
    """Draws the newest items, and records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        index = torch.arange(len(storage) - batch_size, len(storage))
        return index, {"rank": torch.arange(batch_size), ("next", "mark"): index * 2}

    def add(self, index: Any) -> None:
        self.told.append(index)

    def extend(self, index: Any) -> None:
        self.told += index.tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"told": list(self.told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.told = state_dict["told"]

    def dumps(self, path: Any) -> None:
        pass

    def loads(self, path: Any) -> None:
        pass

    def _empty(self) -> None:
        self.told = []


class Backwards(Writer):
    """Writes from the end of the storage to its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 10

    def add(self, data: Any) -> int:
        self.at -= 1
        self._storage.set(self.at, data)
        return self.at

    def extend(self, data: Any) -> torch.Tensor:
        index = torch.tensor([self.add(item) for item in data.unbind(0)])
        for entity in getattr(self._storage, "_attached_entities_iter", list)():
            entity.mark_update(index)
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]

    def dumps(self, path: Any) -> None:
        pass

    def loads(self, path: Any) -> None:
        pass

    def _empty(self, empty_write_count: bool = True) -> None:
        self.at = 10


class ForeignStorage(Storage):
    """A storage on top of a dict."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        if isinstance(cursor, int):
            self.items[cursor] = data
            return
        places = cursor.tolist() if isinstance(cursor, torch.Tensor) else list(cursor)
        for place, item in zip(places, data.unbind(0), strict=True):
            self.items[place] = item

    def get(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.items[index]
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        places = index.tolist() if isinstance(index, torch.Tensor) else list(index)
        return torch.stack([self.items[place] for place in places])

    def __len__(self) -> int:
        return len(self.items)

    def _empty(self) -> None:
        self.items = {}

    def state_dict(self) -> dict[str, Any]:
        return {"items": dict(self.items)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.items = dict(state_dict["items"])


@every_storage
def test_a_custom_sampler_draws_and_is_told_of_writes(maker: Maker) -> None:
    sampler = Latest()
    rb = maker.buffer(10, sampler=sampler, batch_size=3)
    rb.extend(steps(0, 6))
    assert sampler.told == [0, 1, 2, 3, 4, 5]
    rb.add(steps(6, 7)[0])
    assert sampler.told[-1] == 6
    sample = rb.sample()
    assert numbers(sample) == sample["index"].tolist() == [4, 5, 6]
    assert sample["rank"].tolist() == [0, 1, 2]
    assert sample["next", "mark"].tolist() == [8, 10, 12]
    rb.empty()
    assert sampler.told == []


@pytest.mark.parametrize(
    "maker",
    cases(("memory", "memmap"), ("random", "prioritized"), ("round robin",)),
    indirect=True,
    ids=str,
)
def test_a_custom_writer_decides_where_items_go(maker: Maker) -> None:
    rb = maker.buffer(10, writer=Backwards(), batch_size=30)
    assert rb.extend(steps(0, 3)).tolist() == [9, 8, 7]
    assert rb.add(steps(3, 4)[0]) == 6
    assert [int(rb.storage[at]["id"]) for at in (9, 8, 7, 6)] == [0, 1, 2, 3]


@pytest.mark.parametrize("sampler", ["random", "without replacement", "prioritized"])
def test_a_custom_storage_holds_the_items(sampler: str) -> None:
    made: dict[str, Any] = {
        "random": RandomSampler,
        "without replacement": SamplerWithoutReplacement,
        "prioritized": lambda: PrioritizedSampler(10, 0.7, 0.9),
    }
    rb = TensorDictReplayBuffer(storage=ForeignStorage(10), sampler=made[sampler](), batch_size=4)
    assert rb.extend(steps(0, 7)).tolist() == list(range(7))
    assert rb.add(steps(7, 8)[0]) == 7
    assert (len(rb), rb.write_count) == (8, 8)
    for _ in range(3):
        assert_are_steps(rb.sample())
    assert rb.extend(steps(8, 12)).tolist() == [8, 9, 0, 1]
    assert numbers(rb[:]) == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    seen = {number for _ in range(60) for number in numbers(rb.sample())}
    assert seen == set(range(2, 12))
    rb.empty()
    assert len(rb) == 0


# -- tensors that are there already ---------------------------------------------------------------


@pytest.mark.parametrize("form", ["tensordict", "tensor", "tuple"])
def test_a_storage_of_given_tensors_is_full_from_the_start(form: str) -> None:
    data: Any = {
        "tensordict": steps(0, 8),
        "tensor": torch.arange(8),
        "tuple": (torch.arange(8), torch.zeros(8, 2)),
    }[form]
    rb = ReplayBuffer(storage=TensorStorage(data), batch_size=100)

    def ids(batch: Any) -> set[int]:
        batch = {"tensordict": lambda: batch["id"], "tensor": lambda: batch}.get(
            form, lambda: batch[0]
        )()
        return set(batch.tolist())

    assert len(rb) == 8
    assert ids(rb.sample()) == set(range(8))
    assert ids(rb[:]) == set(range(8))


def test_a_storage_of_given_tensors_writes_into_them() -> None:
    data = steps(0, 8)
    rb = TensorDictReplayBuffer(storage=TensorStorage(data), batch_size=4)
    rb.extend(steps(8, 11))
    assert numbers(data) == [8, 9, 10, 3, 4, 5, 6, 7]
    assert_are_steps(rb[:], [8, 9, 10, 3, 4, 5, 6, 7])


# -- making a buffer ------------------------------------------------------------------------------


def test_parts_may_be_given_as_what_makes_them() -> None:
    rb = ReplayBuffer(
        storage=lambda: LazyTensorStorage(10),
        sampler=SamplerWithoutReplacement,
        writer=RoundRobinWriter,
        batch_size=2,
    )
    rb.extend(torch.arange(4))
    assert sorted(x for batch in rb for x in batch.tolist()) == [0, 1, 2, 3]
    assert type(rb.sampler) is SamplerWithoutReplacement


def test_without_parts_there_is_a_list_of_a_thousand() -> None:
    rb = ReplayBuffer(batch_size=2)
    assert type(rb.storage) is ListStorage
    assert rb.storage.max_size == 1000
    assert type(rb.sampler) is RandomSampler
    rb.extend([torch.tensor(1), torch.tensor(2)])
    assert set(rb.sample().tolist()) <= {1, 2}


def test_a_buffer_may_be_made_when_it_is_first_used() -> None:
    made = []

    def storage() -> Any:
        made.append(1)
        return LazyTensorStorage(10)

    rb = TensorDictReplayBuffer(storage=storage, batch_size=2, delayed_init=True)
    assert made == []
    rb.extend(steps(0, 4))
    assert made == [1]
    assert numbers(rb[:]) == [0, 1, 2, 3]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_compilable_is_accepted_everywhere(storage: Any) -> None:
    rb = ReplayBuffer(
        storage=storage(10, compilable=True), writer=RoundRobinWriter(compilable=True),
        compilable=True, batch_size=2,
    )  # fmt: skip
    rb.extend(TensorDict({"a": torch.arange(4)}, [4]))
    assert set(rb.sample()["a"].tolist()) <= {0, 1, 2, 3}


@every_storage
def test_stats_say_what_is_in_the_buffer(maker: Maker) -> None:
    rb = maker.buffer(10)
    stats = rb.stats()
    assert (stats["size"], stats["write_count"], stats["capacity"]) == (0, 0, 10)
    rb.extend(steps(0, 14))
    stats = rb.stats()
    assert (stats["size"], stats["write_count"], stats["capacity"]) == (10, 14, 10)
    assert stats["utilization"] == 1.0
    assert stats["initialized"] is True


@every_storage
def test_data_say_in_what_capacity_they_are(maker: Maker) -> None:
    rb = maker.buffer(10)
    assert rb.storage.max_size == 10
    assert rb.batch_size == 4
    assert rb.transform is not None
    assert rb.storage.ndim == 1

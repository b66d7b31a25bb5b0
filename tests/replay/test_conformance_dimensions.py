"""Storages of several dimensions: lanes beside time, lengths, and multidimensional indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.replay.conformance import RINGS, Maker, cases

pytestmark = pytest.mark.product(few=3)


every_ring = pytest.mark.parametrize(
    "maker", cases(RINGS, ("random",), ("round robin",)), indirect=True, ids=str
)


def grid(lanes: int, start: int, stop: int) -> TensorDict:
    """Makes steps ``[lanes, stop - start]`` whose id is ten times the lane plus the time."""
    number = torch.arange(lanes)[:, None] * 10 + torch.arange(start, stop)
    return TensorDict(
        {"id": number, "obs": torch.stack([number.float(), -number.float()], -1)},
        [lanes, stop - start],
    )


@every_ring
def test_len_counts_elements_and_reading_keeps_the_dimensions(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2))
    index = rb.extend(grid(2, 0, 3))
    assert list(index.shape) == [6, 2]
    assert (len(rb), rb.write_count, rb.storage.max_size) == (6, 6, 12)
    assert list(rb[:].batch_size) == [2, 3]
    assert torch.equal(rb[:]["id"], grid(2, 0, 3)["id"])
    assert torch.equal(rb[:]["obs"], grid(2, 0, 3)["obs"])
    rb.extend(grid(2, 3, 6))
    assert (len(rb), rb.write_count) == (12, 12)
    assert torch.equal(rb[:]["id"], grid(2, 0, 6)["id"])


@every_ring
def test_batches_are_appended_along_the_last_dimension_by_default(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2))
    assert rb.dim_extend == 1
    rb.extend(grid(2, 0, 5))
    rb.extend(grid(2, 5, 8))
    assert rb[:]["id"].tolist() == [[6, 7, 2, 3, 4, 5], [16, 17, 12, 13, 14, 15]]
    assert len(rb) == 12


@every_ring
def test_they_may_be_appended_along_the_first(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2), dim_extend=0)
    assert rb.dim_extend == 0
    rb.extend(grid(2, 0, 3))
    rb.extend(grid(3, 0, 3) + 100)
    assert list(rb[:].batch_size) == [4, 3]
    assert rb[:]["id"].tolist() == [
        [120, 121, 122],
        [10, 11, 12],
        [100, 101, 102],
        [110, 111, 112],
    ]


@every_ring
def test_a_sample_is_flat_and_its_index_has_one_column_for_each_dimension(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2), batch_size=400)
    rb.extend(grid(2, 0, 5))
    sample = rb.sample()
    assert list(sample.batch_size) == [400]
    assert list(sample["index"].shape) == [400, 2]
    time, lane = sample["index"].unbind(-1)
    assert torch.equal(sample["id"], lane * 10 + time)
    assert set(sample["id"].tolist()) == set(grid(2, 0, 5)["id"].flatten().tolist())
    _, info = rb.sample(return_info=True)
    assert isinstance(info["index"], tuple)
    assert [list(part.shape) for part in info["index"]] == [[400], [400]]


@every_ring
def test_both_dimensions_can_be_indexed(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2))
    rb.extend(grid(2, 0, 5))
    assert rb[0, 3]["id"] == 3
    assert rb[1, 3]["id"] == 13
    assert rb[:, 1]["id"].tolist() == [1, 11]
    assert rb[0]["id"].tolist() == [0, 1, 2, 3, 4]
    assert rb[-1]["id"].tolist() == [10, 11, 12, 13, 14]
    assert rb[0:1]["id"].tolist() == [[0, 1, 2, 3, 4]]
    assert rb[1, 2:4]["id"].tolist() == [12, 13]
    assert rb[torch.tensor([0, 1]), torch.tensor([4, 0])]["id"].tolist() == [4, 10]


@every_ring
def test_the_first_batch_fixes_the_lanes_and_the_capacity_is_whole_slots(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(10, ndim=2))
    rb.extend(grid(3, 0, 5))
    assert rb.storage.max_size == 12
    assert len(rb) == 12
    assert rb[:]["id"].tolist() == [[4, 1, 2, 3], [14, 11, 12, 13], [24, 21, 22, 23]]
    with pytest.raises(RuntimeError):
        rb.extend(grid(2, 5, 6))
    assert len(rb) == 12


@every_ring
def test_add_writes_one_step_of_every_lane(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2))
    for time in range(7):
        rb.add(grid(2, time, time + 1)[:, 0])
    assert rb[:]["id"].tolist() == [[6, 1, 2, 3, 4, 5], [16, 11, 12, 13, 14, 15]]
    assert (len(rb), rb.write_count) == (12, 14)


@every_ring
def test_a_pass_without_replacement_is_every_element_once(maker: Maker) -> None:
    rb = ReplayBuffer(
        storage=maker.storage(12, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=4
    )
    rb.extend(grid(2, 0, 5))
    for _ in range(2):
        batches = [batch["id"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        drawn = sorted(number for batch in batches for number in batch)
        assert drawn == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


@every_ring
def test_priorities_are_of_elements(maker: Maker) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=maker.storage(12, ndim=2), batch_size=300
    )
    rb.extend(grid(2, 0, 5))
    sample = rb.sample()
    assert len(set(sample["id"].tolist())) == 10
    sample["td_error"] = (sample["id"] == 13).float()
    rb.update_tensordict_priority(sample)
    assert set(rb.sample()["id"].tolist()) == {13}
    rb.update_priority(torch.tensor([[2, 0]]), torch.tensor([1e6]))
    assert set(rb.sample()["id"].tolist()) == {2}
    rb.update_priority((torch.tensor([4]), torch.tensor([1])), torch.tensor([1e15]))
    assert set(rb.sample()["id"].tolist()) == {14}


@every_ring
def test_a_batch_of_lanes_brings_its_priorities(maker: Maker) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=maker.storage(12, ndim=2), batch_size=300
    )
    data = grid(2, 0, 3)
    rb.extend(data.set("td_error", (data["id"] == 11).float().unsqueeze(-1)))
    assert set(rb.sample()["id"].tolist()) == {11}
    rb.sampler.beta = 0.5
    assert rb.sample()["priority_weight"].tolist() == pytest.approx([1e-4] * 300)


@every_ring
@pytest.mark.parametrize("form", ["tensor", "dict", "tuple"])
def test_trees_have_lanes_too(maker: Maker, form: str) -> None:
    rb = ReplayBuffer(storage=maker.storage(12, ndim=2), batch_size=300)
    number = grid(2, 0, 4)["id"]
    data: Any = {"tensor": number, "dict": {"x": number}, "tuple": (number, number.float())}[form]
    rb.extend(data)

    def first(data: Any) -> torch.Tensor:
        return data if form == "tensor" else data["x"] if form == "dict" else data[0]

    assert torch.equal(first(rb[:]), number)
    assert len(rb) == 8
    assert set(first(rb.sample()).tolist()) == set(number.flatten().tolist())


@every_ring
def test_three_dimensions(maker: Maker) -> None:
    rb = ReplayBuffer(storage=maker.storage(24, ndim=3), batch_size=600)
    number = torch.arange(18).reshape(3, 2, 3)
    index = rb.extend(number)
    assert list(index.shape) == [18, 3]
    assert len(rb) == 18
    assert torch.equal(rb[:], number)
    data, info = rb.sample(return_info=True)
    assert list(data.shape) == [600]
    assert len(info["index"]) == 3
    assert set(data.tolist()) == set(range(18))


@every_ring
def test_emptying_and_saving_keep_the_lanes(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2), batch_size=5)
    rb.extend(grid(2, 0, 5))
    state = rb.state_dict()
    rb.empty()
    assert len(rb) == 0
    with pytest.raises(RuntimeError):
        rb.sample()
    rb.load_state_dict(state)
    assert rb[:]["id"].tolist() == grid(2, 0, 5)["id"].tolist()
    rb.extend(grid(2, 5, 8))
    assert rb[:]["id"].tolist() == [[6, 7, 2, 3, 4, 5], [16, 17, 12, 13, 14, 15]]


@every_ring
def test_whole_slots_are_changed_in_place(maker: Maker) -> None:
    rb = TensorDictReplayBuffer(storage=maker.storage(12, ndim=2), dim_extend=0)
    rb.extend(grid(3, 0, 2))
    rb[1] = grid(1, 90, 92)[0]
    assert rb[:]["id"].tolist() == [[0, 1], [90, 91], [20, 21]]
    rb.write_all(rb[:].clone() + 1)
    assert rb[:]["id"].tolist() == [[1, 2], [91, 92], [21, 22]]


@pytest.mark.parametrize("dim_extend", [-1, 2, 7])
def test_a_dimension_that_is_not_there_cannot_be_extended(tmp_path: Path, dim_extend: int) -> None:
    for case in cases(RINGS, ("random",), ("round robin",)):
        made = Maker(case, tmp_path)
        with pytest.raises(ValueError, match=str(dim_extend)):
            ReplayBuffer(storage=made.storage(12, ndim=2), dim_extend=dim_extend)
        made.close()


@every_ring
def test_a_custom_sampler_gets_and_gives_columns(maker: Maker) -> None:
    storage = maker.storage(12, ndim=2)
    sampler = PrioritizedSampler(12, 1.0, 1.0)
    rb = ReplayBuffer(storage=storage, sampler=sampler, batch_size=6)
    rb.extend(grid(2, 0, 4))
    index, info = sampler.sample(storage, 6)
    assert isinstance(index, tuple)
    assert [list(part.shape) for part in index] == [[6], [6]]
    assert list(info["priority_weight"].shape) == [6]
    assert torch.equal(storage.get(index)["id"], index[1] * 10 + index[0])


@pytest.mark.parametrize("data", [torch.zeros(4), TensorDict({"a": torch.zeros(4)}, [4])])
def test_data_without_the_dimension_that_is_extended_are_refused(data: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    with pytest.raises(ValueError, match=r"along dimension 1 of the data .*size|shape.* \[4\]"):
        rb.extend(data)
    assert not len(rb)

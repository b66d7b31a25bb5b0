"""Transforms: their input, the time and order of their calls, and how they are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from shmbuffer import LazyTensorStorage, ReplayBuffer
from tests.replay.conformance import Maker, assert_are_steps, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)


every_storage = pytest.mark.parametrize(
    "maker", cases(samplers=("random",), writers=("round robin",)), indirect=True, ids=str
)
every_sampler = pytest.mark.parametrize(
    "maker", cases(("memory",), writers=("round robin",)), indirect=True, ids=str
)


class Scale(torch.nn.Module):
    """Multiplies when items are read, divides when they are written."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, data: Any) -> Any:
        return data.set("obs", data["obs"] * self.by)

    def inv(self, data: Any) -> Any:
        return data.set("obs", data["obs"] / self.by)


def add_one(data: Any) -> Any:
    return data.set("obs", data["obs"] + 1)


@every_storage
def test_samples_and_reads_are_transformed_and_the_items_are_not(maker: Maker) -> None:
    rb = maker.buffer(12, transform=add_one)
    rb.extend(steps(0, 12))
    for _ in range(2):
        sample = rb.sample()
        assert torch.equal(sample["obs"], steps(0, 12)["obs"][sample["id"]] + 1)
        assert torch.equal(rb[:]["obs"], steps(0, 12)["obs"] + 1)
        assert torch.equal(rb[3]["obs"], steps(0, 12)["obs"][3] + 1)
        assert torch.equal(rb.read_all_in_order(end=2)["obs"], steps(0, 2)["obs"] + 1)


@every_sampler
@pytest.mark.parametrize("prefetch", [None, 2])
def test_every_sampler_transforms_once(maker: Maker, prefetch: int | None) -> None:
    rb = maker.buffer(12, transform=add_one, prefetch=prefetch)
    rb.extend(steps(0, 12))
    for _ in range(5):
        sample = rb.sample()
        assert torch.equal(sample["obs"], steps(0, 12)["obs"][sample["id"]] + 1)
        assert numbers(sample) == sample["index"].tolist()


@every_storage
def test_transforms_run_in_the_order_in_which_they_were_added(maker: Maker) -> None:
    rb = maker.buffer(12)
    assert rb.append_transform(add_one) is rb
    rb.append_transform(Scale(10.0))
    # stores 0, because the inverse divides by ten
    rb.extend(steps(0, 4).set("obs", torch.zeros(4, 2)))
    assert rb[:]["obs"].unique().tolist() == [10.0]
    rb.insert_transform(0, Scale(3.0))
    assert rb[:]["obs"].unique().tolist() == [10.0]
    rb.insert_transform(1, lambda data: data.set("obs", data["obs"] + 7))
    assert rb[:]["obs"].unique().tolist() == [80.0]
    assert len(rb.transform) == 4


@every_storage
def test_a_transform_cannot_be_inserted_where_there_is_no_place(maker: Maker) -> None:
    rb = maker.buffer(12, transform=add_one)
    for index in (2, 10, -3):
        with pytest.raises(ValueError, match=str(index)):
            rb.insert_transform(index, add_one)
    assert len(rb.transform) == 1


@every_storage
def test_a_transform_with_an_inverse_is_inverted_on_writes(maker: Maker) -> None:
    rb = maker.buffer(12, transform=Scale(10.0))
    rb.extend(steps(0, 6))
    rb.add(steps(6, 7)[0])
    assert_are_steps(rb[:], list(range(7)))
    assert torch.equal(
        torch.stack([rb.storage[at]["obs"] for at in range(7)]), steps(0, 7)["obs"] / 10
    )
    rb[0:2] = steps(20, 22)
    assert_are_steps(rb[:], [20, 21, 2, 3, 4, 5, 6])
    assert torch.equal(rb.storage[1]["obs"], steps(21, 22)["obs"][0] / 10)
    sample = rb.sample()
    assert_are_steps(sample)


@every_storage
def test_inverted_a_transform_is_called_with_what_is_written(maker: Maker) -> None:
    calls = []

    def in_place(data: Any) -> Any:
        calls.append(type(data))
        data["obs"] += 1
        return data

    rb = maker.buffer(12)
    rb.append_transform(in_place, invert=True)
    data = steps(0, 4)
    rb.extend(data)
    assert torch.equal(data["obs"], steps(0, 4)["obs"] + 1)  # the caller's data are unchanged
    assert torch.equal(rb[:]["obs"], steps(0, 4)["obs"] + 1)
    rb.sample()
    assert len(calls) == 1
    rb.add(steps(4, 5)[0])
    assert torch.equal(rb[4]["obs"], steps(4, 5)["obs"][0] + 1)
    assert len(calls) == 2


@every_storage
def test_inverses_run_backwards(maker: Maker) -> None:
    rb = maker.buffer(12, transform=[Scale(10.0), Scale(2.0)])
    order: list[str] = []
    rb.append_transform(lambda data: order.append("last") or data, invert=True)
    rb.insert_transform(0, lambda data: order.append("first") or data, invert=True)
    rb.extend(steps(0, 4))
    assert order == ["last", "first"]
    assert torch.equal(rb.storage[1]["obs"], steps(1, 2)["obs"][0] / 20)


@every_storage
def test_a_module_of_tensordict_is_a_transform(maker: Maker) -> None:
    double = TensorDictModule(lambda obs: 2 * obs, in_keys=["obs"], out_keys=["double"])
    rb = maker.buffer(12, transform=double)
    rb.extend(steps(0, 4))
    sample = rb.sample()
    assert torch.equal(sample["double"], 2 * sample["obs"])
    assert "double" not in rb.storage[0].keys()  # noqa: SIM118


@every_storage
def test_a_transform_may_drop_and_add_entries_and_change_dtypes(maker: Maker) -> None:
    def transform(data: Any) -> Any:
        data = data.exclude("rank")
        data["text"] = data["id"].to(torch.float64)
        return data

    rb = maker.buffer(12, transform=transform)
    rb.extend(steps(0, 4))
    sample = rb.sample()
    assert "rank" not in sample.keys()  # noqa: SIM118
    assert sample["text"].dtype is torch.float64
    rb.extend(steps(4, 8))
    assert len(rb) == 8


@every_sampler
def test_a_transform_that_selects_keys_does_not_lose_the_index(maker: Maker) -> None:
    rb = maker.buffer(12, transform=lambda data: data.select("id", "obs"))
    rb.extend(steps(0, 12))
    sample = rb.sample()
    assert {"id", "obs", "index"} <= set(sample.keys())
    assert numbers(sample) == sample["index"].tolist()


def test_a_factory_makes_the_transform() -> None:
    made = []

    def factory() -> Any:
        made.append(1)
        return Scale(10.0)

    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform_factory=factory, batch_size=2)
    rb.extend(steps(0, 4))
    assert torch.equal(rb.storage[1]["obs"], steps(1, 2)["obs"][0] / 10)
    assert_are_steps(rb.sample())
    assert made == [1]
    with pytest.raises(TypeError, match="transform"):
        ReplayBuffer(storage=LazyTensorStorage(10), transform=add_one, transform_factory=factory)


def test_tensors_and_trees_are_transformed_too() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda x: x * 2, batch_size=50)
    rb.extend(torch.arange(5))
    assert set(rb.sample().tolist()) == {0, 2, 4, 6, 8}
    tree = ReplayBuffer(
        storage=LazyTensorStorage(10),
        transform=lambda data: {"x": data["x"] + 1, "y": data["x"]},
        batch_size=5,
    )
    tree.extend({"x": torch.arange(5)})
    sample = tree.sample()
    assert torch.equal(sample["x"], sample["y"] + 1)


def test_the_state_of_a_transform_is_part_of_the_buffers() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, data: TensorDict) -> TensorDict:
            self.seen += len(data)
            return data

    def made() -> Any:
        return ReplayBuffer(storage=LazyTensorStorage(10), transform=Counter(), batch_size=3)

    rb = made()
    rb.extend(steps(0, 4))
    rb.sample()
    rb.sample()
    other = made()
    other.load_state_dict(rb.state_dict())
    assert int(other.transform[0].seen) == 6

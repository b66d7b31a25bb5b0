"""Items of different shapes are returned as one lazy stack, including text and objects."""

from __future__ import annotations

from typing import Any

import pytest
import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, lazy_stack

from shmbuffer import (
    EmptyBufferError,
    LazyStackStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.kit.rings import ring_of


def item(size: int, *batch: int) -> TensorDict:
    return TensorDict(a=torch.full((*batch, size), float(size)), text=str(size), batch_size=batch)


def rb_of(*items: Any, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyStackStorage(10, **options), batch_size=6)
    rb.extend(list(items))
    return rb


SEED = """LazyStackedTensorDict(
    fields={
        a: Tensor(shape=torch.Size([10, -1]), device=cpu, dtype=torch.float32, is_shared=False),
        b: Tensor(shape=torch.Size([10, 4]), device=cpu, dtype=torch.float32, is_shared=False),
        c: NonTensorStack(
            [<text>,
            batch_size=torch.Size([10]),
            device=None)},
    exclusive_fields={
    },
    batch_size=torch.Size([10]),
    device=None,
    is_shared=False,
    stack_dim=0)"""


def test_a_sample_prints_the_structure_of_the_document() -> None:
    torch.manual_seed(0)
    rb = ReplayBuffer(storage=LazyStackStorage(max_size=1000, stack_dim=-1))
    data0 = TensorDict(a=torch.randn((10,)), b=torch.rand(4), c="a string!")
    data1 = TensorDict(a=torch.randn((11,)), b=torch.rand(4), c="another string!")
    assert rb.add(data0) == 0
    assert rb.add(data1) == 1
    sample = rb.sample(10)
    with tensordict.set_printoptions(show_is_shared=True):  # newer releases print less by default
        printed = repr(sample)
    lines = printed.splitlines()
    assert lines[5].startswith("            ['a")
    lines[5] = "            [<text>,"  # the drawn items
    assert "\n".join(lines) == SEED


def test_several_items_are_one_lazy_stack_and_one_item_is_itself() -> None:
    first, second = item(2), item(3)
    rb = rb_of(first, second)
    assert rb[0] is first
    batch = rb[[1, 0, 1]]
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.batch_size == torch.Size([3])
    assert batch.get_item_shape("a") == torch.Size([3, -1])
    assert [one["a"].tolist() for one in batch.unbind(0)] == [[3.0] * 3, [2.0] * 2, [3.0] * 3]
    assert batch["text"] == ["3", "2", "3"]
    assert isinstance(batch.get("text"), NonTensorStack)


@pytest.mark.parametrize(
    "index",
    [slice(None), [0, 1], range(2), torch.arange(2), torch.tensor([True, True]), (slice(0, 2),)],
    ids=str,
)
def test_every_index_of_several_gives_a_lazy_stack(index: Any) -> None:
    batch = LazyStackStorage.get(rb_of(item(2), item(3)).storage, index)
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch["text"] == ["2", "3"]


def test_where_shapes_agree_an_entry_reads_as_a_tensor() -> None:
    rb = rb_of(*(TensorDict(a=torch.tensor([i, i])) for i in range(4)))
    data, info = rb.sample(return_info=True)
    assert torch.equal(data["a"], info["index"][:, None].repeat(1, 2))


@pytest.mark.parametrize(
    ("stack_dim", "batch_size"),
    [(0, [6, 3, 4]), (1, [3, 6, 4]), (2, [3, 4, 6]), (-1, [3, 4, 6]), (-3, [6, 3, 4])],
)
def test_the_stack_dimension_counts_in_the_stacked_batch_size(
    stack_dim: int, batch_size: list[int]
) -> None:
    rb = rb_of(item(2, 3, 4), item(5, 3, 4), stack_dim=stack_dim)
    sample = rb.sample()
    assert sample.batch_size == torch.Size(batch_size)
    assert sample.get_item_shape("a") == torch.Size([*batch_size, -1])


def test_densify_makes_nested_tensors_and_keeps_text() -> None:
    dense = rb_of(item(2), item(4))[:].densify(layout=torch.jagged)
    assert dense["a"].is_nested
    assert [row.tolist() for row in dense["a"].unbind()] == [[2.0] * 2, [4.0] * 4]
    assert dense["text"] == ["2", "4"]


def test_entries_that_are_not_in_every_item_are_exclusive() -> None:
    batch = rb_of(TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2), b=torch.ones(1)))[:]
    assert set(batch.keys()) == {"a"}
    assert batch["a"].tolist() == [[0, 0], [1, 1]]
    assert batch.tensordicts[1]["b"].tolist() == [1]


def test_tensors_of_one_shape_are_stacked() -> None:
    rb = rb_of(torch.zeros(2, 3), torch.ones(2, 3), stack_dim=1)
    assert rb[:].shape == (2, 2, 3)
    assert rb[:][:, 1].tolist() == [[1.0] * 3] * 2


def test_a_storage_without_items_has_nothing_to_stack() -> None:
    with pytest.raises(EmptyBufferError, match="there are no items"):
        LazyStackStorage(3).get(slice(None))
    with pytest.raises(EmptyBufferError):
        ReplayBuffer(storage=LazyStackStorage(3), batch_size=1).sample()


@pytest.mark.parametrize("stack_dim", [0, 1, -1])
def test_a_read_item_can_be_written_back(stack_dim: int) -> None:
    rb = rb_of(item(2, 3), item(4, 3), stack_dim=stack_dim)
    batch = rb[:]
    batch.set("more", torch.zeros(batch.batch_size))
    rb.write_all(batch)
    assert len(rb) == rb.write_count == 2
    assert [one["a"].shape[1] for one in (rb[0], rb[1])] == [2, 4]
    assert rb[1]["more"].tolist() == [0, 0, 0]


# -- buffers of TensorDicts ------------------------------------------------------------------------


def test_a_sample_of_a_tensordict_buffer_says_where_its_items_are() -> None:
    rb = TensorDictReplayBuffer(storage=LazyStackStorage(10), batch_size=8)
    rb.extend([item(size) for size in range(3)])
    sample = rb.sample()
    assert isinstance(sample, LazyStackedTensorDict)
    assert sample["index"].dtype is torch.int64
    assert [str(at) for at in sample["index"].tolist()] == sample["text"]
    assert set(rb.sample(include_info=False).keys()) == {"a", "text"}
    again = rb.extend(sample)
    assert len(again) == 8


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_index_and_weights_are_expanded_to_the_batch_size_of_each_item(stack_dim: int) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyStackStorage(10, stack_dim=stack_dim), batch_size=6
    )
    rb.extend([item(2, length) for length in (1, 3, 2)])
    sample = rb.sample()
    for one in sample.unbind(stack_dim):
        assert one["index"].shape == one["_weight"].shape == one.batch_size
        assert one["index"].unique().numel() == 1
        assert one.batch_size[0] == {0: 1, 1: 3, 2: 2}[one["index"][0].item()]


def test_priorities_of_trajectories_of_any_length_are_reduced() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyStackStorage(10), batch_size=20, reduction="max"
    )
    lengths = (2, 3, 4)
    items = [item(2, n).set("td_error", torch.arange(float(n))) for n in lengths]
    rb.extend(items)
    assert ring_of(rb.sampler).tree.priorities()[:3].tolist() == [1.0, 2.0, 3.0]
    rb.extend(lazy_stack(items))
    rb.add(items[0])
    assert ring_of(rb.sampler).tree.priorities()[3:7].tolist() == [1.0, 2.0, 3.0, 1.0]
    sample = rb.sample()
    drawn = {int(one["index"][0]) for one in sample.unbind(0)}
    for one in sample.unbind(0):
        one["td_error"] = torch.linspace(0, 10.0 + int(one["index"][0]), one.batch_size[0])
    assert rb.update_tensordict_priority(sample).applied == 20
    raw = ring_of(rb.sampler).tree.priorities()
    assert {at: raw[at] for at in drawn} == {at: 10.0 + at for at in drawn}

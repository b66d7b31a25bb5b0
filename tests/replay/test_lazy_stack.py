"""Items that differ in shape are given as one lazy stack, text and objects included."""

from __future__ import annotations

from pathlib import Path
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
from tests.kit.items import Step
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
    lines[5] = "            [<text>,"  # which of them were drawn
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


def test_items_are_unbound_from_a_tensordict_or_a_lazy_stack() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(4).reshape(2, 2)}, [2]))
    rb.extend(lazy_stack([TensorDict(a=torch.zeros(3)), TensorDict(a=torch.zeros(4))]))
    assert [one["a"].shape[0] for one in rb[:].unbind(0)] == [2, 2, 3, 4]
    assert rb[1]["a"].tolist() == [2, 3]


def test_tensorclasses_are_stacked_as_their_class() -> None:
    rb = rb_of(Step(obs=torch.zeros(2), text="x"), Step(obs=torch.ones(3), text="y"))
    batch = rb[:]
    assert type(batch) is Step
    assert batch.batch_size == torch.Size([2])
    assert [one.obs.tolist() for one in batch.unbind(0)] == [[0.0] * 2, [1.0] * 3]
    assert list(batch.text) == ["x", "y"]


def test_tensors_of_one_shape_are_stacked() -> None:
    rb = rb_of(torch.zeros(2, 3), torch.ones(2, 3), stack_dim=1)
    assert rb[:].shape == (2, 2, 3)
    assert rb[:][:, 1].tolist() == [[1.0] * 3] * 2


CHATS = [{"text": "a", "tokens": [1]}, {"text": "b", "tokens": [1, 2]}]
FLAT = [{"text": "a", "reward": torch.zeros(2)}, {"text": "b", "reward": torch.ones(2)}]


@pytest.fixture(params=["in one process", "records"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "in one process":
        return {}
    return {"scratch_dir": tmp_path / "buffer", "shared_init": True, "max_bytes": 2**16}


def test_items_that_are_no_tensordicts_reach_a_collate_fn_as_a_list(
    options: dict[str, Any],
) -> None:
    storage = LazyStackStorage(10, **options)
    rb = ReplayBuffer(storage=storage, batch_size=4, collate_fn=list)
    rb.extend(CHATS)
    assert rb[:] == CHATS
    assert storage.get([1, 0]) == CHATS[::-1]
    batch, info = rb.sample(return_info=True)
    assert batch == [CHATS[at] for at in info["index"].tolist()]
    rb.extend([(1, "x"), "text", 5, torch.zeros(1), torch.zeros(2), item(3)])
    assert rb[2:5] == [(1, "x"), "text", 5]
    assert [one.shape[0] for one in rb[5:7]] == [1, 2]
    assert [type(one) for one in rb[4:8]] == [int, torch.Tensor, torch.Tensor, TensorDict]
    rb.close()


def test_items_that_are_no_tensordicts_are_collated_as_by_a_list_storage(
    options: dict[str, Any],
) -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(10, **options), batch_size=4)
    rb.extend(FLAT)
    batch = rb[:]
    assert batch["text"] == ["a", "b"]
    assert batch["reward"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    drawn, info = rb.sample(return_info=True)
    assert drawn["text"] == ["ab"[at] for at in info["index"].tolist()]
    rb.empty()
    rb.extend(CHATS)
    with pytest.raises(RuntimeError, match=r"entry 'tokens'.*collate_fn \(list keeps the items"):
        rb[:]
    rb.close()


def test_tensordicts_that_do_not_stack_are_kept_apart_by_a_collate_fn(
    options: dict[str, Any],
) -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(10, **options), collate_fn=list)
    rb.extend([item(2), item(2, 3)])
    assert [one.batch_size for one in rb[:]] == [torch.Size([]), torch.Size([3])]
    rb.close()
    with pytest.raises(RuntimeError, match=r"one batch size.*collate_fn \(list keeps"):
        rb_of(item(2), item(2, 3))[:]


def test_a_storage_without_items_has_nothing_to_stack() -> None:
    with pytest.raises(EmptyBufferError, match="there are no items here"):
        LazyStackStorage(3).get(slice(None))
    with pytest.raises(EmptyBufferError):
        ReplayBuffer(storage=LazyStackStorage(3), batch_size=1).sample()


def test_an_entry_set_in_a_sample_is_not_set_in_the_items() -> None:
    rb = rb_of(item(2), item(3))
    sample = rb.sample()
    sample.set("more", torch.arange(6))
    assert sample["more"].tolist() == [0, 1, 2, 3, 4, 5]  # also of items that were drawn twice
    assert set(rb[0].keys()) == set(rb[1].keys()) == {"a", "text"}


def test_a_stack_without_a_limit_grows() -> None:
    rb = ReplayBuffer(storage=LazyStackStorage(), batch_size=50)
    assert rb.storage.max_size == torch.iinfo(torch.int64).max
    rb.extend([TensorDict(a=torch.full((i % 3,), i)) for i in range(3000)])
    sample, info = rb.sample(return_info=True)
    for one, index in zip(sample.unbind(0), info["index"].tolist(), strict=True):
        assert one["a"].tolist() == [index] * (index % 3)


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


def test_a_state_brings_items_of_any_shape_back() -> None:
    rb = rb_of(item(2), item(3))
    other = ReplayBuffer(storage=LazyStackStorage(10), batch_size=2)
    other.load_state_dict(rb.state_dict())
    assert other[:]["text"] == ["2", "3"]
    rb[0]["a"].fill_(-1)
    assert other[0]["a"].tolist() == [2.0, 2.0]

"""Examples of the design documents, checked by keys, shapes, dtypes and device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, tensorclass

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.kit.rings import ring_of


def description(data: Any) -> dict[Any, tuple[list[int], torch.dtype]]:
    return {
        key: (list(value.shape), value.dtype)
        for key, value in data.items(include_nested=True, leaves_only=True)
    }


def test_a_prioritized_sample_has_the_keys_shapes_and_dtypes_of_the_seed() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=1.1, storage=LazyTensorStorage(10), batch_size=5
    )
    data = TensorDict({"a": torch.ones(10, 3), ("b", "c"): torch.zeros(10, 3, 1)}, [10])
    rb.extend(data)
    assert len(rb) == 10
    for _ in range(2):
        sample = rb.sample(5)
        described = description(sample)
        assert described.pop("priority_weight") == ([5], torch.float32)
        assert described == {
            "_weight": ([5], torch.float32),
            "a": ([5, 3], torch.float32),
            ("b", "c"): ([5, 3, 1], torch.float32),
            "index": ([5], torch.int64),
        }
        assert sample.batch_size == sample["b"].batch_size == torch.Size([5])
        assert sample.device == sample["b"].device == torch.device("cpu")
        sample.set("td_error", 100 * torch.ones(sample.shape))
        rb.update_tensordict_priority(sample)


def test_high_priorities_bring_the_same_items_back() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=1.1, storage=LazyTensorStorage(1000), batch_size=5
    )
    rb.extend(TensorDict({"a": torch.ones(1000, 3)}, [1000]))
    sample = rb.sample()
    chosen = set(sample["index"].tolist())
    sample.set("td_error", 1e9 * torch.ones(sample.shape))
    rb.update_tensordict_priority(sample)
    again = {int(index) for _ in range(20) for index in rb.sample()["index"]}
    assert again == chosen


def test_both_names_of_the_weight_are_one_tensor() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=1.1, storage=LazyTensorStorage(10), batch_size=5
    )
    rb.extend(TensorDict({"a": torch.ones(10, 3)}, [10]))
    sample = rb.sample()
    assert sample["_weight"] is sample["priority_weight"]


def test_weight_key_picks_one_name() -> None:
    for name in ("_weight", "priority_weight", "w"):
        rb = TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=1.1, storage=LazyTensorStorage(10), batch_size=5, weight_key=name
        )
        rb.extend(TensorDict({"a": torch.ones(10, 3)}, [10]))
        assert set(rb.sample().keys()) == {"a", "index", name}


def test_an_inverted_transform_is_called_with_what_is_written() -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=4)
    data = TensorDict({"a": torch.zeros(10)}, [10])

    def t(data: Any) -> Any:
        data += 1
        return data

    assert rb.append_transform(t, invert=True) is rb
    rb.extend(data)
    assert (data == 1).all()
    assert (rb[:] == 1).all()


def test_read_all_in_order_and_write_all() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    index = rb.extend(TensorDict({"obs": torch.arange(3)}, [3]))
    assert index.tolist() == [0, 1, 2]
    data = rb.read_all_in_order()
    assert (data == rb[:]).all()
    data["target"] = data["obs"] + 1
    rb.write_all(data)
    assert (rb[:] == data).all()
    assert set(rb.sample(2).keys()) == {"obs", "target", "index"}


def test_dim_extend_is_the_same_as_adding_along_that_dimension() -> None:
    data = torch.arange(12.0).reshape(3, 4)
    extended = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=1)
    extended.extend(data)
    added = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=1)
    for one in data.unbind(1):
        added.add(one)
    assert len(extended) == len(added) == 12
    assert torch.equal(extended[:], data)
    assert torch.equal(added[:], data)


def test_a_storage_counts_the_first_dimension_and_gives_memory_mapped_views() -> None:
    data = TensorDict(
        {
            "some data": torch.randn(10, 11),
            ("some", "nested", "data"): torch.randn(10, 11, 12),
        },
        batch_size=[10, 11],
    )
    storage = LazyMemmapStorage(100)
    storage.set(range(10), data)
    assert len(storage) == 10
    item = storage.get(0)
    assert item.batch_size == item["some", "nested"].batch_size == torch.Size([11])
    assert item.device == torch.device("cpu")
    assert description(item) == {
        "some data": ([11], torch.float32),
        ("some", "nested", "data"): ([11, 12], torch.float32),
    }
    for leaf in item.values(include_nested=True, leaves_only=True):
        assert isinstance(leaf, MemoryMappedTensor)
        assert not leaf.is_shared()
    assert (item == data[0]).all()


@tensorclass
class MyClass:
    foo: torch.Tensor
    bar: torch.Tensor


def test_a_tensorclass_comes_back_as_its_class() -> None:
    data = MyClass(foo=torch.randn(10, 11), bar=torch.randn(10, 11, 12), batch_size=[10, 11])
    storage = LazyMemmapStorage(10)
    storage.set(range(10), data)
    item = storage.get(0)
    assert type(item) is MyClass
    assert item.batch_size == torch.Size([11])
    assert item.device == torch.device("cpu")
    assert isinstance(item.foo, MemoryMappedTensor)
    assert torch.equal(item.foo, data.foo[0])
    assert torch.equal(item.bar, data.bar[0])


def test_the_checkpoint_example_of_the_prioritized_buffer_runs(tmp_path: Path) -> None:
    size = 1_000_000
    sampler = PrioritizedSampler(size, 1.1, 1.0)
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(size), sampler=sampler)
    for _ in range(20):
        td = TensorDict(
            {
                "obs": torch.randn(100, 3, 4),
                "next": {"obs": torch.randn(100, 3, 4)},
                "td_error": torch.rand(100),
            },
            [100],
        )
        rb.extend(td)
        sample = rb.sample(32)
        assert rb.update_tensordict_priority(sample).applied == 32
    assert rb.write_count == len(rb) == 2000
    rb.dumps(tmp_path)

    sampler = PrioritizedSampler(size, 1.1, 1.0)
    rb_load = TensorDictReplayBuffer(storage=LazyMemmapStorage(size), sampler=sampler)
    rb_load.loads(tmp_path)
    assert len(rb) == len(rb_load)
    assert (rb[:] == rb_load[:]).all()
    priorities = ring_of(rb).tree.priorities()[:2000]
    assert (ring_of(rb_load).tree.priorities()[:2000] == priorities).all()
    assert rb_load.write_count == 2000


def test_a_scratch_dir_holds_the_items_in_the_layout_of_tensordict(tmp_path: Path) -> None:
    td = TensorDict(a=0, b=1).expand(1000).clone()
    # We pass a path that is <main_ckpt_dir>/storage to LazyMemmapStorage
    storage = LazyMemmapStorage(
        10_000_000, scratch_dir=tmp_path / "dump" / "storage", reserve=False
    )
    rb_memmap = ReplayBuffer(storage=storage)
    rb_memmap.extend(td)
    # Checkpointing in `dump` is a zero-copy, as the data is already in `dump/storage`
    file = tmp_path / "dump" / "storage" / "a.memmap"
    before = file.stat()
    rb_memmap.dumps(tmp_path / "dump")
    after = file.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    loaded = TensorDict.load_memmap(tmp_path / "dump" / "storage")
    assert loaded.batch_size == torch.Size([10_000_000])
    assert (loaded[:1000] == td).all()
    rb_memmap.close()
    storage = LazyMemmapStorage(10_000_000, scratch_dir=tmp_path / "dump" / "storage")
    with ReplayBuffer(storage=storage) as again:
        again.loads(tmp_path / "dump")
        assert len(again) == 1000
        assert (again[:] == td).all()

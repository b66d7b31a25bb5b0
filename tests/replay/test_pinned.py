"""Batches in pinned memory are gathered there directly and belong to the caller.

If there is no GPU, torch's allocator is replaced by a memory range that counts as pinned.
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.tensors import pinned
from shmbuffer.tensors.form import tensors
from shmbuffer.tensors.form.tensors import use_allocator

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available")


class Region:
    """A memory range that counts as pinned and is allocated from its start to its end."""

    def __init__(self) -> None:
        self.memory = torch.zeros(2**20, dtype=torch.uint8)
        self.at = 0
        self.forms: list[torch.Size] = []

    def empty_like(self, form: torch.Tensor) -> torch.Tensor:
        assert form.device.type == "cpu"
        self.forms.append(form.shape)
        start, nbytes = self.at, form.numel() * form.element_size()
        self.at += -(-nbytes // 64) * 64
        return self.memory[start : start + nbytes].view(form.dtype).view(form.shape)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start = self.memory.data_ptr()
        return start <= tensor.data_ptr() < start + len(self.memory)


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Region:
    made = Region()
    monkeypatch.setattr(pinned, "empty_like", made.empty_like)
    monkeypatch.setattr(pinned, "is_pinned", made.is_pinned)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return made


def steps(n: int) -> TensorDict:
    return TensorDict({"a": torch.arange(n), "b": torch.arange(n * 3.0).view(n, 3)}, [n])


def all_pinned(region: Region, data: Any) -> bool:
    return all(region.is_pinned(one) for one in data.values(True, True))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(
    "sampler",
    [RandomSampler, SamplerWithoutReplacement, lambda: PrioritizedSampler(20, 0.7, 0.9)],
)
def test_rows_are_gathered_in_pinned_memory_and_not_copied_there(
    region: Region, sampler: Any, prefetch: int | None, tmp_path: Path
) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "buffer"),
        sampler=sampler(),
        batch_size=5,
        pin_memory=True,
        prefetch=prefetch,
    )
    rb.extend(steps(20))
    for _ in range(8):
        batch, info = rb.sample(return_info=True)
        assert all_pinned(region, batch)
        assert torch.equal(batch["b"], batch["a"].unsqueeze(1) * 3.0 + torch.arange(3.0))
        assert all(region.is_pinned(one) for one in info.values() if torch.is_tensor(one))
    rb.close()
    batches = region.forms.count(torch.Size([5, 3]))
    assert 8 <= batches <= 8 + (prefetch or 0)  # one allocation for each batch: nothing was copied


def test_two_buffers_on_one_storage_differ(region: Region) -> None:
    storage = LazyTensorStorage(10)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4, pin_memory=True)
    plain = TensorDictReplayBuffer(storage=storage, batch_size=4)
    rb.extend(steps(10))
    assert all_pinned(region, rb.sample())
    assert not any(region.is_pinned(one) for one in plain.sample().values())
    assert not region.is_pinned(rb[:]["a"])  # indexing does not pin


def test_the_result_of_a_transform_is_copied_to_pinned_memory(region: Region) -> None:
    def add(batch: TensorDict) -> TensorDict:
        batch["c"] = batch["a"] + 1
        return batch

    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), batch_size=4, pin_memory=True, transform=add
    )
    rb.extend(steps(10))
    batch = rb.sample()
    assert all_pinned(region, batch)
    assert torch.equal(batch["c"], batch["a"] + 1)


def test_a_batch_of_records_is_copied_there(region: Region, tmp_path: Path) -> None:
    storage = LazyStackStorage(
        10, max_bytes=2**16, scratch_dir=tmp_path / "buffer", shared_init=True, pad_output=0
    )
    rb = ReplayBuffer(storage=storage, batch_size=4, pin_memory=True)
    rb.extend([TensorDict(tokens=torch.arange(n), text=str(n)) for n in range(1, 9)])
    batch = rb.sample()
    assert region.is_pinned(batch["tokens"])
    assert [str(n) for n in batch["mask"].sum(-1).tolist()] == list(batch["text"])
    rb.close()


def test_a_batch_is_not_written_to_while_it_is_held(region: Region) -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=4, pin_memory=True
    )
    rb.extend(steps(10))
    held = [rb.sample() for _ in range(20)]
    before = [batch.clone() for batch in held]
    rb.extend(steps(10).apply(torch.zeros_like))
    for _ in range(20):
        rb.sample()
    for batch, copy in zip(held, before, strict=True):
        assert (batch == copy).all()
    addresses = [batch["b"].data_ptr() for batch in held]
    assert len(set(addresses)) == len(addresses)


def test_after_an_error_reads_use_ordinary_memory_again(region: Region) -> None:
    with pytest.raises(RuntimeError, match="stop"), use_allocator(region.empty_like):
        raise RuntimeError("stop")
    assert tensors.reads.empty_like is torch.empty_like


def test_every_form_of_a_batch_is_pinned(region: Region) -> None:
    Pair = namedtuple("Pair", "left right")
    one = torch.ones(2)
    found = pinned.pin({"a": one, "b": (one, [one]), "c": Pair(one, "text"), "d": 3})
    assert region.is_pinned(found["a"])
    assert region.is_pinned(found["b"][0])
    assert region.is_pinned(found["b"][1][0])
    assert isinstance(found["c"], Pair)
    assert region.is_pinned(found["c"].left)
    assert (found["c"].right, found["d"]) == ("text", 3)
    batch = pinned.pin(TensorDict(a=one, b=TensorDict(c=one), text=NonTensorData("hello")))
    assert all_pinned(region, batch)
    assert batch["text"] == "hello"
    assert pinned.pin(batch) is batch  # already pinned


def test_an_object_of_the_user_s_pins_itself(region: Region) -> None:
    class Own:
        def pin_memory(self) -> str:
            return "pinned"

    assert pinned.pin([Own()]) == ["pinned"]


def test_without_a_gpu_a_warning_and_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="pin_memory=True has no effect, because torch finds no"):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), batch_size=4, pin_memory=True, prefetch=2
        )
    rb.extend(steps(10))
    assert not rb.sample()["a"].is_pinned()
    rb.close()


@needs_gpu
@pytest.mark.parametrize("prefetch", [None, 3])
def test_transfers_under_way_are_waited_for_before_memory_is_used_again(
    prefetch: int | None,
) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64), batch_size=64, pin_memory=True, prefetch=prefetch
    )
    rb.extend(TensorDict({"a": torch.arange(64).unsqueeze(1).expand(64, 100_000)}, [64]))
    stream = torch.cuda.Stream()
    sent = []
    for _ in range(20):
        batch = rb.sample()
        assert batch["a"].is_pinned()
        with torch.cuda.stream(stream):
            sent.append((batch["index"].clone(), batch["a"].to("cuda", non_blocking=True)))
        del batch
    torch.cuda.synchronize()
    for index, rows in sent:
        assert torch.equal(rows[:, 0].cpu(), index)
        assert torch.equal(rows[:, -1].cpu(), index)
    rb.close()


@needs_gpu
def test_torch_pins_no_more_than_is_held() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64), batch_size=64, pin_memory=True)
    rb.extend(TensorDict({"a": torch.zeros(64, 100_000)}, [64]))
    seen = set()
    for _ in range(100):
        seen.add(rb.sample()["a"].data_ptr())
    assert len(seen) <= 2

"""The direct read path returns the same as the usual path, in memory that the caller owns."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    BufferClosedError,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyTensorStorage,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer._native import _core
from shmbuffer.memory import Totals
from shmbuffer.tensors.form.tensors import use_allocator
from tests.kit.rings import ring_of

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)


def data(count: int) -> TensorDict:
    entries = {
        str(dtype).removeprefix("torch."): torch.arange(count * 6).reshape(count, 2, 3).to(dtype)
        for dtype in DTYPES
    }
    more = {"scalar": torch.arange(count), "empty": torch.zeros(count, 0)}
    return TensorDict({**entries, **more, "in": {"side": torch.rand(count, 5)}}, [count])


def samples(rb: Any, seed: int) -> list[TensorDict]:
    """Returns the same draw over the direct path and over the usual one."""
    generator = torch.Generator()
    rb.set_rng(generator)
    generator.manual_seed(seed)
    short = rb.sample(33)
    generator.manual_seed(seed)
    with use_allocator(lambda form: torch.empty_like(form)):
        return [short, rb.sample(33)]


def same(one: TensorDict, other: TensorDict) -> bool:
    return all(
        torch.equal(one[key], other[key]) and one[key].dtype is other[key].dtype
        for key in {*one.keys(True, True), *other.keys(True, True)}
    )


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "by staleness", "in slices"])
def test_all_dtypes_come_as_they_come_the_usual_way(tmp_path: Path, kind: str) -> None:
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rb", shared_init=True)
    sampler: Any = None
    if kind == "by staleness":
        sampler = StalenessAwareSampler(version_key="scalar")
    elif kind == "in slices":  # the flags of slices are nested
        sampler = SliceSampler(slice_len=11, end_key="bool")
    rb: Any = (
        TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage)
        if kind == "prioritized"
        else TensorDictReplayBuffer(storage=storage, sampler=sampler)
    )
    written = data(70)
    written["bool"].zero_()
    if kind == "prioritized":
        written["td_error"] = torch.rand(70)
    rb.extend(written)
    for seed in range(5):
        short, usual = samples(rb, seed)
        assert same(short, usual)
        assert same(
            short.select("int64", "scalar"), written[short["index"]].select("int64", "scalar")
        )
    assert ring_of(rb).seat.outtake is not None


def test_items_that_were_chosen_are_not_those_that_lie_there_when_they_are_read(
    tmp_path: Path,
) -> None:
    storage = LazyMemmapStorage(8, scratch_dir=tmp_path / "rb", shared_init=True)
    sampler = StalenessAwareSampler(version_key="scalar")
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    rb.extend(data(8))
    index, known = sampler.sample(storage, 4)
    choice: Any = rb.plan.fast
    found, info = choice.read(index, known)
    assert found["scalar"].tolist() == index.tolist() == info["index"].tolist()
    assert torch.equal(found["staleness"], known["staleness"])
    rb.extend(data(8)[index[:1]])  # the oldest slot
    rb.extend(data(7))
    assert choice.read(index, known) is None
    assert choice.read(index, {}) is None, "it says no tickets"
    assert choice.read(index[:3], known) is None
    beyond = torch.full_like(index, 8)
    assert choice.read(beyond, known) is None


def test_a_sample_tells_what_it_was_drawn_from() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.5, beta=0.5, eps=0.0, storage=LazyTensorStorage(50)
    )
    rb.extend(
        TensorDict({"obs": torch.zeros(4, 3), "td_error": torch.tensor([1.0, 4, 9, 16])}, [4])
    )
    ring: Any = ring_of(rb)
    rb.sample(8)
    assert ring.seat.outtake is not None
    assert ring.drawn_from() == ring.totals() == Totals(10.0, 1.0, 16.0, 4)


def test_a_sample_is_the_callers_and_outlives_the_buffer() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50))
    rb.extend(data(50))
    first = rb.sample(20)
    kept = first.clone()
    rb.sample(20).zero_()
    rb.extend(data(50).apply(torch.zeros_like))
    rb.close()
    del rb
    gc.collect()
    assert same(first, kept)
    first["float32"].mul_(2)
    assert torch.equal(first["float32"], kept["float32"] * 2)
    loss = (first["float32"].requires_grad_() ** 2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert first["float32"].grad is not None


def test_its_tensors_are_aligned_and_contiguous() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50))
    rb.extend(data(50))
    sample = rb.sample(7)
    for key in sample.keys(True, True):
        assert sample[key].is_contiguous()
        if sample[key].numel():
            assert sample[key].data_ptr() % 64 == 0


def test_an_impossible_draw_raises_the_usual_error() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50))
    rb.extend(data(50))
    rb.sample(3)
    rb.empty()
    with pytest.raises(EmptyBufferError, match="Cannot sample from an empty storage"):
        rb.sample(3)
    rb.extend(data(5))
    assert rb.sample(3).batch_size == (3,)
    with pytest.warns(UserWarning, match="batch_size=0.*returns an empty batch"):
        assert rb.sample(0).batch_size == (0,)
    rb.close()
    with pytest.raises(BufferClosedError, match="closed"):
        rb.sample(3)
    assert rb.storage.ring() is None or ring_of(rb).seat.outtake is None


def test_more_leaves_than_it_takes_go_the_usual_way() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    many = TensorDict({f"leaf {i}": torch.arange(10) for i in range(65)}, [10])
    rb.extend(many)
    sample = rb.sample(4)
    assert torch.equal(sample["leaf 64"], sample["index"])
    assert ring_of(rb).seat.outtake is None


def test_its_memory_goes_with_its_tensors() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(TensorDict({"a": torch.zeros(64, 1 << 16)}, [64]))

    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096

    for _ in range(3):
        rb.sample(64)
    before = resident()
    for _ in range(50):  # 16 MiB each
        rb.sample(64)
    assert resident() - before < 100 << 20


def test_memory_of_large_leaves_is_used_again() -> None:
    """Memory that malloc returns to the system costs a page fault for every 4 KB."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(TensorDict({"a": torch.arange(64.0)[:, None].expand(64, 1 << 12)}, [64]))
    held = rb.sample(32)
    there = held["a"].data_ptr()
    assert rb.sample(32)["a"].data_ptr() != there
    del held
    again = rb.sample(32)
    assert again["a"].data_ptr() == there
    assert torch.equal(again["a"][:, 5], again["index"].float())
    part = again["a"][3]  # a view keeps the whole buffer
    del again
    assert rb.sample(32)["a"].data_ptr() != there
    assert (part == part[0]).all()


def test_as_much_is_kept_as_two_batches_have() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(TensorDict({"a": torch.zeros(64, 1 << 14)}, [64]))
    held = [rb.sample(32) for _ in range(5)]
    seen = {sample["a"].data_ptr() for sample in held}
    held.clear()
    kept = [rb.sample(32) for _ in range(5)]
    assert sum(sample["a"].data_ptr() in seen for sample in kept[:2]) == 2
    kept.clear()
    rb.sample(16)  # another layout: the pooled memory does not fit
    assert rb.sample(32)["a"].shape == (32, 1 << 14)


def test_the_child_of_a_fork_has_memory_of_its_own() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(TensorDict({"a": torch.arange(64.0)[:, None].expand(64, 1 << 12)}, [64]))
    held = rb.sample(32)
    rb.sample(32)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            del held
            for _ in range(5):
                sample = rb.sample(32)
                assert torch.equal(sample["a"][:, 7], sample["index"].float())
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(held["a"][:, 0], held["index"].float())


def test_threads_sample_side_by_side() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000))
    rb.extend(data(1000))
    wrong: list[int] = []

    def work() -> None:
        for _ in range(100):
            sample = rb.sample(200)  # more than is copied while the interpreter lock is held
            if not torch.equal(sample["scalar"], sample["index"]):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bad_arguments_of_the_core_are_refused() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(TensorDict({"a": torch.zeros(10, 3)}, [10]))
    native: Any = ring_of(rb).seat.native
    with pytest.raises(ValueError, match="is not an item of 12 bytes"):
        _core.Outtake(ring=native, examples=(torch.zeros(4),), tensors=torch.Tensor)
    with pytest.raises(ValueError, match="one example for each leaf"):
        _core.Outtake(ring=native, examples=(), tensors=torch.Tensor)
    with pytest.raises(ValueError, match="__dlpack_c_exchange_api__"):
        _core.Outtake(ring=native, examples=(torch.zeros(3),), tensors=int)
    with pytest.raises(TypeError, match="must be a Ring"):
        _core.Outtake(ring=3, examples=(torch.zeros(3),), tensors=torch.Tensor)  # type: ignore[arg-type]
    out = _core.Outtake(ring=native, examples=(torch.zeros(3),), tensors=torch.Tensor)
    with pytest.raises(OverflowError):
        out.sample(-1, 0, None, 0)
    with pytest.raises(MemoryError):
        out.sample(1 << 50, 0, None, 0)
    with pytest.raises(TypeError, match="takes 4 arguments"):
        out.sample(1, 2)  # type: ignore[call-arg]
    with pytest.raises(OverflowError):
        out.copy(0, 0, -1, 0)
    with pytest.raises(MemoryError):
        out.copy(0, 0, 1 << 50, 0)
    with pytest.raises(TypeError, match="takes 4 arguments"):
        out.copy(1, 2)  # type: ignore[call-arg]

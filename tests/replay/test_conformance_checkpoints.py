"""Saving and loading restore everything that determines the next sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.replay.conformance import Maker, assert_are_steps, cases, numbers, steps, through_files

pytestmark = pytest.mark.product(few=3)

Transfer = Callable[[Any, Any, Path], None]


every_case = pytest.mark.parametrize("maker", cases(), indirect=True, ids=str)
every_storage = pytest.mark.parametrize(
    "maker", cases(samplers=("random",), writers=("round robin",)), indirect=True, ids=str
)
every_sampler = pytest.mark.parametrize(
    "maker", cases(("memory", "directory"), writers=("round robin",)), indirect=True, ids=str
)


def through_state(source: Any, target: Any, path: Path) -> None:
    target.load_state_dict(copy.deepcopy(source.state_dict()))


def through_saved_state(source: Any, target: Any, path: Path) -> None:
    torch.save(source.state_dict(), path / "state.pt")
    target.load_state_dict(torch.load(path / "state.pt", weights_only=False))


every_way = pytest.mark.parametrize(
    "transfer", [through_files, through_state], ids=["files", "state"]
)


@pytest.mark.product("transfer storage", "transfer sampler", few=6)
@every_case
@every_way
def test_a_save_is_restored(maker: Maker, transfer: Transfer, tmp_path: Path) -> None:
    rb = maker.buffer(12)
    rb.extend(steps(0, 17))
    rb.sample()
    other = maker.buffer(12, name="other")
    transfer(rb, other, tmp_path)
    assert numbers(other[:]) == numbers(rb[:])
    assert_are_steps(other[:])
    assert (len(other), other.write_count) == (12, 17)
    assert_are_steps(other.sample(), slices=maker.case.draws_slices)
    # The loaded buffer continues exactly as the first one does.
    for buffer in (rb, other):
        buffer.extend(steps(17, 22))
    assert numbers(other[:]) == numbers(rb[:])
    assert other.write_count == rb.write_count == 22


@pytest.mark.product("transfer storage sampler", few=8)
@every_sampler
@every_way
def test_the_next_batches_are_those_that_would_have_come(
    maker: Maker, transfer: Transfer, tmp_path: Path
) -> None:
    def made(name: str, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return maker.buffer(16, name=name, generator=generator)

    rb, other = made("one", 1), made("other", 2)
    rb.extend(steps(0, 16))
    for _ in range(3):
        rb.sample()
    transfer(rb, other, tmp_path)
    for _ in range(10):
        assert numbers(rb.sample()) == numbers(other.sample())


@pytest.mark.product("transfer storage", few=6)
@every_storage
@every_way
def test_loading_replaces_the_items(maker: Maker, transfer: Transfer, tmp_path: Path) -> None:
    rb = maker.buffer(8)
    rb.extend(steps(0, 5))
    other = maker.buffer(8, name="other")
    other.extend(steps(50, 58))
    transfer(rb, other, tmp_path)
    assert numbers(other[:]) == [0, 1, 2, 3, 4]
    assert (len(other), other.write_count, other.writer._cursor) == (5, 5, 5)
    assert set(numbers(other.sample())) <= {0, 1, 2, 3, 4}
    assert other.extend(steps(5, 7)).tolist() == [5, 6]
    with pytest.raises(IndexError):
        other[7]


@pytest.mark.product(few=3)
@every_storage
def test_a_checkpoint_can_be_written_again_and_again(maker: Maker, tmp_path: Path) -> None:
    rb = maker.buffer(8)
    for start in range(0, 15, 5):
        rb.extend(steps(start, start + 5))
        rb.dumps(tmp_path / "checkpoint")
        other = maker.buffer(8, name=f"other{start}")
        other.loads(tmp_path / "checkpoint")
        assert numbers(other[:]) == numbers(rb[:])
        assert other.write_count == start + 5
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("check")]) == 1


@every_storage
def test_the_checkpoint_does_not_change_with_the_buffer(maker: Maker, tmp_path: Path) -> None:
    rb = maker.buffer(8)
    rb.extend(steps(0, 5))
    rb.dumps(tmp_path / "checkpoint")
    rb.extend(steps(5, 12))
    rb[0:2] = steps(90, 92)
    other = maker.buffer(8, name="other")
    other.loads(tmp_path / "checkpoint")
    assert_are_steps(other[:], [0, 1, 2, 3, 4])
    other.extend(steps(5, 12))
    third = maker.buffer(8, name="third")
    third.loads(tmp_path / "checkpoint")
    assert_are_steps(third[:], [0, 1, 2, 3, 4])


@every_storage
def test_save_dump_and_load_are_other_names(maker: Maker, tmp_path: Path) -> None:
    rb = maker.buffer(8)
    rb.extend(steps(0, 5))
    rb.save(tmp_path / "a")
    rb.dump(tmp_path / "b")
    for name in ("a", "b"):
        other = maker.buffer(8, name=f"other{name}")
        other.load(str(tmp_path / name))
        assert numbers(other[:]) == [0, 1, 2, 3, 4]


@every_storage
def test_loading_what_is_not_there_says_where(maker: Maker, tmp_path: Path) -> None:
    rb = maker.buffer(8)
    with pytest.raises((OSError, RuntimeError), match="nowhere"):
        rb.loads(tmp_path / "nowhere")


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@every_way
def test_priorities_come_back(storage: Any, transfer: Transfer, tmp_path: Path) -> None:
    def made() -> Any:
        return TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.9, storage=storage(10), batch_size=200
        )

    rb = made()
    rb.extend(steps(0, 4))
    rb.update_priority(torch.arange(4), torch.tensor([1.0, 0.0, 4.0, 2.0]))
    rb.sampler.beta = 0.5
    other = made()
    other.extend(steps(70, 80))
    other.update_priority(torch.arange(10), torch.full((10,), 50.0))
    transfer(rb, other, tmp_path)
    sample = other.sample()
    assert set(numbers(sample)) == {0, 2, 3}
    assert other.sampler.beta == 0.5
    mass = {0: 1.0, 1: 1e-8**0.7, 2: 4.0**0.7, 3: 2.0**0.7}
    weights = dict(zip(numbers(sample), sample["priority_weight"].tolist(), strict=True))
    expected = {number: (mass[number] / mass[1]) ** -0.5 for number in (0, 2, 3)}
    assert weights == pytest.approx(expected, rel=1e-4)
    other.extend(steps(4, 5))  # with the largest priority of the first buffer
    rb.extend(steps(4, 5))
    assert float(other.sampler.default_priority) == float(rb.sampler.default_priority) == 4.0
    rb.update_priority(torch.arange(4), 0.0)
    other.update_priority(torch.arange(4), 0.0)
    assert set(numbers(rb.sample())) == set(numbers(other.sample())) == {4}


@every_way
def test_a_pass_without_replacement_goes_on(transfer: Transfer, tmp_path: Path) -> None:
    def made() -> Any:
        return ReplayBuffer(
            storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4
        )

    rb = made()
    rb.extend(torch.arange(10))
    first = rb.sample().tolist()
    other = made()
    transfer(rb, other, tmp_path)
    rest = other.sample().tolist() + other.sample().tolist()
    assert sorted(first + rest) == list(range(10))


@pytest.mark.product("transfer storage form")
@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "nested tensordict"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@every_way
def test_every_form_of_data_comes_back(
    form: str, storage: Any, transfer: Transfer, tmp_path: Path
) -> None:
    number = torch.arange(6)
    data: Any = {
        "tensor": number,
        "tuple": (number, {"x": [number.float()]}),
        "dict": {"a": number, "b": {"c": (number + 1, number.to(torch.bfloat16))}},
        "nested tensordict": TensorDict({"a": {"b": {"c": number, "d": number + 1}}}, [6]),
    }[form]
    rb, other = ReplayBuffer(storage=storage(10)), ReplayBuffer(storage=storage(10))
    rb.extend(data)
    transfer(rb, other, tmp_path)
    assert len(other) == 6
    assert torch.utils._pytree.tree_structure(other[:]) == torch.utils._pytree.tree_structure(rb[:])
    for one, two in zip(
        torch.utils._pytree.tree_leaves(rb[:]),
        torch.utils._pytree.tree_leaves(other[:]),
        strict=True,
    ):
        assert (one == two).all()


def test_a_state_survives_torch_save(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(steps(0, 7))
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    through_saved_state(rb, other, tmp_path)
    assert_are_steps(other[:], list(range(7)))


@every_way
def test_lanes_come_back(transfer: Transfer, tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=5)
    rb.extend(torch.arange(8).reshape(2, 4))
    other = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=5)
    transfer(rb, other, tmp_path)
    assert other[:].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for buffer in (rb, other):
        buffer.extend(torch.arange(8, 14).reshape(2, 3))
    assert torch.equal(rb[:], other[:])


def test_an_empty_buffer_can_be_saved_and_loaded(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    other = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    other.load_state_dict(rb.state_dict())
    assert len(other) == 0
    other.extend(torch.arange(3))
    assert len(other) == 3


# -- hooks ----------------------------------------------------------------------------------------


def test_save_hooks_see_where_the_ring_begins_and_change_what_is_saved(tmp_path: Path) -> None:
    class Double:
        shift: Any = None
        is_full: Any = None

        def __call__(self, data: Any, path: Any = None) -> Any:
            self.seen = (int(self.shift), bool(self.is_full))
            return data.apply(lambda leaf: leaf * 2 if leaf.dtype is torch.int64 else leaf)

    hook = Double()
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    rb.register_save_hook(hook)
    rb.extend(steps(0, 11).select("id"))
    rb.dumps(tmp_path / "a")
    assert hook.seen == (3, True)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    other.loads(tmp_path / "a")
    assert sorted(numbers(other[:])) == [2 * number for number in range(3, 11)]


def test_load_hooks_change_what_is_loaded(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    rb.extend(steps(0, 5).select("id"))
    rb.dumps(tmp_path / "a")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)

    def hook(data: Any, out: Any = None) -> Any:
        return data.apply(lambda leaf: leaf + 100)

    other.register_load_hook(hook)
    other.loads(tmp_path / "a")
    assert numbers(other[:5]) == [100, 101, 102, 103, 104]

"""The cost of a call depends on its items, not on the capacity of the storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyTensorStorage,
    ListStorage,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.ensembles.joint_buffer import newest_of_streams
from shmbuffer.saves.parquet_file import in_order_of_age
from tests.kit.rings import ring_of

ITEMS = 40
SMALL, LARGE = 64, 1 << 16


class Watched(np.ndarray):
    """Slot words that count how many of them are read."""

    looked: list[int]

    def __array_finalize__(self, made_from: Any) -> None:
        self.looked = getattr(made_from, "looked", [])

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        self.looked.append(max(np.size(each) for each in given if isinstance(each, Watched)))
        plain = [np.asarray(each) if isinstance(each, Watched) else each for each in given]
        return getattr(ufunc, method)(*plain, **options)

    def copy(self, order: Any = "C") -> NDArray[Any]:
        self.looked.append(self.size)
        return np.array(self, order=order)


def items(count: int = ITEMS) -> TensorDict:
    steps = torch.arange(count)
    ends = (steps % 8 == 7)[:, None]
    data = TensorDict({"x": torch.zeros(count, 3), "trajectory": steps // 8}, [count])
    return data.set("next", TensorDict({"done": ends, "terminated": ends}, [count]))


def sample(rb: TensorDictReplayBuffer) -> None:
    torch.manual_seed(0)
    rb.extend(items(1))
    rb.sample(8)


def replace_and_ask(rb: TensorDictReplayBuffer) -> None:
    rb[3] = items(1)[0]  # increases the item's ticket by a whole lap of the ring
    assert rb.storage.contains(torch.tensor([3, ITEMS])).tolist() == [True, False]


def buffer(capacity: int, storage: Any, sampler: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=storage(capacity), sampler=sampler, batch_size=8)
    rb.extend(items())
    return rb


def looked_at(capacity: int, storage: Any, sampler: Any, call: Callable[[Any], Any]) -> int:
    rb = buffer(capacity, storage, sampler)
    live = ring_of(rb).live
    words = live.words.view(Watched)
    words.looked = []
    live.words = words
    call(rb)
    return sum(words.looked)


CALLS: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = {
    "a pass": (LazyTensorStorage, SamplerWithoutReplacement, sample),
    "a pass over a list": (ListStorage, SamplerWithoutReplacement, sample),
    "a pass over records": (CompressedListStorage, SamplerWithoutReplacement, sample),
    "can_sample of a shared pass": (
        LazyTensorStorage,
        lambda: SamplerWithoutReplacement(world_size=2, rank=0, seed=0),
        lambda rb: rb.sampler.can_sample(rb.storage, 8),
    ),
    "slices of given trajectories": (
        LazyTensorStorage,
        lambda: SliceSampler(
            slice_len=4, trajectories=torch.arange(ITEMS + 1) // 8, cache_values=True
        ),
        sample,
    ),
    "iteration": (LazyTensorStorage, lambda: None, lambda rb: list(rb.storage)),
    "state_dict": (LazyTensorStorage, lambda: None, lambda rb: rb.storage.state_dict()),
    "items by age": (
        LazyTensorStorage,
        lambda: None,
        lambda rb: list(in_order_of_age(rb.storage.mover())),
    ),
    "contains behind a placed write": (LazyTensorStorage, lambda: None, replace_and_ask),
    "newest items": (LazyTensorStorage, lambda: None, lambda rb: newest_of_streams(rb.storage)),
}


@pytest.mark.parametrize("name", CALLS)
def test_slots_that_were_never_written_are_not_looked_at(name: str) -> None:
    storage, sampler, call = CALLS[name]
    few, many = (looked_at(capacity, storage, sampler(), call) for capacity in (SMALL, LARGE))
    assert 0 < few == many


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_is_the_same_at_every_capacity(shuffle: bool) -> None:
    orders = []
    for capacity in (SMALL, LARGE):
        rb = buffer(capacity, LazyTensorStorage, SamplerWithoutReplacement(shuffle=shuffle))
        rb.sampler._rng = torch.Generator().manual_seed(3)
        orders.append(torch.cat([rb.sample(return_info=True)[1]["index"] for _ in range(5)]))
    assert orders[0].tolist() == orders[1].tolist()
    assert sorted(orders[0].tolist()) == list(range(ITEMS))

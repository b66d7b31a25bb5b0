"""Batches reuse the memory of earlier batches only after these were released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmbuffer.items.records import memory
from shmbuffer.items.records.memory import lent
from shmbuffer.tensors.records.tensor_memory import empty

SHAPE, DTYPE = (300_000,), torch.float32


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_idle", {})


def test_what_nobody_has_any_more_is_given_to_the_next_batch() -> None:
    first = empty(SHAPE, DTYPE)
    address = first.data_ptr()
    del first
    again = empty((300, 2000), torch.int16)
    assert (again.data_ptr(), again.shape, again.dtype) == (address, (300, 2000), torch.int16)


@pytest.mark.parametrize(
    "part",
    [
        lambda one: one,
        lambda one: one[7:9],
        lambda one: one.view(torch.uint8),
        lambda one: one.numpy(),
        lambda one: one.untyped_storage(),
        lambda one: torch.from_dlpack(one),
        lambda one: memoryview(one.numpy()),
    ],
)
def test_what_somebody_has_a_part_of_is_not(part: Callable[[torch.Tensor], Any]) -> None:
    first = empty(SHAPE, DTYPE)
    address, kept = first.data_ptr(), part(first)
    del first
    assert empty(SHAPE, DTYPE).data_ptr() != address
    del kept
    assert address in {one.data_ptr() for one in [empty(SHAPE, DTYPE), empty(SHAPE, DTYPE)]}


def test_another_size_has_memory_of_its_own() -> None:
    first = empty(SHAPE, DTYPE).data_ptr()
    assert empty((300_001,), DTYPE).data_ptr() != first


def test_a_bounded_amount_is_kept() -> None:
    large = [empty((2**23,), torch.uint8) for _ in range(12)]
    assert len({one.data_ptr() for one in large}) == 12
    assert memory._idle == {}
    del large[:8]
    assert sum(one.size for one in memory._idle[2**23]) == memory._IDLE_BYTES
    del large[0]
    assert memory._idle == {}


@pytest.mark.parametrize("nbytes", [2**18 - 1, 2**26 + 1])
def test_memory_of_other_sizes_is_the_allocators(nbytes: int) -> None:
    empty((nbytes,), torch.uint8)
    lent(nbytes)
    assert memory._idle == {}


def test_a_slice_of_an_array_keeps_it() -> None:
    whole = lent(2**20)
    part = whole[5:9]
    del whole
    assert memory._idle == {}
    del part
    assert [*memory._idle] == [2**20]


def test_two_threads_never_have_the_same_memory() -> None:
    found: list[bool] = []

    def run(number: int) -> None:
        for _ in range(2000):
            mine = empty((2**18,), torch.uint8)
            mine[0] = number
            mine[-1] = number
            found.append(bool(mine[0] == number == mine[-1]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8000

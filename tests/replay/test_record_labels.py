"""Versions and groups of records are the same whether they are read in place or decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyStackStorage,
    PromptGroupSampler,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.storages.movers.record_store import RecordStore

CAPACITY = 16
STORAGES = {"lazy stack": LazyStackStorage, "compressed list": CompressedListStorage}
DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32, torch.float64)


@pytest.fixture(params=[*STORAGES])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return STORAGES[request.param](CAPACITY, max_bytes=2**16, scratch_dir=tmp_path)


def item(version: Any, **more: Any) -> TensorDict:
    length = 1 + int(version) % 5
    return TensorDict({"tokens": torch.zeros(length), "policy_version": version, **more})


def versions_drawn(rb: TensorDictReplayBuffer, count: int) -> list[int]:
    """Returns the versions drawn, over all items, by staleness."""
    sampler: Any = rb.sampler
    sample = rb.sample(count)
    found: list[int] = sorted((sampler.consumer_version - sample["staleness"]).long().tolist())
    assert found == sorted(int(one["policy_version"]) for one in sample.unbind(0))
    return found


@pytest.mark.product(few=8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_are_read_where_they_lie(
    storage: Any, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(RecordStore, "entries")
    rb = TensorDictReplayBuffer(storage=storage, sampler=StalenessAwareSampler())
    made = lambda number: item(torch.full(shape, number, dtype=dtype))  # noqa: E731
    rb.extend([made(number) for number in range(10)])
    assert versions_drawn(rb, 10) == [*range(10)]
    for number in range(10, 40):
        rb.add(made(number))
        assert versions_drawn(rb, CAPACITY) == [*range(max(0, number - 15), number + 1)] or (
            number < CAPACITY - 1  # with replacement
        )


def test_records_of_several_forms_are_told_apart_too(storage: Any) -> None:
    rb = TensorDictReplayBuffer(storage=storage, sampler=StalenessAwareSampler())
    rb.extend([item(torch.tensor(1)), item(torch.tensor(2))])
    assert versions_drawn(rb, 2) == [1, 2]
    rb.extend([item(torch.tensor(3), note="other"), item(torch.tensor(4, dtype=torch.int32))])
    assert versions_drawn(rb, 4) == [1, 2, 3, 4]
    rb.extend([item(torch.tensor(number)) for number in range(5, 17)])
    assert versions_drawn(rb, CAPACITY) == [*range(1, 17)]


def test_what_is_no_version_is_refused(storage: Any) -> None:
    rb = TensorDictReplayBuffer(storage=storage, sampler=StalenessAwareSampler())
    rb.add(item(torch.tensor(1.0)))
    assert versions_drawn(rb, 1) == [1]
    rb.add(item(torch.tensor(1.5)))
    with pytest.raises(
        ValueError, match="versions must be integers, but the entry has other numbers"
    ):
        rb.sample(1)
    rb.empty()
    rb.extend([TensorDict({"tokens": torch.zeros(2)})])
    with pytest.raises(KeyError, match="the items have no entry 'policy_version'"):
        rb.sample(1)


def test_groups_of_records_are_whole(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RecordStore, "entries")
    sampler = PromptGroupSampler(group_key="policy_version", group_size=3, num_groups=2)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)
    for first in range(0, 60, 4):
        order = np.random.default_rng(first).permutation(np.repeat(np.arange(first, first + 4), 3))
        rb.extend([item(torch.tensor(number)) for number in order.tolist()])
        drawn = sorted(int(one["policy_version"]) for one in rb.sample(6).unbind(0))
        assert drawn[:3] == [drawn[0]] * 3
        assert drawn[3:] == [drawn[3]] * 3
        assert drawn[0] != drawn[3]

"""A data set and collected items in both libraries, and TorchRL's trainer hooks on our buffers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import described, ours, theirs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchRL warns about its own deprecations
    from torchrl.trainers.algorithms.offline_to_online import (
        OfflineToOnlineAnnealHook,
        OfflineToOnlineReplayBufferHook,
    )

DATA, COLLECTED = 30, 1000


def items(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    after = TensorDict({"reward": number[:, None].float()}, [count])
    return TensorDict({"id": number, "next": after}, [count])


def made(family: Any, fraction: float = 0.3, **options: Any) -> Any:
    data = family.ReplayBuffer(storage=family.LazyTensorStorage(DATA))
    data.extend(items(0, DATA))
    where = {} if "online_storage" in options else {"online_capacity": 20}
    return family.OfflineToOnlineReplayBuffer(
        data, offline_fraction=fraction, batch_size=10, **where, **options
    )


def of_data(sample: Any) -> int:
    return int((sample["id"] < COLLECTED).sum())


# the samples have another batch size; TorchRL has none here
@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("storage", [None, "LazyTensorStorage", "LazyMemmapStorage"])
@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 0.85])
def test_samples_have_the_same_shares_in_the_same_order(fraction: float, storage: Any) -> None:
    found = []
    for family in (ours, theirs):
        options = {} if storage is None else {"online_storage": getattr(family, storage)(20)}
        rb = made(family, fraction, **options)
        seen: list[Any] = [len(rb), of_data(rb.sample()), len(rb.sample(7))]
        seen.append(rb.extend(items(COLLECTED, 15)).tolist())
        seen.append(rb.extend(items(COLLECTED, 15)).tolist())
        for step in (0, 3, 5, 9, 10, 12):
            rb.anneal(step, 10)
            sample = rb.sample()
            seen.append((rb.offline_fraction, of_data(sample), len(rb)))
            seen.append((sample["id"] < COLLECTED).tolist())
            seen.append(list(sample.batch_size))
        found.append(seen)
    assert found[0] == found[1]


def test_a_sample_has_the_same_entries_beside_our_index() -> None:
    samples = []
    for family in (ours, theirs):
        rb = made(family, transform=lambda sample: sample.set("seen", sample["id"] + 1))
        rb.extend(items(COLLECTED, 5))
        samples.append(rb.sample())
    mine, other = (described(sample, values=False) for sample in samples)
    assert {key: entry for key, entry in mine[2].items() if key != "index"} == other[2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"online_capacity": 5, "online_storage": "LazyTensorStorage"},
        {"online_capacity": 5, "offline_fraction": 0.0},
        {"online_capacity": 5, "offline_fraction": 1.0},
        {"online_capacity": 5, "root": "somewhere"},
    ],
)
def test_both_refuse_the_same_arguments(options: dict[str, Any]) -> None:
    for family in (ours, theirs):
        given = dict(options)
        if "online_storage" in given:
            given["online_storage"] = getattr(family, given["online_storage"])(5)
        data = family.ReplayBuffer(storage=family.LazyTensorStorage(3))
        with pytest.raises(ValueError, match="o"):
            family.OfflineToOnlineReplayBuffer(data, **given)
        with pytest.raises(ValueError, match="batch_size"):
            family.OfflineToOnlineReplayBuffer("minari:none", online_capacity=5)


def test_a_prefill_has_as_many_items_and_ours_has_each_once() -> None:
    filled = []
    for family in (ours, theirs):
        data = family.ReplayBuffer(storage=family.LazyTensorStorage(DATA))
        data.extend(items(0, DATA))
        rb = family.ReplayBuffer(storage=family.LazyTensorStorage(50))
        assert family.prefill_replay_buffer(rb, data, n_samples=20, chunk_size=7) is rb
        filled.append(rb)
    assert len(filled[0]) == len(filled[1]) == 20
    assert filled[0][:]["id"].tolist() == list(range(20))


@pytest.mark.parametrize("how", ["buffer", "tensordict"])
def test_what_torchrl_has_saved_is_a_data_set(tmp_path: Path, how: str) -> None:
    if how == "buffer":
        rb = theirs.TensorDictReplayBuffer(storage=theirs.LazyMemmapStorage(50))
        rb.extend(items(0, DATA))
        rb.dumps(tmp_path / "data")
    else:
        items(0, DATA).memmap(tmp_path / "data")
    left_out = pytest.warns(UserWarning, match="'index' is left out")
    with left_out if how == "buffer" else nullcontext():
        mixed = ours.OfflineToOnlineReplayBuffer(
            tmp_path / "data", online_capacity=5, batch_size=200
        )
    assert len(mixed) == DATA
    assert sorted(mixed.sample()["id"].unique().tolist()) == list(range(DATA))


def test_the_hooks_of_torchrl_s_trainer_take_ours() -> None:
    found = []
    for family in (ours, theirs):
        rb = made(family)
        hook = OfflineToOnlineReplayBufferHook(rb, batch_size=10)
        stored = hook.extend(items(COLLECTED, 8).set("log_prob", torch.zeros(8)))
        sample = hook.sample(stored)
        trainer = SimpleNamespace(collected_frames=50)
        OfflineToOnlineAnnealHook(trainer, rb, 200)()
        state = hook.state_dict()
        again = made(family)
        OfflineToOnlineReplayBufferHook(again).load_state_dict(state)
        found.append(
            (
                sorted(stored.keys()),
                of_data(sample),
                rb.offline_fraction,
                again.offline_fraction,
                len(again.online_buffer),
            )
        )
    assert found[0] == found[1]

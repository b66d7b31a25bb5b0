"""Staleness: which items are drawn, how often, and relative to which version of the consumer."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.samplers.labelled.index import LabelIndex
from shmbuffer.samplers.labelled.versions import versions_of
from tests.replay.label_oracle import expected, looked
from tests.replay.test_following import Histories
from tests.selection import seeds

KEY = ("step",)


def versioned(versions: Any, **more: Any) -> TensorDict:
    count = len(versions)
    return TensorDict(
        {"policy_version": torch.as_tensor(versions), "number": torch.arange(count), **more},
        [count],
    )


def buffer_of(versions: Any, **options: Any) -> TensorDictReplayBuffer:
    storage = options.pop("storage", None)
    storage = LazyTensorStorage(max(1, len(versions))) if storage is None else storage
    sampler = StalenessAwareSampler(**options)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)
    rb.extend(versioned(versions))
    return rb


# -- the index -------------------------------------------------------------------------------------


@pytest.mark.product("lanes records", few=1)
@pytest.mark.parametrize("seed", seeds(3, 12))
@pytest.mark.parametrize(("lanes", "records"), [(1, False), (2, False), (1, True)])
def test_every_version_has_the_items_that_lie_there_oldest_first(
    tmp_path: Path, seed: int, lanes: int, records: bool
) -> None:
    happened = Histories(tmp_path / "buffer", seed, lanes=lanes, records=records)
    storage: Any = happened.handles[0].storage
    often, seldom = LabelIndex(KEY, versions_of), LabelIndex(KEY, versions_of)
    whole = 0
    for at in range(150):
        happened.happen()
        if not happened.ring.length:
            continue
        if records:
            labels = np.zeros(happened.capacity, np.int64)
            held = np.flatnonzero(happened.ring.live.holds())
            found, _ = storage.mover().entries(held, [KEY])
            labels[held] = [int(one) for one in found[0]]
        else:
            labels = storage.mover().take(1, np.arange(happened.ring.elements)).reshape(-1).numpy()
        want = expected(happened.ring, labels)
        for one in (often, seldom) if at % 7 == 0 else (often,):
            assert looked(one, storage) == want
            whole += 1
        assert looked(LabelIndex(KEY, versions_of), storage) == want
    assert whole > 20


# -- exact draws -----------------------------------------------------------------------------------


def chance_of_batch(weights: list[float], batch: tuple[int, ...]) -> float:
    """Returns the probability of drawing these items one after the other without replacement."""
    chance, left = 1.0, sum(weights)
    for item in batch:
        chance *= weights[item] / left
        left -= weights[item]
    return chance


def require_frequencies(found: Counter[Any], chances: dict[Any, float]) -> None:
    """Checks that each frequency is within five standard deviations."""
    total = sum(found.values())
    assert set(found) <= {key for key, chance in chances.items() if chance}
    for key, chance in chances.items():
        spread = (total * chance * (1 - chance)) ** 0.5
        assert abs(found[key] - total * chance) <= 5 * spread + 1e-9, (key, found[key])


@pytest.mark.product(few=1)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_batch_is_as_likely_as_successive_draws_without_repetition(count: int) -> None:
    versions = [7, 2, 7, 5, 2]
    rb = buffer_of(versions, max_staleness=-1)
    rb.sampler.consumer_version = 8
    torch.manual_seed(count)
    weights = [1 / (8 - version + 1) for version in versions]
    chances = {one: chance_of_batch(weights, one) for one in permutations(range(5), count)}
    assert sum(chances.values()) == pytest.approx(1)
    found = Counter(tuple(rb.sample(count)["index"].tolist()) for _ in range(6000))
    require_frequencies(found, chances)


def test_what_is_too_stale_is_never_drawn_and_few_fresh_ones_come_again() -> None:
    rb = buffer_of([1, 9, 5, 9, 8], max_staleness=1)
    rb.sampler.consumer_version = 10
    torch.manual_seed(0)
    sample = rb.sample(2)
    assert {*sample["index"].tolist()} == {1, 3}
    found = Counter(rb.sample(3000)["index"].tolist())
    require_frequencies(found, {1: 0.5, 3: 0.5})
    rb.sampler.max_staleness = 2
    found = Counter(rb.sample(9000)["index"].tolist())
    require_frequencies(found, {1: 3 / 8, 3: 3 / 8, 4: 2 / 8})


@pytest.mark.full
def test_the_weight_of_a_batch_that_leaves_little_of_the_heavy_ones_is_exact() -> None:
    """Most proposals are rejected then, and the weights are summed again."""
    versions = [50] * 20 + [0] * 4
    rb = buffer_of(versions, staleness_weight_fn=lambda s: torch.where(s > 0, 1e-4, 1.0))
    rb.sampler.consumer_version = 50
    torch.manual_seed(0)
    last: Counter[int] = Counter()
    for _ in range(4000):
        index = rb.sample(21)["index"].tolist()
        assert len(set(index)) == 21
        last[next(one for one in index if one >= 20)] += 1
    require_frequencies(last, dict.fromkeys(range(20, 24), 0.25))
    assert sorted(rb.sample(24)["index"].tolist()) == list(range(24))


def test_a_weight_function_is_given_each_version_that_is_there_once() -> None:
    asked = []

    def weights(staleness: torch.Tensor) -> torch.Tensor:
        asked.append(staleness.tolist())
        return (staleness == 3).float()

    rb = buffer_of([4, 1, 4, 2], staleness_weight_fn=weights)
    rb.sampler.consumer_version = 4
    sample = rb.sample(1)
    assert sample["index"].tolist() == [1]
    assert sample["staleness"].tolist() == [3.0]
    assert sample["staleness"].dtype is torch.float32
    assert asked == [[3.0, 2.0, 0.0]]


def test_items_newer_than_the_consumer_weigh_as_much_as_fresh_ones() -> None:
    rb = buffer_of([5, 9, 5], max_staleness=0)
    rb.sampler.consumer_version = 5
    torch.manual_seed(0)
    sample = rb.sample(3)
    assert dict(zip(sample["index"].tolist(), sample["staleness"].tolist(), strict=True)) == {
        0: 0.0,
        1: -4.0,
        2: 0.0,
    }
    found = Counter(rb.sample(1)["index"].item() for _ in range(3000))
    require_frequencies(found, dict.fromkeys(range(3), 1 / 3))


def test_the_freshest_come_first_where_that_is_asked_for() -> None:
    rb = buffer_of([3, 9, 7, 9, 1], freshest_first=True, max_staleness=6)
    rb.sampler.consumer_version = 9
    assert rb.sample(3)["index"].tolist() == [3, 1, 2]
    assert rb.sample(6)["index"].tolist() == [3, 1, 2, 0, 3, 1]
    rb.extend(versioned([8])[:1])  # overwrites the oldest item
    assert rb.sample(4)["index"].tolist() == [3, 1, 0, 2]


def test_draws_follow_from_the_seed_and_what_lies_there_alone(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(16, scratch_dir=tmp_path / "buffer")
    rb = buffer_of(list(range(16)), storage=storage)
    torch.manual_seed(3)
    for turn in range(5):  # samples between the writes
        rb.extend(versioned(np.arange(20 + turn, 24 + turn)))
        rb.sample(2)
    other = StalenessAwareSampler()
    torch.manual_seed(7)
    index, info = rb.sampler.sample(rb.storage, 8)
    torch.manual_seed(7)
    again, known = other.sample(rb.storage, 8)
    assert torch.equal(index, again)
    assert torch.equal(info["staleness"], known["staleness"])


# -- what items look like --------------------------------------------------------------------------


@pytest.mark.product(few=8)
@pytest.mark.parametrize("form", [torch.int32, torch.float32, torch.uint8])
@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("kind", ["rows", "records", "objects", "memory"])
def test_versions_of_any_storage_and_dtype(
    tmp_path: Path, kind: str, form: torch.dtype, column: bool
) -> None:
    storage: Any = {
        "rows": lambda: LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer"),
        "records": lambda: LazyStackStorage(8, max_bytes=2**16, scratch_dir=tmp_path / "buffer"),
        "objects": lambda: ListStorage(8),
        "memory": lambda: LazyTensorStorage(8),
    }[kind]()
    rb = TensorDictReplayBuffer(storage=storage, sampler=StalenessAwareSampler(1))
    version = torch.tensor([5, 2, 4, 1]).to(form)
    rb.extend(versioned(version[:, None] if column else version))
    rb.sampler.consumer_version = 5
    sample = rb.sample(6)
    assert {*sample["number"].tolist()} <= {0, 2}
    assert torch.equal(sample["staleness"], 5.0 - sample["policy_version"].reshape(-1).float())
    nine = torch.tensor([9]).to(form)
    rb.extend(versioned(nine[:, None] if column else nine))
    assert {*rb.sample(100)["staleness"].tolist()} == {0.0, 1.0, -4.0}


def test_items_of_a_storage_with_lanes_have_versions_of_their_own() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=StalenessAwareSampler(0)
    )
    version = torch.tensor([[1, 2, 1], [2, 1, 1]])
    rb.extend(TensorDict({"policy_version": version}, [2, 3]))
    rb.sampler.consumer_version = 2
    sample = rb.sample(20)
    assert (sample["policy_version"] == 2).all()
    assert {tuple(row) for row in sample["index"].tolist()} == {(0, 1), (1, 0)} or {
        tuple(row) for row in sample["index"].tolist()
    } == {(1, 0), (0, 1)}


class Foreign:
    """A storage of another library."""

    ndim = 1

    def __init__(self) -> None:
        self.items: list[TensorDict] = []

    def __len__(self) -> int:
        return len(self.items)

    def get(self, index: Any) -> Any:
        return [self.items[at] for at in index]


def test_a_storage_of_somebody_elses_is_read_again_for_each_draw() -> None:
    storage, sampler = Foreign(), StalenessAwareSampler(0)
    sampler.consumer_version = 4
    for version in (4, 3, 4):
        storage.items.append(TensorDict({"policy_version": torch.tensor(version)}, []))
    assert {*sampler.sample(storage, 30)[0].tolist()} == {0, 2}
    storage.items[0] = storage.items[1]
    assert {*sampler.sample(storage, 30)[0].tolist()} == {2}


# -- the consumer's version ------------------------------------------------------------------------


def test_the_version_is_one_for_every_handle_and_publish_raises_it(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    rb = buffer_of([1, 2], storage=LazyMemmapStorage(4, scratch_dir=path, shared_init=True))
    with rb:
        rb.sampler.consumer_version = 3
        other = TensorDictReplayBuffer(
            storage=LazyMemmapStorage(4, scratch_dir=path, shared_init=True),
            sampler=StalenessAwareSampler(),
        )
        assert other.sampler.consumer_version == 3
        other.sampler.increment_consumer_version()
        assert rb.sampler.consumer_version == 4
        for step in range(3):
            version = other.publish({"w": torch.zeros(2)}, step=step)
            assert version > 4
        assert rb.sampler.consumer_version == version
        assert rb.stats()["consumer_version"] == version
        other.close()


def test_a_version_that_is_said_before_the_first_write_counts(tmp_path: Path) -> None:
    for storage in (LazyTensorStorage(4), LazyMemmapStorage(4, scratch_dir=tmp_path / "buffer")):
        sampler = StalenessAwareSampler(max_staleness=1)
        sampler.consumer_version = 7
        rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)
        rb.extend(versioned([6, 1]))
        assert rb.sample(2)["policy_version"].tolist() == [6, 6]
        assert sampler.consumer_version == 7
        sampler.increment_consumer_version()
        assert sampler.consumer_version == 8


def test_it_outlives_emptying_and_is_saved_and_loaded(tmp_path: Path) -> None:
    rb = buffer_of([1, 2], max_staleness=5)
    rb.sampler.consumer_version = 6
    rb.dumps(tmp_path / "save")
    rb.empty()
    assert rb.sampler.consumer_version == 6
    other = buffer_of([0], storage=LazyTensorStorage(4))
    other.loads(tmp_path / "save")
    assert (other.sampler.consumer_version, other.sampler.max_staleness) == (6, 5)
    assert other.sample(2)["staleness"].min() == 4.0
    copy = pickle.loads(pickle.dumps(StalenessAwareSampler(3)))
    copy.load_state_dict(rb.sampler.state_dict())
    assert repr(copy) == "StalenessAwareSampler(consumer_version=6, max_staleness=5)"


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: StalenessAwareSampler(-2), ValueError, "max_staleness must be at least 0, or -1"),
        (lambda: StalenessAwareSampler(1.5), TypeError, "cannot be interpreted as an integer"),
        (
            lambda: setattr(StalenessAwareSampler(), "consumer_version", -1),
            ValueError,
            "consumer_version must be a number from 0",
        ),
        (lambda: buffer_of([0.5]).sample(2), ValueError, "versions must be integers"),
        (
            lambda: buffer_of([2**62]).sample(2),
            ValueError,
            "versions must be smaller than 2\\*\\*62",
        ),
        (lambda: buffer_of([[1, 2]]).sample(2), TypeError, "got 2 numbers"),
        (
            lambda: buffer_of([1], version_key="other").sample(2),
            KeyError,
            "the items have no entry 'other'",
        ),
        (
            lambda: buffer_of([1], staleness_weight_fn=lambda s: s - 9).sample(2),
            ValueError,
            "one weight of at least 0 for each staleness",
        ),
        (
            lambda: buffer_of([1], staleness_weight_fn=lambda s: s / 0 * -1 + 9).sample(2),
            ValueError,
            "finite weights",
        ),
        (
            lambda: buffer_of([0, 0], staleness_weight_fn=lambda s: s * 0).sample(2),
            RuntimeError,
            "All 2 entries in the buffer exceed max_staleness=-1",
        ),
    ],
)
def test_what_cannot_be_is_said(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_who_is_too_stale_is_told_from_who_is_not_there() -> None:
    rb = buffer_of([1, 2], max_staleness=3)
    assert rb.can_sample(2)
    rb.sampler.consumer_version = 6
    assert not rb.can_sample(2)
    with pytest.raises(RuntimeError, match="the newest entry is 4 versions old"):
        rb.sample(2)
    rb.empty()
    assert not rb.can_sample(2)


def test_any_buffer_takes_it_and_the_info_has_the_staleness() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), sampler=StalenessAwareSampler())
    rb.extend(versioned([1, 1]))
    _, info = rb.sample(2, return_info=True)
    assert info["staleness"].tolist() == [-1.0, -1.0]
    before = rb.set_sampler(RandomSampler())
    assert isinstance(before, StalenessAwareSampler)

"""Groups are sampled only as a whole, with several writers and after deaths."""

from __future__ import annotations

import itertools
import pickle
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from shmbuffer import (
    EmptyBufferError,
    GroupCounts,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PromptGroupSampler,
    RingOverrunError,
    TensorDictReplayBuffer,
)
from shmbuffer.samplers.labelled import strategies
from tests.kit.rings import ring_of
from tests.replay.label_oracle import by_age
from tests.replay.test_following import Histories
from tests.selection import seeds

SIZE = 3


def rows(keys: Any, first: int = 0, rewards: Any = None) -> TensorDict:
    count = len(keys)
    given = torch.arange(count).float() if rewards is None else torch.as_tensor(rewards).float()
    query: Any = keys
    if isinstance(keys[0], str):
        query = NonTensorStack(*keys)
    elif not isinstance(keys, torch.Tensor):
        query = torch.tensor(keys)
    data = {"query": query, "number": torch.arange(first, first + count)}
    return TensorDict({**data, "next": {"reward": given[:, None]}}, [count])


def buffer_of(keys: Any, storage: Any = None, rewards: Any = None, **options: Any) -> Any:
    storage = LazyTensorStorage(max(1, len(keys))) if storage is None else storage
    rb = TensorDictReplayBuffer(storage=storage, sampler=PromptGroupSampler(**options))
    rb.extend(rows(keys, rewards=rewards))
    return rb


# -- whole or not at all ---------------------------------------------------------------------------


class Groups(Histories):
    """Histories whose items belong to groups, with a key for each item."""

    def __init__(self, path: Path, seed: int, *, records: bool) -> None:
        self.begun: dict[int, int] = {}  # items of each key that were made so far
        super().__init__(path, seed, records=records)

    def _data(self, writer: int, count: int) -> TensorDict:
        data, keys = super()._data(writer, count), []
        for _ in range(count):
            open_ones = [key for key, made in self.begun.items() if made < SIZE][-4:]
            fresh = not open_ones or self.random.random() < 0.3
            key = len(self.begun) if fresh else self.random.choice(open_ones)
            self.begun[key] = self.begun.get(key, 0) + 1
            keys.append(key)
        data["id"] = torch.tensor(keys)
        return data

    def begin(self) -> None:
        """Begins a write of new items, or an in-place change, that stays open for a while."""
        writer = self.random.randrange(1, 3)
        if self.open[writer] or self.records or sum(held or 0 for held in self.open) > 1:
            return
        storage: Any = self.handles[writer].storage
        ring, count = ring_of(storage), self.random.randint(1, 3)
        held = np.flatnonzero(self.ring.live.holds())
        try:
            if self.random.random() < 0.5 and len(held) >= count:
                slots = np.array(sorted(self.random.sample(held.tolist(), count)))
                ring.claims.claim_slots(slots, in_place=True, timeout=0)
            else:
                first = ring.claims.claim(count, timeout=0)
                slots = (first + np.arange(count)) % self.capacity
                data, mover = self._data(writer, count), storage.mover()
                for leaf, view in zip(mover.leaves.leaves, mover.views(), strict=True):
                    view[torch.from_numpy(slots)] = data[leaf.path]
        except RingOverrunError:
            return
        self.open[writer] = count

    def keys(self) -> Any:
        """Returns the keys of all slots."""
        mover = self.handles[0].storage.mover()  # type: ignore[attr-defined]
        if not self.records:
            return mover.take(0, np.arange(self.capacity)).numpy()
        found = np.full(self.capacity, -1)
        held = np.flatnonzero(self.ring.live.holds())
        found[held] = [int(one) for one in mover.entries(held, [("id",)])[0][0]]
        return found

    def whole(self) -> list[list[int]]:
        """Returns the items of all complete groups, oldest first, computed from the ring itself."""
        keys, members = self.keys(), {}
        for element in by_age(self.ring).tolist():
            members.setdefault(int(keys[element]), []).append(element)
        return [one for one in members.values() if len(one) == SIZE]


def whole_in(sampler: PromptGroupSampler, storage: Any) -> list[list[int]] | None:
    """Returns the groups that a sampler considers complete, or None if the storage is empty."""
    with sampler._index.lock:
        try:
            sampler._look(storage)
        except EmptyBufferError:
            return None
        table = sampler._index.table
        numbers = np.arange(table.marked)
        members = np.empty((len(numbers), SIZE), np.int64)
        table.read_members(numbers.ctypes.data, len(numbers), SIZE, members.ctypes.data)
        return members.tolist()  # type: ignore[no-any-return]


@pytest.mark.product("records", few=2)
@pytest.mark.parametrize("seed", seeds(6, 25))
@pytest.mark.parametrize("records", [False, True])
def test_the_groups_that_are_whole_are_those_of_which_all_items_lie_there(
    tmp_path: Path, seed: int, records: bool
) -> None:
    happened = Groups(tmp_path / "buffer", seed, records=records)
    storage = happened.handles[0].storage

    def sampler() -> PromptGroupSampler:
        return PromptGroupSampler(group_key="id", group_size=SIZE)

    often, seldom, seen, lost = sampler(), sampler(), {}, set()
    found = 0
    for at in range(250):
        happened.happen()
        if not happened.ring.length:  # a draw would wait for items that are being written
            continue
        for one in (often, seldom) if at % 7 == 0 else (often,):
            groups = whole_in(one, storage)
            if groups is not None:
                assert groups == happened.whole()
                found += len(groups)
        fresh = whole_in(sampler(), storage)
        assert fresh is None or fresh == happened.whole()
        if fresh is None:
            continue
        keys, held = happened.keys(), happened.ring.live.holds()
        writing = happened.ring.live.writing()
        there = {int(keys[slot]): set() for slot in np.flatnonzero(held)}
        for slot in np.flatnonzero(held):
            there[int(keys[slot])].add(slot)
        lost |= {
            key
            for key, slots in seen.items()
            if not all(slot in there.get(key, ()) or writing[slot] for slot in slots)
        }
        seen = {
            key: {*there.get(key, ()), *(slot for slot in seen.get(key, ()) if writing[slot])}
            for key in {*seen, *there}
        }
    assert found > 20
    if not any(happened.open):
        whole_in(often, storage)
        assert often.groups.withdrawn >= len(lost) * 0.9


def test_a_group_is_drawn_once_its_last_item_is_there_and_never_after_one_went() -> None:
    rb = buffer_of([1, 1, 2], LazyTensorStorage(6), num_groups=1, group_key="query", group_size=3)
    assert not rb.can_sample(3)
    with pytest.raises(
        EmptyBufferError, match="1 complete groups were requested, but only 0 exist: 2 are"
    ):
        rb.sample(3)
    rb.extend(rows([1, 2], first=3))
    assert sorted(rb.sample(3)["number"].tolist()) == [0, 1, 3]
    assert rb.sampler.groups == GroupCounts(whole=1, open=1, withdrawn=0, given_up=0)
    rb.extend(rows([3, 3], first=5))  # overwrites the first item of group 1
    with pytest.raises(EmptyBufferError, match="1 have lost items"):
        rb.sample(3)
    rb.extend(rows([1], first=7))  # a late item does not complete the group
    assert not rb.can_sample(3)
    assert rb.sampler.groups.withdrawn == 1


@pytest.mark.parametrize("key", [1, "one"])
def test_a_new_item_with_the_key_of_the_one_that_it_is_written_over_begins_another_group(
    key: Any,
) -> None:
    other = 2 if key == 1 else "two"
    rb = buffer_of([key] * 3 + [other] * 3, num_groups=1, group_key="query", group_size=3)
    assert rb.can_sample(3)
    assert rb.sampler.groups == GroupCounts(whole=2, open=0, withdrawn=0, given_up=0)
    rb.extend(rows([key], first=6))
    assert sorted(rb.sample(3)["number"].tolist()) == [3, 4, 5]
    assert rb.sampler.groups == GroupCounts(whole=1, open=1, withdrawn=1, given_up=0)


def test_an_item_that_is_changed_in_place_stays_in_its_group() -> None:
    rb = buffer_of([1, 1, 2, 2], group_key="query", group_size=2, num_groups=2, strategy="reward")
    assert rb.can_sample(4)
    rb[torch.tensor([0, 3])] = rows([1, 2], first=10, rewards=[9.0, -1.0])
    sample = rb.sample(4)
    by_group = {key: sample["number"][sample["query"] == key].tolist() for key in (1, 2)}
    assert by_group == {1: [10, 1], 2: [2, 11]}
    ring = ring_of(rb)
    ring.claims.claim_slots(np.array([2]), in_place=True)
    assert not rb.can_sample(4)  # the item is being written
    assert rb.sampler.groups == GroupCounts(1, 0, 0, 0)
    ring.claims.commit()
    assert rb.can_sample(4)
    ring.claims.claim_slots(np.array([2]), in_place=True)
    ring.claims.abort()
    assert not rb.can_sample(4)
    assert rb.sampler.groups == GroupCounts(1, 0, 1, 0)


def test_a_key_that_comes_again_begins_another_group() -> None:
    rb = buffer_of([4, 4, 4, 4, 4], num_groups=2, group_key="query", group_size=2)
    for _ in range(20):
        first, second = rb.sample(4)["number"].view(2, 2).tolist()
        assert sorted([sorted(first), sorted(second)]) == [[0, 1], [2, 3]]
    assert rb.sampler.groups == GroupCounts(2, 1, 0, 0)


def test_what_comes_to_a_lost_group_is_lost_with_it_and_begins_none() -> None:
    rb = buffer_of([1, 1, 2], LazyTensorStorage(4), num_groups=1, group_key="query", group_size=4)
    assert not rb.can_sample(4)
    rb.extend(rows([3, 3], first=3))  # overwrites an item of group 1
    assert not rb.can_sample(4)
    assert rb.sampler.groups == GroupCounts(0, 2, 1, 0)
    rb.extend(rows([1], first=5))  # overwrites the other item of group 1 and adds one
    assert not rb.can_sample(4)
    assert rb.sampler.groups.withdrawn == 1


def test_a_group_is_given_up_after_the_time_that_was_stated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    rb = buffer_of([1, 1, 2], LazyTensorStorage(9), num_groups=1, group_size=3, give_up_after=5.0)
    assert not rb.can_sample(3)
    now[0] += 3 * 10**9
    rb.extend(rows([3], first=3))
    assert not rb.can_sample(3)
    assert rb.sampler.groups == GroupCounts(0, 3, 0, 0)
    now[0] += 2 * 10**9
    rb.extend(rows([1], first=4))  # just in time
    assert rb.can_sample(3)
    assert rb.sampler.groups == GroupCounts(1, 1, 0, 1)
    rb.extend(rows([2, 2], first=5))  # too late
    now[0] += 3 * 10**9
    assert sorted(rb.sample(3)["number"].tolist()) == [0, 1, 4]
    assert rb.sampler.groups == GroupCounts(1, 0, 0, 2)
    rb.empty()
    assert rb.sampler.groups == GroupCounts(0, 0, 0, 0)


# -- which of them ---------------------------------------------------------------------------------


def test_groups_are_equally_likely_and_each_comes_once_in_a_batch() -> None:
    rb = buffer_of([1, 1, 2, 2, 3, 3, 4, 4, 5], num_groups=2, group_size=2)
    torch.manual_seed(0)
    pairs: Counter[Any] = Counter()
    for _ in range(6000):
        sample = rb.sample(4)
        first, second = sample["query"].view(2, 2)
        assert first[0] == first[1]
        assert second[0] == second[1]
        assert len(set(sample["index"].tolist())) == 4
        pairs[int(first[0]), int(second[0])] += 1
    assert len(pairs) == 12
    for count in pairs.values():
        assert abs(count - 500) < 5 * (500 * 11 / 12) ** 0.5


@pytest.mark.full
def test_items_of_a_group_are_drawn_by_the_strategy() -> None:
    keys, rewards = [1, 2, 1, 2, 1, 2, 1, 2], [5, 0, 1, 0, 4, 9, 2, 3]
    expected = {
        "recency": {1: [4, 6], 2: [5, 7]},
        "reward": {1: [0, 4], 2: [5, 7]},
        "variance": {1: [2, 0], 2: [1, 5]},
    }
    for group_size in (None, 4):
        for strategy, want in expected.items():
            rb = buffer_of(
                keys,
                rewards=rewards,
                samples_per_group=2,
                group_size=group_size,
                strategy=strategy,
            )
            sample = rb.sample(4)
            groups = sample["query"].view(2, 2)[:, 0].tolist()
            numbers = sample["number"].view(2, 2).tolist()
            assert dict(zip(groups, numbers, strict=True)) == want, strategy
    rb = buffer_of(keys, samples_per_group=2, group_size=4)
    torch.manual_seed(0)
    drawn = Counter(tuple(rb.sample(2)["number"].tolist()) for _ in range(6000))
    assert len(drawn) == 24
    assert max(abs(count - 250) for count in drawn.values()) < 5 * 250**0.5


@given(
    st.lists(
        st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
)
def test_the_items_that_differ_most_are_those_of_no_smaller_variance(
    rewards: list[list[float]], wanted: int
) -> None:
    given_rewards = np.array(rewards)
    members = np.arange(given_rewards.size).reshape(given_rewards.shape)
    chosen = strategies.most_different(members, given_rewards, wanted)
    for row, found in zip(given_rewards, chosen % 5, strict=True):
        assert len({*found.tolist()}) == wanted

        def rank(items: Any, row: Any = row) -> tuple[float, float]:
            return round(float(np.var(row[list(items)])), 9), round(
                float(row[list(items)].sum()), 9
            )

        assert rank(found) == max(map(rank, itertools.combinations(range(5), wanted)))


def test_without_a_size_what_is_missing_is_drawn_twice_with_one_warning() -> None:
    rb = buffer_of([1, 1, 1, 2], num_groups=3, strategy="recency")
    with pytest.warns(UserWarning, match="some items are sampled more than once"):
        sample = rb.sample(6)
    assert {*sample["query"].tolist()} == {1, 2}
    pairs = {tuple(pair) for pair in sample["number"].view(3, 2).tolist()}
    assert pairs == {(1, 2), (3, 3)}
    rb.sample(6)


# -- what keys are ---------------------------------------------------------------------------------


@pytest.mark.product(few=5)
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (kind, keys)
        for kind in ("rows", "records", "objects", "memory")
        for keys in ("numbers", "texts", "large", "pairs")
        if (kind, keys) != ("rows", "texts")  # what processes share has no text in rows
    ],
)
def test_keys_of_any_storage(tmp_path: Path, kind: str, keys: str) -> None:
    storage: Any = {
        "rows": lambda: LazyMemmapStorage(12, scratch_dir=tmp_path / "buffer"),
        "records": lambda: LazyStackStorage(12, max_bytes=2**16, scratch_dir=tmp_path / "buffer"),
        "objects": lambda: ListStorage(12),
        "memory": lambda: LazyTensorStorage(12),
    }[kind]()
    given_keys: Any = {
        "numbers": [1, 2, 1, 3, 2],
        "texts": ["a", "b", "a", "c", "b"],
        "large": [2**62, 2**62 + 1, 2**62, 5, 2**62 + 1],
        "pairs": [[1, 2], [1, 3], [1, 2], [2, 1], [1, 3]],
    }[keys]
    rb = buffer_of(given_keys, storage, num_groups=2, group_size=2, strategy="recency")
    for _ in range(8):
        assert sorted(rb.sample(4)["number"].view(2, 2).tolist()) == [[0, 2], [1, 4]]
    rb.extend(rows(given_keys[3:4], first=5))
    numbers = set()
    for _ in range(40):
        numbers |= {tuple(pair) for pair in rb.sample(4)["number"].view(2, 2).tolist()}
    assert numbers == {(0, 2), (1, 4), (3, 5)}


def test_keys_that_nobody_has_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmbuffer.samplers.labelled.group_keys._FEW", 8)
    rb = buffer_of(["a", "a"], LazyTensorStorage(4), num_groups=1, group_size=2)
    for number in range(60):
        rb.extend(rows([f"key {number}", f"key {number}"], first=2 * number))
        assert {*rb.sample(2)["number"].tolist()} <= {*range(2 * number - 2, 2 * number + 2)}
    assert len(rb.sampler._keys._labels) < 20


def test_draws_follow_from_the_seed_and_what_lies_there_alone(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(16, scratch_dir=tmp_path / "buffer")
    rb = buffer_of([1, 2, 3, 4] * 4, storage, num_groups=2, group_size=4)
    rb.sample(8)
    rb.extend(rows([5, 6, 7, 5, 6, 7, 5, 6], first=16))  # overwrites two items of each group
    rb.extend(rows([8, 8, 8, 8, 9, 9, 9, 9], first=24))
    torch.manual_seed(7)
    index, _ = rb.sampler.sample(storage, 8)
    torch.manual_seed(7)
    again, _ = PromptGroupSampler(num_groups=2, group_size=4).sample(storage, 8)
    assert torch.equal(index, again)


def test_a_sampler_is_pickled_without_what_it_has_seen() -> None:
    rb = buffer_of([1, 1, 2, 2], num_groups=1, group_size=2, strategy="reward")
    rb.sample(2)
    copy = pickle.loads(pickle.dumps(rb.sampler))
    assert copy.groups == GroupCounts(0, 0, 0, 0)
    index, _ = copy.sample(rb.storage, 2)
    assert sorted(index.tolist()) in ([0, 1], [2, 3])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        ({}, TypeError, "Exactly one of num_groups or samples_per_group"),
        ({"num_groups": 1, "samples_per_group": 1}, TypeError, "Exactly one of num_groups"),
        ({"num_groups": 0}, ValueError, "num_groups must be a positive integer, got 0"),
        ({"samples_per_group": True}, TypeError, "samples_per_group must be a positive integer"),
        ({"num_groups": 1, "strategy": "best"}, ValueError, "strategy must be one of"),
        ({"samples_per_group": 3, "group_size": 2}, ValueError, "a group only has group_size=2"),
        ({"num_groups": 1, "give_up_after": 3}, TypeError, "requires group_size, got 3"),
        ({"group_size": 1, "give_up_after": 0}, ValueError, "must be a positive number"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    make: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        PromptGroupSampler(**make)


@pytest.mark.parametrize(
    ("options", "size", "error", "says"),
    [
        ({"num_groups": 2}, 3, ValueError, "batch_size=3 is not divisible by num_groups=2"),
        ({"num_groups": 1, "group_size": 1}, 2, ValueError, "2 items of each group were requested"),
        ({"num_groups": 1, "group_key": "other"}, 2, KeyError, "no entry 'other'"),
        (
            {"num_groups": 1, "strategy": "reward", "reward_key": "score"},
            2,
            KeyError,
            "no entry 'score'",
        ),
    ],
)
def test_batches_that_cannot_be_drawn_say_why(
    options: dict[str, Any], size: int, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        buffer_of([1, 1, 2], **options).sample(size)


def test_several_dimensions_are_refused() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PromptGroupSampler(num_groups=1)
    )
    rb.extend(TensorDict({"query": torch.zeros(2, 3)}, [2, 3]))
    with pytest.raises(NotImplementedError, match="requires a storage with ndim=1, got ndim=2"):
        rb.sample(2)


def test_random_numbers_are_those_of_the_seed() -> None:
    rb = buffer_of([1, 1, 2, 2, 3, 3], num_groups=2, group_size=2)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        random.seed(1)
        drawn.append([rb.sample(4)["index"].tolist() for _ in range(5)])
    assert drawn[0] == drawn[1]

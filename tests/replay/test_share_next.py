"""Shared next observations: every item is read as it was written, whatever follows it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import shmbuffer.numpy
from shmbuffer import (
    Coordinator,
    HERReplayBuffer,
    LazyMemmapStorage,
    NStep,
    SchemaMismatchError,
    Sequence,
    SliceSampler,
    SpaceError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    attach,
)
from shmbuffer.cli import main
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import ended, fork
from tests.kit.rings import engine_of, ring_of
from tests.selection import seeds

OBS, END = ("next", "obs"), ("next", "done")


def storage(size: int, path: Path | None = None, **options: Any) -> LazyMemmapStorage:
    return LazyMemmapStorage(
        size, scratch_dir=path, shared_init=path is not None, **{"share_next": True, **options}
    )


def buffer(size: int, path: Path | None = None, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage(size, path, **options), batch_size=64)


def rows(observations: Iterable[float], following: Iterable[float], first: int = 0) -> TensorDict:
    obs, after = (
        torch.tensor([[one, -one, 2 * one] for one in some], dtype=torch.float64)
        for some in (observations, following)
    )
    number = torch.arange(first, first + len(obs))
    return TensorDict({"obs": obs, "number": number, OBS: after}, [len(obs)])


def episode(first: int, count: int) -> TensorDict:
    """Makes steps from observation ``first`` on."""
    return rows(range(first, first + count), range(first + 1, first + count + 1), first)


def wholes(rb: Any) -> int:
    found: int = rb.stats()["own_rows_used"]
    return found


def require_whole(data: TensorDict) -> None:
    assert (data[OBS][:, 0] == data["obs"][:, 0] + 1).all()
    for key in ("obs", OBS):
        assert (data[key] == data[key][:, :1] * torch.tensor([1.0, -1.0, 2.0])).all()


# What is stored.


def test_a_next_observation_that_follows_is_not_stored_again() -> None:
    rb = buffer(100)
    rb.extend(episode(0, 10))
    assert wholes(rb) == 1, "the newest item has no item behind it"
    rb.extend(episode(10, 10))
    assert wholes(rb) == 1
    rb.extend(episode(50, 10))
    assert wholes(rb) == 2, "an episode ended with item 19"
    for first in range(60, 200, 7):
        rb.extend(episode(first, 7))
        require_whole(rb.sample())
    assert wholes(rb) == 1, "its end has been written over"


def test_one_item_at_a_time_is_linked_to_the_one_before() -> None:
    rb = buffer(20)
    for number in range(50):
        rb.add(episode(number, 1)[0])
        assert wholes(rb) == 1
        assert rb[number % 20][OBS][0] == number + 1
    require_whole(rb.sample())


def test_what_differs_in_one_bit_is_stored_whole() -> None:
    rb = buffer(20)
    data = rows([0.0, -0.0, float("nan"), 7.0], [0.0, float("nan"), 7.0, 8.0])
    rb.extend(data)
    assert wholes(rb) == 2, "0.0 and -0.0 are equal numbers; NaN is not, and has the same bits"
    found = rb[:]
    for key in ("obs", OBS):
        assert found[key].view(torch.int64).equal(data[key].view(torch.int64))


def test_each_stream_is_followed_by_itself_wherever_its_items_lie() -> None:
    rb = buffer(100)
    for step in range(30):
        obs = [1000.0 * env + step for env in range(8)]
        rb.extend(rows(obs, [one + 1 for one in obs], 8 * step), streams=range(8))
        assert wholes(rb) == 8
    require_whole(rb.sample())
    rb.extend(episode(500, 1), streams=3)
    assert wholes(rb) == 9, "the episode of stream 3 ended there"


def test_of_several_leaves_all_have_to_follow() -> None:
    rb = buffer(10)
    data = episode(0, 4)
    data["pixels"] = torch.arange(4 * 9, dtype=torch.uint8).reshape(4, 3, 3)
    data["next", "pixels"] = torch.cat([data["pixels"][1:], data["pixels"][:1]])
    data["next", "pixels"][1, 0, 0] += 1
    rb.extend(data)
    assert wholes(rb) == 2
    found = rb[:]
    for key in ("obs", OBS, "pixels", ("next", "pixels")):
        assert found[key].equal(data[key])


def test_done_and_reward_keep_their_columns() -> None:
    """Slices are split by these entries."""
    sampler = SliceSampler(num_slices=4, end_key=END)
    rb = TensorDictReplayBuffer(storage=storage(200), sampler=sampler, batch_size=16)
    for first in range(0, 200, 20):
        data = episode(first, 20)
        for root in ((), ("next",)):
            data[(*root, "done")] = torch.zeros(20, 1, dtype=torch.bool)
            data[(*root, "reward")] = torch.zeros(20, 1, dtype=torch.float64)
        data["next", "done"][-1] = True
        rb.extend(data)
    assert ring_of(rb).schema.sharing.paths == (OBS,)
    found = rb.sample()
    require_whole(found)
    slices = found["number"].reshape(4, 4)
    assert (slices[:, 1:] - slices[:, :-1] == 1).all()
    assert (slices[:, 0] // 20 == slices[:, -1] // 20).all()


def test_keys_that_are_named_are_those_that_are_stored_once() -> None:
    for keys in (["obs"], [("next", "obs")]):
        rb = buffer(10, share_next=keys)
        data = episode(0, 3)
        data["more"], data["next", "more"] = torch.zeros(3, 4), torch.ones(3, 4)
        rb.extend(data)
        assert ring_of(rb).schema.sharing.paths == (OBS,)
        assert rb[:]["next", "more"].sum() == 12


def test_goals_are_of_the_observation_that_was_reached() -> None:
    """Hindsight reads the next observation directly."""
    rb = HERReplayBuffer(
        storage=storage(200),
        batch_size=64,
        goal_key="goal",
        achieved_goal_key="obs",
        strategy="final",
        reward_fn=lambda data: (data["goal"] == data[OBS]).all(-1, keepdim=True).float(),
    )
    for first in range(0, 200, 20):
        data = episode(first, 20)
        data["goal"] = torch.full((20, 3), -1.0, dtype=torch.float64)
        data["next", "reward"] = torch.zeros(20, 1)
        data[END] = torch.zeros(20, 1, dtype=torch.bool)
        data[END][-1] = True
        rb.extend(data)
    found = rb.sample()
    require_whole(found)
    given = found["goal"][:, 0] >= 0
    assert given.any()
    goals, last = found["goal"][given, 0], found["number"][given] // 20 * 20 + 20
    assert goals.equal(last.double())


def test_windows_and_steps_that_are_looked_ahead_are_of_whole_items() -> None:
    for unit in (Sequence(length=4), NStep(n=3, gamma=0.9)):
        rb = TensorDictReplayBuffer(storage=storage(200), batch_size=16, sample_unit=unit)
        for first in range(0, 200, 20):
            data = episode(first, 20)
            for key in ("done", "terminated"):
                data["next", key] = torch.zeros(20, 1, dtype=torch.bool)
                data["next", key][-1] = True
            data["next", "reward"] = torch.ones(20, 1)
            rb.extend(data)
        found = rb.sample()
        ahead = found[OBS][:, 0] - found["obs"][:, 0]
        last = found["number"] // 20 * 20 + 20
        steps_ahead = 1 if isinstance(unit, Sequence) else 3
        assert ahead.equal((last - found["number"]).clamp(max=steps_ahead).double())


# What changes it.


def test_a_write_to_a_slot_changes_no_other_item() -> None:
    rb = buffer(20, share_next_room=40)
    rb.extend(episode(0, 20))
    rb[torch.tensor([5, 6, 12])] = rows([100.0, 200.0, 300.0], [101.0, 201.0, 301.0])
    require_whole(rb[:])
    assert rb[:]["obs"][4:8, 0].tolist() == [4, 100, 200, 7]
    assert wholes(rb) == 1 + 3 + 2, "the newest, the written, and those before them"
    rb.storage.set(torch.arange(20), rows(range(400, 420), range(401, 421)))
    require_whole(rb[:])
    assert wholes(rb) == 20


def test_a_change_of_an_observation_changes_no_next_one() -> None:
    rb = buffer(20)
    rb.extend(episode(0, 20))
    rb.storage.change(torch.tensor([7]), torch.full((1, 3), 9.0, dtype=torch.float64), ("obs",))
    rb.storage.change(torch.tensor([3]), torch.full((1, 3), 9.0, dtype=torch.float64), OBS)
    found = rb[:]
    assert found["obs"][:, 0].tolist() == [*range(7), 9, *range(8, 20)]
    assert found[OBS][:, 0].tolist() == [1, 2, 3, 9, *range(5, 21)]
    assert engine_of(rb).check().ok


def test_a_change_of_something_else_leaves_links_as_they_are() -> None:
    rb = buffer(20, share_next_room=3)
    rb.extend(episode(0, 20))
    rb.storage.change(torch.arange(20), torch.full((20,), 5), ("number",))
    assert wholes(rb) == 1
    assert rb[:]["number"].tolist() == [5] * 20
    require_whole(rb[:])
    rb.extend(episode(20, 15))
    require_whole(rb[:])
    assert wholes(rb) == 2, "the newest was changed, so it is another item for who follows it"


def test_an_update_of_items_that_are_there_still_changes_those() -> None:
    rb = buffer(8)
    rb.extend(episode(0, 8))
    held = ring_of(rb).live.tickets()
    rb.extend(episode(8, 2))
    patch = {"obs": torch.full((3, 3), 9.0, dtype=torch.float64)}
    index = torch.tensor([1, 4, 6])
    changed = rb.storage.change_if_present(index, torch.from_numpy(held[index.numpy()]), patch)
    assert changed.tolist() == [False, True, True]
    assert rb[:]["obs"][:, 0].tolist() == [8, 9, 2, 3, 9, 5, 9, 7]
    assert rb[:][OBS][:, 0].tolist() == [9, 10, 3, 4, 5, 6, 7, 8]


def test_emptied_it_has_all_its_room_again() -> None:
    rb = buffer(20, share_next_room=20)
    rb.extend(rows(range(20), range(100, 120)))
    assert wholes(rb) == 20
    rb.empty()
    assert wholes(rb) == 0
    rb.extend(episode(20, 5))
    assert wholes(rb) == 1
    require_whole(rb[:])


@pytest.mark.parametrize("seed", seeds(3, 12))
def test_items_are_as_they_were_written_whatever_is_done(tmp_path: Path, seed: int) -> None:
    """Compares the buffer with a dict of the expected content of every slot."""
    _Program(seed, tmp_path).run(60)


class _Program:
    """Random writes, changes, loads and reads."""

    def __init__(self, seed: int, path: Path) -> None:
        self.random = Random(seed)
        self.size = self.random.choice([5, 16, 33])
        self.path = path
        self.rb = buffer(self.size, path / "buffer", share_next_room=2 * self.size + 20)
        self.there: dict[int, tuple[float, float]] = {}
        self.current = [self.random.random() for _ in range(4)]

    def run(self, steps: int) -> None:
        for step in range(steps):
            weights = (12, 2, 3, 1, 1, 1) if self.there else (1, 0, 0, 0, 0, 0)
            deeds = self.extend, self.place, self.change, self.empty, self.save, self.state
            self.random.choices(deeds, weights)[0]()
            self.require_same(step)

    def extend(self) -> None:
        count = self.random.choice([1, 2, 3, 8, self.size, self.size + 3])
        streams = [self.random.randrange(4) for _ in range(count)]
        items = []
        for stream in streams:
            follows = self.random.random()
            items.append((self.current[stream], follows))
            is_end = self.random.random() < 0.15
            self.current[stream] = self.random.random() if is_end else follows
        index = self.rb.extend(rows(*zip(*items, strict=True)), streams=streams)
        self.there |= dict(zip(index.tolist(), items, strict=True))

    def place(self) -> None:
        everywhere = self.random.random() < 0.2 and len(self.there) == self.size
        slots = list(range(self.size)) if everywhere else self._some()
        items = [(self.random.random(), self.random.random()) for _ in slots]
        data = rows(*zip(*items, strict=True))
        if self.random.random() < 0.5:
            self.rb.storage.set(torch.tensor(slots), data)
        else:
            self.rb[torch.tensor(slots)] = data
        self.there |= dict(zip(slots, items, strict=True))

    def change(self) -> None:
        slots = self._some()
        values = [self.random.random() for _ in slots]
        at = self.random.randrange(3)
        if at == 2:
            self.rb.storage.change(torch.tensor(slots), torch.zeros(len(slots)).long(), ("number",))
            return
        data = rows(values, values)["obs"]
        self.rb.storage.change(torch.tensor(slots), data, (("obs",), OBS)[at])
        for slot, value in zip(slots, values, strict=True):
            old = self.there[slot]
            self.there[slot] = (value, old[1]) if at == 0 else (old[0], value)

    def empty(self) -> None:
        self.rb.empty()
        self.there = {}

    def save(self) -> None:
        self.rb.dumps(self.path / "save")
        self.rb.loads(self.path / "save")

    def state(self) -> None:
        self.rb.load_state_dict(self.rb.state_dict())

    def _some(self) -> list[int]:
        count = self.random.randrange(1, min(4, len(self.there)) + 1)
        return self.random.sample(sorted(self.there), count)

    def require_same(self, step: int) -> None:
        report = engine_of(self.rb).check()
        assert report.ok, (step, report.problems)
        assert report.verified == len(self.there) == len(self.rb)
        if not self.there:
            return
        slots = sorted(self.there)
        sample = self.rb.sample()
        for data, at in ((self.rb[torch.tensor(slots)], slots), (sample, sample["index"].tolist())):
            expected = rows(*zip(*(self.there[slot] for slot in at), strict=True))
            for key in ("obs", OBS):
                assert data[key].equal(expected[key]), step


# Space.


def test_a_write_without_room_says_what_to_do_and_changes_nothing() -> None:
    rb = buffer(100, share_next_room=10)
    rb.extend(rows(range(8), range(100, 108)))
    with pytest.raises(SpaceError, match="of the 10 own rows are free") as raised:
        rb.extend(rows(range(200, 203), range(300, 303)))
    assert "larger share_next_room" in str(raised.value)
    assert raised.value.needed_bytes == 3 * 24  # type: ignore[attr-defined]
    assert len(rb) == 8
    assert rb[:][OBS][:, 0].tolist() == list(range(100, 108))
    rb.extend(episode(200, 40))
    assert len(rb) == 48
    assert engine_of(rb).check().ok
    with pytest.raises(SpaceError, match="needs 1 own rows for next"):
        rb.storage.set(torch.tensor([3, 4, 5]), rows([1, 2, 3], [5, 6, 7])[0:3]) or rb.storage.set(
            torch.tensor([20, 22, 24]), rows([1, 2, 3], [5, 6, 7])
        )
    assert len(rb) == 48
    assert engine_of(rb).check().ok


def test_what_a_write_evicts_makes_room_for_it() -> None:
    rb = buffer(10, share_next_room=10)
    for first in range(0, 60, 5):
        rb.extend(rows(range(first, first + 5), range(100 + first, 105 + first)))
    assert rb[:][OBS][:, 0].tolist() == [*range(150, 160)]
    rb.extend(rows(range(10), range(200, 210)))
    assert rb[:][OBS][:, 0].tolist() == [*range(200, 210)]


def test_inspect_and_stats_show_the_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rb = buffer(2000, tmp_path / "buffer")
    rb.extend(episode(0, 10))
    rb.extend(episode(50, 10))
    stats = rb.stats()
    assert (stats["own_rows"], stats["own_rows_used"]) == (100, 2)
    found = inspect(tmp_path / "buffer")["sharing"]
    assert found == {"leaves": ["next.obs"], "own_rows": 100, "used": 2}
    assert json.dumps(found)
    assert main(["inspect", str(tmp_path / "buffer")]) == 0
    assert "next.obs stored once; 2 of 100" in capsys.readouterr().out
    other = buffer(20, share_next=False)
    other.extend(episode(0, 5))
    assert "own_rows" not in other.stats()


# What cannot be.


def test_a_leaf_that_is_stored_once_has_no_view(tmp_path: Path) -> None:
    rb = buffer(20)
    rb.extend(episode(0, 10))
    data = rb[2:5]
    data[OBS].zero_()  # a copy, although it is private memory
    require_whole(rb[:])
    rows: Any = rb.storage.mover()
    with pytest.raises(SchemaMismatchError, match=r"leaf 'next.obs' is stored once .* no column"):
        rows.views()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"ndim": 2},
            ValueError,
            "share_next needs ndim=1, but ndim is 2; write the steps of several",
        ),
        (
            {"share_next_room": 0},
            ValueError,
            "share_next_room must be from 1 to 2147483647, but is 0",
        ),
        ({"share_next_room": 2.0}, ValueError, "is 2.0"),
        ({"share_next": False, "share_next_room": 5}, ValueError, "share_next; leave it out"),
        ({"share_next": []}, ValueError, "name at least one key"),
        ({"share_next": [3]}, ValueError, "share_next: 3 is not a key"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        storage(10, **options)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["nothing"], "'next.nothing' needs a leaf 'next.nothing', which does not exist"),
        (["number"], "'next.number' needs a leaf 'next.number', which does not exist"),
        (["other"], r"'next.other' is float32\[2\], but 'other' is float32\[3\]"),
    ],
)
def test_keys_that_cannot_be_are_named_at_the_first_write(keys: list[str], message: str) -> None:
    rb = buffer(10, share_next=keys)
    data = episode(0, 3)
    data["other"], data["next", "other"] = torch.zeros(3, 3), torch.zeros(3, 2)
    with pytest.raises(SchemaMismatchError, match=message):
        rb.extend(data)


def test_items_without_a_next_observation_are_refused() -> None:
    rb = buffer(10)
    with pytest.raises(SchemaMismatchError, match=r"no leaf .'next', key. has the dtype and shape"):
        rb.extend(TensorDict({"obs": torch.zeros(3, 4)}, [3]))
    with pytest.raises(SchemaMismatchError, match="values that are not tensors"):
        rb.extend(TensorDict({"obs": torch.zeros(3, 4), "text": ["a", "b", "c"]}, [3]))


def test_a_buffer_that_is_there_has_what_it_was_made_with(tmp_path: Path) -> None:
    with buffer(10, tmp_path / "shares") as rb:
        rb.extend(episode(0, 3))
    with buffer(10, tmp_path / "shares", share_next=False) as rb:
        rb.extend(episode(3, 3))
        assert "own_rows" in rb.stats()
    with pytest.raises(SchemaMismatchError, match="was created with share_next="):
        buffer(10, tmp_path / "shares", share_next_room=5)
    with buffer(10, tmp_path / "columns", share_next=False) as rb:
        rb.extend(episode(0, 3))
    with pytest.raises(
        SchemaMismatchError, match="was created without share_next, but this storage was created"
    ):
        buffer(10, tmp_path / "columns")


def test_a_save_in_its_own_directory(tmp_path: Path) -> None:
    rb = buffer(10, tmp_path / "save" / "storage")
    rb.extend(episode(0, 3))
    rb.dumps(tmp_path / "save")
    rb.close()
    other = buffer(10, tmp_path / "save" / "storage")
    other.loads(tmp_path / "save")
    require_whole(other[:])


def test_a_coordinator_makes_one(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=100, batch_size=16, share_next=True) as run:
        run.buffer.extend(episode(0, 50))
        assert wholes(run.buffer) == 1
        with shmbuffer.numpy.attach(tmp_path / "buffer") as arrays:
            found = arrays.sample()
            assert (found["next"]["obs"][:, 0] == found["obs"][:, 0] + 1).all()
    options = {"on_existing": "recover", "capacity": 100}
    with pytest.raises(ValueError, match="the buffer in this directory has share_next="):
        Coordinator(tmp_path / "buffer", share_next=["obs"], **options)
    with Coordinator(tmp_path / "buffer", **options) as run:
        require_whole(run.buffer[:])
    with pytest.raises(ValueError, match="'LazyStackStorage' does not support share_next"):
        Coordinator(capacity=10, storage="LazyStackStorage", max_bytes=10**6, share_next=True)


# Saves.


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("size", [40, 100])
def test_a_save_is_of_whole_items_and_loads_into_either(
    tmp_path: Path, *, shares: bool, size: int
) -> None:
    rb = buffer(40)
    for step in range(12):
        obs = [1000.0 * env + step for env in range(8)]
        rb.extend(rows(obs, [one + 1 for one in obs], 8 * step), streams=range(8))
    rb.dumps(tmp_path / "save")
    assert TensorDict.load_memmap(tmp_path / "save/storage")[OBS].shape == (40, 3)
    other = buffer(size, share_next=shares)
    other.loads(tmp_path / "save")
    require_whole(other[:])
    assert {*other[:]["number"].tolist()} == {*range(56, 96)}
    if shares:
        assert wholes(other) == 8
        assert engine_of(other).check().ok
    other.extend(episode(5, 5))
    require_whole(other[:])


def test_a_save_without_it_loads_into_one_that_shares(tmp_path: Path) -> None:
    rb = buffer(40, share_next=False)
    rb.extend(episode(0, 50))
    rb.dumps(tmp_path / "save")
    other = buffer(40)
    other.loads(tmp_path / "save")
    assert wholes(other) == 1
    require_whole(other[:])
    narrow = buffer(40, share_next_room=3)
    narrow.loads(tmp_path / "save")
    require_whole(narrow[:])


def test_a_directory_in_use_loads_into_another_buffer(tmp_path: Path) -> None:
    with buffer(40, tmp_path / "buffer") as rb:
        rb.extend(episode(0, 50))
    other = buffer(40, share_next=False)
    other.storage.loads(tmp_path / "buffer")
    require_whole(other[:])
    assert len(other) == 40


# Several processes.

COLLECTORS, STREAMS, STEPS, LENGTH = 4, 8, 60, 25


def steps(collector: int, first: int, count: int) -> dict[Any, np.ndarray]:
    """Makes steps of each environment of a collector in turn, in episodes of `LENGTH` steps."""
    step = np.repeat(np.arange(first, first + count), STREAMS)
    env = np.tile(np.arange(STREAMS), count) + STREAMS * collector
    obs = np.stack([env, step // LENGTH, step % LENGTH, 7 * step % LENGTH], 1).astype(np.float64)
    following = obs.copy()
    following[:, 2] += 1
    following[:, 3] = np.where(step % LENGTH == LENGTH - 1, -1, (7 * (step + 1)) % LENGTH)
    done = step % LENGTH == LENGTH - 1
    return {"obs": obs, "next": {"obs": following, "done": done}}


def require_steps(obs: np.ndarray, following: np.ndarray, done: np.ndarray) -> None:
    assert (following[:, :2] == obs[:, :2]).all()
    assert (following[:, 2] == obs[:, 2] + 1).all()
    assert (done == (obs[:, 2] == LENGTH - 1)).all()
    step = LENGTH * obs[:, 1] + obs[:, 2]
    expected = np.where(done, -1, 7 * (step + 1) % LENGTH)
    assert (following[:, 3] == expected).all()
    assert (obs[:, 3] == 7 * step % LENGTH).all()


def collect(path: Path, collector: int, *, for_ever: bool = False) -> None:
    """Writes batches of several sizes; odd collectors write arrays, even ones tensors."""
    streams = np.arange(STREAMS)
    with (shmbuffer.numpy.attach if collector % 2 else attach)(path) as rb:
        first = 0
        while first < STEPS or for_ever:
            count = 1 + (first + collector) % 4
            data: Any = steps(collector, first, count)
            if not collector % 2:
                data = tensors(data)
            rb.extend(data, streams=np.tile(streams, count))
            first += count


def tensors(data: dict[Any, Any]) -> TensorDict:
    leaves = {"obs": data["obs"], OBS: data["next"]["obs"], END: data["next"]["done"]}
    return TensorDict(
        {key: torch.from_numpy(leaf) for key, leaf in leaves.items()}, [len(data["obs"])]
    )


def place_for_ever(path: Path, seed: int) -> None:
    """Writes its own steps into slots of others, and changes some items in place."""
    random = Random(seed)
    with attach(path) as rb:
        while True:
            if len(rb) < 400:
                continue
            slots = torch.tensor(random.sample(range(400), 3))
            data = tensors(steps(COLLECTORS + seed, random.randrange(1000), 1))[:3]
            if random.random() < 0.5:
                rb[slots] = data
            else:
                with suppress(IndexError):  # a slot in which a writer died holds no item
                    rb.storage.change(slots, data, None)


def created(path: Path, size: int, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=storage(size, path, **options), batch_size=64
    )
    rb.storage.define(
        TensorDict(
            {
                "obs": torch.zeros(1, 4, dtype=torch.float64),
                OBS: torch.zeros(1, 4, dtype=torch.float64),
                END: torch.zeros(1, dtype=torch.bool),
            },
            [1],
        )
    )
    return rb


def learn(rb: Any) -> None:
    found = rb.sample()
    require_steps(*(found[key].numpy() for key in ("obs", OBS, END)))
    found["td_error"] = torch.rand(len(found))
    rb.update_tensordict_priority(found)


def test_four_collectors_of_eight_environments_each_are_followed(tmp_path: Path) -> None:
    rb = created(tmp_path / "buffer", 4000)
    for collector in range(COLLECTORS):
        assert ended(fork(lambda: collect(tmp_path / "buffer", collector))) == 0  # noqa: B023
    everything = rb[:]
    require_steps(*(everything[key].numpy() for key in ("obs", OBS, END)))
    assert len(everything) >= COLLECTORS * STREAMS * STEPS
    ends = int(everything[END].sum())
    assert ends <= wholes(rb) <= ends + COLLECTORS * STREAMS
    learn(rb)
    with shmbuffer.numpy.attach(tmp_path / "buffer") as arrays:
        found = arrays.sample(64)
        require_steps(found["obs"], found["next"]["obs"], found["next"]["done"])
    rb.close()


@pytest.mark.full
def test_collectors_that_are_killed_while_they_write_lose_no_next_observation(
    tmp_path: Path,
) -> None:
    """The test kills collectors repeatedly at any point, while the ring wraps around."""
    path, random = tmp_path / "buffer", Random(3)
    rb = created(path, 500, share_next_room=600)
    for _ in range(3):
        first = rb.write_count
        victims = [
            fork(lambda: collect(path, collector, for_ever=True))  # noqa: B023
            for collector in range(3)
        ]
        victims += [fork(lambda: place_for_ever(path, seed)) for seed in range(1)]  # noqa: B023
        goal = first + random.randrange(300, 2000)
        while rb.write_count < goal:
            if len(rb):
                learn(rb)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
            assert ended(victim) == -signal.SIGKILL
        engine_of(rb).seat.reap_dead()
        report = engine_of(rb).check()
        assert report.ok, report.problems
        everything = rb[:]
        require_steps(*(everything[key].numpy() for key in ("obs", OBS, END)))
        own = ring_of(rb).live
        held = own.holds()
        assert wholes(rb) == int((held & (own.nexts >= np.uint64(2**63))).sum())
    rb.close()
    with attach(path) as again:
        everything = again[:]
        require_steps(*(everything[key].numpy() for key in ("obs", OBS, END)))
        assert engine_of(again).check().ok

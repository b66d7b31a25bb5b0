"""Each window of written steps is drawn once, with several writers and in a reopened buffer."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from tests.replay.window_oracle import Step, WindowOracle
from tests.selection import seeds

STEPS = 4


def data_of(items: list[Step], *, load: int = 0) -> TensorDict:
    """Makes a batch of these items."""

    def column(name: str, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        return torch.tensor([getattr(item, name) for item in items], dtype=dtype)

    data = {
        "number": column("number", torch.int64),
        "is_init": column("begins")[:, None],
        "next": {"done": column("ends")[:, None]},
    }
    if load:
        data["load"] = torch.zeros(len(items), load)
    return TensorDict(data, [len(items)])


def windows_of(rb: TensorDictReplayBuffer, count: int) -> list[list[int]]:
    """Draws ``count`` slices; returns the numbers of their steps."""
    found: list[list[int]] = rb.sample(count * STEPS)["number"].reshape(-1, STEPS).tolist()
    return found


def drawn(rb: TensorDictReplayBuffer, count: int) -> list[list[int]]:
    """Draws slices like `windows_of`; returns an empty list if no trajectory is long enough."""
    try:
        return windows_of(rb, count)
    except RuntimeError as error:
        if "no trajectory is long enough" not in str(error):
            raise
        return []


def plain(count: int, first: int = 0, *, every: int = 0, source: int = 0) -> list[Step]:
    """Makes steps of one source; one in ``every`` ends an episode."""
    numbers = range(first, first + count)
    return [Step(n, (source, 0), bool(every) and n % every == every - 1) for n in numbers]


def buffer(capacity: int = 64, **options: Any) -> TensorDictReplayBuffer:
    sampler = StreamingSliceSampler(slice_len=STEPS, **options)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)


class History:
    """Several handles that write several streams each in turn, and an oracle."""

    def __init__(self, path: Path, seed: int, *, records: bool) -> None:
        self.random = random.Random(seed)
        self.capacity = self.random.choice([5, 16, 29, 150])
        self.records, self.number = records, 0
        self.oracle = WindowOracle(self.capacity, STEPS)
        self.handles = [self._handle(path) for _ in range(2)]
        self.write()

    def _handle(self, path: Path) -> TensorDictReplayBuffer:
        storage: Any
        if self.records:
            more = {"max_bytes": 2**20, "scratch_dir": path, "shared_init": True}
            storage = LazyStackStorage(self.capacity, **more)
        else:
            storage = LazyMemmapStorage(self.capacity, scratch_dir=path, shared_init=True)
        return TensorDictReplayBuffer(
            storage=storage, sampler=StreamingSliceSampler(slice_len=STEPS)
        )

    def write(self) -> None:
        writer = self.random.randrange(2)
        count = self.random.choice([1, 2, 3, 9, self.capacity // 2])
        count = max(1, min(count, self.capacity))
        items = []
        for _ in range(count):
            source = writer, self.random.choice([0, 0, 7])
            ends, begins = self.random.random() < 0.08, self.random.random() < 0.03
            items.append(Step(self.number, source, ends, begins))
            self.number += 1
        streams = [item.source[1] for item in items]
        self.handles[writer].extend(data_of(items, load=16 * self.records), streams=streams)
        self.oracle.write(items)

    def require_same(self, rb: TensorDictReplayBuffer, count: int) -> None:
        """Checks that the next draw returns the windows of the oracle."""
        expected = self.oracle.take(count)
        found = drawn(rb, count)
        if not found:
            assert not expected
            return
        assert found[: len(expected)] == expected
        items = {item.number: item for item in self.oracle.items}
        for window in found:
            sources = {items[number].source for number in window}
            assert len(sources) == 1
            assert not any(items[number].ends for number in window[:-1])
            assert not any(items[number].begins for number in window[1:])


@pytest.mark.product("seed", few=1)
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("seed", seeds(3, 12))
def test_each_window_comes_once_in_the_order_in_which_they_were_completed(
    tmp_path: Path, seed: int, records: bool
) -> None:
    history = History(tmp_path / "ring", seed, records=records)
    reader = history.handles[1]
    for _ in range(150):
        for _ in range(history.random.randrange(4)):
            history.write()
        history.require_same(reader, history.random.choice([1, 2, 5]))
    last = [item._replace(source=(0, 1)) for item in plain(4, history.number)]
    history.handles[0].extend(data_of(last, load=16 * records), streams=1)
    history.oracle.write(last)
    history.require_same(reader, 100)
    assert reader.sampler.lost == history.oracle.lost
    assert not reader.sampler.waiting


@pytest.mark.product(few=1)
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("seed", seeds(2, 4))
def test_a_save_goes_on_with_the_windows_that_were_left(
    tmp_path: Path, seed: int, records: bool
) -> None:
    history = History(tmp_path / "ring", seed, records=records)
    reader = history.handles[1]
    for turn in range(12):
        for _ in range(3):
            history.write()
        history.require_same(reader, 2)
        reader.dumps(tmp_path / f"save-{turn}")
        again = history._handle(tmp_path / f"ring-{turn}")
        again.loads(tmp_path / f"save-{turn}")
        beside = copy.deepcopy(history.oracle)
        expected = beside.take(3)
        found = drawn(again, 3)
        assert found[: len(expected)] == expected
        again.close()


def test_a_state_goes_on_on_the_ring_as_it_is() -> None:
    rb = buffer(32)
    rb.extend(data_of(plain(16)))
    assert windows_of(rb, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    state = rb.sampler.state_dict()
    rb.extend(data_of(plain(20, 16)))
    other = TensorDictReplayBuffer(
        storage=rb.storage, sampler=StreamingSliceSampler(slice_len=STEPS)
    )
    other.sampler.load_state_dict(state)
    expected = [[n, n + 1, n + 2, n + 3] for n in range(8, 36, 4)]
    assert windows_of(other, 7) == expected == windows_of(rb, 7)


def test_a_state_of_other_windows_is_refused() -> None:
    state = StreamingSliceSampler(slice_len=3).state_dict()
    with pytest.raises(RuntimeError, match=r"slice_len=3 cannot be loaded .* slice_len=4"):
        buffer().sampler.load_state_dict(state)


def test_a_state_dict_of_the_buffer_has_the_position() -> None:
    rb, other = buffer(), buffer()
    rb.extend(data_of(plain(20)))
    windows_of(rb, 2)
    other.load_state_dict(rb.state_dict())
    assert windows_of(other, 3) == [[n, n + 1, n + 2, n + 3] for n in (8, 12, 16)]


def test_what_is_left_of_a_batch_are_slices_at_random() -> None:
    rb = buffer()
    rb.extend(data_of(plain(11)))
    first = windows_of(rb, 5)
    assert first[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for window in first + windows_of(rb, 50):
        assert window == [*range(window[0], window[0] + 4)]
    assert {window[0] for window in windows_of(rb, 200)} == {*range(8)}


def test_a_batch_that_cannot_be_filled_up_takes_no_window() -> None:
    rb = buffer(strict_length=True)
    rb.extend(data_of(plain(3)))
    with pytest.raises(RuntimeError, match="no trajectory is long enough"):
        windows_of(rb, 1)
    rb.extend(data_of(plain(1, 3)))
    assert windows_of(rb, 1) == [[0, 1, 2, 3]]


def test_windows_that_are_written_over_are_left_out_and_counted() -> None:
    rb = buffer(16)
    rb.extend(data_of(plain(16)))
    assert windows_of(rb, 1) == [[0, 1, 2, 3]]
    assert rb.sampler.waiting == 3
    rb.extend(data_of(plain(5, 16)))
    assert windows_of(rb, 1) == [[8, 9, 10, 11]]
    assert rb.sampler.lost == 1


def overtaken(call: Any, rb: TensorDictReplayBuffer, each: int, calls: list[int]) -> Any:
    """Runs a call and then lets a writer overwrite items."""

    def behind(*arguments: Any) -> Any:
        found = call(*arguments)
        first = rb.write_count
        rb.extend(data_of(plain(each, first), load=rb.sampler.load))
        calls.append(first)
        return found

    return behind


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("when", ["it was checked", "it was read"])
def test_a_writer_that_is_always_faster_makes_windows_lost_and_no_draw_fail(
    tmp_path: Path, when: str, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer overwrites next the windows that were never drawn."""
    capacity, storage = 256, LazyTensorStorage(256)
    if records:
        storage = LazyStackStorage(capacity, max_bytes=2**16, scratch_dir=tmp_path / "ring")
    sampler: Any = StreamingSliceSampler(slice_len=STEPS)
    sampler.load = 64 * records
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)
    for first in range(0, capacity + STEPS, STEPS):
        rb.extend(data_of(plain(STEPS, first), load=sampler.load))
    ((oldest, *_),) = windows_of(rb, 1)
    calls: list[int] = []
    for owner, name in (
        [(sampler._windows, "take"), (sampler._windows, "put")]
        if when == "it was checked"
        else [(sampler, "sample"), (sampler, "_again")]
    ):
        monkeypatch.setattr(owner, name, overtaken(getattr(owner, name), rb, 2 * STEPS, calls))
    given = []
    for _ in range(10):
        found = windows_of(rb, 3)
        given += found
    assert 10 < len(calls) < 40
    assert sampler.lost > 0
    monkeypatch.undo()
    while sampler.waiting:
        given += windows_of(rb, 1)
    assert all(window == [*range(window[0], window[0] + STEPS)] for window in given)
    starts = [window[0] for window in given]
    assert starts == sorted(set(starts))
    assert 1 + len(given) + sampler.lost == (rb.write_count - oldest) // STEPS


def test_a_window_with_an_item_that_was_changed_is_not_given() -> None:
    rb = buffer(16)
    rb.extend(data_of(plain(12)))
    windows_of(rb, 1)
    rb[5] = data_of([Step(105, (0, 0), False)])[0]
    assert windows_of(rb, 1) == [[8, 9, 10, 11]]
    assert rb.sampler.lost == 1


def test_marks_say_where_a_window_begins_and_ends() -> None:
    rb = buffer()
    rb.extend(data_of(plain(8)))
    sample = rb.sample(8)
    assert sample["next", "truncated"].flatten().tolist() == [False, False, False, True] * 2
    assert sample["next", "done"].flatten().tolist() == [False, False, False, True] * 2
    assert sample["is_init"].flatten().tolist() == [True, False, False, False] * 2


def test_lanes_are_streams() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60, ndim=2), sampler=StreamingSliceSampler(slice_len=STEPS)
    )
    number = torch.arange(2)[:, None] * 100 + torch.arange(6)
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    done[0, 4] = True
    rb.extend(TensorDict({"number": number, "next": {"done": done}}, [2, 6]))
    assert windows_of(rb, 2) == [[0, 1, 2, 3], [100, 101, 102, 103]]
    number, done = number + 6, torch.zeros_like(done)
    rb.extend(TensorDict({"number": number, "next": {"done": done}}, [2, 6]))
    expected = [[104, 105, 106, 107], [5, 6, 7, 8], [108, 109, 110, 111]]
    assert windows_of(rb, 3) == expected


def test_batches_that_were_made_ahead_and_are_thrown_away_come_again(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64),
        sampler=StreamingSliceSampler(slice_len=STEPS),
        batch_size=STEPS,
        prefetch=3,
    )
    rb.extend(data_of(plain(40)))
    found = [rb.sample()["number"].tolist() for _ in range(2)]
    rb.dumps(tmp_path)
    found += [rb.sample()["number"].tolist() for _ in range(8)]
    assert found == [[n, n + 1, n + 2, n + 3] for n in range(0, 40, 4)]
    again = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64),
        sampler=StreamingSliceSampler(slice_len=STEPS),
        batch_size=STEPS,
    )
    again.loads(tmp_path)
    assert [again.sample()["number"].tolist() for _ in range(8)] == found[2:]


def test_a_copy_begins_with_the_oldest_window() -> None:
    rb = buffer()
    rb.extend(data_of(plain(12)))
    windows_of(rb, 2)
    sampler = pickle.loads(pickle.dumps(rb.sampler))
    other = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler)
    assert windows_of(other, 1) == [[0, 1, 2, 3]]
    assert windows_of(rb, 1) == [[8, 9, 10, 11]]


def _in_a_child(rb: TensorDictReplayBuffer, connection: Any) -> None:
    connection.send(windows_of(rb, 2))


def test_the_child_of_a_fork_begins_with_the_oldest_window() -> None:
    rb = buffer()
    rb.extend(data_of(plain(12)))
    windows_of(rb, 2)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_in_a_child, args=(rb, theirs))
    child.start()
    assert ours.recv() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    child.join()
    assert windows_of(rb, 1) == [[8, 9, 10, 11]]


def test_an_empty_buffer_begins_anew() -> None:
    rb = buffer()
    rb.extend(data_of(plain(12)))
    windows_of(rb, 1)
    rb.empty()
    rb.extend(data_of(plain(8, 50)))
    assert windows_of(rb, 2) == [[50, 51, 52, 53], [54, 55, 56, 57]]


@pytest.mark.parametrize("given", [True, 2.0, "4"])
def test_a_length_that_is_no_integer_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="slice_len must be an integer, got"):
        StreamingSliceSampler(slice_len=given)


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="slice_len must be at least 1, got 0"):
        StreamingSliceSampler(slice_len=0)


def test_a_window_that_no_storage_has_room_for_is_refused() -> None:
    rb = buffer(3)
    rb.extend(data_of(plain(3)))
    with pytest.raises(ValueError, match="too small for one window of slice_len=4"):
        windows_of(rb, 1)


def test_objects_have_windows_too() -> None:
    rb = TensorDictReplayBuffer(
        storage=ListStorage(20), sampler=StreamingSliceSampler(slice_len=STEPS)
    )
    rb.extend(data_of(plain(9)))
    assert windows_of(rb, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    rb.extend(data_of(plain(9, 9)))
    assert windows_of(rb, 2) == [[8, 9, 10, 11], [12, 13, 14, 15]]

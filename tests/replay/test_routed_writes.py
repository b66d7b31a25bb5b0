"""Return values of writes into an ensemble, and the ends of streams after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.kit.rings import ring_of


def steps(*numbers: int, done: int = -1, terminated: int = -1) -> TensorDict:
    number = torch.tensor(numbers)
    flags = {
        "done": (number == done) | (number == terminated),
        "terminated": number == terminated,
        "truncated": number == done,
    }
    entries = {("next", key): flag.unsqueeze(-1) for key, flag in flags.items()}
    return TensorDict({"x": number, **entries}, [len(numbers)])


def member(size: int = 8, sampler: Any = None, **options: Any) -> TensorDictReplayBuffer:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    storage = LazyTensorStorage(size, **options)
    return TensorDictReplayBuffer(storage=storage, writer=writer, sampler=sampler)


# -- routed writes ---------------------------------------------------------------------------------


def test_a_routed_write_says_which_items_it_has_written() -> None:
    rb = ReplayBufferEnsemble(member(4), member(4), routing_key="to")
    for turn in range(4):  # past the ends of both rings
        before = [0 if turn == 0 else ring_of(one).head for one in rb._members]
        found = rb.extend(steps(0, 1, 2, 3, 4).set("to", torch.tensor([0, 1, 1, 0, 1])))
        assert found.batch_size == (5,)
        assert found["buffer_ids"].tolist() == [0, 1, 1, 0, 1]
        first, second = before
        assert found["index_generation"].tolist() == [
            *(first, second, second + 1, first + 1, second + 2),
        ]
        assert torch.equal(rb.writer.generations_of(found), found["index_generation"])
        patch = {"x": torch.arange(10, 15) + turn}
        result = rb.update_if_present(
            index=found, generation=found["index_generation"], patch=patch
        )
        assert result.updated.all()
        for at in range(5):
            one = rb[int(found["buffer_ids"][at])][int(found["index"][at])]
            assert int(one["x"]) == 10 + at + turn


def test_items_of_a_write_that_is_larger_than_a_buffer_are_stale_but_for_the_last() -> None:
    rb = ReplayBufferEnsemble(member(3), member(20), routing_key="to")
    found = rb.extend(steps(*range(8)).set("to", torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])))
    assert found["index"].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert found["index_generation"].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    there = rb.writer.generations_of(found) == found["index_generation"]
    assert there.tolist() == [False] * 4 + [True] * 4


def test_a_handle_is_of_its_own_write_though_another_writer_was_faster(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "buffer", shared_init=True)
    other = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "buffer", shared_init=True)
    )

    class Overtaken(TensorDictReplayBuffer):
        def extend(self, *args: Any, **kwargs: Any) -> Any:
            index = super().extend(*args, **kwargs)
            other.extend(steps(90, 91, 92, 93))
            return index

    rb = ReplayBufferEnsemble(Overtaken(storage=storage), routing_dim=0)
    found = rb.extend(steps(0, 1).unsqueeze(0))
    assert found["index_generation"].tolist() == [0, 1]
    result = rb.update_if_present(
        index=found, generation=found["index_generation"], patch={"x": torch.tensor([7, 7])}
    )
    assert result.stale_count == 2
    assert other[:]["x"].tolist() == [92, 93, 90, 91]
    rb.close()
    other.close()


def test_only_where_every_buffer_says_it_a_write_says_generations() -> None:
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    rb = ReplayBufferEnsemble(member(4), plain, routing_key="to")
    found = rb.extend(steps(0, 1).set("to", torch.tensor([0, 1])))
    assert sorted(found.keys()) == ["buffer_ids", "index"]


def test_a_writer_that_chooses_places_says_what_is_there(tmp_path: Path) -> None:
    class Backwards(RoundRobinWriter):
        def extend(self, data: Any) -> Any:
            return self.write_at(torch.arange(len(data)).flip(0), data)

    rb = ReplayBufferEnsemble(
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(4), writer=Backwards(track_generations=True)
        ),
        routing_dim=0,
    )
    found = rb.extend(steps(0, 1, 2).unsqueeze(0))
    assert found["index"].tolist() == [2, 1, 0]
    assert torch.equal(found["index_generation"], rb[0].storage.tickets(found["index"]))
    assert TensorDictMaxValueWriter().generations_of([1]).tolist() == [-1]


# -- ends of streams -------------------------------------------------------------------------------


def flags(rb: TensorDictReplayBuffer) -> dict[str, list[bool]]:
    return {
        key: rb[:]["next", key].flatten().tolist() for key in ("done", "terminated", "truncated")
    }


def test_the_newest_step_of_each_buffer_becomes_an_end() -> None:
    open_, ended, terminated, empty = (member(4) for _ in range(4))
    open_.extend(steps(*range(6)))  # past the end of the ring: the newest item is at 1
    ended.extend(steps(0, 1, done=1))
    terminated.extend(steps(0, 1, terminated=1))
    before = flags(ended), flags(terminated)
    rb = ReplayBufferEnsemble(open_, ended, terminated, empty)
    counts = rb.write_count
    rb.end_streams()
    assert flags(open_) == {
        "done": [False, True, False, False],
        "terminated": [False] * 4,
        "truncated": [False, True, False, False],
    }
    assert (flags(ended), flags(terminated)) == before
    assert rb.write_count == counts


def test_items_without_the_other_flags_become_done() -> None:
    one = member(8, sampler=SliceSampler(slice_len=2, end_key=("next", "done")))
    one.extend(TensorDict({("next", "done"): torch.zeros(3, 1, dtype=torch.bool)}, [3]))
    ReplayBufferEnsemble(one).end_streams()
    assert one[:]["next", "done"].flatten().tolist() == [False, False, True]


def test_an_item_that_was_changed_does_not_count_as_the_newest() -> None:
    one = member(8)
    index = one.extend(steps(0, 1, 2))
    one.update_if_present(
        index=index[:1],
        generation=one.writer.generations_of(index[:1]),
        patch={"x": torch.tensor([9])},
    )
    ReplayBufferEnsemble(one).end_streams()
    assert flags(one)["done"] == [False, False, True]


def test_every_stream_of_every_collector_ends(tmp_path: Path) -> None:
    handles = [
        TensorDictReplayBuffer(
            storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "buffer", shared_init=True)
        )
        for _ in range(2)
    ]
    for turn in range(3):
        for handle in handles:
            handle.extend(steps(2 * turn, 2 * turn + 1), streams=[0, 1])
    rb = ReplayBufferEnsemble(handles[0])
    rb.end_streams()
    assert flags(handles[1])["truncated"] == [False] * 8 + [True] * 4
    for handle in handles:
        handle.close()


def test_lanes_end_together() -> None:
    one = member(8, ndim=2)
    done = torch.zeros(2, 3, 1, dtype=torch.bool)
    one.extend(TensorDict({"end": done}, [2, 3]))
    ReplayBufferEnsemble(one).end_streams(end_key="end", terminated_key=None, truncated_key=None)
    assert one[:]["end"].squeeze(-1).sum(0).tolist() == [0, 0, 2]


def test_slices_end_there_though_flags_are_kept() -> None:
    sampler = SliceSampler(slice_len=2, end_key=("next", "done"), cache_values=True)
    one = member(8, sampler=sampler)
    one.extend(steps(0, 1, 2))
    assert {tuple(pair) for pair in one.sample(200)["x"].view(-1, 2).tolist()} == {(0, 1), (1, 2)}
    ReplayBufferEnsemble(one).end_streams()
    one.extend(steps(3, 4))
    pairs = {tuple(pair) for pair in one.sample(200)["x"].view(-1, 2).tolist()}
    assert pairs == {(0, 1), (1, 2), (3, 4)}


@pytest.mark.parametrize(
    ("lists", "keys", "error", "message"),
    [
        (True, {}, RuntimeError, "a ListStorage cannot change items in place"),
        (False, {"end_key": "end"}, KeyError, "the items have no entry 'end'"),
        (False, {"end_key": "x"}, TypeError, "'x' must be bool, got torch.int64"),
        (False, {"end_key": ("next", "truncated")}, ValueError, "the keys must be different"),
    ],
)
def test_what_cannot_end_is_refused_before_anything_changes(
    lists: bool, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    first = member(4)
    second = TensorDictReplayBuffer(storage=ListStorage(3)) if lists else member(4)
    for one in (first, second):
        one.extend(steps(0, 1))
    with pytest.raises(error, match=message):
        ReplayBufferEnsemble(first, second).end_streams(**keys)
    assert not any(flags(first)["done"])

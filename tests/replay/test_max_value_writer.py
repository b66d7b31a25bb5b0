"""`TensorDictMaxValueWriter` keeps the best items, in whatever batches they are written."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from shmbuffer import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.kit.rings import ring_of
from tests.selection import seeds

pytestmark = pytest.mark.product(few=4)

KINDS = ["memory", "anonymous memmap", "list", "stack", "compressed", "tensors", "somebody else's"]


class Own(Storage):
    """A storage without a ring: a dict behind the three methods of the protocol."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: dict[int, Any] = {}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        if isinstance(cursor, int):
            self.items[cursor] = data
        else:
            self.items.update(zip(cursor.tolist(), data.unbind(0), strict=True))

    def get(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.items[index]
        return torch.stack([self.items[int(at)] for at in index])

    def __len__(self) -> int:
        return len(self.items)

    def _empty(self) -> None:
        self.items = {}


def scored(*scores: float) -> TensorDict:
    """Makes items whose payload repeats their score."""
    score = torch.tensor(scores, dtype=torch.float64)
    return TensorDict({"score": score, "obs": score * 10}, [len(scores)])


def storage_of(kind: str, capacity: int) -> Storage:
    if kind == "memory":
        return LazyTensorStorage(capacity)
    if kind == "anonymous memmap":
        return LazyMemmapStorage(capacity)
    if kind == "list":
        return ListStorage(capacity)
    if kind == "stack":
        return LazyStackStorage(capacity)
    if kind == "compressed":
        return CompressedListStorage(capacity)
    if kind == "tensors":
        # full from the start, with the lowest scores
        return TensorStorage(scored(*[-1e9] * capacity))
    return Own(capacity)


def buffer(storage: Storage, **options: Any) -> TensorDictReplayBuffer:
    writer = TensorDictMaxValueWriter(rank_key="score", **options)
    return TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4)


def scores(rb: ReplayBuffer) -> list[float]:
    if not len(rb):
        return []
    items = rb.storage.get(range(len(rb)) if isinstance(rb.storage, Own) else slice(None))
    items = list(items if isinstance(items, list) else items.unbind(0))
    return [float(item["score"]) for item in items]


# -- what stays --------------------------------------------------------------------------------


def test_a_batch_larger_than_the_capacity_leaves_its_best_items() -> None:
    rb = buffer(LazyTensorStorage(3))
    index = rb.extend(scored(1, 5, 3, 4, 2, 9))
    assert index.tolist() == [-1, 1, -1, 0, -1, 2]
    assert index.dtype == torch.int64
    assert rb[:]["score"].tolist() == [4, 5, 9]
    assert rb[:]["obs"].tolist() == [40, 50, 90]


def test_a_worse_item_never_evicts_a_better_one() -> None:
    rb = buffer(LazyTensorStorage(2))
    rb.extend(scored(7, 8))
    assert rb.extend(scored(1, 2, 3)).tolist() == [-1, -1, -1]
    assert rb.add(scored(6)[0]) is None
    assert scores(rb) == [7, 8]


def test_an_equal_item_is_not_better() -> None:
    rb = buffer(LazyTensorStorage(3))
    assert rb.extend(scored(1, 1, 1, 1, 1)).tolist() == [0, 1, 2, -1, -1]
    assert rb.add(scored(1)[0]) is None
    assert rb.write_count == 3


def test_the_smallest_index_among_equally_low_items_goes_first() -> None:
    rb = buffer(LazyTensorStorage(3))
    rb.extend(scored(1, 1, 1))
    assert [rb.add(scored(2)[0]), rb.add(scored(3)[0])] == [0, 1]
    assert scores(rb) == [2, 3, 1]


def test_add_gives_the_index_or_none() -> None:
    rb = buffer(LazyTensorStorage(2))
    assert [rb.add(item) for item in scored(3, 1, 2, 0).unbind(0)] == [0, 1, 1, None]
    assert scores(rb) == [3, 2]


def test_a_batch_is_judged_as_if_each_item_were_added_alone() -> None:
    at_once, one_by_one = buffer(LazyTensorStorage(4)), buffer(LazyTensorStorage(4))
    data = scored(*torch.randperm(30).tolist())
    at_once.extend(data)
    for item in data.unbind(0):
        one_by_one.add(item)
    assert scores(at_once) == scores(one_by_one)
    assert at_once.write_count == one_by_one.write_count


def test_the_count_is_that_of_accepted_items() -> None:
    rb = buffer(LazyTensorStorage(1))
    rb.extend(scored(0, 1, 2, 1, 0))
    assert rb.write_count == 3
    rb.extend(scored(0, 0))
    assert rb.add(scored(5)[0]) == 0
    assert rb.write_count == 4
    assert len(rb) == 1


def test_the_example_of_torchrl() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1),
        sampler=SamplerWithoutReplacement(),
        batch_size=1,
        writer=TensorDictMaxValueWriter(rank_key="key"),
    )
    for first, best in ((0, 9), (10, 19), (0, 19)):
        values = torch.arange(first, first + 10)
        rb.extend(TensorDict({"key": values, "obs": values}, [10]))
        assert rb.sample()["obs"].item() == best


def test_infinite_ranks_are_ranks() -> None:
    rb = buffer(LazyTensorStorage(2))
    assert rb.extend(scored(float("-inf"), 1, float("inf"))).tolist() == [-1, 1, 0]


def test_large_integers_are_compared_exactly() -> None:
    rb = buffer(LazyTensorStorage(1))
    big = 2**60
    data = TensorDict({"score": torch.tensor([big, big + 1, big])}, [3])
    assert rb.extend(data).tolist() == [-1, 0, -1]


@pytest.mark.product(few=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(2, 4))
def test_random_operations_keep_what_a_sorted_list_keeps(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 7, 16])
    rb = buffer(storage_of(kind, capacity))
    kept: list[float] = [-1e9] * capacity if kind == "tensors" else []
    accepted = 0
    for _ in range(150):
        what = rng.random()
        # Few different values give many ties.
        batch = [float(rng.randrange(60)) for _ in range(rng.choice([0, 1, 1, 2, 5, 40]))]
        if what < 0.03 and kind != "tensors":
            rb.empty()
            kept, accepted = [], 0
            continue
        if what < 0.5:
            index = rb.extend(scored(*batch)).tolist()
            assert len(index) == len(batch)
        else:
            index = [-1 if (at := rb.add(item)) is None else at for item in scored(*batch)]
        for score in batch:
            if len(kept) < capacity or score > min(kept):
                accepted += 1
                if len(kept) == capacity:
                    kept.remove(min(kept))
                kept.append(score)
        found = scores(rb)
        assert sorted(found) == sorted(kept)
        assert rb.write_count == accepted
        if what < 0.5:  # the item is at the returned index
            taken = [at for at in index if at >= 0]
            assert len(set(taken)) == len(taken)
            for at, score in zip(index, batch, strict=True):
                assert at == -1 or found[at] == score


# -- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "index", "best"),
    [
        ("max", [0, -1, 1], [9, 8]),
        ("min", [-1, 1, 0], [3, 4]),
        ("mean", [-1, 1, 0], [4.25, 4]),
        ("median", [-1, 1, 0], [3, 4]),  # of an even number of values: the lower one in the middle
        ("sum", [-1, 1, 0], [17, 16]),
    ],
)
@pytest.mark.parametrize("trajectories", [False, True])
def test_several_values_are_reduced_to_one(
    reduction: str, index: list[int], best: list[float], trajectories: bool
) -> None:
    values = torch.tensor([[1.0, 2, 9, 0], [4, 4, 4, 4], [3, 3, 3, 8]])
    rb = buffer(LazyTensorStorage(2), reduction=reduction)
    batch = [3, 4] if trajectories else [3]  # items are whole trajectories, or have four scores
    assert rb.extend(TensorDict({"score": values}, batch)).tolist() == index
    assert rb[:].batch_size == torch.Size([2, *batch[1:]])
    writer: Any = rb.writer
    assert sorted(rank for rank, _ in writer._current_top_values) == sorted(best)
    assert writer.reduction == reduction


@pytest.mark.product("shape reduction")
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
@pytest.mark.parametrize("shape", [[], [1], [2, 3], [1, 2, 3]])
@pytest.mark.parametrize("with_batch_size", [False, True])
def test_the_rank_is_what_torch_computes(
    reduction: str, shape: list[int], with_batch_size: bool
) -> None:
    values = torch.rand(shape)
    rb = buffer(LazyTensorStorage(1), reduction=reduction)
    assert rb.add(TensorDict({"score": values}, shape if with_batch_size else [])) == 0
    writer: Any = rb.writer
    assert writer._current_top_values == [(getattr(torch, reduction)(values).item(), 0)]
    assert torch.equal(rb[0]["score"], values)


def test_add_and_extend_rank_alike() -> None:
    values = torch.rand(64, 37)
    at_once, one_by_one = buffer(LazyTensorStorage(64)), buffer(LazyTensorStorage(64))
    data = TensorDict({"score": values}, [64])
    at_once.extend(data)
    for item in data.unbind(0):
        one_by_one.add(item)
    ranks: Any = [rb.writer._current_top_values for rb in (at_once, one_by_one)]  # type: ignore[attr-defined]
    assert sorted(ranks[0]) == sorted(ranks[1])


@pytest.mark.product
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16]
)
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
def test_any_dtype_can_be_a_rank(dtype: torch.dtype, reduction: str) -> None:
    rb = buffer(LazyTensorStorage(1), reduction=reduction)
    values = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 0]]).to(dtype)
    assert rb.extend(TensorDict({"score": values}, [3])).max().item() == 0
    assert bool(rb[0]["score"].all()) or reduction == "max"


def test_the_default_rank_is_the_reward_of_the_next_step() -> None:
    writer = TensorDictMaxValueWriter()
    assert (writer.rank_key, writer.reduction) == (("next", "reward"), "sum")
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=writer)
    rewards = torch.tensor([[1.0], [3.0], [2.0]])
    data = TensorDict({"obs": torch.arange(3), "next": {"reward": rewards}}, [3])
    assert rb.extend(data).tolist() == [-1, 0, -1]
    assert rb[0]["obs"].item() == 1


def test_tensorclasses_are_ranked() -> None:
    @tensorclass
    class Step:
        score: torch.Tensor

    rb = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("score"))
    assert rb.extend(Step(torch.tensor([1.0, 3, 2]), batch_size=[3])).tolist() == [-1, 1, 0]
    assert rb[:].score.tolist() == [2, 3]


@pytest.mark.parametrize("as_list", [False, True])
def test_items_of_different_shapes_are_ranked_each(as_list: bool) -> None:
    items = [TensorDict({"score": torch.ones(length)}, [length]) for length in (2, 5, 3)]
    data: Any = items if as_list else LazyStackedTensorDict.lazy_stack(items)
    rb = ReplayBuffer(storage=ListStorage(2), writer=TensorDictMaxValueWriter("score"))
    assert rb.extend(data).tolist() == [-1, 1, 0]
    assert [len(item) for item in rb.storage.get([0, 1])] == [3, 5]


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [torch.ones(3), {"score": torch.ones(3)}, (torch.ones(3),), [torch.ones(())]]
)
@pytest.mark.parametrize("how", ["add", "extend"])
@pytest.mark.parametrize("cls", [ReplayBuffer, TensorDictReplayBuffer])
def test_other_data_than_tensordicts_are_refused(
    data: Any, how: str, cls: type[ReplayBuffer]
) -> None:
    rb = cls(storage=ListStorage(3), writer=TensorDictMaxValueWriter("score"))
    if cls is TensorDictReplayBuffer and isinstance(data, dict):
        return  # the leaf is the TensorDict with these entries
    with pytest.raises(
        (RuntimeError, TypeError),
        match=r"tensor collection with the entry 'score', got|have names",
    ):
        getattr(rb, how)(data)
    assert len(rb) == 0


def test_a_missing_rank_is_named_with_what_is_there() -> None:
    rb = buffer(LazyTensorStorage(3))
    with pytest.raises(KeyError, match=r"rank_key is 'score', but .*'other'"):
        rb.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    assert len(rb) == 0


def test_nan_is_refused_before_anything_has_changed() -> None:
    rb = buffer(LazyTensorStorage(2))
    rb.extend(scored(1, 2))
    with pytest.raises(ValueError, match=r"rank of item 1 \('score'\) is NaN"):
        rb.extend(scored(9, float("nan")))
    assert scores(rb) == [1, 2]
    assert rb.write_count == 2


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reduction must be one of .*got 'product'"):
        TensorDictMaxValueWriter(reduction="product")


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="rank"):
        TensorDictMaxValueWriter(rank="score")  # type: ignore[call-arg]


def test_a_storage_of_several_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a storage with ndim=1, but this one has ndim=2"):
        buffer(LazyTensorStorage(4, ndim=2))


def test_a_batch_without_a_dimension_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"extend\(\) takes a batch .* use add\(\)"):
        buffer(LazyTensorStorage(2)).extend(scored(1)[0])


def test_an_item_without_values_has_no_rank() -> None:
    with pytest.raises(ValueError, match="an item has no values to reduce"):
        buffer(LazyTensorStorage(2)).extend(TensorDict({"score": torch.zeros(3, 0)}, [3]))


def test_a_write_that_fails_changes_no_rank() -> None:
    rb = buffer(LazyTensorStorage(2))
    rb.extend(scored(1, 2))
    with pytest.raises(RuntimeError, match="obs"):
        rb.extend(TensorDict({"score": torch.tensor([8.0, 9.0], dtype=torch.float64)}, [2]))
    assert rb.extend(scored(3)).tolist() == [0]
    assert scores(rb) == [3, 2]


def test_a_writer_without_a_storage_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"has no storage; pass it to a buffer"):
        TensorDictMaxValueWriter("score").add(scored(1)[0])


# -- priorities --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:5])
def test_priorities_in_the_data_are_those_of_accepted_items(kind: str) -> None:
    sampler = PrioritizedSampler(3, alpha=1.0, beta=1.0, eps=0.0)
    rb = TensorDictReplayBuffer(
        storage=storage_of(kind, 3),
        sampler=sampler,
        writer=TensorDictMaxValueWriter("score"),
        priority_key="p",
        batch_size=300,
    )
    data = scored(1, 5, 3, 4, 2, 9)
    data["p"] = torch.tensor([1.0, 2, 3, 4, 5, 6])
    assert rb.extend(data).tolist() == [-1, 1, -1, 0, -1, 2]
    assert ring_of(sampler).tree.mass()[:3].tolist() == [4, 2, 6]
    data["p"] = data["p"] * 10
    assert rb.extend(data).tolist() == [-1, -1, -1, -1, -1, 0]  # the 9 replaces the 4
    assert ring_of(sampler).tree.mass()[:3].tolist() == [60, 2, 6]
    worse = data[0].clone()
    assert rb.add(worse) is None
    assert ring_of(sampler).tree.mass()[:3].tolist() == [60, 2, 6]
    drawn = torch.bincount(rb.sample()["index"], minlength=3)
    assert drawn[0] > 6 * drawn[2] > 0


def test_without_a_priority_an_accepted_item_gets_the_default_one() -> None:
    sampler = PrioritizedSampler(2, alpha=1.0, beta=1.0, eps=0.0)
    writer = TensorDictMaxValueWriter("score")
    rb = ReplayBuffer(storage=LazyTensorStorage(2), sampler=sampler, writer=writer)
    rb.update_priority(rb.extend(scored(1, 2)), torch.tensor([0.5, 7.0]))
    assert rb.add(scored(3)[0]) == 0
    assert ring_of(sampler).tree.mass().tolist() == [7, 7]  # the largest so far replaces 0.5


def test_a_sampler_with_its_own_table_hears_of_accepted_items_only() -> None:
    rb = TensorDictReplayBuffer(
        storage=Own(3),
        sampler=PrioritizedSampler(3, alpha=1.0, beta=1.0, eps=0.0),
        writer=TensorDictMaxValueWriter("score"),
        priority_key="p",
        batch_size=40,
    )
    data = scored(1, 5, 3, 4, 2, 9)
    data["p"] = torch.tensor([0.0, 2, 0, 0, 0, 6])
    assert rb.extend(data).tolist() == [-1, 1, -1, 0, -1, 2]
    assert set(rb.sample()["index"].tolist()) == {1, 2}


def test_an_index_of_a_write_goes_back_to_update_priority() -> None:
    sampler = PrioritizedSampler(2, alpha=1.0, beta=1.0, eps=0.0)
    writer = TensorDictMaxValueWriter("score")
    rb = ReplayBuffer(storage=LazyTensorStorage(2), sampler=sampler, writer=writer)
    index = rb.extend(scored(1, 4, 3))
    assert index.tolist() == [-1, 1, 0]
    assert rb.update_priority(index, torch.tensor([9.0, 2.0, 3.0])) == (2, 0)
    assert ring_of(sampler).tree.mass().tolist() == [3, 2]


# -- the storage -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:6])
def test_a_batch_is_one_placed_write(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rb = buffer(storage_of(kind, 4))
    calls = []
    given = rb.storage.set
    monkeypatch.setattr(rb.storage, "set", lambda *a, **k: (calls.append(a[0]), given(*a, **k)))
    rb.extend(scored(3, 1, 2, 5, 4, 0, 9, 8))
    assert len(calls) == 1
    assert sorted(scores(rb)) == [4, 5, 8, 9]
    rb.extend(scored(0, 0))
    assert len(calls) == 1  # no item to write


def test_items_that_are_there_already_are_ranked() -> None:
    rb = buffer(TensorStorage(scored(5, 6, 7)))
    assert rb.extend(scored(1, 6.5)).tolist() == [-1, 0]
    assert scores(rb) == [6.5, 6, 7]
    assert rb.write_count == 1


def test_items_written_into_the_storage_by_others_are_ranked_too() -> None:
    storage = LazyTensorStorage(3)
    rb, other = buffer(storage), ReplayBuffer(storage=storage, writer=RoundRobinWriter())
    rb.extend(scored(1, 2, 3))
    other.extend(scored(50, 60))
    assert rb.extend(scored(2.5, 4)).tolist() == [-1, 2]  # 3 was the lowest of 50, 60, 3
    assert scores(rb) == [50, 60, 4]


def test_holes_are_filled_before_anything_goes() -> None:
    storage = LazyTensorStorage(4)
    rb = buffer(storage)
    storage.set([1, 3], scored(10, 30))
    assert rb.extend(scored(1, 2)).tolist() == [2, 0]
    assert rb.extend(scored(1.5, 7)).tolist() == [-1, 2]
    assert scores(rb) == [2, 10, 7, 30]


def test_two_writers_on_one_storage_agree() -> None:
    storage = LazyTensorStorage(2)
    one, other = buffer(storage), buffer(storage)
    one.extend(scored(1, 2))
    assert other.extend(scored(3)).tolist() == [0]
    assert one.extend(scored(1.5, 2.5)).tolist() == [-1, 1]
    assert scores(one) == [3, 2.5]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tensors"])
def test_after_empty_it_starts_from_the_beginning(kind: str) -> None:
    rb = buffer(storage_of(kind, 2))
    rb.extend(scored(8, 9))
    rb.empty()
    assert (len(rb), rb.write_count) == (0, 0)
    assert rb.extend(scored(0, 1, 0)).tolist() == [0, 1, -1]
    assert scores(rb) == [0, 1]
    rb.empty(empty_write_count=False)
    assert rb.write_count == 2


def test_another_storage_begins_with_what_is_in_it() -> None:
    rb = buffer(LazyTensorStorage(2))
    rb.extend(scored(8, 9))
    rb.set_storage(TensorStorage(scored(1, 2)))
    assert rb.extend(scored(3)).tolist() == [0]
    assert scores(rb) == [3, 2]


def test_get_insert_index_takes_the_place_it_names() -> None:
    writer = TensorDictMaxValueWriter("score")
    writer.register_storage(LazyTensorStorage(2))
    places = [writer.get_insert_index(item) for item in scored(1, 2, 0, 5)]
    assert places == [0, 1, None, 0]
    assert "rank_key='score'" in repr(writer)


# -- state -------------------------------------------------------------------------------------


def test_a_state_brings_back_ranks_cursor_and_count() -> None:
    rb = buffer(LazyTensorStorage(4))
    rb.extend(scored(5, 3, 4))
    again = buffer(LazyTensorStorage(4))
    again.load_state_dict(rb.state_dict())
    assert again.write_count == 3
    for one in (rb, again):
        assert one.extend(scored(1, 4, 4)).tolist() == [-1, 3, 1]
        assert scores(one) == [5, 4, 4, 4]
    assert again.writer.state_dict() == rb.writer.state_dict()


def test_a_state_of_the_writer_alone_is_the_same_heap() -> None:
    rb = buffer(LazyTensorStorage(3))
    rb.extend(scored(5, 3, 4))
    other = TensorDictMaxValueWriter("score")
    other.load_state_dict(rb.writer.state_dict())
    assert sorted(other._current_top_values) == [(3, 1), (4, 2), (5, 0)]
    assert other.state_dict() == rb.writer.state_dict()


# -- sharing -----------------------------------------------------------------------------------


def test_it_cannot_be_passed_to_another_process() -> None:
    rb = buffer(LazyTensorStorage(3))
    rb.extend(scored(1))
    with pytest.raises(RuntimeError, match=r"ranks in one process.*RoundRobinWriter"):
        pickle.dumps(rb.writer)
    process = multiprocessing.get_context("spawn").Process(target=len, args=(rb,))
    with pytest.raises(RuntimeError, match=r"ranks in one process.*RoundRobinWriter"):
        process.start()


def test_a_storage_that_was_opened_to_be_shared_is_refused(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(3, scratch_dir=tmp_path / "buffer", shared_init=True)
    with pytest.raises(RuntimeError, match=r"created to be shared.*RoundRobinWriter"):
        buffer(storage)
    storage.close()


def test_a_directory_of_one_process_is_written(tmp_path: Path) -> None:
    with buffer(LazyMemmapStorage(2, scratch_dir=tmp_path / "buffer")) as rb:
        assert rb.extend(scored(1, 3, 2)).tolist() == [-1, 1, 0]
        assert scores(rb) == [2, 3]


def test_a_directory_that_others_have_open_is_not_written(tmp_path: Path) -> None:
    with buffer(LazyMemmapStorage(2, scratch_dir=tmp_path / "buffer")) as rb:
        rb.extend(scored(1, 2))
        other = LazyMemmapStorage(2, scratch_dir=tmp_path / "buffer", shared_init=True)
        with pytest.raises(RuntimeError, match=r"another client has .* open.*RoundRobinWriter"):
            rb.extend(scored(3))
        assert scores(rb) == [1, 2]
        other.close()
        assert rb.extend(scored(3)).tolist() == [0]


def test_before_it_has_a_storage_it_is_only_its_arguments() -> None:
    for writer in (
        pickle.loads(pickle.dumps(TensorDictMaxValueWriter(rank_key="rank", reduction="max"))),
        copy.deepcopy(TensorDictMaxValueWriter(rank_key="rank", reduction="max")),
    ):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=writer, batch_size=2)
        rb.extend(TensorDict({"rank": torch.tensor([[1.0, 5.0], [2.0, 3.0], [9.0, 0.0]])}, [3]))
        assert sorted(rb[:]["rank"].amax(1).tolist()) == [5.0, 9.0]
        with pytest.raises(RuntimeError, match="another process"):
            copy.copy(writer)

"""In-place changes of items: of entries, of lanes, and only if the item is still the same."""

from __future__ import annotations

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
    ReplayBuffer,
    SchemaMismatchError,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    attach,
)
from tests.kit.items import items
from tests.kit.rings import engine_of


def buffer(storage: Any, **options: Any) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4, **options)
    rb.extend(items(0, 6))
    return rb


def test_one_entry_of_some_items_is_changed_and_the_rest_stays(make: Any) -> None:
    rb = buffer(make(8))
    assert rb.set_at_("a", torch.tensor([50, 60]), torch.tensor([1, 4])) is rb
    assert rb[:]["a"].tolist() == [0, 50, 2, 3, 60, 5]
    rb.set_at_(("b", "c"), torch.zeros(2, 3), slice(0, 2))
    assert rb[:]["b", "c"][:, 0].tolist() == [0, 0, 2, 3, 4, 5]
    rb.set_at_("a", 7, 0)
    rb.set_at_("a", -1, [True, False, False, False, False, True])
    assert rb[:]["a"].tolist() == [-1, 50, 2, 3, 60, -1]
    assert (len(rb), rb.write_count) == (6, 6)


def test_an_entry_of_every_item_is_changed(make: Any) -> None:
    rb = buffer(make(8))
    assert rb.set_("a", torch.arange(6) * 10) is rb
    assert rb["a"].tolist() == [0, 10, 20, 30, 40, 50]
    rb["a"] = torch.zeros(6, dtype=torch.int64)
    rb["b", "c"] = torch.ones(6, 3)
    assert rb["a"].tolist() == [0] * 6
    assert (rb["b", "c"] == 1).all()
    changed = {"a": torch.arange(6), "b": TensorDict({"c": torch.zeros(6, 3)}, [6])}
    assert rb.update_(changed, keys_to_update=["b"]) is rb
    assert rb["a"].tolist() == [0] * 6
    assert (rb["b", "c"] == 0).all()
    rb.update_(TensorDict(changed, [6]))
    assert rb["a"].tolist() == list(range(6))


def test_an_entry_that_is_not_there_and_what_does_not_fit_change_nothing(make: Any) -> None:
    rb = buffer(make(8))
    with pytest.raises(KeyError, match=r"'zz' is not a leaf of .*'a', 'b\.c'"):
        rb.set_("zz", torch.zeros(6))
    with pytest.raises(SchemaMismatchError, match=r"'a' is int64\[2\], but this write has float32"):
        rb.set_at_("a", torch.zeros(2), slice(0, 2))
    with pytest.raises(
        SchemaMismatchError, match=r"'b.c' is float32\[6, 3\].* has float32\[6, 2\]"
    ):
        rb.update_({"b": {"c": torch.zeros(6, 2)}, "a": torch.zeros(6, dtype=torch.int64)})
    with pytest.raises(SchemaMismatchError, match=r"'a' is int64\[\], but this write has NoneType"):
        rb.set_at_("a", None, 0)
    with pytest.raises(SchemaMismatchError, match=r"'a' is int64\[\], but this write has float32"):
        rb.set_at_("a", 1.5, 0)
    with pytest.raises(IndexError, match="no item at 7"):
        rb.set_at_("a", 1, 7)
    assert rb[:]["a"].tolist() == list(range(6))


def test_lanes_are_changed_by_themselves(make: Any) -> None:
    rb = TensorDictReplayBuffer(storage=make(12, ndim=2), batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(12).view(3, 4)}, [3, 4]))  # 3 lanes, 4 steps
    rb.set_at_("a", torch.tensor([100, 200]), (1, slice(0, 2)))
    assert rb[:]["a"].tolist() == [[0, 1, 2, 3], [100, 200, 6, 7], [8, 9, 10, 11]]
    rb[0, 1:3] = TensorDict({"a": torch.tensor([-1, -2])}, [2])
    assert rb[:]["a"].tolist() == [[0, -1, -2, 3], [100, 200, 6, 7], [8, 9, 10, 11]]


def test_priorities_and_counts_stay(make: Any) -> None:
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=make(8), batch_size=64)
    rb.extend(items(0, 6))
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 0, 0, 5.0, 0, 0]))
    rb.set_("a", torch.arange(6) + 100)
    assert set(rb.sample()["a"].tolist()) == {103}
    assert rb.write_count == 6


def test_while_others_have_the_buffer_one_entry_can_be_changed(tmp_path: Path) -> None:
    rb = buffer(LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer", shared_init=True))
    with attach(tmp_path / "buffer") as other:
        other.extend(items(6, 8))
        rb.set_at_("a", torch.tensor([70, 80]), slice(6, 8))
        rb["b", "c"] = torch.zeros(8, 3)
        assert other[:]["a"].tolist() == [0, 1, 2, 3, 4, 5, 70, 80]
        assert (other[:]["b", "c"] == 0).all()
        assert engine_of(other).check().ok
    rb.close()


def test_only_items_of_the_sample_are_changed(make: Any) -> None:
    rb = buffer(make(8), writer=TensorDictRoundRobinWriter(track_generations=True))
    rb.extend(items(6, 8))
    sample = rb.sample(4)
    index = torch.arange(8)
    generation = torch.arange(8)
    rb.extend(items(8, 11))  # overwrites 0, 1, 2
    result = rb.update_if_present(
        index=index,
        generation=generation,
        patch={"a": -index - 1, "b": {"c": torch.zeros(8, 3)}},
    )
    assert result.updated.tolist() == [False] * 3 + [True] * 5
    assert (result.updated_count, result.stale_count) == (5, 3)
    assert rb[:]["a"].tolist() == [8, 9, 10, -4, -5, -6, -7, -8]
    assert rb[:]["b", "c"][:, 0].tolist() == [8, 9, 10, 0, 0, 0, 0, 0]
    again = rb.update_if_present(index=index, generation=generation, patch={"a": index})
    assert again.updated_count == 0, "an item that was changed has another generation"
    now = rb.sample(4)
    assert sample["index_generation"].max() < 8
    kept = rb.update_if_present(
        index=now["index"], generation=now["index_generation"], patch={"a": torch.zeros(4).long()}
    )
    assert kept.updated.all()
    rb.empty()
    gone = rb.update_if_present(index=index, generation=generation, patch={"a": index})
    assert gone.stale_count == 8
    with pytest.raises(RuntimeError, match="3 generations for 8 items"):
        rb.update_if_present(index=index, generation=generation[:3], patch={"a": index})


@pytest.mark.parametrize("dim_extend", [0, 1])
@pytest.mark.parametrize("lanes", [3, 1, 2])
def test_a_patch_may_have_the_dimensions_in_which_the_batch_was_written(
    make: Any, dim_extend: int, lanes: int
) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(4 * lanes, ndim=2),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        dim_extend=dim_extend,
        batch_size=4,
    )
    size = (lanes, 2) if dim_extend else (2, lanes)
    number = torch.arange(2.0 * lanes).view(size)
    rb.add(TensorDict({"a": torch.zeros(lanes), "v": torch.zeros(lanes, 2)}, [lanes]))
    batch = TensorDict({"a": number, "v": number[..., None].expand(*size, 2)}, size)
    index = rb.extend(batch)
    for patch in (batch + 1, {"a": number + 2, "v": (number + 2)[..., None].expand(*size, 2)}):
        found = rb.update_if_present(
            index=index, generation=rb.writer.generations_of(index), patch=patch
        )
        assert found.updated.tolist() == [True] * 2 * lanes
        flat = number.transpose(0, dim_extend).reshape(-1) + float((patch["a"] - number).min())
        at = (index[:, 0], index[:, 1])
        assert torch.equal(rb.storage.get(at)["a"], flat)
        assert torch.equal(rb.storage.get(at)["v"][:, 1], flat)
    rows = torch.arange(2.0 * lanes)
    rb.update_if_present(
        index=index,
        generation=rb.writer.generations_of(index),
        patch={"a": rows, "v": torch.ones(2)},
    )
    assert torch.equal(rb.storage.get((index[:, 0], index[:, 1]))["a"], rows)
    with pytest.raises(SchemaMismatchError, match=r"leaf 'a' is float32"):
        rb.update_if_present(
            index=index,
            generation=rb.writer.generations_of(index),
            patch={"a": torch.ones(lanes + 1, lanes + 2)},
        )


def test_a_version_may_have_the_dimensions_in_which_the_batch_was_written(make: Any) -> None:
    rb = TensorDictReplayBuffer(
        storage=make(6, ndim=2),
        writer=TensorDictRoundRobinWriter(track_generations=True),
    )
    version = torch.tensor([[1, 5, 1], [5, 1, 5]])
    index = rb.extend(TensorDict({"a": torch.zeros(2, 3), "version": version}, [2, 3]))
    found = rb.update_if_present(
        index=index,
        generation=rb.writer.generations_of(index),
        patch={"a": torch.arange(6.0).view(2, 3)},
        version_key="version",
        version=torch.tensor([[3, 3, 2], [3, 3, 9]]),
    )
    assert found.updated.tolist() == [True, False, False, True, True, True]
    rows = rb.storage.get((index[:, 0], index[:, 1]))
    assert rows["a"].tolist() == [0, 0, 0, 4, 2, 5]
    assert rows["version"].tolist() == [3, 5, 5, 3, 2, 9]


@pytest.mark.parametrize("records", [False, True], ids=["rows", "records"])
@pytest.mark.parametrize("stream_dim", [0, 1])
def test_a_patch_may_have_the_dimensions_of_streams(
    tmp_path: Path, records: bool, stream_dim: int
) -> None:
    shared: dict[str, Any] = {"scratch_dir": tmp_path / "buffer", "shared_init": True}
    storage = (
        LazyStackStorage(6, max_bytes=2**16, **shared)
        if records
        else LazyMemmapStorage(6, **shared)
    )
    with TensorDictReplayBuffer(storage=storage) as rb:
        data = TensorDict({"a": torch.zeros(2, 3), "v": torch.zeros(2, 3, 2)}, [2, 3])
        index = rb.extend(data, stream_dim=stream_dim)
        assert index.shape == (2, 3)
        number = torch.arange(6.0).view(2, 3)
        found = rb.update_if_present(
            index=index,
            generation=rb.writer.generations_of(index),
            patch={"a": number, "v": number[..., None].expand(2, 3, 2)},
        )
        assert found.updated.all()
        for row in range(2):
            for column in range(3):
                item = rb[int(index[row, column])]
                assert float(item["a"]) == number[row, column]
                assert item["v"].tolist() == [number[row, column]] * 2


def test_a_buffer_without_generations_refuses_a_conditional_update(tmp_path: Path) -> None:
    for made, tracks in (
        (LazyTensorStorage(6), False),
        (LazyMemmapStorage(6), False),
        (TensorStorage(items(0, 6)), False),
        (LazyMemmapStorage(6, scratch_dir=tmp_path / "rows", shared_init=True), True),
    ):
        with TensorDictReplayBuffer(storage=made, batch_size=4) as rb:
            index = rb.extend(items(0, 6))
            generation = rb.writer.generations_of(index)
            assert (rb.sample().get("index_generation", None) is not None) is tracks
            update: dict[str, Any] = {"index": index, "patch": {"a": index + 10}}
            if tracks:
                assert rb.update_if_present(generation=generation, **update).updated.all()
                continue
            with pytest.raises(RuntimeError, match=r"does not track.*track_generations=True"):
                rb.update_if_present(generation=generation, **update)
            with pytest.raises(RuntimeError, match=r"Nothing was changed.*track_generations=True"):
                rb.submit_update_if_present(generation=generation, **update).result()
            with pytest.raises(RuntimeError, match=r"track_generations=True"):
                rb.update_if_present(
                    generation=generation, version_key="a", version=9, index=index, patch={}
                )
            assert rb[:]["a"].tolist() == list(range(6))
            tickets = rb.storage.tickets(index)  # with these tickets, the items can be changed
            assert rb.update_if_present(generation=tickets, **update).updated.all()
    with TensorDictReplayBuffer(storage=LazyTensorStorage(6), shared=True, batch_size=4) as rb:
        rb.extend(items(0, 6))
        batch = rb.sample()
        found = rb.update_if_present(
            index=batch["index"], generation=batch["index_generation"], patch={"a": batch["a"]}
        )
        assert found.updated.any()


def test_the_callers_own_tensors_are_changed() -> None:
    data = items(0, 5)
    rb = ReplayBuffer(storage=TensorStorage(data), batch_size=2)
    rb.set_at_("a", torch.tensor([9, 9]), slice(0, 2))
    assert data["a"].tolist() == [9, 9, 2, 3, 4]


def test_objects_are_changed_one_by_one() -> None:
    rb = TensorDictReplayBuffer(storage=ListStorage(5), batch_size=2)
    rb.extend(items(0, 4))
    before = rb[1]
    rb.set_at_("a", torch.tensor([10, 30]), [1, 3])
    rb.set_at_(("b", "c"), torch.zeros(3), 0)
    assert [rb[i]["a"].item() for i in range(4)] == [0, 10, 2, 30]
    assert rb[0]["b", "c"].tolist() == [0, 0, 0]
    assert before["a"].item() == 1, "what was given out stays"
    with pytest.raises(RuntimeError, match="does not track generations"):
        rb.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch={"a": 1})


@pytest.mark.parametrize("count", [3, 5])
def test_items_that_are_changed_one_by_one_need_a_value_each(tmp_path: Path, count: int) -> None:
    values = torch.full((count,), 9)
    for shared in ({}, {"max_bytes": 10_000, "scratch_dir": tmp_path, "shared_init": True}):
        rb = TensorDictReplayBuffer(storage=LazyStackStorage(4, **shared), batch_size=4)
        rb.extend(items(0, 4))
        with pytest.raises(ValueError, match=f"'a' has {count} values for 4 items"):
            rb["a"] = values
        if shared:
            sample = rb.sample()
            with pytest.raises(ValueError, match=f"'a' has {count} values for 4 items"):
                rb.update_if_present(
                    index=sample["index"],
                    generation=sample["index_generation"],
                    patch={"a": values},
                )
        rb.set_at_("a", torch.tensor([7, 8]), [1, 1])
        assert rb["a"].tolist() == [0, 8, 2, 3]
        rb.close()


def test_a_pytree_is_changed_by_its_key() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    rb.extend({"x": torch.arange(3), "y": (torch.zeros(3), torch.ones(3))})
    rb.set_at_("x", torch.tensor([7]), [2])
    assert rb[:]["x"].tolist() == [0, 1, 7]
    rb.set_at_(("y", "1"), 5.0, 0)
    assert rb[:]["y"][1].tolist() == [5.0, 1.0, 1.0]

"""Writes to given slots, and the generation of the write that put an item there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    Storage,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Writer,
)


def items(*numbers: int) -> TensorDict:
    return TensorDict({"x": torch.tensor(numbers)}, [len(numbers)])


def tracking(size: int = 6, **options: Any) -> TensorDictReplayBuffer:
    writer = TensorDictRoundRobinWriter(track_generations=True)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(size, **options), writer=writer, batch_size=4
    )


def test_a_write_to_given_slots_is_of_new_items_and_leaves_the_cursor() -> None:
    rb = tracking()
    index = rb.extend(items(0, 1, 2))
    before = rb.writer.generations_of(index)
    assert rb.writer.write_at(torch.tensor([1, 4]), items(10, 40)).tolist() == [1, 4]
    assert rb.writer.write_at(2, items(20)[0]) == 2
    assert rb.write_count == 6
    assert rb.extend(items(3)).tolist() == [3]
    assert [int(rb[at]["x"]) for at in range(5)] == [0, 10, 20, 3, 40]
    after = rb.writer.generations_of(index)
    assert (after > before).tolist() == [False, True, True]
    stale = rb.update_if_present(index=index, generation=before, patch={"x": torch.zeros(3).long()})
    assert stale.updated.tolist() == [True, False, False]


def test_with_lanes_a_write_returns_the_coordinates_of_its_elements() -> None:
    rb = tracking(ndim=2)
    rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2]))
    data = TensorDict({"x": torch.ones(1, 3)}, [1, 3])
    assert rb.writer.write_at(torch.tensor([1]), data).tolist() == [[1, 0], [1, 1], [1, 2]]
    assert rb[:]["x"].sum() == 3


def test_a_storage_of_ones_own_is_written_at_given_places_and_counted() -> None:
    class Own(Storage):
        def __init__(self) -> None:
            super().__init__(8)
            self.items: dict[int, Any] = {}

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            for at, one in zip(torch.as_tensor(cursor).reshape(-1).tolist(), data, strict=True):
                self.items[at] = one

        def get(self, index: Any) -> Any:
            return [self.items[at] for at in index.tolist()]

        def __len__(self) -> int:
            return len(self.items)

    writer = RoundRobinWriter()
    writer.register_storage(Own())
    assert writer.write_at([2, 5], ["a", "b"]).tolist() == [2, 5]
    assert writer.write_count == 2
    assert writer.generations_of([2, 5]).tolist() == [-1, -1]
    assert not writer.tracks_generations


def test_an_item_says_which_write_has_put_it_there() -> None:
    rb = tracking()
    assert rb.writer.generations_of(3).item() == -1  # before the first write
    index = rb.extend(items(0, 1, 2, 3))
    assert rb.writer.tracks_generations
    sample = rb.sample()
    assert torch.equal(rb.writer.generations_of(sample["index"]), sample["index_generation"])
    assert rb.writer.generations_of(torch.tensor([[0, 5], [99, -1]])).tolist() == [
        [int(rb.storage.tickets(index)[0]), -1],
        [-1, -1],
    ]
    assert rb.writer.generations_of(1).shape == ()
    rb.empty()
    assert rb.writer.generations_of(index).tolist() == [-1] * 4


def test_of_coordinates_the_slot_counts() -> None:
    rb = tracking(ndim=2)
    index = rb.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2]))
    of_slots = rb.writer.generations_of(torch.tensor([0, 1]))
    assert rb.writer.generations_of(index).tolist() == of_slots.repeat_interleave(3).tolist()
    assert torch.equal(
        rb.writer.generations_of(tuple(index.unbind(-1))), rb.writer.generations_of(index)
    )


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter])
def test_only_where_it_was_asked_for_or_others_write_there_items_say_it(
    writer: Any, tmp_path: Path
) -> None:
    alone = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=writer())
    index = alone.extend(items(0).set("next", {"reward": torch.zeros(1)}))
    assert not alone.writer.tracks_generations
    assert alone.writer.generations_of(index).tolist() == [-1]
    if writer is RoundRobinWriter:
        storage = LazyMemmapStorage(6, scratch_dir=tmp_path / "buffer")
        with TensorDictReplayBuffer(storage=storage, writer=writer()) as shared:
            index = shared.extend(items(0, 1))
            assert shared.writer.tracks_generations
            assert torch.equal(shared.writer.generations_of(index), storage.tickets(index))


def test_an_ensemble_asks_the_writer_of_each_item() -> None:
    members = [tracking(), tracking()]
    rb = ReplayBufferEnsemble(*members, batch_size=8)
    for one in members:
        one.extend(items(*range(8)))
    members[1].extend(items(*range(6)))
    sample = rb.sample()
    assert rb.writer.tracks_generations
    assert torch.equal(
        rb.writer.generations_of(sample["index"]), sample["index_generation"].flatten()
    )
    members[0].set_writer(RoundRobinWriter())
    assert not rb.writer.tracks_generations


def test_storages_say_their_shape_and_what_can_be_changed(tmp_path: Path) -> None:
    lists = ListStorage(7), LazyStackStorage(7)
    rows = LazyTensorStorage(7), TensorStorage(torch.zeros(7))
    for storage in (*lists, *rows):
        assert storage.supports_conditional_update == (storage in rows)
    for storage in (*lists, rows[1]):
        assert storage.shape == torch.Size([7])
    records = LazyStackStorage(
        7, scratch_dir=tmp_path / "records", shared_init=True, max_bytes=2**20
    )
    assert records.supports_conditional_update
    records.close()
    assert not StorageEnsemble(*rows).supports_conditional_update

    class Lanes(Storage):
        ndim = 2

    with pytest.raises(RuntimeError, match="a Lanes of 2 dimensions does not define their sizes"):
        Lanes(3).shape  # noqa: B018


def test_a_writer_takes_torchrl_s_arguments_and_a_data_set_says_why_it_refuses() -> None:
    assert not Writer().compilable
    assert Writer(compilable=True).compilable
    rb = ReplayBuffer(storage=TensorStorage(torch.zeros(3)), writer=ImmutableDatasetWriter(True))
    assert rb.writer.compilable
    with pytest.raises(RuntimeError, match=f"^{ImmutableDatasetWriter.WRITING_ERR}: an item"):
        rb.add(torch.zeros(()))

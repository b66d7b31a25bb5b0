"""Several processes on one buffer: what they see, what works, and what is refused and why."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import (
    BufferExistsError,
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.kit.rings import engine_of, path_of
from tests.replay.conformance import RECORDS, SHARED, Maker, assert_are_steps, cases, numbers, steps

pytestmark = pytest.mark.product(few=3)


every_shared_case = pytest.mark.parametrize("maker", cases(SHARED), indirect=True, ids=str)
every_shared_sampler = pytest.mark.parametrize(
    "maker", cases(SHARED, writers=("tensordict round robin",)), indirect=True, ids=str
)


every_shared_storage = pytest.mark.parametrize(
    "maker", cases(SHARED, ("random",), ("round robin",)), indirect=True, ids=str
)


# -- two handles ----------------------------------------------------------------------------------


@every_shared_case
def test_length_writes_and_changes_are_visible_both_ways(maker: Maker) -> None:
    one, other = maker.buffer(12), maker.buffer(12)
    one.extend(steps(0, 5))
    assert len(other) == 5
    assert_are_steps(other[:], [0, 1, 2, 3, 4])
    assert other.extend(steps(5, 8)).tolist() == [5, 6, 7]
    assert (len(one), one.write_count, one.writer._cursor) == (8, 8, 8)
    assert one["id"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    other[2] = steps(90, 91)[0]
    assert one[2]["id"] == 90
    one.empty()
    assert len(other) == 0
    with pytest.raises(RuntimeError):
        other.sample()


@pytest.mark.product(few=2)
@every_shared_sampler
def test_a_sampler_draws_what_others_wrote(maker: Maker) -> None:
    learner, collector = maker.buffer(12, batch_size=12), maker.buffer(12)
    collector.extend(steps(0, 12))
    seen = {number for _ in range(60) for number in numbers(learner.sample())}
    assert seen == set(range(12))
    collector.extend(steps(12, 16))
    seen = {number for _ in range(80) for number in numbers(learner.sample())}
    assert seen == set(range(4, 16))


@every_shared_sampler
def test_a_sample_says_which_write_its_items_are_of(maker: Maker) -> None:
    rb = maker.buffer(12)
    rb.extend(steps(0, 16))
    sample = rb.sample()
    assert torch.equal(sample["index_generation"], sample["id"])
    assert torch.equal(sample["index_generation"] % 12, sample["index"])


@pytest.mark.parametrize(
    "maker",
    cases(SHARED, ("slices", "prioritized slices"), ("round robin",)),
    indirect=True,
    ids=str,
)
def test_slices_do_not_cross_from_one_collector_to_another(maker: Maker) -> None:
    learner = maker.buffer(12, batch_size=12)
    one, other = maker.buffer(12), maker.buffer(12)
    for at in range(3):  # the writers take turns, and use the same trajectory numbers
        one.extend(steps(2 * at, 2 * at + 2))
        other.extend(steps(100 + 2 * at, 100 + 2 * at + 2))
    for _ in range(40):
        ids = numbers(learner.sample())
        for first, second in zip(ids[::2], ids[1::2], strict=True):
            assert second == first + 1
            assert first // 4 == second // 4


# -- processes ------------------------------------------------------------------------------------


def works_on(rb: Any, connection: Connection) -> None:
    """Reads and changes the buffer in another process, and sends what it sees."""
    torch.set_num_threads(1)
    seen = (len(rb), rb["id"].tolist())
    rb.extend(steps(6, 9))
    rb[0] = steps(70, 71)[0]
    connection.send((*seen, rb.write_count))
    assert connection.recv() == "written"
    connection.send(rb["id"].tolist())
    assert_are_steps(rb.sample())
    rb.storage.close()


def exchange(rb: Any, context: Any) -> None:
    """Lets both processes write, read and change items in turn."""
    here, there = context.Pipe()
    process = context.Process(target=works_on, args=(rb, there))
    process.start()
    there.close()
    try:
        assert here.recv() == (6, [0, 1, 2, 3, 4, 5], 9)
        assert rb["id"].tolist() == [70, 1, 2, 3, 4, 5, 6, 7, 8]
        rb.extend(steps(9, 11))
        here.send("written")
        assert here.recv() == [70, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    finally:
        here.close()
        process.join(50)
    assert process.exitcode == 0


HANDED_ON: dict[str, Callable[[Path], Any]] = {
    "stack of records": lambda path: LazyStackStorage(
        20, scratch_dir=path / "buffer", shared_init=True, max_bytes=2**20
    ),
    "compressed records": lambda path: CompressedListStorage(
        20, scratch_dir=path / "buffer", shared_init=True, max_bytes=2**20
    ),
    "memory": lambda path: LazyTensorStorage(20),
    "memmap": lambda path: LazyMemmapStorage(20),
    "directory": lambda path: LazyMemmapStorage(20, scratch_dir=path / "buffer"),
    "memory shared at first": lambda path: LazyTensorStorage(20, shared_init=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "storage"),
    [
        *(("fork", storage) for storage in HANDED_ON),
        *(("forkserver", storage) for storage in ("directory", *RECORDS)),
    ],
)
def test_a_buffer_is_handed_to_a_process_and_both_go_on(
    start: str, storage: str, tmp_path: Path
) -> None:
    rb = TensorDictReplayBuffer(storage=HANDED_ON[storage](tmp_path), batch_size=4)
    rb.extend(steps(0, 6))
    exchange(rb, multiprocessing.get_context(start))
    rb.storage.close()


def writes_first(rb: Any, connection: Connection) -> None:
    torch.set_num_threads(1)
    rb.extend(steps(0, 3))
    connection.send(len(rb))
    rb.storage.close()


@pytest.mark.slow
def test_with_shared_init_any_process_may_write_first(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "buffer", shared_init=True),
        batch_size=4,
    )
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=writes_first, args=(rb, there))
    process.start()
    there.close()
    assert here.recv() == 3
    process.join(50)
    assert process.exitcode == 0
    assert rb["id"].tolist() == [0, 1, 2]
    assert rb.extend(steps(3, 5)).tolist() == [3, 4]
    rb.storage.close()


# -- what is of one process -----------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True], ids=["empty", "written"])
@pytest.mark.parametrize(
    "storage", [ListStorage, LazyStackStorage, CompressedListStorage], ids=lambda cls: cls.__name__
)
def test_a_list_refuses_to_be_handed_on_and_names_what_can_be(storage: Any, written: bool) -> None:
    rb = ReplayBuffer(storage=storage(10), batch_size=2)
    if written:
        rb.extend(steps(0, 4))
    spawn = multiprocessing.get_context("spawn")
    says = f"a {storage.__name__} holds objects of this process.*LazyMemmapStorage"
    for what in (rb, rb.storage):
        with pytest.raises(RuntimeError, match=says):
            spawn.Process(target=len, args=(what,)).start()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_top_k_writer_refuses_to_be_handed_on(storage: Any) -> None:
    rb = TensorDictReplayBuffer(
        storage=storage(10), writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=2
    )
    rb.extend(steps(0, 4))
    spawn = multiprocessing.get_context("spawn")
    for what in (rb, rb.writer):
        with pytest.raises(RuntimeError, match=r"(?i)writer"):
            spawn.Process(target=len, args=(what,)).start()


@every_shared_storage
def test_a_top_k_writer_refuses_a_directory(maker: Maker) -> None:
    writer = TensorDictMaxValueWriter(rank_key="rank")
    with pytest.raises(RuntimeError, match="keeps its ranks in one process"):
        maker.buffer(10, writer=writer).extend(steps(0, 4))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_an_unwritten_buffer_needs_shared_init_to_be_passed_on(storage: Any) -> None:
    rb = ReplayBuffer(storage=storage(10), batch_size=2)
    with pytest.raises(RuntimeError, match="shared_init"):
        multiprocessing.get_context("spawn").Process(target=len, args=(rb,)).start()


def test_the_callers_own_tensors_stay_with_the_caller() -> None:
    rb = ReplayBuffer(storage=TensorStorage(steps(0, 8)), batch_size=2)
    with pytest.raises(RuntimeError, match="LazyMemmapStorage"):
        multiprocessing.get_context("spawn").Process(target=len, args=(rb,)).start()


def test_a_prioritized_buffer_does_not_refuse(tmp_path: Path) -> None:
    rb = ReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer"),
        sampler=PrioritizedSampler(10, 1.0, 1.0),
        batch_size=50,
    )
    rb.extend(torch.arange(4))
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 1.0, 0.0]))
    other = pickle.loads(pickle.dumps(rb))
    assert set(other.sample().tolist()) == {2}
    for one in (rb, other):
        one.storage.close()


# -- directories ----------------------------------------------------------------------------------


@every_shared_storage
def test_a_directory_is_made_by_the_first_write_and_has_to_be_free_unless_told(
    maker: Maker, tmp_path: Path
) -> None:
    first = TensorDictReplayBuffer(storage=maker.storage(10, shared_init=False))
    assert not (tmp_path / "buffer").exists()
    first.extend(steps(0, 3))
    assert (tmp_path / "buffer").is_dir()
    second = maker.storage(10, shared_init=False)
    assert len(second) == 0
    with pytest.raises(BufferExistsError, match="already contains a buffer"):
        second.set(0, steps(9, 10)[0])
    third = TensorDictReplayBuffer(storage=maker.storage(10, shared_init=False, existsok=True))
    assert_are_steps(third[:], [0, 1, 2])
    assert third.extend(steps(3, 4)).tolist() == [3]
    assert_are_steps(maker.buffer(10)[:], [0, 1, 2, 3])


@every_shared_storage
def test_a_directory_that_has_no_name_is_temporary_and_cleanup_removes_it_once(
    maker: Maker,
) -> None:
    rb = maker.buffer(10, storage=maker.storage(10, scratch_dir=None))
    path = path_of(engine_of(rb))
    rb.extend(steps(0, 3))
    with pickle.loads(pickle.dumps(rb)) as other:
        assert_are_steps(other[:], [0, 1, 2])
    assert path.is_dir()
    assert rb.storage.cleanup() is True
    assert not path.exists()
    assert rb.storage.cleanup() is False
    rb.close()
    rb.close()

"""Several handles on one buffer: in one process, and in processes of every kind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    Sampler,
    SchemaMismatchError,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from shmbuffer.buffers.reopened import from_engine
from shmbuffer.memory import Engine
from shmbuffer.storages import indexing
from shmbuffer.storages.movers import storage_mover
from tests.kit.items import items
from tests.kit.rings import ring_of
from tests.replay import programs


def learner(storage: Any, **options: Any) -> TensorDictPrioritizedReplayBuffer:
    options = {"alpha": 0.7, "beta": 0.9, "batch_size": 50, **options}
    return TensorDictPrioritizedReplayBuffer(storage=storage, **options)


# -- two handles in one process --------------------------------------------------------------------


def test_one_handle_reads_the_writes_of_another(directory: Any) -> None:
    one, other = learner(directory()), learner(directory())
    assert one.shared
    assert not other.storage.initialized
    one.extend(items(0, 3))
    assert other.storage.initialized
    assert other[:]["a"].tolist() == [0, 1, 2]
    assert other.extend(items(3, 4)).tolist() == [3]
    assert one.write_count == other.write_count == 4
    assert set(one.sample()["a"].tolist()) == {0, 1, 2, 3}


def test_the_second_to_write_first_must_bring_the_same_leaves(directory: Any) -> None:
    one, other = learner(directory()), learner(directory())
    one.extend(items(0, 1))
    with pytest.raises(SchemaMismatchError, match=r"'b\.c'"):
        other.extend(TensorDict({"a": torch.arange(2)}, [2]))
    nested = {"d": np.ones(1, bool), "c": np.zeros((1, 3), np.float32)}
    assert other.extend({"b": nested, "a": np.zeros(1, np.int64)}).tolist() == [1]


def test_a_storage_says_the_tickets_of_items_and_of_places_without_one(directory: Any) -> None:
    rb, wide = learner(directory(4)), LazyTensorStorage(8, ndim=2)
    rb.extend(items(0, 6))
    sample = rb.sample()
    assert torch.equal(rb.storage.tickets(sample["index"]), sample["index_generation"])
    rb.empty()
    assert rb.storage.tickets(torch.tensor([3, 0])).tolist() == [-1, -1]
    wide.set(range(2), torch.zeros(2, 4))
    assert wide.tickets((torch.tensor([1, 0]), torch.tensor([3, 2]))).tolist() == [1, 0]


def test_reads_of_a_shared_buffer_are_copies_of_what_is_committed(directory: Any) -> None:
    rb = TensorDictReplayBuffer(storage=directory(6))
    rb.extend(items(0, 4))
    storage = rb.storage
    ring_of(storage).claims.claim(1)  # another writer begins to write the fifth item
    assert rb[:]["a"].tolist() == [0, 1, 2, 3]
    with pytest.raises(IndexError, match="no item at 4"):
        rb[4]
    ring_of(storage).claims.abort()
    rb[:]["a"].fill_(9)
    assert rb.read_all_in_order()["a"].tolist() == [0, 1, 2, 3]


def test_shared_treats_anonymous_memory_as_if_others_used_it() -> None:
    rb = learner(LazyTensorStorage(4), shared=True)
    rb.extend(items(0, 4))
    assert "index_generation" in rb.sample().keys()  # noqa: SIM118 - it iterates over rows
    rb[0]["a"].fill_(7)
    assert rb[0]["a"] == 0
    rb.share(False)
    assert "index_generation" not in rb.sample().keys()  # noqa: SIM118


# -- made again from the directory -----------------------------------------------------------------


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    "make_buffer",
    [
        lambda storage: ReplayBuffer(storage=storage, batch_size=7),
        lambda storage: TensorDictReplayBuffer(
            storage=storage, batch_size=7, priority_key=("x", "y"), weight_key="w"
        ),
        lambda storage: PrioritizedReplayBuffer(
            storage=storage, batch_size=7, alpha=0.3, beta=0.2, eps=1e-3, reduction="mean"
        ),
        lambda storage: TensorDictPrioritizedReplayBuffer(
            storage=storage, batch_size=7, alpha=0.3, beta=0.2, eps=1e-3, priority_key="p"
        ),
        lambda storage: TensorDictReplayBuffer(
            storage=storage, batch_size=7, sampler=PrioritizedSampler(10, 0.3, 0.2, 1e-3)
        ),
        lambda storage: TensorDictReplayBuffer(
            storage=storage,
            batch_size=7,
            writer=TensorDictRoundRobinWriter(track_generations=True),
        ),
    ],
)
@pytest.mark.parametrize("written", [False, True])
def test_the_directory_remembers_class_and_arguments(
    directory: Any, tmp_path: Path, make_buffer: Any, written: bool
) -> None:
    first = make_buffer(directory())
    if written:
        first.extend(items(0, 3))
    again = from_engine(Engine.open(tmp_path / "buffer", None))
    with again:
        assert type(again) is type(first)
        assert again.batch_size == 7
        assert getattr(again, "priority_key", 0) == getattr(first, "priority_key", 0)
        assert again._parts.weight_keys == first._parts.weight_keys
        assert type(again.sampler) is type(first.sampler)
        assert again.writer.track_generations == first.writer.track_generations  # type: ignore[attr-defined]
        for name in ("alpha", "beta", "eps", "reduction"):
            assert getattr(again.sampler, name, 0) == getattr(first.sampler, name, 0)
        assert again.extend(items(5, 7)).tolist() == ([3, 4] if written else [0, 1])


def test_a_directory_says_what_its_buffer_is_before_the_first_item_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are recorded when the directory is made, so every process sees them."""
    monkeypatch.delattr(Engine, "update_settings")
    first = learner(LazyMemmapStorage(8, scratch_dir=tmp_path / "buffer"), priority_key="error")
    first.extend(items(0, 3))
    with Engine.open(tmp_path / "buffer", None) as engine:
        again = from_engine(engine)
        assert type(again) is TensorDictPrioritizedReplayBuffer
        assert (again.priority_key, again.sampler.alpha, again.sampler.beta) == ("error", 0.7, 0.9)


def test_arguments_may_be_given_in_place_of_what_is_remembered(
    directory: Any, tmp_path: Path
) -> None:
    learner(directory()).extend(items(0, 3))
    with from_engine(
        Engine.open(tmp_path / "buffer", None), batch_size=3, beta=0.1, transform=lambda td: td
    ) as rb:
        assert rb.batch_size == 3
        assert rb.sampler.beta == 0.1  # type: ignore[attr-defined]
        assert len(rb.transform) == 1


def test_a_directory_without_a_remembered_class_gives_tensordicts(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer", shared_init=True)
    storage.set(range(2), items(0, 2))
    with from_engine(Engine.open(tmp_path / "buffer", None)) as rb:
        assert type(rb) is TensorDictReplayBuffer
        assert len(rb) == 2
    storage.close()


def test_a_buffer_pickles_with_its_parts(directory: Any) -> None:
    rb = learner(directory(), transform=str_of_keys, generator=torch.Generator().manual_seed(4))
    rb.extend(items(0, 3))
    other = pickle.loads(pickle.dumps(rb))
    assert other.transform[0] is str_of_keys
    assert torch.equal(other.sample()["index"], rb.sample()["index"])
    other.close()


def str_of_keys(data: Any) -> Any:
    return data


# -- processes -------------------------------------------------------------------------------------


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


def answer(context: Any, target: Any, *args: Any) -> Any:
    """Runs ``target(*args, connection)`` in a process; returns its answer, or EOFError."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        ours.close()
        process.join(50)
        assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.product(few=1)
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_buffer_can_be_passed_to_a_process(context: Any, directory: Any, kind: str) -> None:
    rb = learner(LazyTensorStorage(10) if kind == "memory" else directory())
    rb.extend(items(0, 2))
    assert answer(context, programs.write, rb, 10) == ([2, 3], 4)
    assert rb[:]["a"].tolist() == [0, 1, 10, 11]


@pytest.mark.parametrize(
    "make",
    [LazyTensorStorage, LazyMemmapStorage, partial(LazyMemmapStorage, shared_init=True)],
    ids=["tensors", "memmap", "shared_init"],
)
def test_an_emptied_buffer_takes_its_form_from_the_next_write_of_any_process(make: Any) -> None:
    """TorchRL's collectors write a dummy item, empty the buffer, and pass it to workers."""
    context = multiprocessing.get_context("forkserver")
    rb = learner(make(10))
    for _ in range(2):
        rb.extend(items(0, 3).set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
        assert len(rb.sample()) == 50
        rb.empty()
    assert answer(context, programs.write, rb, 10) == ([0, 1], 2)
    assert set(rb.sample().keys()) >= {"a", "b", "index"}
    assert rb[:]["a"].tolist() == [10, 11]
    rb.empty()
    rb.extend(torch.zeros(2))
    assert rb[:].tolist() == [0, 0]


def test_an_emptied_buffer_keeps_its_form_while_another_process_has_it_open(directory: Any) -> None:
    one, other = learner(directory()), learner(directory())
    one.extend(items(0, 3))
    one.empty()
    with pytest.raises(SchemaMismatchError, match=r"'b\.c'"):
        one.extend(TensorDict({"a": torch.arange(2)}, [2]))
    other.close()
    one.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert one[:]["a"].tolist() == [0, 1]


def test_priorities_alpha_and_limits_outlive_another_form() -> None:
    rb = learner(LazyTensorStorage(6), rate_limiter=RateLimiter(min_size=2))
    rb.extend(items(0, 6))
    rb.sampler.alpha = 0.3
    rb.empty()
    rb.extend(torch.zeros(4, 2))
    assert rb.sampler.alpha == 0.3
    assert rb.rate_limiter is not None
    assert rb.rate_limiter.min_size == 2
    rb.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 5.0, 0.0]))
    assert set(rb.sample(return_info=True)[1]["index"].tolist()) == {2}


@pytest.mark.slow
def test_the_first_process_to_write_defines_the_buffer_for_all(directory: Any) -> None:
    context = multiprocessing.get_context("fork")
    rb = learner(directory(100))
    barrier = context.Barrier(4)
    processes = [
        context.Process(target=programs.write_first, args=(rb, barrier, 10 * n)) for n in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(50)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(rb[:]["a"].tolist()) == [0, 1, 10, 11, 20, 21, 30, 31]


@pytest.mark.slow
def test_two_learners_see_one_tree(directory: Any) -> None:
    context = multiprocessing.get_context("fork")
    rb = learner(directory())
    rb.extend(items(0, 3))
    assert answer(context, programs.set_priorities, rb) == (50, 0)
    assert set(rb.sample()["a"].tolist()) == {2}


# -- between the look and the copy -----------------------------------------------------------------


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Lets item 1 be overwritten between the choice of the items and the copy."""
    claimed: list[Any] = []

    def claim(ring: Any) -> None:
        if not claimed:
            ring.claims.claim_slots(np.array([1]), in_place=True)
            claimed.append(ring)

    def select_and_claim(index: Any, ring: Any, *args: Any) -> Any:
        selection = indexing.select(index, ring, *args)
        claim(ring)
        return selection

    def look_and_claim(ring: Any, index: Any) -> Any:
        found = drawn_slots(ring, index)
        if found is not None:
            claim(ring)
        return found

    drawn_slots = storage_mover.drawn_slots
    monkeypatch.setattr(storage_mover, "select", select_and_claim)
    monkeypatch.setattr(storage_mover, "drawn_slots", look_and_claim)
    yield claimed
    for ring in claimed:
        ring.claims.abort()


@pytest.mark.parametrize("ndim", [1, 2])
def test_an_item_that_vanishes_is_left_out_of_a_slice(
    directory: Any, vanishing: list[Any], ndim: int
) -> None:
    rb = ReplayBuffer(storage=directory(12, ndim=ndim), dim_extend=0)
    data = torch.arange(12.0).reshape(4, 3)
    rb.extend(data)
    assert torch.equal(rb[:], data[[0, 2, 3]])
    assert vanishing


def test_an_item_that_vanishes_is_an_index_error_where_it_was_named(
    directory: Any, vanishing: list[Any]
) -> None:
    rb = ReplayBuffer(storage=directory())
    rb.extend(torch.arange(4))
    with pytest.raises(IndexError, match="no item at 1"):
        rb[[0, 1]]
    assert vanishing


def test_a_users_sampler_is_asked_again_where_its_choice_vanished(
    directory: Any, vanishing: list[Any]
) -> None:
    class InTurn(Sampler):
        calls = 0

        def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
            self.calls += 1
            return torch.full((batch_size,), self.calls), {}

    rb = ReplayBuffer(storage=directory(), sampler=InTurn(), batch_size=2)
    rb.extend(torch.arange(4))
    assert rb.sample().tolist() == [2, 2]
    assert vanishing


@pytest.mark.parametrize("made", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_storage_in_memory_that_is_pickled_before_the_first_write_is_another_one(
    made: Any,
) -> None:
    rb = ReplayBuffer(storage=made(10), batch_size=4, collate_fn=torch.stack)
    if made is not ListStorage:
        rb = ReplayBuffer(storage=made(10), batch_size=4)
    with pytest.warns(UserWarning, match="another storage; to share this one, write first, or use"):
        other = pickle.loads(pickle.dumps(rb))
    other.extend(torch.arange(5))
    assert (len(other), len(rb)) == (5, 0)
    rb.extend(torch.zeros(2, 3))
    assert rb.sample().shape == (4, 3)


def test_a_writer_of_ranks_is_pickled_only_before_it_has_any() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("key"), batch_size=2
    )
    with pytest.warns(UserWarning, match="another storage"):
        other = pickle.loads(pickle.dumps(rb))
    other.extend(TensorDict({"key": torch.arange(9)}, [9]))
    assert sorted(other[:]["key"].tolist()) == [5, 6, 7, 8]
    with pytest.raises(RuntimeError, match="keeps its ranks in one process"):
        pickle.dumps(other.writer)


def test_a_storage_of_a_directory_is_shared_before_it_is_opened(tmp_path: Path) -> None:
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "later"))
    assert rb.shared
    assert not (tmp_path / "later").exists()
    assert rb.stats()["size"] == 0
    rb.flush()
    with pytest.raises(RuntimeError, match=r"before the first write.*shared_init=True"):
        pickle.dumps(rb)
    with rb:
        rb.extend(torch.arange(3))
        other = pickle.loads(pickle.dumps(rb))
        assert len(other) == 3
        other.close()
    assert (tmp_path / "later").exists()


def _extend_in_child(rb: ReplayBuffer) -> int:
    try:
        rb.extend(items(0, 2))
    except RuntimeError as error:
        return 3 if "child of a fork" in str(error) and "shared_init" in str(error) else 4
    return 5


def test_an_unwritten_buffer_is_not_shared_by_a_fork() -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    pid = os.fork()
    if pid == 0:
        os._exit(_extend_in_child(rb))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    rb.extend(items(0, 2))
    assert len(rb) == 2

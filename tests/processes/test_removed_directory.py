"""The directory of a buffer is removed, or moved, under processes that use it.

A process that writes, draws, weighs or waits checks once a second that the directory exists. Each
loop below ends with the error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import (
    BufferClosedError,
    BufferUnlinkedError,
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.first_write import first_ring
from tests.crash.harness import ended, fork
from tests.kit.rings import ring_of
from tests.memory.rows import contents, sample, schema, write
from tests.processes.players import Player, items


def rows(path: Path) -> ReplayBuffer:
    storage = LazyMemmapStorage(32, scratch_dir=path, shared_init=True)
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=storage, batch_size=4, priority_key="number"
    )


def by_index(path: Path) -> ReplayBuffer:
    storage = LazyMemmapStorage(32, scratch_dir=path, shared_init=True)
    sampler = SamplerWithoutReplacement()
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)


def records(path: Path) -> ReplayBuffer:
    storage = LazyStackStorage(32, scratch_dir=path, max_bytes=2**20, shared_init=True)
    return TensorDictReplayBuffer(storage=storage, batch_size=4)


def compressed(path: Path) -> ReplayBuffer:
    storage = CompressedListStorage(32, scratch_dir=path, max_bytes=2**20, shared_init=True)
    return ReplayBuffer(storage=storage, batch_size=4)


def until_refused(call: Callable[[], object]) -> str:
    while True:
        try:
            call()
        except BufferUnlinkedError as error:
            return str(error)


@pytest.mark.product(few=2)
@pytest.mark.parametrize("make", [rows, by_index, records, compressed])
def test_each_call_of_a_removed_buffer_ends_in_the_same_error(
    make: Callable[[Path], ReplayBuffer], fast_path: Path
) -> None:
    path = fast_path / "buffer"
    buffer = make(path)
    buffer.extend(items(0, 8))
    batch = buffer.sample()
    buffer.publish({"w": torch.ones(2)}, 0)
    shutil.rmtree(path)
    calls = [
        lambda: buffer.extend(items(8, 4)),
        lambda: buffer.add(items(8, 1)[0]),
        buffer.sample,
        lambda: buffer.newest(),
        lambda: buffer.newest(than=1),
    ]
    if make is rows:
        calls += [
            lambda: buffer.sample(out=batch),
            lambda: buffer.update_tensordict_priority(batch),
            lambda: buffer.update_priority(torch.arange(4), torch.ones(4)),
        ]
    for call in calls:
        assert until_refused(call) == (
            f"{path}: the directory was removed or replaced while this handle was open, so "
            "no other process sees new items; save the items with dumps() "
            "if you need them, then close the handle and create the buffer again"
        )
    if make is rows:
        buffer.dumps(fast_path / "save")
        loaded = rows(fast_path / "again")
        loaded.loads(fast_path / "save")
        assert loaded[:]["number"].tolist() == buffer[:]["number"].tolist()


@pytest.fixture
def path(fast_path: Path) -> Path:
    """The path of a buffer with eight slots, all full."""
    path = fast_path / "buffer"
    with Engine.open(path, Settings(capacity=8)) as engine:
        write(engine.define(schema()), range(8))
    return path


@pytest.fixture
def shared(fast_path: Path) -> Path:
    """The path of such a buffer for players."""
    path = fast_path / "buffer"
    storage = LazyMemmapStorage(8, scratch_dir=path, shared_init=True)
    TensorDictReplayBuffer(storage=storage).extend(items(0, 8))
    storage.close()
    return path


def ends_removed(player: Player, what: str, *args: Any, **kwargs: Any) -> None:
    while (error := player.do(what, *args, **kwargs).error) is None:
        pass
    assert isinstance(error, BufferUnlinkedError)


def test_a_collector_and_a_learner_whose_directory_is_removed_get_an_error(shared: Path) -> None:
    with Player(shared) as collector, Player(shared) as learner:
        collector.done("extend", 8, 1)
        learner.done("sample", 4)
        shutil.rmtree(shared)
        ends_removed(collector, "extend", 9, 1)
        ends_removed(learner, "sample", 4)


@pytest.mark.parametrize(
    ("limiter", "order"),
    [
        (RateLimiter(max_times_sampled=1), ("extend", 8, 1)),
        (
            RateLimiter(samples_per_insert=1, error_buffer=4, min_size=1, when_no_peer="wait"),
            ("sample", 6),
        ),
    ],
    ids=["a writer", "a learner"],
)
def test_a_waiter_for_the_other_side_of_a_removed_buffer_gets_an_error(
    shared: Path, limiter: RateLimiter, order: tuple[Any, ...]
) -> None:
    with Engine.open(shared, None) as engine, Player(shared) as player:
        engine.set_limiter(limiter)
        player.tell(*order)
        player.waits()
        shutil.rmtree(shared)
        assert isinstance(player.answer().error, BufferUnlinkedError)


def test_a_waiter_for_the_first_write_to_a_removed_buffer_gets_an_error(fast_path: Path) -> None:
    with Engine.open(fast_path / "buffer", Settings(capacity=8)) as engine:
        shutil.rmtree(fast_path / "buffer")
        with pytest.raises(BufferUnlinkedError, match="removed or replaced"):
            first_ring(engine, 1)


def test_a_waiter_for_a_slot_of_a_removed_buffer_gets_an_error(shared: Path) -> None:
    with Player(shared) as other, Player(shared) as player:
        other.tell("extend and stop", 8, 8, "write.claimed")
        other.stopped()
        shutil.rmtree(shared)
        assert isinstance(player.do("extend", 16, 8).error, BufferUnlinkedError)


def test_a_buffer_that_was_made_again_at_the_same_path_is_another_one(path: Path) -> None:
    with Engine.open(path, None) as old:
        shutil.rmtree(path)
        with Engine.open(path, Settings(capacity=8)) as new:
            write(new.define(schema()), [100])
            until_refused(lambda: write(ring_of(old), [9]))
            assert contents(ring_of(new)) == {0: 100}


def test_the_private_files_alone_are_enough_to_be_missed(path: Path) -> None:
    with Engine.open(path, None) as engine:
        shutil.rmtree(path / ".shmbuffer")
        until_refused(lambda: write(ring_of(engine), [9]))


def test_the_child_of_a_fork_misses_the_directory_too(path: Path) -> None:
    with Engine.open(path, None) as engine:
        write(ring_of(engine), [8])

        def body() -> None:
            write(ring_of(engine), [9])  # it joins with an entry of its own
            shutil.rmtree(path)
            until_refused(lambda: write(ring_of(engine), [10]))

        assert ended(fork(body)) == 0


def test_a_directory_that_is_moved_goes_on_and_only_a_flush_misses_it(path: Path) -> None:
    moved, removed = path.with_name("moved"), path.with_name("removed")
    with Engine.open(path, None) as engine, Engine.open(removed, Settings(capacity=8)) as later:
        path.rename(moved)
        write(later.define(schema()), [1])
        shutil.rmtree(removed)
        ring = ring_of(engine)
        until_refused(lambda: (write(ring, [8]), write(ring_of(later), [1])))
        write(ring, [9])  # the check of the moved directory was due before
        sample(ring, 4)
        with Engine.open(moved, None) as other:
            assert contents(ring_of(other)) == contents(ring)
        with pytest.raises(BufferUnlinkedError, match=rf"was moved .* attach to {moved}"):
            engine.flush()


def test_a_reader_of_a_removed_buffer_may_read_on(path: Path) -> None:
    with Engine.open(path, None) as engine, Engine.open(path, None) as other:
        ring = ring_of(other)
        assert engine.cleanup()
        for use in (lambda: write(ring, [9]), other.flush):
            with pytest.raises(BufferClosedError, match=r"is being removed|was removed"):
                use()
        later = path.with_name("later")
        with Engine.open(later, Settings(capacity=8)) as timer:
            write(timer.define(schema()), [1])
            shutil.rmtree(later)
            until_refused(lambda: (sample(ring, 4), write(ring_of(timer), [1])))
        sample(ring, 4)


def test_a_failed_look_for_the_directory_proves_nothing(path: Path) -> None:
    later = path.with_name("later")
    with Engine.open(path, None) as engine, Engine.open(later, Settings(capacity=8)) as timer:
        write(timer.define(schema()), [1])
        ring = ring_of(engine)
        engine.seat.backing.close()  # there is no directory to check
        shutil.rmtree(later)
        until_refused(lambda: (write(ring, [8]), write(ring_of(timer), [1])))
        write(ring, [9])
        sample(ring, 4)

"""Buffers whose parts are made when they are first used."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any, ClassVar

import pytest
import torch

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def add_one(data: Any) -> Any:
    return data + 1


def make_transform() -> Any:
    return add_one


def delayed(**options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=partial(LazyTensorStorage, 10), batch_size=4, delayed_init=True, **options
    )


class Registered(ReplayBuffer):
    """A buffer class with its own hooks and a registered kind."""

    __slots__ = ("slot",)
    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kinds.append(kind)

    def __getattr__(self, name: str) -> Any:
        if name == "answer":
            return 42
        raise AttributeError(f"there is no {name}")


class Named(Registered, kind="named"):
    """A buffer class that is pickled as a call."""

    def __reduce__(self) -> Any:
        return named, (type(self).__name__,)


def named(name: str, kind: type[ReplayBuffer] = Named) -> ReplayBuffer:
    rb = kind(storage=partial(LazyTensorStorage, 10), batch_size=4, delayed_init=True)
    rb.name = name  # type: ignore[attr-defined]
    return rb


def test_a_class_keeps_its_hooks_while_its_buffer_waits() -> None:
    rb: Any = named("first")
    assert Registered.kinds == ["named"]
    assert rb.answer == 42
    with pytest.raises(AttributeError, match="there is no question"):
        _ = rb.question
    again = pickle.loads(pickle.dumps(rb))
    assert (again.name, again.initialized) == ("Named", False)
    assert again.extend(torch.arange(3)).tolist() == [0, 1, 2]
    assert type(again) is Named
    assert again.answer == 42


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol_pickles_a_buffer_that_waits(protocol: int) -> None:
    rb = pickle.loads(pickle.dumps(delayed(), protocol))
    assert not rb.initialized
    rb.extend(torch.arange(3))
    assert type(rb) is ReplayBuffer


def test_nothing_is_made_before_the_first_use() -> None:
    made = []
    rb = ReplayBuffer(
        storage=lambda: made.append("storage") or LazyTensorStorage(10),  # type: ignore[func-returns-value]
        sampler=lambda: made.append("sampler") or RandomSampler(),  # type: ignore[func-returns-value]
        writer=lambda: made.append("writer") or RoundRobinWriter(),  # type: ignore[func-returns-value]
        transform_factory=lambda: made.append("transform") or add_one,  # type: ignore[func-returns-value]
        batch_size=4,
    )
    assert not rb.initialized
    assert "not used yet" in repr(rb)
    assert rb.stats()["initialized"] is False
    assert made == []
    rb.extend(torch.arange(3))
    assert sorted(made) == ["sampler", "storage", "transform", "writer"]
    assert rb.initialized
    assert set(rb.sample().tolist()) <= {1, 2, 3}


@pytest.mark.parametrize(
    "use",
    [
        len,
        lambda rb: rb.storage,
        lambda rb: rb.sampler,
        lambda rb: rb.writer,
        lambda rb: rb.transform,
        lambda rb: rb.add(torch.tensor(1)),
        lambda rb: rb.append_transform(add_one),
        lambda rb: rb.write_count,
        lambda rb: rb.set_sampler(SamplerWithoutReplacement()),
        lambda rb: rb.empty(),
    ],
)
def test_any_use_makes_the_parts(use: Any) -> None:
    rb = delayed()
    use(rb)
    assert rb.initialized


def test_parts_are_made_at_once_unless_asked_otherwise() -> None:
    assert ReplayBuffer(storage=LazyTensorStorage(4)).initialized
    assert ReplayBuffer(transform_factory=make_transform, delayed_init=False).initialized
    assert not ReplayBuffer(transform_factory=make_transform).initialized


def test_it_can_be_pickled_with_what_makes_it() -> None:
    rb = pickle.loads(pickle.dumps(delayed(transform_factory=make_transform, prefetch=2)))
    assert not rb.initialized
    rb.extend(torch.arange(3))
    assert set(rb.sample().tolist()) <= {1, 2, 3}


def _extend(rb: TensorDictReplayBuffer, connection: Any) -> None:
    torch.set_num_threads(1)
    index = rb.extend({"a": torch.arange(3)})
    connection.send((index.tolist(), len(rb)))
    rb.close()


def test_another_process_makes_the_parts_for_itself(tmp_path: Any) -> None:
    storage = partial(LazyMemmapStorage, 10, scratch_dir=tmp_path / "buffer", shared_init=True)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4, delayed_init=True)
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_extend, args=(rb, theirs))
    process.start()
    assert ours.recv() == ([0, 1, 2], 3)
    process.join(60)
    assert process.exitcode == 0
    assert sorted(rb[:]["a"].tolist()) == [0, 1, 2]
    rb.close()


def test_a_wrong_argument_is_reported_when_the_parts_are_made() -> None:
    rb = ReplayBuffer(sampler=partial(SamplerWithoutReplacement, drop_last=True), delayed_init=True)
    with pytest.raises(ValueError, match="a predictable batch-size: pass batch_size"):
        len(rb)
    with pytest.raises(ValueError, match="batch_size to the constructor"):
        ReplayBuffer(sampler=SamplerWithoutReplacement(drop_last=True))
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        _ = delayed().nothing_like_it


def test_prioritized_buffers_may_wait_too() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), batch_size=4, delayed_init=True
    )
    rb.extend({"a": torch.arange(3), "td_error": torch.tensor([0.0, 1.0, 0.0])})
    assert rb.sample()["a"].tolist() == [1] * 4
    assert isinstance(rb.sampler, PrioritizedSampler)


def test_a_factory_that_fails_is_asked_again() -> None:
    """Each attempt raises the factory's error rather than saying that parts are missing."""
    errors = [OSError("no disk"), OSError("still no disk")]

    def make() -> Any:
        if errors:
            raise errors.pop(0)
        return add_one

    rb = delayed(transform_factory=make)
    with pytest.raises(OSError, match="no disk"):
        rb.extend(torch.arange(3))
    with pytest.raises(OSError, match="still no disk"):
        len(rb)
    rb.extend(torch.arange(3))
    assert rb[:].tolist() == [1, 2, 3]


def test_threads_that_use_it_first_together_make_the_parts_once() -> None:
    made, inside, other = [], Event(), Event()

    def make() -> LazyTensorStorage:
        made.append("storage")
        inside.set()
        other.wait(5)  # until the other thread is about to check, too
        return LazyTensorStorage(10)

    def extend_too() -> Any:
        other.set()
        return rb.extend(torch.arange(3))

    rb = ReplayBuffer(storage=make, batch_size=4, delayed_init=True)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rb.extend, torch.arange(3))
        assert inside.wait(40)
        second = pool.submit(extend_too)
        written = [*first.result(40).tolist(), *second.result(40).tolist()]
    assert sorted(written) == list(range(6))
    assert made == ["storage"]


def test_a_child_makes_the_parts_that_another_thread_was_making() -> None:
    begun, forked = Event(), Event()

    def storage() -> LazyTensorStorage:
        begun.set()
        assert os.getpid() != parent or forked.wait(30)
        return LazyTensorStorage(10)

    def used_in_child() -> None:
        rb.extend(torch.arange(3))
        assert len(rb) == 3

    parent = os.getpid()
    rb = ReplayBuffer(storage=storage, delayed_init=True)
    with ThreadPoolExecutor() as threads:
        made = threads.submit(len, rb)
        assert begun.wait(30)
        try:
            assert exit_code(used_in_child) == 0
        finally:
            forked.set()
        assert made.result() == 0


def exit_code(body: Callable[[], object]) -> int:
    """Returns the exit code of a forked child, which ends itself after 20 seconds."""
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

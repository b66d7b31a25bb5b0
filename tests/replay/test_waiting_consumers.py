"""A sample for a consumer waits by one rule, whichever sampler chooses the items."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    ConsumerError,
    ConsumingSampler,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    PromptGroupSampler,
    RateLimitTimeout,
    StalenessAwareSampler,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow import consumer
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.format.layout import Side
from shmbuffer.samplers import claiming
from tests.crash.harness import ended, fork
from tests.kit.rings import engine_of

SIZE, CAPACITY = 4, 32
"""The number of items in a group, and in a window."""
SAMPLERS: dict[str, Callable[[], Any]] = {
    "consuming": lambda: ConsumingSampler(consumer="learners"),
    "groups": lambda: PromptGroupSampler(group_size=SIZE, consumer="learners"),
    "fresh": lambda: StalenessAwareSampler(consumer="learners"),
    "windows": lambda: StreamingSliceSampler(slice_len=SIZE, consumer="learners"),
}
STORAGES: dict[str, Callable[[Path], Any]] = {
    "rows": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path, shared_init=True),
    "records": lambda path: LazyStackStorage(
        CAPACITY, max_bytes=2**20, scratch_dir=path, shared_init=True
    ),
}


@pytest.fixture(params=[*SAMPLERS])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def learner(
    path: Path, kind: str, batch_size: int = 2 * SIZE, form: str = "rows"
) -> TensorDictReplayBuffer:
    sampler = SAMPLERS[kind]()
    return TensorDictReplayBuffer(
        storage=STORAGES[form](path), sampler=sampler, batch_size=batch_size
    )


def units(first: int, count: int) -> TensorDict:
    """Makes ``count`` groups, each of which is also a window."""
    number = torch.arange(first * SIZE, (first + count) * SIZE)
    items = {"number": number, "query": number // SIZE}
    items["policy_version"] = torch.zeros_like(number)
    done = torch.zeros(len(number), 1, dtype=torch.bool)
    return TensorDict({**items, ("next", "done"): done}, [len(number)])


def require_waiting(rb: Any) -> None:
    """Waits until a sample of this handle waits."""
    seat = engine_of(rb).seat
    end = time.monotonic() + 50
    while not int(seat.control.entries["waits_for"][seat.entry]) & Side.INSERTS:
        assert time.monotonic() < end
        time.sleep(0.001)


def require_quiet(rb: Any) -> None:
    """Checks that no client waits and that the consumer holds no item."""
    control = engine_of(rb).seat.control
    assert not control.entries["waits_for"].any()
    assert int(control.runtime["limited"][0]) == 0
    (status,) = rb.consumers()
    assert status.held == 0


@contextmanager
def once_waiting(rb: Any, deed: Callable[[], Any]) -> Iterator[None]:
    """Runs ``deed`` while a sample of this handle waits."""

    def behind() -> None:
        require_waiting(rb)
        deed()

    thread = threading.Thread(target=behind)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_batch_is_waited_for_while_anybody_writes(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 1))
        assert not rb.can_sample(), "it would wait"
        with once_waiting(rb, lambda: writer.extend(units(1, 1))):
            batch = rb.sample(lease=100.0, timeout=50)
        assert sorted(batch["number"].tolist()) == [*range(2 * SIZE)]
        assert rb.ack(batch) == (2 * SIZE, 0)
        require_quiet(rb)


def test_a_wait_for_a_batch_ends_at_its_deadline_and_takes_nothing(
    tmp_path: Path, kind: str
) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 1))
        with pytest.raises(RateLimitTimeout) as caught:
            rb.sample(timeout=0.05)
        wanted = f"sample waits: {2 * SIZE} undelivered items are needed, but this consumer has"
        assert wanted in str(caught.value)
        assert f"the only collector, pid {os.getpid()}, last inserted" in str(caught.value)
        require_quiet(rb)
        (status,) = rb.consumers()
        assert (status.delivered, status.acked) == (0, 0)


def test_what_is_given_back_meanwhile_ends_the_wait(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as other:
        other.extend(units(0, 2))
        held = other.sample(lease=100.0)
        with once_waiting(rb, other.close):
            again = rb.sample(timeout=50)
        assert sorted(again["index"].tolist()) == sorted(held["index"].tolist())
        assert rb.consumers()[0].redelivered == 2 * SIZE


def test_where_nobody_writes_a_batch_is_what_is_left(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb:
        rb.extend(units(0, 3))
        first = rb.sample()["number"].tolist()
        assert len(first) == 2 * SIZE
        assert rb.can_sample()
        assert sorted(first + rb.sample()["number"].tolist()) == [*range(3 * SIZE)]
        assert not rb.can_sample()
        message = "consumer 'learners' was given every .* and no client writes"
        with pytest.raises(EmptyBufferError, match=message):
            rb.sample()
        require_quiet(rb)


def test_an_iteration_ends_where_nobody_writes(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb:
        rb.extend(units(0, 3))
        batches = [batch["number"].tolist() for batch in rb]
        assert [len(one) for one in batches] == [2 * SIZE, SIZE]
        assert sorted(number for one in batches for number in one) == [*range(3 * SIZE)]


def test_ctrl_c_ends_the_wait_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 1))
        with (
            pytest.raises(KeyboardInterrupt),
            once_waiting(rb, lambda: os.kill(os.getpid(), signal.SIGINT)),
        ):
            rb.sample(timeout=50)
        require_quiet(rb)
        writer.extend(units(1, 1))
        assert len(rb.sample(timeout=50)) == 2 * SIZE


def test_who_waits_for_a_consumer_that_is_removed_is_told(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 1))
        remove = lambda: writer.remove_consumer("learners")  # noqa: E731
        with once_waiting(rb, remove), pytest.raises(ConsumerError, match="was removed"):
            rb.sample(timeout=50)


def test_a_batch_for_which_there_is_no_room_is_refused(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind, 2 * CAPACITY) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 1))
        with pytest.raises(ValueError, match="a batch of 64 items through a buffer of 32"):
            rb.sample(timeout=50)


def test_a_buffer_that_is_emptied_is_waited_for(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 2))
        assert len(rb.sample()) == 2 * SIZE
        writer.empty()
        with once_waiting(rb, lambda: writer.extend(units(5, 2))):
            batch = rb.sample(timeout=50)
        assert sorted(batch["number"].tolist()) == [*range(5 * SIZE, 7 * SIZE)]


def test_what_came_back_is_found_without_a_look_at_every_item(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_EVERY_S", "_SHORT_S"):
        monkeypatch.setattr(claiming, pause, 1e9)
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as other:
        other.extend(units(0, 4))
        mine = rb.sample(lease=100.0)
        theirs = other.sample(lease=100.0)
        assert not rb.can_sample()
        monkeypatch.delattr(Consumer, "item_states")
        other.close()
        assert rb.can_sample()
        again = rb.sample(lease=1e-9)
        assert sorted(again["index"].tolist()) == sorted(theirs["index"].tolist())
        assert rb.can_sample(), "its lease is over"
        rb.ack(mine)
        assert rb.ack(rb.sample(lease=100.0)) == (2 * SIZE, 0)
        assert rb.consumers()[0].behind == 0


@pytest.mark.product
@pytest.mark.parametrize("form", [*STORAGES])
@pytest.mark.parametrize("is_new", [True, False], ids=["a new buffer", "a buffer with items"])
def test_a_loaded_buffer_gives_its_consumer_what_the_save_had_left(
    tmp_path: Path, kind: str, form: str, is_new: bool
) -> None:
    with learner(tmp_path / "saved", kind, form=form) as rb:
        rb.extend(units(0, 6))
        done = rb.sample()["number"].tolist()
        rb.dumps(tmp_path / "save")
    with learner(tmp_path / "loaded", kind, form=form) as rb:
        if not is_new:
            rb.extend(units(10, 4))
            assert len(rb.sample()) == 2 * SIZE
        rb.loads(tmp_path / "save")
        assert rb.can_sample()
        found = [int(number) for batch in rb for number in batch["number"]]
        assert sorted(done + found) == [*range(6 * SIZE)]
        rb.extend(units(6, 2))
        assert sorted(rb.sample()["number"].tolist()) == [*range(6 * SIZE, 8 * SIZE)]


def taken_by_a_killed_learner(path: Path, kind: str, count: int) -> list[int]:
    """Returns the numbers of the items that a killed learner held under an endless lease."""
    hear, tell = os.pipe()

    def holds() -> None:
        torch.manual_seed(1)  # a seed of its own, because samplers warn about equal draws
        rb = learner(path, kind, count)
        batch = rb.sample(lease=math.inf)
        os.write(tell, bytes(batch["number"].tolist()))
        signal.pause()

    pid = fork(holds)
    os.close(tell)
    found = [*os.read(hear, 100)]
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    os.close(hear)
    return found


@pytest.mark.parametrize("kind", ["consuming", "windows"])
def test_what_a_killed_learner_held_is_given_before_newer_items(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(consumer, "_CHECK_SHARE", 0)
    monkeypatch.setattr(claiming, "CHECK_INTERVAL_S", 0.0)
    with learner(tmp_path, kind, SIZE) as rb:
        rb.extend(units(0, 6))
        assert rb.sample()["number"].tolist() == [0, 1, 2, 3]
        assert taken_by_a_killed_learner(tmp_path, kind, SIZE) == [4, 5, 6, 7]
        assert rb.sample()["number"].tolist() == [4, 5, 6, 7]
        require_quiet(rb)


def test_a_learner_looks_for_dead_holders_at_most_ten_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looks = [1000.0], []
    monkeypatch.setattr(consumer, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with learner(tmp_path, "consuming", SIZE) as rb, learner(tmp_path, "consuming", 1) as other:
        rb.extend(units(0, 8))
        other.sample(lease=math.inf)
        monkeypatch.setattr(Seat, "reap_if_dead", lambda *asked: looks.append(asked[1:]))
        for _ in range(3):
            rb.sample()
        seat = engine_of(other).seat
        assert looks == [(seat.entry, seat.incarnation)]
        now_s[0] += 0.1
        rb.sample()
        assert len(looks) == 2


def test_a_learner_that_only_asks_finds_what_a_killed_one_held(tmp_path: Path, kind: str) -> None:
    with learner(tmp_path, kind) as rb, learner(tmp_path, kind) as writer:
        writer.extend(units(0, 2))
        assert rb.can_sample()
        held = taken_by_a_killed_learner(tmp_path, kind, 2 * SIZE)
        end = time.monotonic() + 50
        while not rb.can_sample():
            assert time.monotonic() < end
        assert sorted(rb.sample()["number"].tolist()) == sorted(held)

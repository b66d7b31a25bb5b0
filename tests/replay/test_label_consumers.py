"""Groups and fresh items go to one of a consumer's learners only, also after kills."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    EmptyBufferError,
    GroupCounts,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    PromptGroupSampler,
    RateLimiter,
    RateLimitTimeout,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.format.ledger import ItemStates
from shmbuffer.samplers import claiming
from shmbuffer.samplers.labelled.index import LabelIndex
from tests.kit.rings import engine_of
from tests.replay.label_programs import SIZE, items, opened
from tests.replay.workers import began, collectors, kill, start

GROUPS_EACH = 60


def grouped(*keys: int) -> TensorDict:
    return TensorDict({"query": torch.tensor(keys)}, [len(keys)])


def learner(path: Path, capacity: int = 12, **options: Any) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)
    sampler = PromptGroupSampler(group_size=2, consumer="learners", **options)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler)


def require(happens: Any) -> None:
    """Waits until the condition is true."""
    deadline = time.monotonic() + 50
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def standing(rb: Any) -> Any:
    (one,) = rb.consumers()
    return one


# -- groups ----------------------------------------------------------------------------------------


def test_a_group_is_given_to_one_learner_of_a_consumer(tmp_path: Path) -> None:
    with learner(tmp_path / "b") as one, learner(tmp_path / "b") as other:
        one.extend(grouped(1, 2, 1, 3, 2, 3, 4))
        found = [*one.sample(2)["query"].tolist(), *other.sample(4)["query"].tolist()]
        assert sorted(found) == [1, 1, 2, 2, 3, 3]
        assert not one.can_sample(2)
        assert not other.can_sample(2)
        message = r"every complete group \(1 are incomplete, .*, and no client writes"
        with pytest.raises(EmptyBufferError, match=message):
            one.sample(2)
        with pytest.raises(RateLimitTimeout, match="2 undelivered items are needed"):
            other.sample(2, timeout=0.05)
        one.extend(grouped(4))
        assert other.sample(2)["query"].tolist() == [4, 4]
        assert standing(one).acked == 8
        assert standing(one).floor == 8


def test_a_lease_holds_a_group_until_its_learner_is_gone(tmp_path: Path) -> None:
    with learner(tmp_path / "b") as one:
        other = learner(tmp_path / "b")
        one.extend(grouped(1, 1))
        sample = other.sample(2, lease=100.0)
        with pytest.raises(RateLimitTimeout):
            one.sample(2, timeout=0.05)
        other.close()
        again = one.sample(2, lease=100.0)
        assert sorted(again["index"].tolist()) == sorted(sample["index"].tolist())
        assert one.ack(again) == (2, 0)
        assert one.ack(sample) == (0, 2)
        assert standing(one).redelivered == 2


@pytest.mark.parametrize("alone", [False, True])
def test_a_group_comes_again_once_its_lease_is_over(tmp_path: Path, alone: bool) -> None:
    with learner(tmp_path / "b") as one, learner(tmp_path / "b") as other:
        one.extend(grouped(1, 1))
        late = one.sample(2, lease=0.001)
        heir = one if alone else other
        require(lambda: heir.can_sample(2))
        again = heir.sample(2, lease=100.0)
        assert one.ack(late) == (0, 2)
        assert heir.ack(again) == (2, 0)
        assert not heir.can_sample(2)


def test_what_one_draw_could_not_complete_is_given_back(tmp_path: Path) -> None:
    with learner(tmp_path / "b") as one, learner(tmp_path / "b") as other:
        one.extend(grouped(1, 1, 2))
        with pytest.raises(RateLimitTimeout):
            one.sample(4, timeout=0.05)
        assert other.sample(2)["query"].tolist() == [1, 1]


def test_a_batch_that_writers_cannot_complete_has_the_groups_that_are_there(
    tmp_path: Path,
) -> None:
    with learner(tmp_path / "b", 4) as one, learner(tmp_path / "b", 4) as other:
        one.extend(grouped(1, 1, 2, 2))
        both = one.sample(4, lease=0.001)
        assert one.ack(both[both["index"] >= 2]) == (2, 0)
        require(lambda: other.can_sample(4))
        again = other.sample(4, lease=100.0)
        assert sorted(again["index"].tolist()) == [0, 1]
        assert not one.can_sample(4)
        assert other.ack(again) == (2, 0)
        one.extend(grouped(3, 3, 4, 4), timeout=50)


def test_groups_that_are_given_up_hold_no_writer_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**12]
    monkeypatch.setattr("shmbuffer.samplers.labelled.index.time.monotonic_ns", lambda: now[0])
    with learner(tmp_path / "b", 4, give_up_after=5.0) as rb:
        rb.extend(grouped(1, 2, 2, 3))
        assert rb.sample(2)["query"].tolist() == [2, 2]
        assert standing(rb).floor == 0
        now[0] += 5 * 10**9
        assert not rb.can_sample(2)
        assert rb.sampler.groups == GroupCounts(0, 0, 0, 2)  # type: ignore[attr-defined]
        assert (standing(rb).dropped, standing(rb).floor) == (2, 4)
        rb.extend(grouped(1, 4, 4))  # items that come late are not delivered
        assert rb.sample(2)["query"].tolist() == [4, 4]
        assert standing(rb).dropped == 2 or standing(rb).floor == 7


@pytest.mark.parametrize("consumer", ["learners", None])
def test_groups_that_are_larger_than_the_storage_are_refused(consumer: str | None) -> None:
    sampler = PromptGroupSampler(group_size=3, consumer=consumer)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(2), sampler=sampler)
    rb.extend(grouped(0, 0))
    for call in (rb.can_sample, rb.sample):
        with pytest.raises(ValueError, match="2 items is too small for a group of group_size=3"):
            call(3)


def test_what_is_given_up_counts_in_no_version(tmp_path: Path) -> None:
    """Otherwise groups that were given up would fill the gate and block all writers forever."""
    with learner(tmp_path / "b", give_up_after=1e-6) as rb:
        rb.extend(grouped(0, 0))
        rb.rate_limiter = RateLimiter(max_staleness=1, items_per_version=2)
        for key in range(1, 9):
            rb.extend(grouped(key), timeout=50)
            require(lambda key=key: rb.can_sample(2) and standing(rb).dropped == key)
        assert rb.sample(2)["query"].tolist() == [0, 0]  # the first batch of version 0
        rb.extend(grouped(9, 9), timeout=50)
        with pytest.raises(RateLimitTimeout, match="while learners have version 0"):
            rb.extend(grouped(11), timeout=0.05)


def test_a_late_item_of_what_another_learner_gave_up_is_given_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_EVERY_S", "_SHORT_S", "_RARELY"):
        monkeypatch.setattr(claiming, pause, 0)
    now = [10**12]
    monkeypatch.setattr("shmbuffer.samplers.labelled.index.time.monotonic_ns", lambda: now[0])
    with learner(tmp_path / "b", give_up_after=5.0) as one, learner(tmp_path / "b") as other:
        one.extend(grouped(1))
        assert not one.can_sample(2)
        assert not other.can_sample(2)
        now[0] += 5 * 10**9
        assert not one.can_sample(2)
        assert standing(one).dropped == 1
        one.close()
        other.extend(grouped(1))
        with pytest.raises(EmptyBufferError):  # the group looks complete to this learner
            other.sample(2)
        assert standing(other).dropped == 2
        assert standing(other).floor == 2


# -- groups that are never completed ---------------------------------------------------------------


def write_behind(rb: Any, *batches: TensorDict) -> threading.Thread:
    """Writes from a thread, which waits for space."""

    def write() -> None:
        for batch in batches:
            rb.extend(batch, timeout=50)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("asked", ["sample", "can_sample"])
def test_a_group_that_has_no_room_to_become_whole_holds_no_writer_up(
    tmp_path: Path, asked: str
) -> None:
    with learner(tmp_path / "b", 4) as rb, learner(tmp_path / "b", 4) as writer:
        writer.extend(grouped(1, 2, 2))
        assert rb.sample(2)["query"].tolist() == [2, 2]
        writer.extend(grouped(3))
        thread = write_behind(writer, grouped(3, 4), grouped(4))
        try:
            if asked == "can_sample":
                require(lambda: rb.can_sample(4))
            found: list[int] = []
            while len(found) < 4:  # a batch is smaller if its writer is late
                found += rb.sample(4 - len(found), timeout=50)["query"].tolist()
        finally:
            rb.remove_consumer("learners")
            thread.join()
        assert sorted(found) == [3, 3, 4, 4]
        assert rb.sampler.groups.given_up == 1  # type: ignore[attr-defined]
        assert rb.sampler.groups.withdrawn == 0  # type: ignore[attr-defined]


def test_groups_are_given_up_no_earlier_than_they_have_to_be(tmp_path: Path) -> None:
    with learner(tmp_path / "b", 4) as rb, learner(tmp_path / "b", 4) as writer:
        writer.extend(grouped(1, 2, 3))
        with pytest.raises(RateLimitTimeout):
            rb.sample(2, timeout=0.05)
        assert rb.sampler.groups == GroupCounts(0, 3, 0, 0)  # type: ignore[attr-defined]
        writer.extend(grouped(3))  # the ring is full, and no writer has more to write
        assert rb.sample(2)["query"].tolist() == [3, 3]
        with pytest.raises(RateLimitTimeout):
            rb.sample(2, timeout=0.05)
        # The oldest item keeps the other item of its group out; behind it there is space again.
        assert rb.sampler.groups.given_up == 1  # type: ignore[attr-defined]
        writer.extend(grouped(2))
        assert rb.sample(2, timeout=50)["query"].tolist() == [2, 2]


def test_a_group_that_may_be_completed_is_given_up_once_all_writers_have_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is space for the last item, and a writer that has more items waits."""
    path, now = tmp_path / "b", [1000.0]
    with learner(path, 4) as rb, learner(path, 4) as one, learner(path, 4) as other:
        monkeypatch.setattr("shmbuffer.samplers.claiming.time.monotonic", lambda: now[0])
        one.extend(grouped(1))
        other.extend(grouped(2, 2))
        assert rb.sample(2)["query"].tolist() == [2, 2]
        counts = lambda: rb.sampler.groups  # type: ignore[attr-defined]  # noqa: E731
        thread = write_behind(other, grouped(3, 3))
        try:
            seat = engine_of(other).seat
            require(lambda: int(seat.control.entries["waits_for"][seat.entry]))
            for _ in range(3):
                assert not rb.can_sample(2)
                now[0] += 10.0
            assert counts().given_up == 0, "the other writer is at it"
            one.close()
            assert not rb.can_sample(2)
            now[0] += 0.9
            assert not rb.can_sample(2)
            assert counts().given_up == 0, "a writer that has died may come again"
            now[0] += 0.2
            rb.can_sample(2)
            assert counts().given_up == 1
            assert rb.sample(2, timeout=50)["query"].tolist() == [3, 3]
        finally:
            rb.remove_consumer("learners")
            thread.join()


def test_who_has_room_reserved_may_complete_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "b", [1000.0]
    with learner(path, 4) as rb, learner(path, 4) as one, learner(path, 4) as other:
        monkeypatch.setattr("shmbuffer.samplers.claiming.time.monotonic", lambda: now[0])
        one.extend(grouped(1))
        assert not rb.can_sample(2)
        with one.reserve(1) as room:
            thread = write_behind(other, grouped(3, 3, 4))
            try:
                seat = engine_of(other).seat
                require(lambda: int(seat.control.entries["waits_for"][seat.entry]))
                for _ in range(3):
                    assert not rb.can_sample(2)
                    now[0] += 10.0
                room.commit(grouped(1))
                assert rb.sample(2, timeout=50)["query"].tolist() == [1, 1]
            finally:
                rb.remove_consumer("learners")
                thread.join()
        assert rb.sampler.groups.given_up == 0  # type: ignore[attr-defined]


def test_only_whole_groups_are_given_to_a_consumer() -> None:
    with pytest.raises(ValueError, match="only gets whole groups, so group_size is required"):
        PromptGroupSampler(num_groups=2, consumer="learners")
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=PromptGroupSampler(samples_per_group=1, group_size=2, consumer="learners"),
    )
    rb.extend(grouped(1, 1))
    with pytest.raises(ValueError, match=r"a batch of 2 would have 1 items .* use batch_size=4"):
        rb.sample(2)


# -- fresh items -----------------------------------------------------------------------------------


def versioned(*versions: int) -> TensorDict:
    return TensorDict({"policy_version": torch.tensor(versions)}, [len(versions)])


def fresh(path: Path, records: bool = False, **options: Any) -> TensorDictReplayBuffer:
    storage: Any = (
        LazyMemmapStorage(12, scratch_dir=path, shared_init=True) if not records else None
    )
    if records:
        storage = LazyStackStorage(12, max_bytes=2**16, scratch_dir=path, shared_init=True)
    sampler = StalenessAwareSampler(consumer="learners", **options)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler)


@pytest.mark.parametrize("records", [False, True])
def test_an_item_is_given_to_one_learner_and_again_when_it_is_gone(
    tmp_path: Path, records: bool
) -> None:
    with fresh(tmp_path / "b", records) as one:
        other = fresh(tmp_path / "b", records)
        one.extend(versioned(3, 1, 2, 3, 2))
        one.sampler.consumer_version = 3  # type: ignore[attr-defined]
        first = one.sample(2)
        held = other.sample(2, lease=100.0)
        assert not {*first["index"].tolist()} & {*held["index"].tolist()}
        assert torch.equal(held["staleness"], 3.0 - held["policy_version"])
        with pytest.raises(RateLimitTimeout, match="2 undelivered items are needed"):
            one.sample(2, timeout=0.05)
        other.close()
        last = one.sample(3)
        assert {*held["index"].tolist()} < {*last["index"].tolist()}
        assert standing(one).acked == 5


def test_what_others_have_is_looked_at_the_more_rarely_the_longer_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looks = [1000.0], []
    item_states, find_groups = Consumer.item_states, LabelIndex.find_groups

    def looked(self: Consumer) -> ItemStates:
        looks.append(now_s[0])
        return item_states(self)

    def takes_long(self: LabelIndex, elements: Any) -> Any:
        now_s[0] += 3.0
        return find_groups(self, elements)

    monkeypatch.setattr(Consumer, "item_states", looked)
    monkeypatch.setattr(LabelIndex, "find_groups", takes_long)
    monkeypatch.setattr(claiming, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    rb = fresh(tmp_path / "buffer")
    rb.extend(versioned(1, 1, 1))
    assert rb.can_sample(1)
    assert len(looks) == 1
    assert rb.can_sample(1)
    assert len(looks) == 1
    now_s[0] += 60.0
    assert rb.can_sample(1)
    assert len(looks) == 2


def test_what_is_too_stale_is_given_to_nobody_and_holds_no_writer_up(tmp_path: Path) -> None:
    with fresh(tmp_path / "b", max_staleness=1, freshest_first=True) as rb:
        rb.extend(versioned(0, 3, 1, 2))
        rb.sampler.consumer_version = 3  # type: ignore[attr-defined]
        assert rb.sample(2)["policy_version"].tolist() == [3, 2]
        assert (standing(rb).dropped, standing(rb).floor) == (2, 4)
        rb.extend(versioned(*[9] * 12))


# -- under kills -----------------------------------------------------------------------------------


def writes_groups(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes some whole groups and reports when all are written."""
    torch.set_num_threads(1)
    buffer, written = opened(path, capacity), 0
    while written < GROUPS_EACH * SIZE:
        count = min(1 + written % 5, GROUPS_EACH * SIZE - written)
        buffer.extend(items(source, written, count), timeout=50)
        written += count
    connection.send("all")
    connection.recv()


def learns(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Draws groups and logs each draw and each acknowledgement in a file of its own."""
    torch.set_num_threads(1)
    sampler = PromptGroupSampler(group_size=SIZE, consumer="learners")
    buffer = opened(path, capacity, sampler)
    log = os.open(path.parent / f"log-{source}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    connection.send("began")
    while not connection.poll():
        try:
            batch = buffer.sample(SIZE, lease=100.0, timeout=1.0)
        except (EmptyBufferError, RateLimitTimeout):
            continue  # all groups may have been delivered
        keys = {*batch["query"].tolist()}
        assert len(keys) == 1
        assert {*batch["member"].tolist()} == {*range(SIZE)}
        (key,) = keys
        os.write(log, f"got {key}\n".encode())
        done = buffer.ack(batch)
        assert done == (SIZE, 0), done
        os.write(log, f"done {key}\n".encode())
    buffer.close()


@pytest.mark.slow
@pytest.mark.parametrize("records", [False, True])
def test_every_group_is_trained_on_once_by_learners_that_are_killed(
    tmp_path: Path, records: bool
) -> None:
    # The ring has space for all groups, so that one writer's open group does not block the other.
    path, capacity = tmp_path / ("records" if records else "rows"), 640
    wanted = 2 + 2 * GROUPS_EACH
    with opened(path, capacity) as rb, collectors(learns, path, capacity, 3) as learners:
        began(*learners)
        rb.extend(items(9, 0, 2 * SIZE))  # creates a consumer that holds writers back
        require(lambda: rb.consumers() and standing(rb).floor == 2 * SIZE)
        with collectors(writes_groups, path, capacity, 2) as writers:
            for turn in range(6):
                time.sleep(0.2)
                kill(learners[turn % 3])
                learners[turn % 3] = start(learns, path, capacity, 3 + turn)
            for _, connection in writers:
                assert connection.poll(50)
                assert connection.recv() == "all"
            require(lambda: standing(rb).floor == wanted * SIZE)
        assert standing(rb).dropped == 0
    got: set[str] = set()
    done: Counter[str] = Counter()
    for log in tmp_path.glob("log-*"):
        for line in log.read_text().splitlines():
            what, key = line.split()
            got.add(key)
            done[key] += what == "done"
    assert len(got) == wanted
    assert max(done.values()) == 1
    # a learner that was killed after its acknowledgement has not logged it
    assert wanted - sum(done.values()) <= 6

"""Windows for a consumer with several learners: each is delivered once, also if they are killed."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import (
    EmptyBufferError,
    LazyMemmapStorage,
    RateLimitTimeout,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.samplers import claiming
from shmbuffer.samplers.slicing.windows import Windows
from tests.replay.slice_programs import steps
from tests.replay.test_streaming_slices import data_of, plain
from tests.replay.workers import collectors, kill, start

STEPS = 4


def learner(path: Path, capacity: int = 64) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True),
        sampler=StreamingSliceSampler(slice_len=STEPS, consumer="learners"),
    )


def firsts(sample: Any) -> list[int]:
    """Returns the first number of each window, after checking that its steps are consecutive."""
    number = sample["number"].reshape(-1, STEPS)
    assert (number == number[:, :1] + torch.arange(STEPS)).all()
    found: list[int] = number[:, 0].tolist()
    return found


def test_learners_of_one_consumer_share_the_windows(tmp_path: Path) -> None:
    with learner(tmp_path) as one, learner(tmp_path) as two:
        one.extend(data_of(plain(26)))
        first = one.sample(2 * STEPS, lease=math.inf)
        assert firsts(first) == [0, 4]
        assert firsts(two.sample(2 * STEPS)) == [8, 12]
        assert one.ack(first) == (8, 0)
        with learner(tmp_path) as late:
            assert firsts(late.sample(2 * STEPS)) == [16, 20]
            assert not late.can_sample(STEPS)
        with pytest.raises(EmptyBufferError, match="was given every complete window, and"):
            one.sample(STEPS)
        with pytest.raises(RateLimitTimeout, match="4 undelivered items are needed"):
            two.sample(STEPS, timeout=0.05)
        one.extend(data_of(plain(4, 26)))
        assert firsts(one.sample(STEPS)) == [24]
        (status,) = one.consumers()
        assert (status.acked, status.redelivered) == (28, 0)


def test_what_a_learner_held_when_it_ended_comes_again_first(tmp_path: Path) -> None:
    with learner(tmp_path) as one:
        one.extend(data_of(plain(24)))
        with learner(tmp_path) as two:
            held = two.sample(2 * STEPS, lease=math.inf)
            assert firsts(held) == [0, 4]
            assert firsts(one.sample(STEPS)) == [8]
        time.sleep(0.03)
        assert one.can_sample(5 * STEPS)
        assert firsts(one.sample(5 * STEPS)) == [0, 4, 12, 16, 20]
        assert one.ack(held) == (0, 8), "too late: it is somebody else's"


def test_a_lease_that_is_over_comes_again_to_its_holder_too(tmp_path: Path) -> None:
    with learner(tmp_path) as rb:
        rb.extend(data_of(plain(8)))
        first = rb.sample(2 * STEPS, lease=0.05)
        time.sleep(0.1)
        assert rb.can_sample(2 * STEPS)
        again = rb.sample(2 * STEPS, lease=math.inf)
        assert firsts(again) == firsts(first)
        assert rb.ack(first) == (0, 8)
        assert rb.ack(again) == (8, 0)


def test_a_batch_that_is_too_short_takes_nothing(tmp_path: Path) -> None:
    with learner(tmp_path) as one, learner(tmp_path) as two:
        one.extend(data_of(plain(8)))
        with pytest.raises(RateLimitTimeout, match="12 undelivered items are needed"):
            one.sample(3 * STEPS, timeout=0.05)
        assert firsts(two.sample(2 * STEPS)) == [0, 4]


@pytest.mark.parametrize("lease", [None, 60, math.inf])
def test_what_was_too_little_for_a_batch_is_there_for_the_next(
    tmp_path: Path, lease: float | None
) -> None:
    with learner(tmp_path) as one, learner(tmp_path) as writer:
        writer.extend(data_of(plain(8)))
        for _ in range(2):
            with pytest.raises(RateLimitTimeout, match="12 undelivered items are needed"):
                one.sample(3 * STEPS, lease=lease, timeout=0.05)
        writer.extend(data_of(plain(4, 8)))
        assert firsts(one.sample(3 * STEPS, lease=lease)) == [0, 4, 8]


def test_a_batch_that_writers_cannot_complete_has_the_windows_that_are_there(
    tmp_path: Path,
) -> None:
    with learner(tmp_path, 16) as one, learner(tmp_path, 16) as two:
        one.extend(data_of(plain(16)))
        # Long enough that the lease outlives the other sample on a busy machine.
        oldest, others = one.sample(STEPS, lease=2.0), two.sample(3 * STEPS, lease=60)
        assert one.ack(others) == (3 * STEPS, 0)
        while not (one.can_sample(2 * STEPS) and two.can_sample(2 * STEPS)):
            time.sleep(0.02)
        again = two.sample(2 * STEPS, lease=60)
        assert firsts(again) == firsts(oldest) == [0]
        assert two.ack(again) == (STEPS, 0)
        one.extend(data_of(plain(16, 16)), timeout=50)
        assert firsts(one.sample(4 * STEPS)) == [16, 20, 24, 28]


def test_what_is_written_during_a_look_comes_in_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learner(tmp_path) as one, learner(tmp_path) as two:
        two.extend(data_of(plain(8)))
        item_states, late = Consumer.item_states, [data_of(plain(56, 8))]

        def after_a_write(consumer: Consumer) -> Any:
            if late:
                two.extend(late.pop())
            return item_states(consumer)

        assert one.can_sample(STEPS)
        for pause in ("_EVERY_S", "_RARELY"):
            monkeypatch.setattr(claiming, pause, 0)
        monkeypatch.setattr(Consumer, "item_states", after_a_write)
        seen = firsts(one.sample(2 * STEPS))
        assert one.can_sample(14 * STEPS)
        seen += firsts(one.sample(14 * STEPS))
        assert seen == [*range(0, 64, STEPS)]
        (status,) = one.consumers()
        assert (status.acked, status.dropped) == (64, 0)


def test_writers_do_not_wait_for_steps_that_are_in_no_window(tmp_path: Path) -> None:
    """The last two steps of an episode of six are outside any window; a third stream is idle."""
    with learner(tmp_path, 32) as rb:
        rb.extend(data_of(plain(3, 1000)), streams=9)
        seen = []
        for number in range(0, 600, 6):
            rb.extend(data_of(plain(6, number, every=6)), timeout=50)
            seen += firsts(rb.sample(STEPS))
        assert seen == [*range(0, 600, 6)]
        (status,) = rb.consumers()
        assert status.dropped > 180


def test_writers_do_not_wait_for_the_rest_of_a_window_that_was_given_up(tmp_path: Path) -> None:
    """When a slow stream continues, the first steps of its window are too old to wait for."""
    with learner(tmp_path, 32) as rb:
        for number in range(0, 400, STEPS):
            if number % 24 == 0:
                rb.extend(data_of(plain(1, 1000 + number // 24)), streams=9, timeout=0)
            rb.extend(data_of(plain(STEPS, number)), timeout=0)
            assert firsts(rb.sample(STEPS)) == [number]


def test_a_window_that_is_written_over_while_it_is_chosen_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learner(tmp_path, 32) as one, learner(tmp_path, 32) as two:
        one.extend(data_of(plain(32)))
        assert firsts(one.sample(STEPS)) == [0]
        assert len(firsts(two.sample(7 * STEPS))) == 7
        take = Windows.take

        def slow(self: Windows, count: int) -> Any:
            """Lets other items overwrite the slots meanwhile."""
            found = take(self, count)
            monkeypatch.undo()
            two.extend(data_of(plain(2, 1000)), streams=9)
            two.extend(data_of(plain(30, 32)))
            return found

        monkeypatch.setattr(Windows, "take", slow)
        assert firsts(one.sample(STEPS)) == [32]


def _learns(path: Path, capacity: int, number: int, connection: Any) -> None:
    torch.set_num_threads(1)
    log = os.open(path.with_name(f"log-{number}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with learner(path, capacity) as rb:
        rb.can_sample(STEPS)
        connection.send("attached")
        while True:
            windows = 3 if rb.can_sample(3 * STEPS) else 1  # the windows at the end
            batch = rb.sample(windows * STEPS, lease=math.inf)
            tickets = batch["index_generation"].reshape(-1, STEPS).tolist()
            os.write(log, json.dumps(["seen", tickets]).encode() + b"\n")
            applied, _ = rb.ack(batch)
            assert applied == len(batch)
            os.write(log, json.dumps(["done", tickets]).encode() + b"\n")


@pytest.mark.slow
def test_three_learners_that_are_killed_share_each_window_once(tmp_path: Path) -> None:
    path, capacity, total = tmp_path / "ring", 600, 6000
    chance, numbers = random.Random(0), itertools.count(3)
    with learner(path, capacity) as rb:
        rb.extend(steps(0, 0, 20, 20))
        written = 20
        assert rb.can_sample(STEPS)  # creates the consumer, which sees all items from here on
        with collectors(_learns, path, capacity, 3) as running:
            assert all(connection.poll(50) for _, connection in running)
            deaths = 0
            while written < total:
                rb.extend(steps(0, written, 20, 20), timeout=50)
                written += 20
                if chance.random() < 0.03:
                    at = chance.randrange(3)
                    time.sleep(chance.random() * 0.01)
                    kill(running[at])
                    running[at] = start(_learns, path, capacity, next(numbers))
                    deaths += 1
            assert deaths > 3
            end = time.monotonic() + 50
            while rb.consumers()[0].acked < total and time.monotonic() < end:
                time.sleep(0.02)
        (status,) = rb.consumers()
    seen, done = [], []
    for log in tmp_path.glob("log-*"):
        for line in log.read_text().splitlines():
            what, windows = json.loads(line)
            (seen if what == "seen" else done).extend(map(tuple, windows))
    expected = {tuple(range(at, at + STEPS)) for at in range(0, total, STEPS)}
    assert {*seen} == expected, "tickets are numbers: one writer, and no aborted write"
    assert len(done) == len({*done}), "nobody was told twice that it is done"
    assert status.acked == total
    assert status.dropped == 0

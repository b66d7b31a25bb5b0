"""A collector and two learners share a data set and an online buffer and are killed repeatedly."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedSampler,
    ReadOnlyStorage,
    TensorDictReplayBuffer,
)
from tests.crash.harness import ended, fork
from tests.kit.rings import engine_of

DATA, CAPACITY, BATCH = 50, 64, 20
COLLECTED = 1000
SHARES = [0.8 * max(0.0, 1 - step / 10) for step in range(12)]

pytestmark = pytest.mark.crash


def items(first: int, count: int) -> TensorDict:
    """Makes items each of whose leaves identifies the item."""
    number = torch.arange(first, first + count)
    after = TensorDict({"square": (number[:, None].double() ** 2).expand(-1, 40)}, [count])
    return TensorDict({"id": number, "next": after.contiguous()}, [count])


def prioritized(capacity: int) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, 1.0, 1.0, eps=0.0)


def opened(path: Path) -> Any:
    data = TensorDictReplayBuffer(
        storage=ReadOnlyStorage(path / "data", priorities=path / "table"),
        sampler=prioritized(DATA),
        writer=ImmutableDatasetWriter(),
    )
    return OfflineToOnlineReplayBuffer(
        data,
        online_storage=LazyMemmapStorage(CAPACITY, scratch_dir=path / "on", shared_init=True),
        online_sampler=prioritized(CAPACITY),
        offline_fraction=0.8,
        batch_size=BATCH,
    )


def require_whole(rb: Any, sample: TensorDict) -> None:
    """Checks that each row is one item, and that the share of the data set was one of `SHARES`."""
    square = sample["next", "square"]
    assert (square == (sample["id"].double() ** 2)[:, None]).all()
    of_data = sample["id"] < COLLECTED
    assert (sample["index"] >= CAPACITY).equal(of_data)
    assert torch.equal(sample["id"][of_data], sample["index"][of_data] - CAPACITY)
    assert of_data[: int(of_data.sum())].all()
    assert int(of_data.sum()) in {round(share * BATCH) for share in SHARES}
    assert ((sample["_weight"] > 0) & (sample["_weight"] <= 1)).all()


def collects(path: Path) -> None:
    rb = opened(path)
    number = COLLECTED + os.getpid() * 1000
    while True:
        rb.extend(items(number, 7))
        number += 7


def learns(path: Path) -> None:
    torch.manual_seed(os.getpid())
    rb, draws = opened(path), random.Random(os.getpid())
    while True:
        sample = rb.sample()
        require_whole(rb, sample)
        priority = 1 + sample["id"].remainder(5).double()  # an item always has the same priority
        update = rb.update_tensordict_priority(sample.set("td_error", priority))
        assert update.applied + update.stale == BATCH
        rb.anneal(draws.randrange(12), 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    items(0, DATA).memmap(tmp_path / "data")
    with opened(tmp_path) as rb:
        rb.extend(items(COLLECTED, CAPACITY))
    return tmp_path


def done(rb: Any) -> tuple[int, int]:
    """Returns the number of items written, and of priorities updated in the data set."""
    online, table = engine_of(rb.online_buffer), engine_of(rb.offline_buffer)
    return online.stats()["inserts"], table.stats()["updates_applied"]


def goes_on(rb: Any, living: dict[int, Callable[[Path], None]]) -> None:
    """Waits until each living process has made progress; fails if one has ended by itself."""
    first = done(rb)
    works = {body: at for at, body in enumerate((collects, learns))}
    waited = {works[body] for body in living.values()}
    while any(done(rb)[at] < first[at] + 200 for at in waited):
        for pid in living:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "its traceback is above"
        time.sleep(0.001)


@pytest.mark.product(few=1)
@pytest.mark.parametrize("seed", range(3))
def test_parts_and_share_stay_whole_whoever_is_killed(path: Path, seed: int) -> None:
    draws = random.Random(seed)
    bodies = [collects, learns, learns]
    with opened(path) as rb:
        living = {fork(lambda body=body: body(path)): body for body in bodies}
        for _ in range(4):
            goes_on(rb, living)
            victim = draws.choice([*living])
            os.kill(victim, signal.SIGKILL)
            assert ended(victim) == -signal.SIGKILL
            body = living.pop(victim)
            goes_on(rb, living)
            require_whole(rb, rb.sample())
            assert rb.offline_fraction in SHARES
            living[fork(lambda body=body: body(path))] = body
        for pid in living:
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -signal.SIGKILL
    with opened(path) as rb:  # no other client is attached: recovered
        assert rb.offline_fraction in SHARES
        for part in rb.online_buffer, rb.offline_buffer:
            assert engine_of(part).check().ok
        everything = rb[:]
        assert (everything["next", "square"] == everything["id"].double()[:, None] ** 2).all()
        numbers = torch.arange(DATA)
        assert torch.equal(rb[CAPACITY + numbers]["id"], numbers)
        raw = rb.offline_buffer.sampler.state_dict()["_priorities"]
        assert torch.equal(raw, 1 + numbers.remainder(5).double())

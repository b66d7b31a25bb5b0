"""Four writers and a learner are killed repeatedly, then all at once. The items stay bit-exact.

The kills come at random times, and the checks hold at any time. `tests/crash` kills writers at each
named step of a write.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import struct
import time
from collections import defaultdict
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    LazyStackStorage,
    TensorDictPrioritizedReplayBuffer,
    attach,
)
from tests.frames import recorded, sequences, transitions

WRITERS = 4
KILLS = 10
POOL = 48  # distinct items of a writer, which it writes repeatedly with new numbers
ROOM = {"frames": (600, 2**20), "sequences": (600, 4 * 2**20)}
BATCH = {"frames": 8, "sequences": 5}


@cache
def pool(kind: str, writer: int) -> list[TensorDict]:
    """Returns the items of a writer without their numbers.

    Writer 0 plays a real game if Atari is installed.
    """
    games = all(importlib.util.find_spec(name) for name in ("gymnasium", "ale_py"))
    if kind == "frames" and writer == 0 and games:
        return played()
    if kind == "frames":
        return list(transitions(POOL, seed=writer).unbind(0))
    return sequences(POOL, seed=writer, text=True)


def played() -> list[TensorDict]:
    """Returns steps of an Atari game in the layout of `transitions`."""
    stacks = torch.from_numpy(recorded("ALE/Breakout-v5", POOL + 4)).unfold(0, 4, 1)
    stacks = stacks.permute(0, 3, 1, 2).contiguous()
    likeness = transitions(POOL, seed=0)
    likeness["observation"] = stacks[:POOL]
    likeness["next", "observation"] = stacks[1 : POOL + 1]
    return list(likeness.unbind(0))


def numbered(kind: str, writer: int, life: int, start: int) -> Any:
    """Makes a batch of items that name their writer, its life and their number."""
    made = []
    for number in range(start, start + BATCH[kind]):
        item = pool(kind, writer)[number % POOL].clone()
        who = torch.tensor([writer, life, number])
        made.append(item.set("who", who))
    return torch.stack(made) if kind == "frames" else made


def require_whole(kind: str, item: TensorDict) -> tuple[int, int, int]:
    """Returns the writer, life and number of an item; fails if any bit belongs to another item."""
    writer, life, number = item["who"].tolist()
    expected = pool(kind, writer)[number % POOL]
    for key in expected.keys(include_nested=True, leaves_only=True):
        wanted, found = expected.get(key), item.get(key)
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), f"{key} of {writer, life, number}"
        else:
            assert item[key] == expected[key]
    return writer, life, number


def write(kind: str, path: Path, log: Path, writer: int, life: int) -> None:
    """Writes until the process is killed, and logs each acknowledged write."""
    torch.set_num_threads(1)
    rb = attach(path)
    rng = np.random.default_rng(life)
    acknowledged = os.open(log, os.O_WRONLY | os.O_APPEND)
    for start in range(0, 10**9, BATCH[kind]):
        batch = numbered(kind, writer, life, start)
        if rng.random() < 0.2 and kind == "sequences":
            rb.extend(batch, update_priority=False)
        else:
            rb.extend(batch)
        os.write(acknowledged, struct.pack("<qqq", writer, life, start + BATCH[kind]))


def learn(kind: str, path: Path, log: Path) -> None:
    """Samples, checks every bit, and updates priorities, until the process is killed."""
    torch.set_num_threads(1)
    rb = attach(path)
    looked_at = os.open(log, os.O_WRONLY | os.O_APPEND)
    while True:
        batch = rb.sample(16)
        for item in batch.unbind(0):
            require_whole(kind, item)
        batch["td_error"] = torch.rand(16)
        rb.update_tensordict_priority(batch)
        os.write(looked_at, struct.pack("<q", 16))


def numbers_in(log: Path, width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.frombuffer(log.read_bytes(), np.int64).reshape(-1, width)


@pytest.fixture
def context() -> Any:
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.replay.records.test_kills"])
    return found


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frames", "sequences"])
def test_items_of_four_writers_come_back_bit_exact_when_any_of_them_is_killed(
    kind: str, tmp_path: Path, context: Any
) -> None:
    path, acknowledged, looked_at = tmp_path / "buffer", tmp_path / "written", tmp_path / "read"
    acknowledged.touch()
    looked_at.touch()
    max_size, max_bytes = ROOM[kind]
    options: dict[str, Any] = {"scratch_dir": path, "shared_init": True, "max_bytes": max_bytes}
    storage: Any
    if kind == "frames":
        storage = CompressedListStorage(max_size, **options)
    else:
        storage = LazyStackStorage(max_size, **options)
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=16)
    rb.extend(numbered(kind, 0, 0, 0))
    rng = np.random.default_rng(0)
    lives = 0

    def born(writer: int) -> BaseProcess:
        nonlocal lives
        lives += 1
        process = context.Process(target=write, args=(kind, path, acknowledged, writer, lives))
        process.start()
        return process

    def learner() -> BaseProcess:
        process = context.Process(target=learn, args=(kind, path, looked_at))
        process.start()
        return process

    def killed(process: BaseProcess) -> None:
        assert process.exitcode is None, f"{process} ended by itself, with {process.exitcode}"
        process.kill()
        process.join()

    processes = [*(born(writer) for writer in range(WRITERS)), learner()]
    for _ in range(KILLS):
        before = acknowledged.stat().st_size, looked_at.stat().st_size
        while acknowledged.stat().st_size < before[0] + 24 * 30 or (
            looked_at.stat().st_size < before[1] + 8 * 2
        ):
            assert all(process.is_alive() for process in processes)
            time.sleep(0.005)
        time.sleep(float(rng.random()) * 0.02)
        victim = int(rng.integers(0, WRITERS + 1))
        killed(processes[victim])
        processes[victim] = learner() if victim == WRITERS else born(victim)
        assert rb.storage.engine().check().ok
    rb.close()
    for process in processes:
        killed(process)

    found = attach(path)
    report = found.storage.engine().report
    assert report is not None
    assert report.reason == "no client alive"
    assert report.checksum_failed == report.words_refused == 0
    with_numbers = numbers_in(acknowledged, 3)
    ends: dict[int, int] = {0: BATCH[kind]}
    for _, life, end in with_numbers.tolist():
        ends[life] = max(end, ends.get(life, 0))
    there: dict[int, set[int]] = defaultdict(set)
    for at in found.storage.ring().live.committed().tolist():
        _, life, number = require_whole(kind, found[at])
        there[life].add(number)
    assert found.storage.engine().check().ok
    assert sum(map(len, there.values())) == len(found) == report.items > 30
    for life, present in there.items():
        end = ends.get(life, 0)
        # The oldest items may be overwritten, and a committed batch may be missing from the log.
        assert present >= set(range(min(present), end)), "an acknowledged item is missing"
        assert max(present) + 1 in (end, end + BATCH[kind]), "a batch is there in part"
    written = len(with_numbers) * BATCH[kind]
    assert written > 3 * len(found)
    assert int(numbers_in(looked_at, 1).sum()) > 16 * KILLS
    found.close()

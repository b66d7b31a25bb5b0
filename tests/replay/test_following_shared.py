"""The incremental index stays correct while writers die and several processes update it."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import TensorDictReplayBuffer
from shmbuffer._native import _core
from tests.kit.rings import engine_of, ring_of
from tests.replay.slice_programs import opened, steps
from tests.replay.trajectory_oracle import boundaries, followed, listed, require_whole
from tests.replay.workers import began, collectors, kill, start

CAPACITY, END = 20, ("next", "done")
#: Sync points of a write of rows, and of an in-place change.
POINTS = [
    *("write.locked", "write.noted", "write.marking", "write.head", "write.mark", "write.source"),
    *("write.raw", "write.length", "write.payload", "write.claimed", "write.copy"),
    *("write.relocked", "write.goal", "write.committing", "write.commit", "write.lengthened"),
    *("write.count", "write.idle", "write.done"),
]


def dies_at(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes on request, and dies at a sync point of the last write or of the edit."""
    torch.set_num_threads(1)
    buffer, written = opened(path, capacity), 0
    point, action, after, counts, edits = connection.recv()
    for count in counts:
        buffer.extend(steps(source, written, count, 6))
        written += count
    connection.send("wrote")
    connection.recv()
    _core.arm(point, action, after)
    if edits:
        buffer[edits] = steps(source, 1000, len(edits), 1)
    else:
        buffer.extend(steps(source, written, 5, 6))
    connection.send("alive")


def require_one_writer_each(rb: TensorDictReplayBuffer, found: Any) -> None:
    """Checks that unedited items of a trajectory are ascending steps of one writer."""
    elements = np.arange(CAPACITY)
    number = found.entries.at(("number",), elements).reshape(-1)
    source = found.entries.at(("source",), elements).reshape(-1)
    for one in listed(found.table):
        for before, after in pairwise(one):
            assert source[before] == source[after]
            assert number[after] > number[before] or number[before] >= 1000


def require_same(one: Any, rb: TensorDictReplayBuffer, *, at_rest: bool) -> None:
    """Checks the followed index; at rest, it must equal a new index and the content of the ring."""
    found = one.find(rb.storage)
    require_whole(found.table)
    require_one_writer_each(rb, found)
    if at_rest:  # while named slots are being marked, those that were told of stay until all are
        fresh = boundaries(("number",), ("source",), end_key=END).find(rb.storage)
        assert listed(found.table) == listed(fresh.table)
        ends = found.entries.at(END, np.arange(CAPACITY)).reshape(-1)
        assert listed(found.table) == followed(ring_of(rb), ends, None)


@pytest.mark.slow
@pytest.mark.product("edits after", few=6)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("edits", [[], [3, 4, 9]])
@pytest.mark.parametrize("after", [0, 2])
def test_what_is_followed_is_right_when_a_writer_dies_at_any_step(
    tmp_path: Path, point: str, edits: list[int], after: int
) -> None:
    path = tmp_path / "buffer"
    one = boundaries(("number",), ("source",), end_key=END)
    with opened(path, CAPACITY) as rb:
        rb.extend(steps(0, 0, 4, 6))
        with collectors(dies_at, path, CAPACITY, 1) as (victim,):
            victim[1].send((point, "kill", after, (7, 3), edits))
            assert victim[1].poll(50)
            assert victim[1].recv() == "wrote"
            rb.extend(steps(0, 4, 3, 6))
            require_same(one, rb, at_rest=True)
            victim[1].send("go")
            victim[0].join(50)
            died = victim[0].exitcode == -signal.SIGKILL
            assert died or victim[1].recv() == "alive"
            require_same(one, rb, at_rest=False)  # in the state that the writer left behind
            rb.sample(4)  # repairs the ring if the mutex was held
            require_same(one, rb, at_rest=True)
            engine_of(rb).seat.reap_dead()
            require_same(one, rb, at_rest=True)
            for turn in range(3):
                rb.extend(steps(0, 7 + 4 * turn, 4, 6))
                require_same(one, rb, at_rest=True)
    stays = point in ("write.source", "write.raw") and edits  # in-place changes keep both
    assert died or after or stays


@pytest.mark.slow
@pytest.mark.parametrize("point", ["write.head", "write.mark", "write.payload", "write.commit"])
def test_an_edit_that_was_looked_at_half_way_is_seen_once_it_is_done(
    tmp_path: Path, point: str
) -> None:
    path = tmp_path / "buffer"
    one = boundaries(("number",), ("source",), end_key=END)
    with opened(path, CAPACITY) as rb, collectors(dies_at, path, CAPACITY, 1) as (writer,):
        rb.extend(steps(0, 0, 4, 6))
        writer[1].send((point, "stop", 0, (9,), [5, 7, 8]))
        assert writer[1].poll(50)
        assert writer[1].recv() == "wrote"
        require_same(one, rb, at_rest=True)
        writer[1].send("go")
        while "T" not in Path(f"/proc/{writer[0].pid}/stat").read_text().rsplit(")", 1)[1].split():
            time.sleep(0.001)
        for _ in range(3):
            require_same(one, rb, at_rest=False)
        os.kill(writer[0].pid, signal.SIGCONT)
        assert writer[1].poll(50)
        assert writer[1].recv() == "alive"
        require_same(one, rb, at_rest=True)
        assert [6, 7] in listed(one.find(rb.storage).table)  # 5 and 7 now end an episode


def writes_and_edits(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes without end and changes items in place."""
    torch.set_num_threads(1)
    buffer, written = opened(path, capacity), 0
    connection.send("began")
    while not connection.poll():
        buffer.extend(steps(source, written, 1 + written % 4, 6))
        written += 1 + written % 4
        if written % 7 == 0:
            data = buffer[written % capacity : written % capacity + 1]
            if len(data) and int(data["source"][0]) == source:
                buffer[written % capacity : written % capacity + 1] = data


@pytest.mark.full
@pytest.mark.slow
def test_what_is_followed_beside_writers_that_are_killed_is_what_lies_there(
    tmp_path: Path,
) -> None:
    path, capacity = tmp_path / "buffer", 300
    one = boundaries(end_key=END)
    looks = 0
    with collectors(writes_and_edits, path, capacity, 3) as running, opened(path, capacity) as rb:
        began(*running)
        while rb.storage.ring() is None or not ring_of(rb).length:  # type: ignore[attr-defined]
            pass
        for turn in range(6):
            for _ in range(200):
                require_whole(one.find(rb.storage).table)
                looks += 1
            kill(running[turn % 3])
            running[turn % 3] = start(writes_and_edits, path, capacity, 3 + turn)
        for each in running:
            kill(each)
        rb.sample(1)
        engine_of(rb).seat.reap_dead()
        ends = one.find(rb.storage).entries.at(END, np.arange(capacity)).reshape(-1)
        expected = followed(ring_of(rb), ends, None)
        assert listed(one.find(rb.storage).table) == expected
    assert looks == 1200

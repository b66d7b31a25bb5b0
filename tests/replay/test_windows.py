"""Windows are delivered once and match the ring, whatever happens to the ring and its writers."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import StreamingSliceSampler, TensorDictReplayBuffer
from shmbuffer.memory.format import slots
from shmbuffer.samplers.slicing.windows import Windows
from tests.kit.rings import engine_of, ring_of
from tests.replay.slice_programs import opened, steps, up_to_three_thousand
from tests.replay.test_following import END, KEYS, PATHS, Histories, found_by
from tests.replay.trajectory_oracle import boundaries, followed, listed
from tests.replay.workers import collectors, kill, start
from tests.selection import seeds

STEPS = 3
MOST_LEFT = 2 * (STEPS - 1)  # steps of a lost window and of an incomplete one


class Taken:
    """Items that were delivered, by ticket and lane; no item may come twice."""

    def __init__(self, ring: Any, steps: int = STEPS) -> None:
        self.ring, self.steps = ring, steps
        self.items: set[tuple[int, int]] = set()

    def take(self, windows: Windows, table: Any, count: int) -> int:
        """Takes up to ``count`` windows."""
        rows = table.rows_of(windows.take(count))
        if not len(rows):
            return 0
        all_rows = (rows[:, None] + np.arange(self.steps)).ravel()
        elements = table.elements_of(all_rows)
        assert (elements >= 0).all(), "a window is of one trajectory"
        assert (table.rows_of(elements) == all_rows).all()
        words = self.ring.live.words[elements // self.ring.width]
        assert slots.committed(words).all()
        tickets, lanes = slots.tickets(words), elements % self.ring.width
        new = {*zip(tickets.tolist(), lanes.tolist(), strict=True)}
        assert len(new) == len(elements)
        assert not new & self.items, "an item comes in one window"
        self.items |= new
        return len(rows)

    def left(self, trajectory: list[int]) -> int:
        """Returns the number of items after the last one that was delivered."""
        found = np.array(trajectory)
        tickets = slots.tickets(self.ring.live.words[found // self.ring.width])
        lanes = (found % self.ring.width).tolist()
        each = [one in self.items for one in zip(tickets.tolist(), lanes, strict=True)][::-1]
        return each.index(True) if any(each) else len(each)


@pytest.mark.product("name lanes records", few=3)
@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("name", [name for name in KEYS if name != "by step"])
@pytest.mark.parametrize(("lanes", "records"), [(1, False), (2, False), (1, True)])
def test_no_item_comes_twice_and_no_window_is_left_whatever_happens(
    tmp_path: Path, name: str, seed: int, lanes: int, records: bool
) -> None:
    happened = Histories(tmp_path / "buffer", seed, lanes=lanes, records=records)
    windows = Windows(STEPS)
    one = boundaries(*PATHS, windows=windows, **KEYS[name])
    taken, count = Taken(happened.ring), 0
    is_edited = seed % 2 == 1
    if not is_edited:
        happened.edit = lambda: None  # type: ignore[method-assign]
    for _ in range(400):
        happened.happen()
        if not happened.ring.length or happened.random.random() < 0.3:
            continue
        if happened.random.random() < 0.03:
            one.forget()  # rebuilds the table; delivered items stay delivered
        table = found_by(one, happened.handles[0].storage).table
        count += taken.take(windows, table, happened.random.choice([0, 1, 5]))
        if not any(happened.open):
            count += taken.take(windows, table, 1000)
            for trajectory in listed(table) if not is_edited else ():
                assert taken.left(trajectory) <= MOST_LEFT
    assert count > 5


@pytest.mark.parametrize("how", ["commit", "abort"])
def test_no_step_is_passed_over_that_is_being_written(tmp_path: Path, how: str) -> None:
    """The slot of another writer lies between the steps of a stream until its write ends."""
    windows = Windows(STEPS)
    one = boundaries(("number",), ("source",), end_key=END, windows=windows)
    with opened(tmp_path / "buffer", 40) as rb, opened(tmp_path / "buffer", 40) as other:
        rb.extend(steps(0, 0, 2, 100))
        claims = ring_of(other).claims
        claims.claim(1)
        rb.extend(steps(0, 2, 5, 100))
        table = one.find(rb.storage).table
        assert not len(windows.take(5))
        getattr(claims, how)()
        table = one.find(rb.storage).table
        rows = table.rows_of(windows.take(5))
        found = table.elements_of((rows[:, None] + np.arange(STEPS)).ravel()).tolist()
        # The other writer's slot is 2. If the slot was released, the stream may have a gap there.
        assert found == ([0, 1, 3, 4, 5, 6] if how == "commit" else [3, 4, 5])


POINTS = [
    *("write.locked", "write.noted", "write.marking", "write.head", "write.mark", "write.source"),
    *("write.raw", "write.length", "write.payload", "write.claimed", "write.copy"),
    *("write.relocked", "write.goal", "write.committing", "write.commit", "write.lengthened"),
    *("write.count", "write.idle", "write.done"),
]


@pytest.mark.slow
@pytest.mark.product("edits", few=6)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("edits", [[], [3, 4, 9]])
def test_windows_are_right_when_a_writer_dies_at_any_step(
    tmp_path: Path, point: str, edits: list[int]
) -> None:
    from tests.replay.test_following_shared import CAPACITY, dies_at

    path, windows = tmp_path / "buffer", Windows(STEPS)
    one = boundaries(("number",), ("source",), end_key=END, windows=windows)
    with opened(path, CAPACITY) as rb:
        rb.extend(steps(0, 0, 4, 6))
        taken = Taken(ring_of(rb))
        with collectors(dies_at, path, CAPACITY, 1) as (victim,):
            victim[1].send((point, "kill", 0, (7, 3), edits))
            assert victim[1].poll(50)
            assert victim[1].recv() == "wrote"
            rb.extend(steps(0, 4, 3, 6))
            taken.take(windows, one.find(rb.storage).table, 1)
            victim[1].send("go")
            victim[0].join(50)
            taken.take(windows, one.find(rb.storage).table, 1)
            rb.sample(4)  # repairs the ring if the mutex was held
            engine_of(rb).seat.reap_dead()
            for turn in range(3):
                table = one.find(rb.storage).table
                taken.take(windows, table, 100)
                for trajectory in listed(table) if not edits else ():
                    assert taken.left(trajectory) <= MOST_LEFT
                rb.extend(steps(0, 7 + 4 * turn, 4, 6))
    assert taken.items


def _numbers(sample: Any, length: int) -> list[tuple[int, ...]]:
    found = torch.stack([sample["source"], sample["number"]], -1).reshape(-1, length, 2)
    for window in found.tolist():
        assert len({source for source, _ in window}) == 1
        assert all(after == before + 1 for (_, before), (_, after) in pairwise(window))
    return [tuple(window) for window in sample["index_generation"].reshape(-1, length).tolist()]


@pytest.mark.full
@pytest.mark.slow
def test_three_collectors_that_are_killed_lose_no_window_and_repeat_none(tmp_path: Path) -> None:
    """Each window in the ring at the end was delivered once, in the order of its collector."""
    path, capacity, length = tmp_path / "buffer", 40_000, 4
    sampler = StreamingSliceSampler(slice_len=length)
    with opened(path, capacity) as rb:
        rb.extend(steps(99, 0, 50, 11))
        reader = TensorDictReplayBuffer(storage=rb.storage, sampler=sampler)
        chance, seen = random.Random(0), []
        with collectors(up_to_three_thousand, path, capacity, 3) as running:
            for one in running:
                assert one[1].poll(50)
            for source in range(3, 11):
                for _ in range(chance.randrange(5, 30)):
                    seen += _windows(reader, sampler, 16, length)
                at = chance.randrange(3)
                kill(running[at])
                running[at] = start(up_to_three_thousand, path, capacity, source)
                assert running[at][1].poll(50)
            for one in running:
                kill(one)
        engine_of(rb).seat.reap_dead()
        while True:
            more = _windows(reader, sampler, 512, length)
            if not more:
                break
            seen += more
        ring = ring_of(rb)
        assert ring.head < capacity
        ends = reader.sampler._boundaries.find(rb.storage).entries.at(END, np.arange(capacity))
        trajectories = followed(ring, ends.reshape(-1), None)
        expected = [
            tuple(one[at : at + length])
            for one in trajectories
            for at in range(0, len(one) - length + 1, length)
        ]
        assert len(seen) == len({*seen}), "none comes twice"
        assert {*seen} == {*expected}, "tickets are slots, before the first lap"
        assert len(seen) > 100
        assert sampler.lost == 0


def _windows(
    reader: TensorDictReplayBuffer, sampler: StreamingSliceSampler, count: int, length: int
) -> list[tuple[int, ...]]:
    """Returns the windows of a batch, without the slices that were drawn at random."""
    before = sampler._windows.position
    sample = _numbers(reader.sample(count * length), length)
    after = sampler._windows.position
    assert after is not None
    return sample[: after[0] - (before[0] if before else 0)]

"""Units are read consistently while other processes write, also if any process is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from shmbuffer import FrameStack, NStep, RandomSampler, Sequence, TensorDictReplayBuffer
from shmbuffer.memory.upkeep.check import check
from shmbuffer.samplers.item_entries import RowEntries
from tests.kit.rings import engine_of, ring_of
from tests.replay import unit_programs
from tests.replay.unit_programs import UNITS, learn, opened, require_right
from tests.replay.workers import Worker, began, collectors, kill, start

CAPACITY, BATCHES = 2_000, 20


def steps(first: int, count: int, reward: float = 1.0) -> TensorDict:
    number = torch.arange(first, first + count)
    after = {
        "number": number + 1,
        "reward": torch.full((count,), reward),
        "done": torch.zeros(count, dtype=torch.bool),
    }
    return TensorDict({"number": number, "next": after}, [count])


class Overtaken(RandomSampler):
    """A sampler with which all items are overwritten between its first draws and the read."""

    def __init__(self, others: Any) -> None:
        super().__init__()
        self.others, self.turns = others, 3
        self.drawn: list[int] = []

    def sample(self, storage: Any, batch_size: int) -> Any:
        index, info = super().sample(storage, batch_size)
        self.drawn = info["index_generation"].tolist()
        if self.turns:
            self.turns -= 1
            self.others.extend(steps(self.others.write_count, 6))
        return index, info


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequence(2, burn_in=1),
        lambda: NStep(2, 1.0),
        lambda: FrameStack(2, keys=("number",)),
    ],
)
def test_an_anchor_is_the_item_that_was_drawn_and_not_the_next_one_of_its_slot(
    directory: Any, make: Any
) -> None:
    unit = make()
    others = TensorDictReplayBuffer(storage=directory(6))
    others.extend(steps(0, 6))
    sampler = Overtaken(others)
    rb = TensorDictReplayBuffer(storage=directory(6), sampler=sampler, sample_unit=unit)
    sample = rb.sample(4)
    assert not sampler.turns
    key = "anchor_generation" if isinstance(unit, Sequence) else "index_generation"
    assert sample[key][:: len(sample) // 4].tolist() == sampler.drawn
    assert (sample["number"] >= 18).all()


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("base", [Sequence, NStep])
def test_what_is_written_over_before_it_is_read_is_drawn_again(
    directory: Any, base: Any, prefetch: int | None
) -> None:
    others = TensorDictReplayBuffer(storage=directory(6))
    others.extend(steps(0, 6))
    overtaken = []

    class Slow(base):  # type: ignore[misc]
        def _expand(self, index: Any, info: Any, storage: Any) -> Any:
            found = super()._expand(index, info, storage)
            if len(overtaken) < 3:
                overtaken.append(found)
                others.extend(steps(others.write_count, 5))
            return found

    unit = Slow(3) if base is Sequence else Slow(3, 1.0)
    rb = TensorDictReplayBuffer(
        storage=directory(6), sample_unit=unit, batch_size=16, prefetch=prefetch
    )
    for _ in range(4):
        sample = rb.sample()
        if base is Sequence:
            rows, valid = sample["number"].view(16, 3), sample["validity_mask"].view(16, 3)
            assert (rows.diff(dim=1) == valid[:, 1:]).all()
        else:
            count = sample["steps_to_next_obs"]
            assert torch.equal(sample["next", "number"], sample["number"] + count)
            assert torch.equal(sample["next", "reward"], count.float())
        assert torch.equal(sample["index_generation"], sample["number"])
    assert len(overtaken) == 3
    rb.close()


def test_a_reward_that_is_written_over_while_it_is_copied_is_not_summed(
    directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step lies between the first and the last step, which stay where they are."""

    class Second(RandomSampler):
        def sample(self, storage: Any, batch_size: int) -> Any:
            return torch.ones(batch_size, dtype=torch.int64), {}

    writer, other = (TensorDictReplayBuffer(storage=directory(8)) for _ in range(2))
    rb = TensorDictReplayBuffer(
        storage=directory(8), sampler=Second(), sample_unit=NStep(3, 1.0), batch_size=4
    )
    writer.extend(steps(0, 5))
    assert set(rb.sample()["next", "reward"].tolist()) == {3.0}
    take, writes = RowEntries.take, [steps(1_000, 1, reward=1_000.0)]

    def overtaken(self: Any, path: Any, elements: Any) -> Any:
        if writes:
            other.storage.set(torch.tensor([2]), writes.pop())
        return take(self, path, elements)

    monkeypatch.setattr(RowEntries, "take", overtaken)
    sample = rb.sample()
    assert not writes
    # The slots now hold steps of another collector; this collector's next steps are 3 and 4.
    assert set(sample["next", "reward"].tolist()) == {3.0}
    assert set(sample["next", "number"].tolist()) == {5}


@pytest.mark.parametrize("base", [Sequence, NStep])
def test_observations_that_are_stored_once_are_whole_in_what_a_unit_makes(
    directory: Any, base: Any
) -> None:
    unit = Sequence(3, burn_in=1) if base is Sequence else NStep(3, 1.0)
    storage = directory(50, share_next=True)
    rb = TensorDictReplayBuffer(storage=storage, sample_unit=unit, batch_size=200)
    number = torch.arange(70)
    seen = number[:, None].float().expand(70, 8).clone()
    after = {"seen": seen + 1, "reward": torch.ones(70), "done": number % 10 == 9}
    for part in TensorDict({"seen": seen, "next": TensorDict(after, [70])}, [70]).split(7):
        rb.extend(part)
    sample = rb.sample()
    steps = sample["steps_to_next_obs"] if base is NStep else torch.ones(len(sample))
    assert torch.equal(sample["next", "seen"], sample["seen"] + steps[:, None])
    assert set(steps.tolist()) == ({1, 2, 3} if base is NStep else {1.0})


def test_it_gives_up_where_others_write_faster_than_it_looks(directory: Any) -> None:
    others = TensorDictReplayBuffer(storage=directory(6))
    others.extend(steps(0, 6))
    sampler = Overtaken(others)
    sampler.turns = 10**9
    rb = TensorDictReplayBuffer(storage=directory(6), sampler=sampler, sample_unit=Sequence(2))
    with pytest.raises(
        IndexError, match="the items that the Overtaken chose were overwritten during each of"
    ):
        rb.sample(4)


@pytest.mark.product(few=1)
@pytest.mark.slow
@pytest.mark.parametrize("which", range(len(UNITS)), ids=list(UNITS))
def test_windows_stay_whole_while_collectors_and_learners_are_killed(
    tmp_path: Path, which: int
) -> None:
    path, unit = tmp_path / "buffer", list(UNITS.values())[which]()

    def begun(target: Any, number: int) -> Worker:
        worker = start(target, path, CAPACITY, number)
        began(worker)
        return worker

    with (
        collectors(unit_programs.collector, path, CAPACITY, 2) as writing,
        collectors(unit_programs.learning, path, CAPACITY, 1) as learning,
    ):
        began(*writing, *learning)
        with opened(path, CAPACITY, unit) as rb:
            lives: set[int] = set()
            for turn in range(2):
                for _ in range(BATCHES):
                    sample = rb.sample()
                    learn(rb, unit, sample)
                    lives.update(sample["life"].tolist())
                kill(writing[turn % 2])  # at any point
                kill(learning[0])  # it has not stopped because of an error
                learn(rb, unit, rb.sample())
                writing[turn % 2] = begun(unit_programs.collector, 2 + turn)
                learning[0] = begun(unit_programs.learning, which + turn)
            assert lives >= {0, 1, 2}
        for one in (*writing, *learning):
            kill(one)
    with opened(path, CAPACITY, unit) as rb:  # no client is alive: recovered
        assert engine_of(rb).report.reason == "no client alive"
        ring = ring_of(rb)
        rb.update_priority(np.arange(ring.elements)[ring.live.holds(slice(CAPACITY))], 1.0)
        found = set()
        for _ in range(BATCHES):
            sample = rb.sample()
            require_right(unit, sample)
            found.update(sample["life"].tolist())
        assert len(found) > 1
    assert check(path).problems == []

"""Slices of a buffer with several collectors: each is from one of them, also if they die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.crash.harness import dies
from tests.kit.rings import engine_of, ring_of
from tests.replay import slice_programs
from tests.replay.slice_model import History, cut_up, drawn, slices
from tests.replay.slice_programs import opened, steps
from tests.replay.workers import began, collectors, kill, start, tell
from tests.selection import seeds

SAMPLERS = {
    "uniform": SliceSampler,
    "without replacement": SliceSamplerWithoutReplacement,
    "prioritized": lambda **options: PrioritizedSliceSampler(1000, 0.7, 0.9, **options),
}


@pytest.fixture(params=SAMPLERS)
def kind(request: pytest.FixtureRequest) -> Any:
    return SAMPLERS[request.param]


def learner(storage: Any, sampler: Any, batch_size: int) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)


# -- several handles in one process ----------------------------------------------------------------


@pytest.mark.product("kind lanes", few=2)
@pytest.mark.parametrize("seed", seeds(2, 4))
@pytest.mark.parametrize("lanes", [1, 2])
def test_slices_are_of_one_collector_and_of_consecutive_steps_of_it(
    directory: Any, kind: Any, seed: int, lanes: int
) -> None:
    history = History(seed, lanes=lanes, ends=0.12)
    options = {"max_size": 24 * lanes, "ndim": min(lanes, 2)}
    rb = learner(directory(**options), kind(slice_len=3), 30)
    collectors = [TensorDictReplayBuffer(storage=directory(**options)) for _ in range(3)]
    for at in range(14 + 6 * seed):
        source = (at * 7 + seed) % 3
        collectors[source].extend(history.steps(history.chunk(4), source))
        if at % 9 == 8:
            ring = ring_of(collectors[source])
            ring.claims.claim(1)
            ring.claims.abort()
            history.hole(1)
    legal = slices(history.trajectories(24), 3)
    assert legal
    assert set(drawn(rb, 200)) == legal
    sample = rb.sample()
    assert (sample["source"].view(-1, 3) == sample["source"].view(-1, 3)[:, :1]).all()


def test_ids_that_two_collectors_use_are_two_trajectories(directory: Any) -> None:
    rb = learner(directory(12), SliceSampler(slice_len=2, traj_key="id"), 400)
    collectors = [TensorDictReplayBuffer(storage=directory(12)) for _ in range(2)]
    for at in range(4):
        for source, collector in enumerate(collectors):
            data = steps(source, 2 * at + source, 1, 10**9).set("id", torch.zeros(1))
            collector.extend(data)
    assert set(drawn(rb, 4)) == {(at, at + 2) for at in range(6)}


def test_an_id_changes_also_where_another_collector_wrote_in_between(directory: Any) -> None:
    rb = learner(directory(16), SliceSampler(slice_len=2, traj_key="id"), 400)
    collectors = [TensorDictReplayBuffer(storage=directory(16)) for _ in range(2)]
    for at in range(6):
        for source, collector in enumerate(collectors):
            data = steps(source, at, 1, 10**9)
            data["id"] = torch.tensor([10 * source + (at >= 2 + source)])
            collector.extend(data.set("number", data["number"] + 100 * source))
    assert set(drawn(rb, 4)) == {(0, 1), (2, 3), (3, 4), (4, 5)} | {
        (at, at + 1) for at in (100, 101, 103, 104)
    }


def test_fragments_of_two_collectors_are_kept_apart(directory: Any) -> None:
    sampler = SliceSampler(slice_len=2, traj_key="id", step_key="number", fragmented=True)
    rb = learner(directory(12), sampler, 400)
    collectors = [TensorDictReplayBuffer(storage=directory(12)) for _ in range(2)]
    for at in (2, 0, 1):
        for source, collector in enumerate(collectors):
            data = steps(source, at, 1, 10**9).set("id", torch.zeros(1, dtype=torch.int64))
            collector.extend(data.set("name", data["number"] + 100 * source))
    sample = rb.sample()
    pairs = {tuple(pair) for pair in sample["name"].view(-1, 2).tolist()}
    assert pairs == {(0, 1), (1, 2), (100, 101), (101, 102)}


@pytest.mark.parametrize("strict", [True, False])
def test_slices_that_are_written_over_before_they_are_read_are_drawn_again(
    directory: Any, kind: Any, strict: bool
) -> None:
    others = TensorDictReplayBuffer(storage=directory(6))
    base = type(kind(slice_len=3))

    class Slow(base):  # type: ignore[misc, valid-type]
        """A sampler with which a writer overwrites items between its first draw and the read."""

        overtaken = 0

        def sample(self, storage: Any, batch_size: int) -> Any:
            found = super().sample(storage, batch_size)
            if self.overtaken < 3:
                self.overtaken += 1
                others.extend(steps(0, 6 * self.overtaken, 6, 4))
            return found

    options = {"slice_len": 3, "strict_length": strict}
    prioritized = base is PrioritizedSliceSampler
    sampler = Slow(10, 0.7, 0.9, **options) if prioritized else Slow(**options)
    rb = learner(directory(6), sampler, 6)
    others.extend(steps(0, 0, 6, 4))
    sample = rb.sample()
    assert sampler.overtaken > 0
    last = 6 * sampler.overtaken
    assert (sample["number"] >= last).all()
    assert torch.equal(sample["index_generation"], sample["number"])
    for one in cut_up(sample["number"], sample["next", "truncated"]):
        assert one == tuple(range(one[0], one[0] + len(one)))


def test_items_that_a_dead_writer_had_not_come_to_follow_nothing(directory: Any) -> None:
    """The head is past these slots, so they would count as newer than their successors."""
    rb = learner(directory(12), SliceSampler(slice_len=2), 400)
    rb.extend(steps(0, 0, 12, 10**9))
    assert rb.storage.scratch_dir is not None
    path = Path(rb.storage.scratch_dir)
    assert dies(path, "write.mark", lambda engine: engine.ring().claims.claim(3), after=1)  # type: ignore[union-attr]
    assert set(drawn(rb, 4)) == {(at, at + 1) for at in range(2, 11)}
    engine_of(rb).seat.reap_dead()
    assert set(drawn(rb, 4)) == {(at, at + 1) for at in range(3, 11)}
    rb.extend(steps(0, 12, 2, 10**9))
    assert set(drawn(rb, 4)) == {(at, at + 1) for at in (*range(5, 11), 12)}


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tail_that_a_killed_collector_leaves_is_truncated_and_mixed_with_nothing(
    tmp_path: Path,
) -> None:
    path, capacity = tmp_path / "buffer", 40

    def numbers_and_sources(rb: Any) -> set[tuple[tuple[int, ...], int]]:
        found = set()
        for _ in range(10):
            sample = rb.sample()
            last = torch.tensor([False, False, True] * 100).unsqueeze(-1)
            assert torch.equal(sample["next", "truncated"], last)
            assert torch.equal(sample["next", "done"], last)
            assert not sample["next", "terminated"].any()
            rows = sample["number"].view(-1, 3).tolist()
            sources = sample["source"].view(-1, 3)
            assert (sources == sources[:, :1]).all()
            assert torch.equal(sample["payload"], sample["number"][:, None].expand(300, 64))
            found |= {(tuple(row), int(by)) for row, by in zip(rows, sources[:, 0], strict=True)}
        return found

    def triples(first: int, last: int, source: int) -> set[tuple[tuple[int, ...], int]]:
        return {((at, at + 1, at + 2), source) for at in range(first, last - 1)}

    with collectors(slice_programs.on_command, path, capacity, 2) as (survivor, victim):
        tell(survivor, 2)
        for count in (1, 2, 1, 1):
            tell(victim, count)
            tell(survivor, count)
        with opened(path, capacity) as rb:
            rb.set_sampler(SliceSampler(slice_len=3))
            rb._parts.batch_size = 300
            legal = triples(0, 6, 0) | triples(0, 4, 1)
            assert numbers_and_sources(rb) == legal
            kill(victim)  # between two writes
            tell(survivor, 2)
            assert numbers_and_sources(rb) == triples(0, 8, 0) | triples(0, 4, 1)
            again = start(slice_programs.on_command, path, capacity, 2)
            try:
                tell(again, 4)  # a new life, which does not continue the earlier one
                tell(again, -3)  # this one dies in the middle of a write
                kill(again)
            finally:
                again[0].kill()
                again[0].join(50)
            tell(survivor, 3)
            legal = triples(0, 8, 0) | triples(9, 11, 0) | triples(0, 4, 1) | triples(0, 3, 2)
            assert numbers_and_sources(rb) == legal
            rb.close()
        kill(survivor)
    with opened(path, capacity) as rb:  # no client is alive: recovered
        assert engine_of(rb).report.reason == "no client alive"
        rb.set_sampler(SliceSampler(slice_len=3))
        rb._parts.batch_size = 300
        assert numbers_and_sources(rb) == legal


@pytest.mark.product(few=1)
@pytest.mark.slow
def test_slices_stay_whole_while_collectors_write(tmp_path: Path, kind: Any) -> None:
    path, capacity = tmp_path / "buffer", 600
    with collectors(slice_programs.without_end, path, capacity, 2) as running:
        began(*running)
        with opened(path, capacity) as rb:
            rb.set_sampler(kind(slice_len=4, strict_length=False))
            rb._parts.batch_size = 32
            seen = set()
            newest = [0, 0]
            while min(newest) < 5 * capacity:
                sample = rb.sample()
                number, source = sample["number"], sample["source"]
                assert torch.equal(sample["payload"], number[:, None].expand(-1, 64))
                last = sample["next", "truncated"].squeeze(-1)
                assert last[-1]
                follows = ~last[:-1]
                assert (number[1:] == number[:-1] + 1)[follows].all()
                assert (source[1:] == source[:-1])[follows].all()
                ends = number % (11 + source) == 10 + source
                assert not ends[~last].any()
                for by in (0, 1):
                    if (source == by).any():
                        newest[by] = max(newest[by], int(number[source == by].max()))
                        seen.add(by)
            assert seen == {0, 1}
        for _, connection in running:
            connection.send("stop")

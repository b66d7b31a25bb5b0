"""Streams of several collectors that take turns and die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shmbuffer import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.kit.rings import engine_of
from tests.replay import slice_programs
from tests.replay.slice_model import Slice, cut_up
from tests.replay.slice_programs import opened, rows_of_streams
from tests.replay.workers import collectors, kill, start, tell

CAPACITY, LENGTH = 150, 3


class Written:
    """The steps that collectors were told to write, in the order in which they wrote them."""

    def __init__(self) -> None:
        self.rows: list[tuple[tuple[int, int], int, bool] | None] = []
        self._steps: dict[int, int] = {}

    def steps(self, source: int, count: int) -> None:
        """Makes ``count`` steps of all environments of a collector."""
        for step in range(self._steps.get(source, 0), self._steps.get(source, 0) + count):
            data = rows_of_streams(source, step, source + 2)
            numbers, done = data["number"].tolist(), data["next", "done"].flatten().tolist()
            self.rows += [
                ((source, env), number, end)
                for env, (number, end) in enumerate(zip(numbers, done, strict=True))
            ]
            self._steps[source] = step + 1

    def slices(self) -> set[Slice]:
        """Returns every slice of the trajectories that are still stored, by stream."""
        found: set[Slice] = set()
        open_: dict[tuple[int, int], list[int]] = {}
        for row in self.rows[-CAPACITY:]:
            if row is None:
                open_.clear()
                continue
            stream, number, end = row
            run = open_.setdefault(stream, [])
            run.append(number)
            if len(run) >= LENGTH:
                found.add(tuple(run[-LENGTH:]))
            if end:
                del open_[stream]
        return found


def drawn(rb: Any, batches: int) -> set[Slice]:
    found: set[Slice] = set()
    for _ in range(batches):
        sample = rb.sample()
        assert torch.equal(
            sample["next", "truncated"].flatten(),
            torch.tensor([False] * (LENGTH - 1) + [True]).repeat(len(sample) // LENGTH),
        )
        found.update(cut_up(sample["number"], sample["next", "truncated"]))
    return found


def learner(path: Path, sampler: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=opened(path, CAPACITY).storage, sampler=sampler, batch_size=LENGTH * 300
    )


def test_slices_of_three_collectors_are_exactly_those_of_each_of_their_streams(
    tmp_path: Path,
) -> None:
    path, written = tmp_path / "buffer", Written()
    with collectors(slice_programs.in_streams, path, CAPACITY, 3) as running:

        def write(source: int, count: int) -> None:
            tell(running[source], count)
            written.steps(source, count)

        for turn in range(8):
            for source in range(3):
                write(source, 1 + (turn + source) % 2)
        with learner(path, SliceSampler(slice_len=LENGTH)) as rb:
            legal = written.slices()
            assert len({number // 1000 for slice_ in legal for number in slice_}) == 2 + 3 + 4
            assert drawn(rb, 12) == legal
            tell(running[1], -2)  # it dies in the middle of a write
            kill(running[1])
            engine_of(rb).seat.reap_dead()
            written.rows += [None] * 2
            for turn in range(6):
                for source in (0, 2):
                    write(source, 1 + turn % 2)
            assert drawn(rb, 12) == written.slices()
            running[1] = start(slice_programs.in_streams, path, CAPACITY, 5)
            written.steps(5, 4)  # a new life, whose streams have the same numbers
            tell(running[1], 4)
            write(0, 2)
            assert drawn(rb, 20) == written.slices()
            for sampler in (
                SliceSamplerWithoutReplacement(slice_len=LENGTH),
                PrioritizedSliceSampler(CAPACITY, 0.7, 0.9, slice_len=LENGTH),
            ):
                rb.set_sampler(sampler)
                rb._parts.batch_size = LENGTH * (
                    9 if sampler.__class__.__name__.endswith("ment") else 300
                )
                found = drawn(rb, 20)
                assert found
                assert found <= written.slices()
            assert found == written.slices()


def test_rows_of_a_dead_collector_are_recovered_with_their_streams(tmp_path: Path) -> None:
    path, written = tmp_path / "buffer", Written()
    with collectors(slice_programs.in_streams, path, CAPACITY, 2) as running:
        for source in (0, 1, 0, 1):
            tell(running[source], 3)
            written.steps(source, 3)
        for one in running:
            kill(one)
    with learner(path, SliceSampler(slice_len=LENGTH)) as rb:
        assert engine_of(rb).report.reason == "no client alive"
        assert drawn(rb, 12) == written.slices()

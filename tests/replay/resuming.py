"""A learner's loop that can be saved and resumed, and then repeats the same steps exactly.

As a program, it resumes every save in a folder in a process of its own and writes the samples
beside each save: ``python -m tests.replay.resuming FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    LinearScheduler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)

ROOT = Path(__file__).parents[2]
STEPS, SAVED_AT = 14, 5  # saved after a write
ROOM, WRAPS = 400, 60  # with prefetch nothing is overwritten, because that would be a race
EPISODE = 5

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda _: RandomSampler(),
    "prioritized": lambda size: PrioritizedSampler(size, 0.7, 0.4),
    "prioritized, float64": lambda size: PrioritizedSampler(size, 0.7, 0.4, dtype=torch.double),
    "prioritized, largest within": lambda size: PrioritizedSampler(
        size, 0.7, 0.4, max_priority_within_buffer=True
    ),
    "without replacement": lambda _: SamplerWithoutReplacement(),
    "shared pass": lambda _: SamplerWithoutReplacement(world_size=2, rank=1),
    "slices": lambda _: SliceSampler(slice_len=4),
    "slices without replacement": lambda _: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda size: PrioritizedSliceSampler(
        size, alpha=0.7, beta=0.4, slice_len=4
    ),
}
PLACES: dict[str, Callable[[int, Path], Any]] = {
    "memory": lambda size, _: LazyTensorStorage(size),
    "directory": lambda size, path: LazyMemmapStorage(size, scratch_dir=path),
    "records": lambda size, path: LazyStackStorage(
        size, max_bytes=2**20, scratch_dir=path, shared_init=True
    ),
}


class Case(NamedTuple):
    sampler: str
    place: str
    prefetch: int

    @property
    def name(self) -> str:
        return f"{self.sampler}-{self.place}-{self.prefetch}"


CASES = [
    Case(sampler, place, prefetch)
    for sampler in SAMPLERS
    for place in PLACES
    for prefetch in (0, 3)
]


def items(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "episode": number // EPISODE}, [count])


class Loop:
    """A buffer, the schedule of its beta, and the current step of both."""

    def __init__(self, case: Case, folder: Path) -> None:
        size = ROOM if case.prefetch else WRAPS
        self.rb = TensorDictReplayBuffer(
            storage=PLACES[case.place](size, folder / "buffer"),
            sampler=SAMPLERS[case.sampler](size),
            batch_size=8,
            prefetch=case.prefetch or None,
            generator=torch.Generator().manual_seed(3),
        )
        self.beta = None
        if isinstance(self.rb.sampler, PrioritizedSampler):
            self.beta = LinearScheduler(self.rb, "beta", final_value=1.0, num_steps=STEPS)
        self.step = 0

    def write(self, first: int, count: int) -> None:
        """Writes whole episodes of two environments in turn."""
        data = items(first, count)
        self.rb.extend(data, streams=(data["episode"] % 2).to(torch.int64))

    def begin(self) -> None:
        self.write(0, 50)

    def next(self) -> dict[str, torch.Tensor]:
        """Runs a step: samples, updates priorities, and writes items at every third step."""
        batch = self.rb.sample()
        found = {
            ".".join(key): value.clone()
            for key, value in batch.items(True, leaves_only=True, is_leaf=None)
            for key in [(key,) if isinstance(key, str) else key]
        }
        batch["td_error"] = (batch["number"] * 7 + self.step) % 13 / 4.0
        self.rb.update_tensordict_priority(batch)
        if self.beta is not None:
            self.beta.step()
        if self.step % 3 == 1:
            self.write(35 + self.step * EPISODE, EPISODE * 3)
        self.step += 1
        return found

    def save(self, path: Path) -> None:
        beta = None if self.beta is None else self.beta.state_dict()
        self.rb.dumps(path, extra={"beta": beta, "step": self.step})

    def load(self, path: Path) -> None:
        extra = self.rb.loads(path)
        self.step = extra["step"]
        if self.beta is not None:
            self.beta.load_state_dict(extra["beta"])

    def rest(self) -> list[dict[str, torch.Tensor]]:
        """Runs the remaining steps."""
        return [self.next() for _ in range(self.step, STEPS)]

    def close(self) -> None:
        self.rb.close()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(99)
    for case in CASES:
        if (where / case.name).exists():
            (where / case.name / "again").mkdir()
            loop = Loop(case, where / case.name / "again")
            loop.load(where / case.name / "save")
            torch.save(loop.rest(), where / case.name / "resumed.pt")
            loop.close()

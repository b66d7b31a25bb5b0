"""Windows of one stream compared with TorchRL, and how an ensemble weights ``sampleable``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import ours, theirs

CAPACITY, STEPS = 48, 4


class Stream:
    """Makes the steps of one collector, equally for both families."""

    def __init__(self, seed: int, keys: str) -> None:
        self.random, self.keys, self.number, self.episode = random.Random(seed), keys, 0, 0

    def steps(self, count: int) -> TensorDict:
        rows = []
        for _ in range(count):
            ends, begins = self.random.random() < 0.1, self.random.random() < 0.04
            rows.append((self.number, ends, begins and self.keys != "ids", self.episode))
            self.number += 1
            self.episode += ends
        number, ends, begins, episode = (torch.tensor(one) for one in zip(*rows, strict=True))
        data = {"number": number, "is_init": begins[:, None]}
        if self.keys != "flags":
            data["episode"] = episode
        if self.keys != "ids":
            data["next"] = TensorDict({"done": ends[:, None]}, [count])
        return TensorDict(data, [count])


def buffer(family: Any, **options: Any) -> Any:
    return family.TensorDictReplayBuffer(
        storage=family.LazyTensorStorage(CAPACITY),
        sampler=family.StreamingSliceSampler(slice_len=STEPS, **options),
    )


def options_of(keys: str) -> dict[str, Any]:
    return {} if keys == "flags" else {"traj_key": "episode"}


def queued(rb: Any, count: int) -> int:
    """Returns the number of windows in TorchRL's next draw."""
    sampler, found = rb._sampler, 0
    for index, version in list(sampler._queued_slices):
        found += bool(torch.equal(sampler._slot_versions[index], version)) and found < count
    return found


@pytest.mark.parametrize("keys", ["flags", "ids", "both"])
@pytest.mark.parametrize("seed", range(12))
def test_the_same_windows_come_in_the_same_order(keys: str, seed: int) -> None:
    stream, chance = Stream(seed, keys), random.Random(seed)
    pair = [buffer(family, **options_of(keys)) for family in (ours, theirs)]
    windows = 0
    for _ in range(60):
        data = stream.steps(chance.choice([1, 2, 7, 20]))
        for rb in pair:
            rb.extend(data.clone())
        pair[0].can_sample(STEPS)  # our index is updated on request, theirs at every write
        count = chance.choice([1, 2, 4])
        fresh = queued(pair[1], count)
        if not fresh or chance.random() < 0.3:
            continue
        samples = [rb.sample(count * STEPS) for rb in pair]
        for key in ("number", ("next", "truncated"), ("next", "done"), "is_init"):
            mine, its = (sample.get(key).reshape(count, -1)[:fresh] for sample in samples)
            assert mine.tolist() == its.tolist(), key
        windows += fresh
    assert windows > 20


@pytest.mark.parametrize("strict", [True, False])
def test_the_same_members_are_sampleable(strict: bool) -> None:
    found = []
    for family in (ours, theirs):
        # without is_init, which splits our slices
        options = {"traj_key": "episode", "strict_length": strict}
        rb = buffer(family, **options)
        rb.extend(Stream(3, "ids").steps(40))
        plain = family.SliceSampler(slice_len=STEPS, **options)
        each = [rb._sampler, plain, family.RandomSampler()]
        found.append([int(one._sampleable_count(rb._storage, 8)) for one in each])
    assert found[0] == found[1]

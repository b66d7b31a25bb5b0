"""The sets of slices that can be drawn equal those of TorchRL, including the flags."""

# Every step is called immediately, so the loop variables in it have the values of its round.
# ruff: noqa: B023

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compat.family import ours, theirs
from tests.compat.trace import Scenario, Step, assert_the_same, episodes

CAPACITY = 20

CONTENTS = {
    "full": [episodes(4, 4, 4, 4, 4)],
    "open": [episodes(4, 4), episodes(4, first=8)[:2]],
    "wrapped": [episodes(4, 4, 4, 4, 4), episodes(4, 4, first=20)[:7]],
    "ragged": [episodes(5, 3, 1, 7, 4)],
}

Slice = tuple[tuple[int, bool, bool, bool], ...]


def made(family: Any, cls: str, contents: str, batch_size: int, options: dict[str, Any]) -> Any:
    sampler_class = getattr(family, cls)
    if cls == "PrioritizedSliceSampler":
        sampler = sampler_class(CAPACITY, 0.7, 0.9, **options)
    else:
        sampler = sampler_class(**options)
    rb = family.TensorDictReplayBuffer(
        storage=family.LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=batch_size
    )
    for data in CONTENTS[contents]:
        rb.extend(data)
    return rb


def support(rb: Any, draws: int = 80) -> set[Slice]:
    """Returns every slice in ``draws`` samples, with the id and the flags of each step."""
    seen: set[Slice] = set()
    for _ in range(draws):
        sample = rb.sample()
        flags = [
            sample["next", key].flatten().tolist() for key in ("truncated", "done", "terminated")
        ]
        current: list[tuple[int, bool, bool, bool]] = []
        for step in zip(sample["id"].tolist(), *flags, strict=True):
            current.append(step)
            if step[1]:
                seen.add(tuple(current))
                current = []
        assert not current, "the last step of a sample is truncated"
    return seen


LENGTHS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 steps": (8, {"slice_len": 2}),
    "4 steps": (8, {"slice_len": 4}),
    "2 slices": (8, {"num_slices": 2}),
    "3 steps, not strict": (9, {"slice_len": 3, "strict_length": False}),
    "2 slices, not strict": (8, {"num_slices": 2, "strict_length": False}),
}


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("by", ["traj_key", "end_key"])
@pytest.mark.parametrize(
    "cls", ["SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler"]
)
def test_the_same_slices_can_be_drawn(cls: str, by: str, lengths: str, contents: str) -> None:
    batch_size, options = LENGTHS[lengths]
    options = {**options, by: "episode" if by == "traj_key" else ("next", "done")}
    mine = made(ours, cls, contents, batch_size, options)
    other = made(theirs, cls, contents, batch_size, options)
    found = support(mine)
    try:
        expected = support(other)
    except RuntimeError:
        # TorchRL fails if its draw hits only short trajectories, or any. Here they are never drawn,
        # as strict_length says.
        assert options.get("strict_length", True)
        assert cls != "SliceSampler"
        length = options.get("slice_len", batch_size // options.get("num_slices", 1))
        assert {len(one) for one in found} == {length}
        return
    # Rare slices may be missing in either set; a slice that only one library can draw is an error.
    for rare in found ^ expected:
        assert rare in support(other, 600), f"only here: {rare}"
        assert rare in support(mine, 600), f"only in TorchRL: {rare}"


def what_slice_samples_hold(family: Any, step: Step) -> None:
    for cls in ("SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler"):
        for key in (("next", "truncated"), ("next", "cut"), None):
            options = {"slice_len": 2, "traj_key": "episode", "truncated_key": key}
            rb = made(family, cls, "full", 8, options)
            step(f"{cls} {key}", lambda: rb.sample(), values=False)
        options = {"slice_len": 3, "traj_key": "episode"}
        step(f"{cls} odd", lambda: made(family, cls, "full", 8, options).sample())
        options = {"num_slices": 3, "traj_key": "episode"}
        step(f"{cls} odd slices", lambda: made(family, cls, "full", 8, options).sample())
        options = {"slice_len": 6, "traj_key": "episode"}
        step(f"{cls} too long", lambda: made(family, cls, "full", 12, options).sample())


def passes(family: Any, step: Step) -> None:
    options = {"num_slices": 2, "traj_key": "episode", "shuffle": False}
    rb = made(family, "SliceSamplerWithoutReplacement", "full", 8, options)
    for number in range(2):
        step(f"pass {number}", lambda: [batch["id"].tolist() for batch in rb])
    rb = made(family, "SliceSamplerWithoutReplacement", "full", 8, {**options, "drop_last": True})
    for number in range(2):
        step(f"drop last {number}", lambda: [batch["id"].tolist() for batch in rb])
    rb = made(
        family, "SliceSamplerWithoutReplacement", "ragged", 100,
        {"num_slices": 5, "traj_key": "episode", "strict_length": False},
    )  # fmt: skip
    step("not strict", lambda: sorted(rb.sample()["id"].tolist()))


def lanes(family: Any, step: Step) -> None:
    for cls in ("SliceSampler", "SliceSamplerWithoutReplacement"):
        rb = family.TensorDictReplayBuffer(
            storage=family.LazyTensorStorage(16, ndim=2),
            sampler=getattr(family, cls)(slice_len=2, traj_key="episode"),
            batch_size=8,
        )
        rb.extend(torch.stack([episodes(4, 4), episodes(4, 4, first=100)]))
        step(f"{cls} sample", lambda: rb.sample(), values=False)
        step(
            f"{cls} slices",
            lambda: sorted(
                {tuple(one) for _ in range(100) for one in rb.sample()["id"].view(-1, 2).tolist()}
            ),
        )


@pytest.mark.parametrize("program", [what_slice_samples_hold, passes, lanes])
def test_samples_and_passes_are_the_same(program: Any) -> None:
    # TorchRL's index of a slice sample has the shape [n, 1].
    hidden = {"_weight", "priority_weight"} | ({"index"} if program is not lanes else set())
    assert_the_same(Scenario(program), frozenset(hidden))


def test_the_index_of_a_slice_sample_is_flat_here_and_a_column_in_torchrl() -> None:
    options = {"slice_len": 2, "traj_key": "episode"}
    mine = made(ours, "SliceSampler", "full", 8, options).sample()
    other = made(theirs, "SliceSampler", "full", 8, options).sample()
    assert list(mine["index"].shape) == [8]
    assert list(other["index"].shape) == [8, 1]

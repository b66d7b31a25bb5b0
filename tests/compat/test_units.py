"""Sample units agree with TorchRL for one writer: windows, masks and priorities."""

# Every step is called immediately, so the loop variables in it have the values of its round.
# ruff: noqa: B023

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.compat.family import ours, theirs
from tests.compat.trace import Scenario, Step, assert_the_same, episodes

from torchrl.envs.transforms import (  # type: ignore[import-not-found, unused-ignore]  # isort: skip
    MultiStepTransform,
)

CAPACITY = 20
HIDDEN = frozenset({"index_generation", "anchor_generation", "_weight", "priority_weight"})
CONTENTS = {
    "full": [episodes(4, 4, 4, 4, 4)],
    "open": [episodes(4, 4), episodes(4, first=8)[:2]],
    "wrapped": [episodes(4, 4, 4, 4, 4), episodes(4, 4, first=20)[:7]],
    "ragged": [episodes(5, 3, 1, 7, 4)],
}
UNITS: list[dict[str, Any]] = [
    {"length": 3},
    {"length": 2, "burn_in": 2, "bootstrap": 1},
    {"length": 2, "burn_in": 1, "dilation": 2},
    {"length": 9, "done_key": None},
]


def filled(family: Any, contents: str, sampler: Any = None, unit: Any = None) -> Any:
    rb = family.TensorDictReplayBuffer(
        storage=family.LazyTensorStorage(CAPACITY),
        sampler=sampler,
        sample_unit=unit,
        batch_size=5,
    )
    for data in CONTENTS[contents]:
        rb.extend(data)
    return rb


def windows(family: Any, step: Step) -> None:
    for contents in CONTENTS:
        rb = filled(family, contents)
        for options in UNITS:
            for boundary in ("pad", "stop", "include_reset"):
                unit = family.Sequence(episode_boundary=boundary, **options)
                info = {"extra": torch.arange(len(rb)), "one": torch.tensor(3)}
                step(
                    f"{contents} {options} {boundary}",
                    lambda: unit.expand(torch.arange(len(rb)), info, rb.storage),
                )


def lanes(family: Any, step: Step) -> None:
    rb = family.TensorDictReplayBuffer(storage=family.LazyTensorStorage(40, ndim=2))
    rb.extend(torch.stack([episodes(4, 4), episodes(5, 3, first=100)]))
    anchors = tuple(torch.tensor([[0, 0], [3, 1], [4, 0], [7, 1]]).T)
    for boundary in ("pad", "stop", "include_reset"):
        unit = family.Sequence(2, boundary, burn_in=1, bootstrap=1)
        step(boundary, lambda: unit.expand(anchors, {}, rb.storage))


def samples(family: Any, step: Step) -> None:
    rb = filled(family, "full", unit=family.Sequence(2, burn_in=1))
    step("shapes", lambda: rb.sample(), values=False)
    step("info", lambda: sorted(rb.sample(return_info=True)[1]))
    rb = filled(family, "full", unit=family.Transition())
    step("transition", lambda: rb.sample(), values=False)
    order = family.SamplerWithoutReplacement(shuffle=False)
    rb = filled(family, "full", order, family.Sequence(2, burn_in=1))
    step("pass", lambda: [(one["id"], one["validity_mask"]) for one in (rb.sample(), rb.sample())])


def refused(family: Any, step: Step) -> None:
    for name, arguments in {
        "length": {"length": 0},
        "burn_in": {"length": 2, "burn_in": -1},
        "bootstrap": {"length": 2, "bootstrap": -1},
        "dilation": {"length": 2, "dilation": 0},
        "boundary": {"length": 2, "episode_boundary": "cut"},
    }.items():
        step(name, lambda: family.Sequence(**arguments))
    step("no unit", lambda: family.ReplayBuffer(sample_unit="Sequence"))
    rb = filled(family, "full", unit=family.Sequence(2, done_key="over"))
    step("the flag", lambda: rb.sample())


@pytest.mark.parametrize("program", [windows, lanes, samples, refused])
def test_windows_are_the_same(program: Any) -> None:
    assert_the_same(Scenario(program), HIDDEN)


def test_the_priority_of_a_window_is_that_of_its_anchor() -> None:
    """The windows have neither burn-in nor bootstrap, and all their steps are trained on."""
    found = []
    for family in (ours, theirs):
        rb = family.TensorDictReplayBuffer(
            storage=family.LazyTensorStorage(CAPACITY),
            sampler=family.PrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0),
            sample_unit=family.Sequence(3),
        )
        rb.extend(episodes(4, 4, 4, 4, 4))
        index, info = family.Sequence(3).expand(torch.tensor([2, 5, 11, 12]), {}, rb.storage)
        sample = TensorDict({"index": index, **info}, [12])
        sample["td_error"] = torch.tensor([1.0, 3, 2, 9, 4, 5, 6, 7, 7, 1, 8, 2])
        rb.update_tensordict_priority(sample)
        everything = np.arange(CAPACITY)
        if family is ours:
            found.append(rb.storage.ring().tree.priorities(everything).tolist())
        else:
            found.append(rb.sampler._sum_tree[everything].tolist())
    assert found[0] == found[1]


def test_n_steps_at_the_draw_are_those_of_torchrl_s_transform_at_the_write() -> None:
    data = episodes(6, 5, 9)
    number = data["id"]
    data["next", "id"] = number + 1
    data["next", "reward"] = (2.0 ** (number % 5)).unsqueeze(-1)
    other = theirs.TensorDictReplayBuffer(
        storage=theirs.LazyTensorStorage(CAPACITY),
        transform=MultiStepTransform(n_steps=3, gamma=0.5),
    )
    other.extend(data)
    unit = ours.NStep(3, gamma=0.5)
    rb = ours.TensorDictReplayBuffer(storage=ours.LazyTensorStorage(CAPACITY), sample_unit=unit)
    rb.extend(data)
    sample = rb.sample(500)
    assert len(set(sample["id"].tolist())) == CAPACITY
    written = other[:]
    assert len(written) == CAPACITY - 3  # the last window waits for more steps
    for row in sample[sample["id"] < len(written)]:
        same = written[int(row["id"])]
        for key in ("id", "reward"):
            assert torch.equal(row["next", key], same["next", key]), (int(row["id"]), key)
        assert torch.equal(row["steps_to_next_obs"].flatten(), same["steps_to_next_obs"].flatten())

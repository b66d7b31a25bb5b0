"""TorchRL's own transforms, unchanged, in our buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tests.compat.family  # noqa: F401 - skips these tests where TorchRL is not installed

from torchrl.envs import transforms as T  # noqa: N812  # isort: skip

import shmbuffer


def buffers(make: Callable[[], Any] | None = None) -> list[Any]:
    """Makes one buffer of each family, each with its own transform."""
    from torchrl import data

    return [
        family.TensorDictReplayBuffer(
            storage=family.LazyTensorStorage(20), batch_size=4, transform_factory=make
        )
        for family in (data, shmbuffer)
    ]


def steps(n: int) -> TensorDict:
    t = torch.arange(n)
    obs = t[:, None].float().expand(n, 3).clone()
    return TensorDict(
        {
            "obs": obs,
            "pixels": torch.randint(0, 255, (n, 8, 8, 3), dtype=torch.uint8),
            "action": t,
            "next": {
                "obs": obs + 1,
                "reward": t[:, None].float(),
                "done": (t % 5 == 4)[:, None],
                "terminated": (t % 5 == 4)[:, None],
                "truncated": torch.zeros(n, 1, dtype=torch.bool),
            },
        },
        [n],
    )


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "compose": lambda: T.Compose(
        T.ToTensorImage(in_keys=["pixels"]), T.FlattenObservation(-3, -1, in_keys=["pixels"])
    ),
    "scaling": lambda: T.RewardScaling(loc=1.0, scale=2.0, in_keys=[("next", "reward")]),
    "cat": lambda: T.CatTensors(in_keys=["obs", ("next", "obs")], out_key="both", del_keys=False),
    "rename": lambda: T.RenameTransform(in_keys=["obs"], out_keys=["observation"]),
    "exclude": lambda: T.ExcludeTransform("pixels"),
    "inverse": lambda: T.ObservationNorm(
        loc=1.0, scale=2.0, in_keys=["obs"], in_keys_inv=["obs"], standard_normal=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_does_the_same_on_the_way_in_and_out(name: str) -> None:
    data = steps(12)
    seen = []
    for rb in buffers(TRANSFORMS[name]):
        rb.extend(data.clone())
        seen.append(rb[:].exclude("index"))
    theirs, ours = seen
    assert set(theirs.keys(True, True)) == set(ours.keys(True, True))
    for key in theirs.keys(True, True):
        assert torch.equal(theirs[key], ours[key]), key


@pytest.mark.parametrize("invert", [False, True])
def test_transforms_can_be_appended_and_inserted(invert: bool) -> None:
    seen = []
    for rb in buffers():
        rb.append_transform(T.RewardScaling(1.0, 2.0, in_keys=[("next", "reward")]), invert=invert)
        rb.insert_transform(0, T.RewardScaling(0.0, 3.0, in_keys=[("next", "reward")]))
        rb.extend(steps(6))
        seen.append(rb[:]["next", "reward"].flatten().tolist())
    assert seen[0] == seen[1]


def test_a_transform_that_waits_for_more_steps_writes_when_it_has_them() -> None:
    lengths = []
    for rb in buffers(lambda: T.MultiStepTransform(n_steps=3, gamma=0.5)):
        indices = [len(rb.extend(steps(2))) for _ in range(4)]
        lengths.append((indices, len(rb), rb[:]["next", "reward"].flatten().tolist()))
    assert lengths[0] == lengths[1]


def test_single_items_go_through_a_transform_as_a_batch_of_one() -> None:
    seen = []
    for rb in buffers(lambda: T.RewardScaling(1.0, 2.0, in_keys=[("next", "reward")])):
        for item in steps(5).unbind(0):
            rb.add(item)
        seen.append(rb[:]["next", "reward"].flatten().tolist())
    assert seen[0] == seen[1]


def test_modules_and_callables_are_transforms() -> None:
    for rb in buffers():
        rb.append_transform(lambda td: td.set("twice", td["action"] * 2))
        rb.extend(steps(6))
        sample = rb.sample()
        assert torch.equal(sample["twice"], sample["action"] * 2)

"""Makes episode data (TED) for tests, as collectors write it and as a ring stores it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, tensorclass


@tensorclass
class Step:
    """Steps of episodes, as a tensorclass."""

    observation: torch.Tensor
    action: torch.Tensor
    done: torch.Tensor
    next: TensorDict


def stream(
    steps: int, lanes: Sequence[int] = (), *, seed: int = 0, ends: float = 0.3
) -> TensorDict:
    """Makes the steps that environments return, ``[steps, *lanes]``, in episodes of random length.

    Every value is used once, so that it identifies the step that it comes from.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (steps, *lanes)
    count = steps * max(1, torch.Size(lanes).numel())
    done = torch.rand(*shape, 1, generator=random) < ends
    terminated = done & (torch.rand(*shape, 1, generator=random) < 0.5)
    pixels = torch.randint(256, (steps + 1, *lanes, 2, 3), generator=random, dtype=torch.uint8)
    obs = torch.randn(steps + 1, *lanes, 4, generator=random)
    last = torch.randn(*shape, 4, generator=random)  # the last observation of an episode
    last_pixels = torch.randint(256, (*shape, 2, 3), generator=random, dtype=torch.uint8)
    flags = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    return TensorDict(
        {
            "observation": obs[:-1],
            "camera": {"pixels": pixels[:-1]},
            "action": torch.arange(count).reshape(shape),
            "collector": {"traj_ids": done[..., 0].long().cumsum(0)},
            **{name: torch.zeros_like(done) for name in flags},
            "next": {
                "observation": torch.where(done, last, obs[1:]),
                "camera": {"pixels": torch.where(done[..., None], last_pixels, pixels[1:])},
                "reward": torch.randn(*shape, 1, generator=random),
                **flags,
            },
        },
        batch_size=shape,
    )


def ring(written: TensorDict, slots: int) -> tuple[TensorDict, int, bool]:
    """Returns the data, ``shift`` and ``is_full`` of a ring into which ``written`` was written.

    Slots without an item are zero.
    """
    steps = len(written)
    data = written.new_zeros((slots, *written.batch_size[1:]))
    for step in range(max(0, steps - slots), steps):
        data[step % slots] = written[step]
    return data, (steps - 1) % slots + 1, steps >= slots


def same(one: TensorDict, other: TensorDict) -> None:
    """Checks that two TensorDicts have the same entries, bit for bit."""
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    assert one.batch_size == other.batch_size
    for key in one.keys(True, True):
        here, there = one[key], other[key]
        assert here.dtype == there.dtype, key
        assert torch.equal(here, there), f"{key}: {here} is not {there}"

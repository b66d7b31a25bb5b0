"""Single frames like those of an Atari game, and a ring of frames in plain NumPy.

The peers import this module, so it must not import shmbuffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS, EPISODE, STACK, SHAPE = 10_000, 250, 4, (84, 84)
PIECE = 500  # steps that are made together


def episodes(capacity: int) -> list[NDArray[np.uint8]]:
    """Returns the frames ``[steps + 1, 84, 84]`` of each episode, ``capacity`` steps in total."""
    random = np.random.default_rng(0)
    lengths = [min(EPISODE, capacity - first) for first in range(0, capacity, EPISODE)]
    return [random.integers(0, 256, (one + 1, *SHAPE), np.uint8) for one in lengths]


def stacked(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the stacks ``[steps + 1, 4, 84, 84]`` of an episode."""
    at = np.maximum(np.arange(len(frames))[:, None] + np.arange(1 - STACK, 1), 0)
    return frames[at]


class FrameRing:
    """A simple ring for one process, without priorities and checks."""

    def __init__(self, capacity: int) -> None:
        self.frames = np.empty((capacity, *SHAPE), np.uint8)
        self.first, self.rest = np.zeros(capacity, np.int64), capacity  # of each step's episode
        self.final: dict[int, NDArray[np.uint8]] = {}  # by the last step of an episode
        self.random = np.random.default_rng(1)

    def extend(self, frames: NDArray[np.uint8], at: int) -> None:
        """Writes an episode to the slots from ``at``."""
        end = at + len(frames) - 1
        self.frames[at:end], self.first[at:end] = frames[:-1], at
        self.final[end - 1] = frames[-1]

    def sample(self, count: int) -> tuple[Any, Any]:
        """Returns stacks and next stacks."""
        step = self.random.integers(0, self.rest, count)
        at = np.maximum(step[:, None] + np.arange(1 - STACK, 2), self.first[step][:, None])
        stacks = self.frames[at[:, :STACK]]
        after = self.frames[np.minimum(at[:, 1:], self.rest - 1)]
        for row, one in enumerate(step.tolist()):
            if one in self.final:
                after[row, -1] = self.final[one]
        return stacks, after

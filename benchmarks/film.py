"""Single frames, as an Atari game gives them, and a ring of them in plain NumPy.

Imported by the peers too: it must not import shmbuffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STEPS, EPISODE, STACK, SHAPE = 10_000, 250, 4, (84, 84)
PIECE = 500  # steps that are made together


def episodes(capacity: int) -> list[NDArray[np.uint8]]:
    """Frames ``[steps + 1, 84, 84]`` of one episode after the other, ``capacity`` steps in all."""
    random = np.random.default_rng(0)
    lengths = [min(EPISODE, capacity - first) for first in range(0, capacity, EPISODE)]
    return [random.integers(0, 256, (one + 1, *SHAPE), np.uint8) for one in lengths]


def stacked(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The stacks ``[steps + 1, 4, 84, 84]`` of an episode."""
    at = np.maximum(np.arange(len(frames))[:, None] + np.arange(1 - STACK, 1), 0)
    return frames[at]


class FrameRing:
    """What a program would write for itself: one process, no priorities, no checks."""

    def __init__(self, capacity: int) -> None:
        self.frames = np.empty((capacity, *SHAPE), np.uint8)
        self.first, self.rest = np.zeros(capacity, np.int64), capacity  # of each step's episode
        self.final: dict[int, NDArray[np.uint8]] = {}  # by the last step of an episode
        self.random = np.random.default_rng(1)

    def extend(self, frames: NDArray[np.uint8], at: int) -> None:
        """Write an episode from a place on."""
        end = at + len(frames) - 1
        self.frames[at:end], self.first[at:end] = frames[:-1], at
        self.final[end - 1] = frames[-1]

    def sample(self, count: int) -> tuple[Any, Any]:
        """Stacks, and next stacks."""
        step = self.random.integers(0, self.rest, count)
        at = np.maximum(step[:, None] + np.arange(1 - STACK, 2), self.first[step][:, None])
        stacks = self.frames[at[:, :STACK]]
        after = self.frames[np.minimum(at[:, 1:], self.rest - 1)]
        for row, one in enumerate(step.tolist()):
            if one in self.final:
                after[row, -1] = self.final[one]
        return stacks, after

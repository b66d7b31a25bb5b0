"""Learns a path from a data set, then a shorter one from collected steps, by Q-learning.

    python examples/offline_to_online.py [SEED]

    S . . D . . G      D is a door. While the data set was recorded, the door was locked, and each
    path . . . # . . .      to the goal led through the gap at the bottom (16 steps). It is now open
    (6 steps). . . . # . . . . . . # . . . . . . # . . . . . . . . . .

The learner first learns only from the data set, which is memory-mapped from its files and not
changed. Then it acts. Half of each batch is sampled from the data set at first, and this fraction
decreases during the training, because the data set describes the locked door.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, OfflineToOnlineReplayBuffer

WIDTH, HEIGHT, WALL = 7, 6, 3
START, DOOR, GOAL = (0, 0), (WALL, 0), (WIDTH - 1, 0)
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))
LONGEST = 60  # largest number of steps per episode
SHORTEST = 6  # number of steps through the door
GAMMA = 0.95
RECORDED = 5_000  # number of steps in the data set
UPDATES, ANNEALED, MOST_UPDATES = 300, 500, 2_000
STEPS_PER_UPDATE = 4


class Rooms:
    """Two rooms. Only the goal cell gives a reward, and it ends the episode."""

    def __init__(self, *, is_open: bool) -> None:
        self.wall = {(WALL, y) for y in range(HEIGHT - 1)} - ({DOOR} if is_open else set())
        self.cell, self.steps = START, 0

    def reset(self) -> None:
        """Moves the agent to the start."""
        self.cell, self.steps = START, 0

    def step(self, action: int) -> tuple[float, bool]:
        """Moves the agent; returns the reward, and whether the episode is over."""
        x, y = self.cell[0] + MOVES[action][0], self.cell[1] + MOVES[action][1]
        if 0 <= x < WIDTH and 0 <= y < HEIGHT and (x, y) not in self.wall:
            self.cell = (x, y)
        self.steps += 1
        return float(self.cell == GOAL), self.cell == GOAL or self.steps == LONGEST


def number(cell: tuple[int, int]) -> int:
    """Returns the number of a cell."""
    return cell[0] + WIDTH * cell[1]


def through_the_gap(cell: int) -> int:
    """Returns the greedy action of the policy that recorded the data set."""
    x, y = cell % WIDTH, cell // WIDTH
    if x < WALL and y < HEIGHT - 1:
        return 2
    return 0 if x < WIDTH - 1 else 3


def walked(
    rooms: Rooms, policy: Callable[[int], int], epsilon: float, count: int, random: Generator
) -> TensorDict:
    """Returns ``count`` steps of an epsilon-greedy policy, as items."""
    rows: list[tuple[int, int, float, bool, int]] = []
    for _ in range(count):
        cell = number(rooms.cell)
        action = int(random.integers(4)) if random.random() < epsilon else policy(cell)
        reward, over = rooms.step(action)
        rows.append((cell, action, reward, rooms.cell == GOAL, number(rooms.cell)))
        if over:
            rooms.reset()
    cells, actions, rewards, ends, then = zip(*rows, strict=True)
    after = {
        "cell": torch.tensor(then),
        "reward": torch.tensor(rewards),
        "terminated": torch.tensor(ends),
    }
    return TensorDict(
        {"cell": torch.tensor(cells), "action": torch.tensor(actions), "next": after}, [count]
    )


def way(policy: Callable[[int], int], *, is_open: bool) -> int:
    """Returns the number of steps that a policy takes to the goal; `LONGEST` if it fails."""
    rooms = Rooms(is_open=is_open)
    while not rooms.step(policy(number(rooms.cell)))[1]:
        pass
    return rooms.steps


class Learner:
    """Q-learning with a value for each action in each cell."""

    def __init__(self) -> None:
        self.values = torch.zeros(4, WIDTH * HEIGHT)

    def act(self, cell: int) -> int:
        """Returns the greedy action."""
        return int(self.values[:, cell].argmax())

    def update(self, batch: TensorDict) -> None:
        """Moves each value in a batch halfway to its mean target."""
        after, which = batch["next"], (batch["action"], batch["cell"])
        worth = self.values[:, after["cell"]].max(0).values
        error = after["reward"] + GAMMA * ~after["terminated"] * worth - self.values[which]
        counts, sums = torch.zeros_like(self.values), torch.zeros_like(self.values)
        counts.index_put_(which, torch.ones_like(error), accumulate=True)
        sums.index_put_(which, error, accumulate=True)
        self.values += 0.5 * sums / counts.clamp(min=1)


def main(seed: int = 0) -> tuple[int, int]:
    """Returns the steps to the goal after learning from the data set, and after the training."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    random, learner = np.random.default_rng(seed), Learner()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        locked = Rooms(is_open=False)
        walked(locked, through_the_gap, 0.5, RECORDED, random).memmap(path / "data")
        storage = LazyMemmapStorage(2_000, scratch_dir=path / "online", shared_init=True)
        with OfflineToOnlineReplayBuffer(
            path / "data", online_storage=storage, offline_fraction=0.5, batch_size=128
        ) as rb:
            for _ in range(UPDATES):
                learner.update(
                    rb.sample()
                )  # nothing was collected yet, so all items are from the data set
            first = way(learner.act, is_open=False)
            print(f"from the data set: {first} steps to the goal")
            rooms = Rooms(is_open=True)
            for update in range(MOST_UPDATES):
                rb.extend(walked(rooms, learner.act, 0.4, STEPS_PER_UPDATE, random))
                rb.anneal(update, ANNEALED)
                learner.update(rb.sample())
                if update % 50 == 49 and (last := way(learner.act, is_open=True)) == SHORTEST:
                    break
            print(f"update {update}, share of the data set {rb.offline_fraction:.2f}: {last} steps")
    return first, last


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

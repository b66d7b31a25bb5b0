"""Trains an n-step DQN on a corridor, from a buffer of single steps.

    python examples/nstep_dqn.py [SEED]

The reward is at the end of the corridor. A learner of single steps propagates its value back cell
by cell. A learner of five-step returns needs fewer updates. Both sample from the same buffer, which
stores each step once, because each learner chooses n for its own samples.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shmbuffer import Coordinator, NStep, Recorder, attach

CELLS = 20
LONGEST = 100  # number of steps after which an episode is truncated
GAMMA = 0.9
STEPS = 4_000  # number of collected steps
MOST_UPDATES = 4_000
EVALUATE_EVERY = 20  # number of updates between evaluations


class Corridor:
    """A corridor. Actions 0 and 1 move backward and forward; only the last cell gives a reward.

    The last cell also ends the episode.
    """

    def reset(self) -> np.ndarray:
        """Moves the agent to the first cell."""
        self.cell, self.steps = 0, 0
        return self.seen()

    def seen(self) -> np.ndarray:
        """Returns the observation: a one-hot vector of the cell."""
        return np.eye(CELLS, dtype=np.float32)[self.cell]

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """Moves the agent; returns observation, reward, ``terminated`` and ``truncated``."""
        self.cell = min(max(self.cell + 2 * action - 1, 0), CELLS - 1)
        self.steps += 1
        there = self.cell == CELLS - 1
        return self.seen(), float(there), there, self.steps == LONGEST and not there


def collect(path: Path, seed: int) -> None:
    """Moves at random, more often forward than backward, and writes single steps."""
    random, corridor = np.random.default_rng(seed), Corridor()
    with attach(path) as rb, Recorder(rb, n_step=1, gamma=GAMMA) as recorder:
        recorder.reset(corridor.reset())
        for _ in range(STEPS):
            action = int(random.random() < 0.6)
            obs, reward, terminated, truncated = corridor.step(action)
            recorder.step(obs, action, reward, terminated, truncated)
            if terminated or truncated:
                recorder.reset(corridor.reset())


def goes_straight(network: nn.Module) -> bool:
    """True if the greedy policy moves forward in each cell."""
    with torch.no_grad():
        return bool((network(torch.eye(CELLS)[:-1]).argmax(1) == 1).all())


def learn(path: Path, n: int, seed: int) -> int:
    """Returns the number of updates until the policy moves straight to the reward."""
    torch.manual_seed(seed)
    online, target = nn.Linear(CELLS, 2), nn.Linear(CELLS, 2)
    for network in (online, target):
        nn.init.zeros_(network.weight)
        nn.init.zeros_(network.bias)
    optimizer = torch.optim.Adam(online.parameters(), lr=0.02)
    with attach(path, sample_unit=NStep(n, GAMMA), batch_size=64) as rb:
        for update in range(MOST_UPDATES):
            if update % EVALUATE_EVERY == 0 and goes_straight(online):
                return update
            batch = rb.sample()
            after = batch["next"]
            with torch.no_grad():
                worth = target(after["observation"]).max(1).values
                wanted = after["reward"] + batch["gamma"] * ~after["terminated"] * worth
            values = online(batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
            error = wanted - values
            optimizer.zero_grad()
            (error**2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
    return MOST_UPDATES


def main(seed: int = 0) -> dict[int, int]:
    """Returns the number of updates until the policy moves straight to the reward, by n."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "buffer"
        with Coordinator(path, capacity=10_000, alpha=None):
            collect(path, seed)
            found = {n: learn(path, n, seed) for n in (1, 5)}
    for n, updates in found.items():
        print(f"n = {n}: {updates} updates")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

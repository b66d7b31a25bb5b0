"""Trains a DQN on bit flipping with hindsight experience replay, or without it for comparison.

    python examples/hindsight_dqn.py                    # 15 bits, with hindsight
    python examples/hindsight_dqn.py --without          # only with the original goals
    python examples/hindsight_dqn.py --plot curve.png   # both, with three seeds; needs matplotlib

An action flips one bit. An episode ends at its goal, or after as many steps as there are bits. Each
step before the goal has the reward -1, so an agent that never reaches its goal, one of 32,768
states, has nothing to learn from. Hindsight replaces the goal of a sampled step by a state that the
agent reached later in the episode (Andrychowicz et al., Hindsight Experience Replay, NeurIPS 2017,
section 3.1).

Several environments are stepped together. Each writes to a stream of its own, so that a goal is
always taken from the same episode.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from shmbuffer import HERReplayBuffer, LazyTensorStorage

ENVIRONMENTS = 16
EPSILON, GAMMA = 0.2, 0.98
BATCH, CAPACITY = 256, 2**17
WARMUP = 1_000  # number of steps before the first update
TARGET_RATE = 0.02  # fraction by which the target network approaches the online network
EPISODES = 512  # number of episodes per evaluation
SOLVED = 0.95  # fraction of episodes that must reach their goal


def reached(rows: TensorDictBase) -> torch.Tensor:
    """True for each step that has reached its goal, ``[n, 1]``."""
    return (rows["next", "observation"] == rows["desired_goal"]).all(-1, keepdim=True)


def reward(rows: TensorDictBase) -> torch.Tensor:
    """Returns the reward of each step, ``[n, 1]``: 0 at the goal, otherwise -1."""
    return reached(rows).float() - 1


class BitFlips:
    """Several environments; each is reset when its episode ends."""

    def __init__(self, bits: int, count: int) -> None:
        self.bits = bits
        self.observation = self._random(count)
        self.goal = self._random(count)
        self.taken = torch.zeros(count, 1, dtype=torch.int64)

    def step(self, action: torch.Tensor) -> TensorDict:
        """Flips a bit in each environment, and returns the transitions ``[count]``."""
        after = self.observation ^ nn.functional.one_hot(action, self.bits).bool()
        rows = TensorDict(
            {
                "observation": self.observation,
                "desired_goal": self.goal,
                "action": action,
                "next": {"observation": after},
            },
            [len(action)],
        )
        self.taken += 1
        terminated = reached(rows)
        done = terminated | (self.taken == self.bits)
        rows["next"].update({"reward": reward(rows), "terminated": terminated, "done": done})
        self.observation = torch.where(done, self._random(len(action)), after)
        self.goal = torch.where(done, self._random(len(action)), self.goal)
        self.taken[done] = 0
        return rows

    def _random(self, count: int) -> torch.Tensor:
        return torch.rand(count, self.bits) < 0.5


class Agent:
    """A double DQN whose networks take the observation and the goal."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.online, self.target = (
            nn.Sequential(nn.Linear(2 * bits, 256), nn.ReLU(), nn.Linear(256, bits))
            for _ in range(2)
        )
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-3)

    @torch.no_grad()
    def act(self, observation: torch.Tensor, goal: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Returns epsilon-greedy actions ``[n]``."""
        best = self.online(seen(observation, goal)).argmax(-1)
        random = torch.randint(self.bits, best.shape)
        return torch.where(torch.rand(best.shape) < epsilon, random, best)

    def update(self, batch: TensorDictBase) -> None:
        """Performs one step of the optimizer."""
        goal, action = batch["desired_goal"], batch["action"].unsqueeze(-1)
        after = seen(batch["next", "observation"], goal)
        with torch.no_grad():
            chosen = self.online(after).argmax(-1, keepdim=True)
            worth = self.target(after).gather(-1, chosen)
            wanted = batch["next", "reward"] + GAMMA * worth * ~batch["next", "terminated"]
        values = self.online(seen(batch["observation"], goal)).gather(-1, action)
        loss = nn.functional.smooth_l1_loss(values, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            parameters = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for slow, fast in parameters:
                slow.lerp_(fast, TARGET_RATE)

    def success(self) -> float:
        """Returns the fraction of episodes that reach their goal with greedy actions."""
        environments = BitFlips(self.bits, EPISODES)
        won = torch.zeros(EPISODES, 1, dtype=torch.bool)
        over = torch.zeros(EPISODES, 1, dtype=torch.bool)
        for _ in range(self.bits):
            action = self.act(environments.observation, environments.goal, 0.0)
            after = environments.step(action)["next"]
            won |= after["terminated"] & ~over
            over |= after["done"]
        return won.float().mean().item()


def seen(observation: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Returns the input of a network."""
    return torch.cat((observation, goal), -1).float()


def train(
    bits: int,
    steps: int,
    *,
    hindsight: bool = True,
    seed: int = 0,
    every: int = 2_000,
    until: float = SOLVED,
) -> Iterator[tuple[int, float]]:
    """Trains for ``steps`` steps, or until the task is solved.

    Returns the step and the success rate of each evaluation.
    """
    torch.manual_seed(seed)
    buffer = HERReplayBuffer(
        reward,
        her_ratio=0.8 if hindsight else 0.0,
        achieved_goal_key="observation",
        terminated_fn=reached,
        storage=LazyTensorStorage(CAPACITY),
        batch_size=BATCH,
    )
    environments, agent, evaluations = BitFlips(bits, ENVIRONMENTS), Agent(bits), 0
    for step in range(ENVIRONMENTS, steps + 1, ENVIRONMENTS):
        action = agent.act(environments.observation, environments.goal, EPSILON)
        buffer.extend(environments.step(action), streams=range(ENVIRONMENTS))
        if step >= WARMUP:
            agent.update(buffer.sample())
        if step // every > evaluations:
            evaluations += 1
            success = agent.success()
            yield step, success
            if success >= until:
                return


def plot(path: str, bits: int, steps: int) -> None:
    """Plots the learning curves of both agents, with three seeds each."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 3.6))
    for hindsight, colour, label in ((True, "C0", "with hindsight"), (False, "C1", "without")):
        for seed in range(3):
            curve = list(train(bits, steps, hindsight=hindsight, seed=seed, until=2.0))
            print(f"{label}, seed {seed}: {curve[-1][1]:.1%}", flush=True)
            axes.plot(*zip(*curve, strict=True), color=colour, label=label if not seed else None)
    axes.set_xlabel(f"steps of {ENVIRONMENTS} environments together")
    axes.set_ylabel("goals reached")
    axes.set_title(f"{bits} bits, three seeds each")
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> int:
    """Trains and prints the progress; returns 0 if the task was solved."""
    parser = argparse.ArgumentParser(description="Bit flipping, with hindsight or without.")
    parser.add_argument("--bits", type=int, default=15, help="of a state (%(default)s)")
    parser.add_argument("--steps", type=int, default=40_000, help="at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (%(default)s)")
    parser.add_argument("--without", action="store_true", help="leave the goals as they were")
    parser.add_argument("--plot", metavar="FILE", help="draw both agents into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.plot:
        plot(arguments.plot, arguments.bits, arguments.steps)
        return 0
    began_s, success = time.monotonic(), 0.0
    options = {"hindsight": not arguments.without, "seed": arguments.seed}
    for step, success in train(arguments.bits, arguments.steps, **options):
        print(f"{time.monotonic() - began_s:4.0f} s  step {step:6,}  goals reached {success:.1%}")
    print("solved" if success >= SOLVED else "not solved")
    return int(success < SOLVED)


if __name__ == "__main__":
    sys.exit(main())

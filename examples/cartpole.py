"""Trains a double DQN on CartPole in one process, with prioritized replay.

    python examples/cartpole.py [SEED]

The buffer is in memory and is lost when the process ends. In examples/demo/cartpole.py, the same
agent learns from a buffer in files, which several processes share and which survives all of them.
`shmbuffer demo` runs that program and kills it during the training. The agent is
examples/demo/double_dqn.py.
"""

from __future__ import annotations

import sys
import time

import torch

from shmbuffer import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from shmbuffer.examples.double_dqn import Agent, Config, Rollout, evaluate

GOAL = 475.0
EVALUATE_EVERY = 2_000  # number of steps between evaluations
LONGEST = 200_000  # largest number of steps


def main(seed: int = 0) -> bool:
    """Trains until 20 greedy episodes reach the goal; returns whether they did."""
    torch.set_num_threads(1)
    config = Config(seed=seed)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=config.alpha,
        beta=config.beta,
        batch_size=config.batch_size,
        storage=LazyTensorStorage(config.capacity),
    )
    agent, rollout = Agent(config), Rollout(config, seed)
    began_s, evaluations = time.monotonic(), 0
    while (step := buffer.write_count) < LONGEST:
        buffer.extend(rollout.collect(agent.online, config.epsilon.at(step), rows=16))
        while agent.updates < config.updates_due(step):
            batch = buffer.sample()
            batch["td_error"] = agent.update(batch, step)
            buffer.update_tensordict_priority(batch)
        if step // EVALUATE_EVERY > evaluations:
            evaluations = step // EVALUATE_EVERY
            mean_return = evaluate(agent.online, config, seed=2_000_000_000 + step)
            print(f"{time.monotonic() - began_s:4.0f} s  step {step:6,}  return {mean_return:.1f}")
            if mean_return >= GOAL:
                print("solved")
                return True
    return False


if __name__ == "__main__":
    sys.exit(not main(*map(int, sys.argv[1:2])))

"""Trains a DQN on CartPole with TorchRL's environment, collector, loss and transforms.

    pip install shmbuffer torchrl gymnasium
    python examples/dqn_torchrl.py

Only the replay buffer is imported from shmbuffer. If it is imported from `torchrl.data` instead,
the script runs with TorchRL's buffer.
"""

from __future__ import annotations

import argparse

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, MultiStepTransform, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from shmbuffer import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

GAMMA = 0.99
RANDOM_STEPS = 500
STEPS_PER_BATCH = 50
UPDATES_PER_BATCH = 25


def train(frames: int, seed: int = 0) -> tuple[list[float], TensorDict]:
    """Trains for ``steps`` steps; returns the return of each episode, and the last sample."""
    torch.manual_seed(seed)
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))
    env.set_seed(seed)
    actor = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[120, 84]),
        in_keys=["observation"],
        spec=env.action_spec,
    )
    explore = EGreedyModule(env.action_spec, eps_end=0.05, annealing_num_steps=frames // 4)
    collector = Collector(
        env,
        TensorDictSequential(actor, explore),
        frames_per_batch=STEPS_PER_BATCH,
        total_frames=frames,
        init_random_frames=RANDOM_STEPS,
        auto_register_policy_transforms=False,
    )

    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6,
        beta=0.4,
        priority_key="td_error",
        storage=LazyTensorStorage(20_000),
        transform=MultiStepTransform(n_steps=3, gamma=GAMMA),
        batch_size=128,
    )
    loss_module = DQNLoss(actor, loss_function="l2", delay_value=True, double_dqn=True)
    loss_module.make_value_estimator(gamma=GAMMA)
    target = SoftUpdate(loss_module, tau=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)

    rewards: list[float] = []
    steps = 0
    for data in collector:
        steps += data.numel()
        finished = data["next", "episode_reward"][data["next", "done"]].tolist()
        rewards += finished
        for reward in finished:
            print(f"step {steps:6d}  reward {reward:5.0f}", flush=True)
        explore.step(data.numel())
        buffer.extend(data)
        if steps < RANDOM_STEPS:
            continue
        for _ in range(UPDATES_PER_BATCH):
            sample = buffer.sample()
            loss = loss_module(sample)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            buffer.update_tensordict_priority(sample)
            target.step()
    collector.shutdown()
    return rewards, sample


def main() -> None:
    """Trains, and prints the mean return of the last episodes."""
    parser = argparse.ArgumentParser(description="DQN on CartPole: TorchRL on a shmbuffer.")
    parser.add_argument("--frames", type=int, default=10_000, help="steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (%(default)s)")
    arguments = parser.parse_args()
    if arguments.frames <= RANDOM_STEPS:
        parser.error(f"--frames has to be more than the {RANDOM_STEPS} random steps")
    rewards, _ = train(arguments.frames, arguments.seed)
    last = rewards[-20:]
    print(f"mean reward of the last {len(last)} episodes: {sum(last) / len(last):.1f}")


if __name__ == "__main__":
    main()

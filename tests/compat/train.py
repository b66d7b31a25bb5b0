"""TorchRL's trainers on either library's buffer.

python -m tests.compat.train {DQN,SAC} {torchrl,shmbuffer} {plain,prioritized}
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, QValueActor, TanhNormal
from torchrl.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate
from torchrl.trainers.algorithms.dqn import DQNTrainer
from torchrl.trainers.algorithms.sac import SACTrainer

FRAMES = 600


def environment(name: str) -> Any:
    env = TransformedEnv(GymEnv(name))
    env.append_transform(StepCounter())
    env.append_transform(RewardSum())
    return env


def dqn() -> tuple[Any, Any, Any, Any]:
    """Returns environment, policy, loss and target updater for DQN."""
    env = environment("CartPole-v1")
    policy = QValueActor(MLP(4, 2, num_cells=[32]), in_keys=["observation"], spec=env.action_spec)
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    return env, policy, loss, HardUpdate(loss, value_network_update_interval=50)


def sac() -> tuple[Any, Any, Any, Any]:
    """Returns environment, policy, loss and target updater for SAC."""
    env = environment("Pendulum-v1")
    body = nn.Sequential(MLP(3, 2, num_cells=[32]), NormalParamExtractor())
    policy = ProbabilisticActor(
        TensorDictModule(body, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )
    values = TensorDictModule(
        MLP(4, 1, num_cells=[32]), ["observation", "action"], ["state_action_value"]
    )
    loss = SACLoss(policy, values)
    return env, policy, loss, SoftUpdate(loss, eps=0.99)


def main(algorithm: str, library: str, kind: str) -> None:
    torch.manual_seed(0)
    family: Any = importlib.import_module("torchrl.data" if library == "torchrl" else library)
    storage = family.LazyTensorStorage(1000)
    if kind == "prioritized":
        rb = family.TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.5, storage=storage, batch_size=32
        )
    else:
        rb = family.ReplayBuffer(storage=storage, batch_size=32)
    env, policy, loss, updater = {"DQN": dqn, "SAC": sac}[algorithm]()
    loss.make_value_estimator(gamma=0.99)
    trainer = {"DQN": DQNTrainer, "SAC": SACTrainer}[algorithm](
        collector=Collector(env, policy, frames_per_batch=50, total_frames=FRAMES),
        total_frames=FRAMES,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
        replay_buffer=rb,
        target_net_updater=updater,
        progress_bar=False,
        enable_logging=False,
    )
    before = [one.clone() for one in loss.parameters()]
    trainer.train()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, loss.parameters(), strict=True))
    print(
        json.dumps(
            {
                "len": len(rb),
                "moved": moved > 0,
                "finite": all(one.isfinite().all().item() for one in loss.parameters()),
                "keys": sorted(map(str, rb[:].keys(True, True))),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

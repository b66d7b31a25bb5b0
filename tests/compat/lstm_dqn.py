"""DQN with an LSTM on either library's buffer, modelled on TorchRL's ``dqn_with_rnn``.

python -m tests.compat.lstm_dqn

The items are whole rollouts. The last line of the output is JSON: the losses of each run.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

from tests.compat.sota import TorchRLDraws, recorded


def losses_of(library: str, **options: Any) -> list[str]:
    """Trains for 300 steps on the library's buffer; returns the losses."""
    family: Any = importlib.import_module(library)
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum(), InitTracker()))
    lstm = LSTMModule(input_size=4, hidden_size=16, in_key="observation", out_key="embed")
    env.append_transform(lstm.make_tensordict_primer())
    env.set_seed(0)
    mlp = MLP(in_features=16, out_features=2, num_cells=[16])
    head = TensorDictModule(mlp, in_keys=["embed"], out_keys=["action_value"])
    values = QValueModule(action_space=None, spec=env.action_spec)
    policy = TensorDictSequential(lstm, head, values)
    explore = EGreedyModule(annealing_num_steps=300, spec=env.action_spec, eps_init=0.2)
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    updater, optimizer = SoftUpdate(loss, eps=0.95), torch.optim.Adam(policy.parameters(), lr=3e-4)
    collector = Collector(
        env, TensorDictSequential(policy, explore), frames_per_batch=30, total_frames=300
    )
    rb = family.TensorDictReplayBuffer(
        storage=family.LazyMemmapStorage(20), batch_size=4, **options
    )
    with recorded() as losses:
        for data in collector:
            rb.extend(data.unsqueeze(0).to_tensordict().cpu())
            for _ in range(3):
                with set_recurrent_mode(True):
                    found = loss(rb.sample())
                found["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            explore.step(data.numel())
            updater.step()
            collector.update_policy_weights_()
    collector.shutdown()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(
            {
                "torchrl": losses_of("torchrl.data"),
                "same draws": losses_of("shmbuffer", sampler=TorchRLDraws()),
                "shipped": losses_of("shmbuffer", prefetch=10),
            }
        )
    )

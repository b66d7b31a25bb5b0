"""A double DQN for CartPole with n-step transitions, independent of processes and buffers.

    Rollout   steps an environment              ──▶ batches of transitions, for a buffer
    Agent     learns from a prioritized sample  ──▶ its new priorities
    evaluate  plays some episodes               ──▶ mean return of the policy

Double Q-learning: van Hasselt, Guez and Silver, AAAI 2016. Priorities: Schaul et al., ICLR 2016.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import nn

Observation = NDArray[np.float32]


@dataclass(frozen=True)
class Schedule:
    """A value that changes linearly from ``start`` to ``end`` over a number of steps."""

    start: float
    end: float
    steps: int

    def at(self, step: int) -> float:
        """Returns the value at a step."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Config:
    """Options of the agent. Steps are counted over all environments of all collectors."""

    seed: int = 0
    environment: str = "CartPole-v1"
    hidden: int = 128
    gamma: float = 0.99
    n_step: int = 10
    epsilon: Schedule = Schedule(1.0, 0.05, 10_000)
    learning_rate: Schedule = Schedule(1e-3, 1e-4, 40_000)
    batch_size: int = 128
    capacity: int = 2**14
    """Small, because n-step returns do not correct for the older policies of old transitions."""
    alpha: float = 0.6
    beta: float = 0.6
    warmup_steps: int = 1_000
    steps_per_update: int = 4
    target_rate: float = 0.01  # fraction by which the target network approaches the online network
    largest_gradient: float = 10.0
    reward_scale: float = 0.1  # values are at most 10 instead of 100, which suits network and loss
    evaluation_episodes: int = 20

    def updates_due(self, step: int) -> int:
        """Returns the number of updates that the learner should have made at a step."""
        return max(0, step - self.warmup_steps) // self.steps_per_update


class QNetwork(nn.Module):
    """Computes the values ``[n, 2]`` of both actions for observations ``[n, 4]``."""

    scale: torch.Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        # About the largest observed position, velocity, angle and angular velocity.
        self.register_buffer("scale", torch.tensor([2.4, 2.5, 0.21, 2.5]))
        self.layers = nn.Sequential(
            nn.Linear(4, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2),
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Returns the values."""
        values: torch.Tensor = self.layers(observation / self.scale)
        return values

    @torch.no_grad()
    def greedy(self, observations: Observation) -> NDArray[np.int64]:
        """Returns the greedy actions ``[n]`` for observations ``[n, 4]``."""
        values: torch.Tensor = self(torch.from_numpy(observations))
        best: NDArray[np.int64] = values.argmax(-1).numpy()
        return best

    @torch.no_grad()
    def load_flat(self, vector: torch.Tensor) -> None:
        """Sets the parameters from one vector."""
        nn.utils.vector_to_parameters(vector, self.parameters())


class Agent:
    """A double DQN. Its state consists of a dict of tensors and the number of updates."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.updates = 0
        self.online = QNetwork(config.hidden)
        self.target = QNetwork(config.hidden)
        self.target.load_state_dict(self.online.state_dict())
        self.parameters = list(self.online.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, fused=True)

    def update(self, batch: TensorDictBase, step: int) -> torch.Tensor:
        """Performs one gradient step; returns the new priorities, the absolute TD errors."""
        config, after = self.config, batch["next"]
        with torch.no_grad():
            # The online network chooses the action, and the target network evaluates it.
            chosen = self.online(after["observation"]).argmax(1, keepdim=True)
            worth = self.target(after["observation"]).gather(1, chosen).squeeze(1)
            # An episode that ends at its time limit is truncated, not terminated.
            discount = batch["gamma"] * ~after["terminated"]
            wanted = config.reward_scale * after["reward"] + discount * worth
        values = self.online(batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
        surprise: torch.Tensor = (values - wanted).detach().abs()
        weights = batch["priority_weight"] / batch["priority_weight"].max()
        loss = (weights * nn.functional.huber_loss(values, wanted, reduction="none")).mean()

        self.optimizer.param_groups[0]["lr"] = config.learning_rate.at(step)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, config.largest_gradient)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.parameters, strict=True):
                slow.lerp_(fast, config.target_rate)
        self.updates += 1
        return surprise

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of networks and optimizer."""
        return {
            "online": flat(self.parameters),
            "target": flat(self.target.parameters()),
            "first_moment": self._moment("exp_avg"),
            "second_moment": self._moment("exp_avg_sq"),
        }

    def load(self, state: Mapping[str, torch.Tensor], updates: int) -> None:
        """Loads a result of `state`, of any process, and the number of updates."""
        self.online.load_flat(state["online"])
        self.target.load_flat(state["target"])
        self.updates = updates
        sizes = [parameter.numel() for parameter in self.parameters]
        first = torch.split(state["first_moment"], sizes)
        second = torch.split(state["second_moment"], sizes)
        for parameter, mean, square in zip(self.parameters, first, second, strict=True):
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.updates)),
                "exp_avg": mean.view_as(parameter).clone(),
                "exp_avg_sq": square.view_as(parameter).clone(),
            }

    def _moment(self, name: str) -> torch.Tensor:
        state = self.optimizer.state  # still empty before the first update
        return flat(state[p][name] if p in state else torch.zeros_like(p) for p in self.parameters)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors to one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class _Moment(NamedTuple):
    """Data of one step."""

    observation: Observation
    action: int
    reward: float


class Rollout:
    """Steps an environment indefinitely, and creates n-step transitions."""

    def __init__(self, config: Config, seed: int) -> None:
        self._gamma = config.gamma
        self._n_step = config.n_step
        self._random = np.random.default_rng(seed)
        self._environment: gymnasium.Env[Any, Any] = gymnasium.make(config.environment)
        self._observation: Observation = self._environment.reset(seed=seed)[0]
        self._recent: deque[_Moment] = deque()
        self._rows: list[tuple[Observation, int, float, Observation, float, bool]] = []

    def collect(self, network: QNetwork, epsilon: float, rows: int) -> TensorDict:
        """Steps until there are enough transitions; their ``gamma`` discounts the next value."""
        while len(self._rows) < rows:
            self._step(network, epsilon)
        n = len(self._rows)
        observations, actions, gammas, following, rewards, ends = zip(*self._rows, strict=True)
        self._rows.clear()
        after = {
            "observation": torch.from_numpy(np.stack(following)),
            "reward": torch.tensor(rewards),
            "terminated": torch.tensor(ends),
        }
        return TensorDict(
            {
                "observation": torch.from_numpy(np.stack(observations)),
                "action": torch.tensor(actions),
                "gamma": torch.tensor(gammas),
                "next": TensorDict(after, [n]),
            },
            [n],
        )

    def _step(self, network: QNetwork, epsilon: float) -> None:
        if self._random.random() < epsilon:
            action = int(self._random.integers(2))
        else:
            action = int(network.greedy(self._observation[None])[0])
        after, reward, terminated, truncated, _ = self._environment.step(action)
        self._recent.append(_Moment(self._observation, action, float(reward)))
        if terminated or truncated:
            while self._recent:
                self._add_row(after, terminated)
            after, _ = self._environment.reset()
        elif len(self._recent) == self._n_step:
            self._add_row(after, False)
        self._observation = after

    def _add_row(self, after: Observation, terminated: bool) -> None:
        """Adds a transition from the oldest recent step to the state after the newest one."""
        reward = sum(self._gamma**k * moment.reward for k, moment in enumerate(self._recent))
        discount = self._gamma ** len(self._recent)
        oldest = self._recent.popleft()
        self._rows.append((oldest.observation, oldest.action, discount, after, reward, terminated))


def evaluate(network: QNetwork, config: Config, seed: int) -> float:
    """Returns the mean return of greedy episodes, which are played in parallel."""
    environments = [gymnasium.make(config.environment) for _ in range(config.evaluation_episodes)]
    playing = {env: env.reset(seed=seed + k)[0] for k, env in enumerate(environments)}
    total = 0.0
    while playing:
        actions = network.greedy(np.stack(list(playing.values())))
        for env, action in zip(list(playing), actions, strict=True):
            playing[env], reward, terminated, truncated, _ = env.step(int(action))
            total += float(reward)
            if terminated or truncated:
                del playing[env]
                env.close()
    return total / config.evaluation_episodes

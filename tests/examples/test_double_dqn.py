"""The agent and the transitions that it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from shmbuffer.examples.double_dqn import Agent, Config, QNetwork, Rollout, Schedule, evaluate


class Counting(gymnasium.Env[Any, Any]):
    """An environment whose observation and reward count the steps; ends after ``length`` steps."""

    observation_space = gymnasium.spaces.Box(0.0, 100.0, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observation(), float(self.count), self.count == self.length, False, {}

    def observation(self) -> Any:
        return np.full(4, self.count, np.float32)


@pytest.fixture
def counting() -> Iterator[str]:
    """Registers an environment with episodes of three or four steps and a limit of three."""
    gymnasium.register("Three-v0", lambda: Counting(3))
    gymnasium.register("CutOff-v0", lambda: Counting(4), max_episode_steps=3)
    yield "Three-v0"
    for name in ("Three-v0", "CutOff-v0"):
        gymnasium.registry.pop(name)


@pytest.mark.parametrize(("name", "terminated"), [("Three-v0", True), ("CutOff-v0", False)])
def test_a_transition_goes_n_steps_ahead_or_to_the_end_of_the_episode(
    counting: str, name: str, terminated: bool
) -> None:
    config = Config(environment=name, n_step=2, gamma=0.5)
    batch = Rollout(config, seed=0).collect(QNetwork(8), epsilon=1.0, rows=3)
    assert batch["observation"][:, 0].tolist() == [0, 1, 2]
    assert batch["next", "observation"][:, 0].tolist() == [2, 3, 3]
    assert batch["next", "reward"].tolist() == [1 + 0.5 * 2, 2 + 0.5 * 3, 3]
    assert batch["gamma"].tolist() == [0.25, 0.25, 0.5]
    assert batch["next", "terminated"].tolist() == [False, terminated, terminated]


def test_the_next_episode_starts_from_a_reset(counting: str) -> None:
    batch = Rollout(Config(environment=counting, n_step=2), 0).collect(QNetwork(8), 1.0, rows=5)
    assert batch["observation"][:, 0].tolist() == [0, 1, 2, 0, 1, 2][: len(batch)]


def test_the_best_action_is_taken_but_for_epsilon() -> None:
    config = Config()
    network = QNetwork(8)
    rows = Rollout(config, seed=0).collect(network, epsilon=0.0, rows=64)
    assert rows["action"].tolist() == network.greedy(rows["observation"].numpy()).tolist()
    random = Rollout(config, seed=0).collect(network, epsilon=1.0, rows=64)
    assert 10 < int(random["action"].sum()) < 54


def prioritized(config: Config, rows: int) -> Any:
    batch = Rollout(config, seed=1).collect(QNetwork(8), epsilon=1.0, rows=rows)
    batch["priority_weight"] = torch.rand(len(batch)) + 0.1
    return batch


def test_an_agent_goes_on_from_its_saved_state_as_if_nothing_had_happened() -> None:
    config = Config(hidden=16)
    batch = prioritized(config, 32)
    agent = Agent(config)
    for step in range(5):
        agent.update(batch, step)
    successor = Agent(Config(hidden=16, seed=7))
    successor.load(agent.state(), agent.updates)
    for step in range(5, 8):
        assert torch.equal(agent.update(batch, step), successor.update(batch, step))
    mine, its = agent.state(), successor.state()
    for key in mine:
        assert torch.equal(mine[key], its[key]), key


def test_the_state_of_a_new_agent_can_be_saved_too() -> None:
    agent = Agent(Config(hidden=16))
    successor = Agent(Config(hidden=16, seed=7))
    successor.load(agent.state(), updates=0)
    assert torch.equal(agent.state()["online"], successor.state()["online"])


def test_nothing_is_expected_after_a_terminated_episode_only() -> None:
    config = Config(hidden=16, reward_scale=1.0)
    batch = prioritized(config, 32)
    batch["next", "reward"] = torch.zeros(len(batch))
    values = Agent(config).online(batch["observation"]).detach()
    value = values.gather(1, batch["action"][:, None]).squeeze(1)
    for terminated in (True, False):
        batch["next", "terminated"] = torch.full((len(batch),), terminated)
        surprise = Agent(config).update(batch, step=0)
        assert torch.allclose(surprise, value.abs()) == terminated


def test_updates_are_due_once_there_is_something_to_learn_from() -> None:
    config = Config(warmup_steps=100, steps_per_update=4)
    assert [config.updates_due(step) for step in (0, 99, 100, 104, 120)] == [0, 0, 0, 1, 5]


def test_a_schedule_ends_where_it_says() -> None:
    schedule = Schedule(1.0, 0.5, 10)
    assert [schedule.at(step) for step in (0, 5, 10, 1000)] == [1.0, 0.75, 0.5, 0.5]


def test_an_evaluation_plays_whole_episodes_of_its_own(counting: str) -> None:
    config = Config(environment=counting, evaluation_episodes=3)
    assert evaluate(QNetwork(8), config, seed=0) == 1 + 2 + 3

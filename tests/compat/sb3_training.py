"""Trains a model of Stable-Baselines3 in one of several processes that share its transitions.

A process resumes from the checkpoint of an earlier process with its number. It sends a report
before it begins, and another one whenever it has saved a checkpoint.
"""

from __future__ import annotations

import os
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecFrameStack

from shmbuffer import RateLimiter
from shmbuffer.sb3 import SharedHerReplayBuffer, SharedReplayBuffer

BATCH, LEARNING_STARTS, EVERY = 8, 50, 20


def task(name: str, seed: int) -> tuple[type[Any], str, Any, dict[str, Any], dict[str, Any]]:
    """Returns the algorithm, policy, environment, and arguments of the model and its buffer."""
    if name == "atari":
        import ale_py

        gym.register_envs(ale_py)
        envs = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", seed=seed), 4)
        small = {"features_extractor_kwargs": {"features_dim": 32}, "net_arch": []}
        options = {"buffer_size": 50_000, "optimize_memory_usage": True, "policy_kwargs": small}
        return DQN, "CnnPolicy", envs, options, {"frame_stack": 4, "alpha": 0.6}
    if name == "mujoco":
        env = gym.make("InvertedPendulum-v5")
        return SAC, "MlpPolicy", env, {"policy_kwargs": {"net_arch": [32]}}, {}
    options = {"replay_buffer_class": SharedHerReplayBuffer}
    return DQN, "MultiInputPolicy", BitFlippingEnv(n_bits=6, max_steps=7), options, {}


class Trainer:
    """A model, its checkpoint, and the reports about it."""

    def __init__(self, name: str, number: int, path: Path, reports: Connection) -> None:
        self.checkpoint, self.version, self.reports = path / f"{number}.zip", 0, reports
        algorithm, policy, env, options, more = task(name, number)
        if self.checkpoint.exists():
            self.model = algorithm.load(self.checkpoint, env, device="cpu")
        else:
            options = {"buffer_size": 200_000, "replay_buffer_class": SharedReplayBuffer, **options}
            self.model = algorithm(
                policy,
                env,
                seed=number,
                device="cpu",
                batch_size=BATCH,
                learning_starts=LEARNING_STARTS,
                replay_buffer_kwargs={"scratch_dir": str(path / "replay"), "rank": number, **more},
                **options,
            )
        self.model.set_logger(Logger(None, []))
        self.began, self.rb = self.model.num_timesteps, self.model.replay_buffer.buffer
        if "alpha" in more:
            self.model.replay_buffer.prioritize(self.model.q_net)
        self.report()

    def save(self) -> None:
        """Replaces the checkpoint atomically by the current state."""
        new = self.checkpoint.with_suffix(".new.zip")
        self.model.save(new)
        os.replace(new, self.checkpoint)

    def report(self) -> None:
        """Sends what this process has stored and learned, and what it sees in the buffer."""
        # one transition is not stored yet
        stored = max(self.model.num_timesteps - self.began - 1, 0)
        learned = {"updates": self.model._n_updates, "version": self.version}
        self.reports.send({"stored": stored, "items": len(self.rb), **learned})

    def train(self) -> None:
        """Explores and learns as the algorithm does by default."""
        self.model.learn(10**9, Each(self), reset_num_timesteps=False)

    def collect(self) -> None:
        """Explores with the newest policy of the learner."""
        self.model.gradient_steps = 0
        self.train()

    def learn(self) -> None:
        """Learns once for each step of the collector, and publishes the policy."""
        self.rb.rate_limiter = RateLimiter(
            BATCH, min_size=LEARNING_STARTS, error_buffer=2 * EVERY * BATCH
        )
        for _ in count():
            self.model.train(EVERY, BATCH)
            self.save()
            self.version = self.rb.publish(self.model.policy.state_dict(), self.model._n_updates)
            self.report()


class Each(BaseCallback):
    """Follows the learner, if there is one, and saves the model at every twentieth step."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer

    def _on_step(self) -> bool:
        if newer := self.trainer.rb.newest(than=self.trainer.version):
            self.model.policy.load_state_dict(newer.state_dict)
            self.trainer.version = newer.version
        if self.num_timesteps % EVERY == 0:
            self.trainer.save()
            self.trainer.report()
        return True


def main(name: str, number: int, path: Path, reports: Connection) -> None:
    """Trains until the process is killed."""
    os.chdir(path)  # MuJoCo writes its log there
    torch.set_num_threads(1)
    trainer = Trainer(name, number, path, reports)
    if name != "mujoco":
        trainer.train()
    elif number == 0:
        trainer.learn()
    else:
        trainer.collect()

"""Trains a DQN on stacks of frames in CleanRL's style: in one loop, or in several processes.

    pip install ".[demo,sb3]"
    python examples/cleanrl_dqn.py --collectors 0    # its own loop, as in dqn_atari.py
    python examples/cleanrl_dqn.py                   # two collectors and a learner, on run/dqn

The agent has to catch a ball that falls through a small picture. A single frame does not show
whether the ball drifts to the left or to the right. To train on an Atari game, return it from
`make_env` with gymnasium's ``AtariPreprocessing``. Only the network needs stacks of frames. With
shmbuffer, each step stores its newest frame, and `FrameStack` creates the stacks of a sample.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from shmbuffer import Coordinator, FrameStack, RateLimiter, attach

SIDE, STACK = 12, 4


class Falling(gym.Env[np.ndarray, int]):
    """A ball falls one row per step and drifts. The paddle in the lowest row has to catch it."""

    observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space: Any = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode with a ball in the highest row."""
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(SIDE))
        self.drift, self.paddle = int(self.np_random.choice([-1, 1])), SIDE // 2
        return self._frame(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Moves the paddle to the left (0), not at all (1), or to the right (2)."""
        self.paddle = min(max(self.paddle + int(action) - 1, 0), SIDE - 1)
        self.row, self.column = self.row + 1, self.column + self.drift
        if not 0 <= self.column < SIDE:
            self.drift = -self.drift
            self.column += 2 * self.drift
        over = self.row == SIDE - 1
        caught = over and abs(self.column - self.paddle) <= 1
        return self._frame(), float(caught), over, False, {}

    def _frame(self) -> np.ndarray:
        frame = np.zeros((SIDE, SIDE), np.uint8)
        frame[self.row, self.column] = 255
        frame[SIDE - 1, self.paddle] = 128
        return frame


def make_env() -> Any:
    """Creates the environment, whose observations are stacks ``[STACK, SIDE, SIDE]``."""
    return gym.wrappers.FrameStackObservation(Falling(), STACK)


@dataclass
class Args:
    """CleanRL's arguments, with ``collectors`` and ``scratch_dir`` in addition."""

    collectors: int = 2
    scratch_dir: str = "run/dqn"
    seed: int = 1
    total_timesteps: int = 20_000
    buffer_size: int = 20_000
    gamma: float = 0.99
    learning_rate: float = 1e-3
    batch_size: int = 32
    train_frequency: int = 4
    target_network_frequency: int = 100  # number of updates
    learning_starts: int = 1_000
    start_e: float = 1.0
    end_e: float = 0.05
    exploration_fraction: float = 0.5
    eval_episodes: int = 50

    def epsilon(self, step: int) -> float:
        """Returns the fraction of random actions."""
        slope = (self.end_e - self.start_e) / (self.exploration_fraction * self.total_timesteps)
        return max(self.start_e + slope * step, self.end_e)


class QNetwork(nn.Module):
    """Computes the values of the three actions from a stack of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(STACK, 16, 4, 2), nn.Conv2d(16, 16, 3)
        self.fc1, self.fc2 = nn.Linear(16 * 3 * 3, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns values ``[n, 3]`` for uint8 stacks ``[n, STACK, SIDE, SIDE]``."""
        x = functional.relu(self.conv2(functional.relu(self.conv1(x / 255.0))))
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> int:
        """Returns the greedy action for one observation."""
        return int(self(torch.as_tensor(obs)[None]).argmax())


class Learner:
    """Networks and optimizer. CleanRL has the code of `update` in its training loop."""

    def __init__(self, args: Args) -> None:
        self.args, self.updates = args, 0
        self.q, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=args.learning_rate)

    def update(self, batch: dict[str, torch.Tensor]) -> None:
        """Performs one gradient step."""
        with torch.no_grad():
            value = self.target(batch["next_obs"]).amax(1)
            wanted = batch["reward"] + self.args.gamma * value * (1 - batch["done"])
        found = self.q(batch["obs"]).gather(1, batch["action"][:, None]).squeeze(1)
        self.optimizer.zero_grad()
        functional.mse_loss(found, wanted).backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.args.target_network_frequency == 0:
            self.target.load_state_dict(self.q.state_dict())


# -- CleanRL's own loop ----------------------------------------------------------------------------


def own_loop(learner: Learner, env: Any, args: Args) -> None:
    """Trains in one process with Stable-Baselines3's buffer, like CleanRL's script."""
    from stable_baselines3.common.buffers import ReplayBuffer

    place = args.buffer_size, env.observation_space, env.action_space
    rb = ReplayBuffer(
        *place, device="cpu", optimize_memory_usage=True, handle_timeout_termination=False
    )
    obs, _ = env.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        action = learner.q.act(obs)
        if np.random.random() < args.epsilon(step):
            action = int(env.action_space.sample())
        next_obs, reward, terminated, truncated, info = env.step(action)
        rb.add(obs, next_obs, np.array(action), reward, terminated, [info])
        obs = env.reset()[0] if terminated or truncated else next_obs
        if step >= args.learning_starts and step % args.train_frequency == 0:
            data = rb.sample(args.batch_size)
            batch = {"obs": data.observations, "next_obs": data.next_observations}
            batch |= {"action": data.actions.squeeze(1), "reward": data.rewards.squeeze(1)}
            learner.update({**batch, "done": data.dones.squeeze(1)})


# -- the same with shmbuffer -----------------------------------------------------------------------


def collect(scratch_dir: str, index: int, options: dict[str, Any]) -> None:
    """Collects steps with the newest network and writes their newest frames, in its own process."""
    args = Args(**options)
    torch.set_num_threads(1)
    rng = np.random.default_rng([args.seed, index])
    env, q, version = make_env(), QNetwork(), 0
    with attach(scratch_dir) as rb:
        obs, _ = env.reset(seed=args.seed * 1_000 + index)
        while True:
            if (newer := rb.newest(than=version)) is not None:
                q.load_state_dict(newer.state_dict)
                version = newer.version
            action = q.act(obs)
            if rng.random() < args.epsilon(rb.write_count):
                action = int(rng.integers(3))
            next_obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            after = {"obs": next_obs[-1], "reward": np.float32(reward)}
            after |= {"terminated": terminated, "done": over}
            rb.add({"obs": obs[-1], "action": action, "next": after})
            obs = env.reset()[0] if over else next_obs


def shared_loop(learner: Learner, args: Args) -> None:
    """Updates and publishes the network.

    The rate limiter keeps CleanRL's ratio of updates to steps.
    """
    ratio = RateLimiter(
        args.batch_size / args.train_frequency,
        min_size=args.learning_starts,
        error_buffer=20 * args.batch_size,
        when_no_peer="wait",  # collectors write nothing while the learner is dead
    )
    with Coordinator(
        args.scratch_dir,
        capacity=args.buffer_size,
        alpha=None,
        rate_limiter=ratio,
        share_next=True,
        share_next_room=args.buffer_size // 8,  # an episode has 11 steps and one final observation
        sample_unit=FrameStack(STACK, keys=("obs",)),
        on_existing="recover",
    ) as run:
        run.spawn(collect, args.collectors, asdict(args), restart=True)
        for update in range((args.total_timesteps - args.learning_starts) // args.train_frequency):
            if update % 4 == 0:
                run.buffer.publish(learner.q.state_dict(), update)
            batch = run.buffer.sample(args.batch_size)
            after = batch["next"]
            data = {"obs": batch["obs"], "action": batch["action"], "next_obs": after["obs"]}
            learner.update({**data, "reward": after["reward"], "done": after["terminated"].float()})


def evaluate(q: QNetwork, env: Any, episodes: int) -> float:
    """Returns the fraction of balls that the greedy policy catches."""
    caught = 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=1_000_000 + episode)
        over = False
        while not over:
            obs, reward, over, _, _ = env.step(q.act(obs))
            caught += float(reward)
    return caught / episodes


def main() -> None:
    """Trains, and prints one line with the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Args):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    args = Args(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    env = make_env()
    env.action_space.seed(args.seed)
    learner, began_s = Learner(args), time.monotonic()
    if args.collectors:
        shared_loop(learner, args)
    else:
        own_loop(learner, env, args)
    took_s, caught = time.monotonic() - began_s, evaluate(learner.q, env, args.eval_episodes)
    print(f"{learner.updates} updates in {took_s:.0f} s: {caught:.0%} caught")


if __name__ == "__main__":
    main()

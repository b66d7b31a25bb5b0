"""Trains SAC in one file in CleanRL's style: in one loop, or with collectors and a learner.

    pip install ".[demo,sb3]"
    python examples/cleanrl_sac.py --collectors 0    # one loop: step, store, update
    python examples/cleanrl_sac.py                   # two collectors and a learner, on run/sac

Networks, losses, hyperparameters and the ratio of updates to steps are the same in both modes. The
code that differs is between the two lines of dashes: `own_loop`, and `collect` with `shared_loop`.
The shared mode can be killed at any time. When restarted, it continues with the transitions in the
buffer.
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

from shmbuffer import Coordinator, RateLimiter, attach


@dataclass
class Args:
    """CleanRL's arguments, with ``collectors`` and ``scratch_dir`` in addition."""

    collectors: int = 2
    scratch_dir: str = "run/sac"
    env_id: str = "Pendulum-v1"
    seed: int = 1
    total_timesteps: int = 5_000
    buffer_size: int = 100_000
    gamma: float = 0.99
    tau: float = 0.005
    batch_size: int = 256
    learning_starts: int = 500
    policy_lr: float = 3e-4
    q_lr: float = 1e-3
    policy_frequency: int = 2
    eval_episodes: int = 20


class SoftQNetwork(nn.Module):
    """Computes the value of an action in a state."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        inputs = env.observation_space.shape[0] + env.action_space.shape[0]
        self.fc1, self.fc2 = nn.Linear(inputs, 256), nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 1)

    def forward(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Returns values ``[n]`` for observations ``[n, obs]`` and actions ``[n, action]``."""
        x = functional.relu(self.fc1(torch.cat([x, a], 1)))
        return self.fc3(functional.relu(self.fc2(x))).squeeze(1)


class Actor(nn.Module):
    """A policy with a squashed Gaussian distribution."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        size = env.action_space.shape[0]
        self.fc1, self.fc2 = nn.Linear(env.observation_space.shape[0], 256), nn.Linear(256, 256)
        self.fc_mean, self.fc_logstd = nn.Linear(256, size), nn.Linear(256, size)
        high, low = env.action_space.high, env.action_space.low
        self.register_buffer("scale", torch.tensor((high - low) / 2))
        self.register_buffer("bias", torch.tensor((high + low) / 2))

    def get_action(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns a sampled action, its log probability, and the mean action."""
        x = functional.relu(self.fc2(functional.relu(self.fc1(x))))
        mean, log_std = self.fc_mean(x), torch.tanh(self.fc_logstd(x))
        normal = torch.distributions.Normal(mean, torch.exp(-5 + 3.5 * (log_std + 1)))
        drawn = normal.rsample()
        squashed = torch.tanh(drawn)
        log_prob = normal.log_prob(drawn) - torch.log(self.scale * (1 - squashed**2) + 1e-6)
        action = squashed * self.scale + self.bias
        return action, log_prob.sum(1), torch.tanh(mean) * self.scale + self.bias

    @torch.no_grad()
    def act(self, obs: np.ndarray, greedy: bool = False) -> np.ndarray:
        """Samples an action for one observation."""
        action, _, mean = self.get_action(torch.as_tensor(obs, dtype=torch.float32)[None])
        return (mean if greedy else action)[0].numpy()


class Learner:
    """Networks and optimizers. CleanRL has the code of `update` in its training loop."""

    def __init__(self, env: Any, args: Args) -> None:
        self.args, self.updates = args, 0
        self.actor = Actor(env)
        self.qs, self.targets = ([SoftQNetwork(env), SoftQNetwork(env)] for _ in range(2))
        for q, target in zip(self.qs, self.targets, strict=True):
            target.load_state_dict(q.state_dict())
        parameters = [p for q in self.qs for p in q.parameters()]
        self.q_optimizer = torch.optim.Adam(parameters, lr=args.q_lr)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.a_optimizer = torch.optim.Adam([self.log_alpha], lr=args.q_lr)
        self.target_entropy = -float(env.action_space.shape[0])

    def update(self, batch: dict[str, torch.Tensor]) -> None:
        """Performs one gradient step for each network."""
        args, alpha = self.args, self.log_alpha.exp().item()
        self.updates += 1
        with torch.no_grad():
            action, log_prob, _ = self.actor.get_action(batch["next_obs"])
            values = [target(batch["next_obs"], action) for target in self.targets]
            value = torch.min(*values) - alpha * log_prob
            wanted = batch["reward"] + (1 - batch["done"]) * args.gamma * value
        loss = sum(functional.mse_loss(q(batch["obs"], batch["action"]), wanted) for q in self.qs)
        self.q_optimizer.zero_grad()
        loss.backward()
        self.q_optimizer.step()
        if self.updates % args.policy_frequency == 0:
            for _ in range(args.policy_frequency):  # compensates for the delay
                self._update_policy(batch["obs"])
        for q, target in zip(self.qs, self.targets, strict=True):
            for ours, slow in zip(q.parameters(), target.parameters(), strict=True):
                slow.data.lerp_(ours.data, args.tau)

    def _update_policy(self, obs: torch.Tensor) -> None:
        action, log_prob, _ = self.actor.get_action(obs)
        value = torch.min(*(q(obs, action) for q in self.qs))
        loss = (self.log_alpha.exp().item() * log_prob - value).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        log_prob = self.actor.get_action(obs)[1].detach()
        alpha_loss = (-self.log_alpha.exp() * (log_prob + self.target_entropy)).mean()
        self.a_optimizer.zero_grad()
        alpha_loss.backward()
        self.a_optimizer.step()


# -- CleanRL's own loop ----------------------------------------------------------------------------


def own_loop(learner: Learner, env: Any, args: Args) -> None:
    """Trains in one process with Stable-Baselines3's buffer, like CleanRL's script."""
    from stable_baselines3.common.buffers import ReplayBuffer

    rb = ReplayBuffer(args.buffer_size, env.observation_space, env.action_space, device="cpu")
    obs, _ = env.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        action = learner.actor.act(obs)
        if step < args.learning_starts:
            action = env.action_space.sample()
        next_obs, reward, terminated, truncated, info = env.step(action)
        rb.add(obs, next_obs, action, reward, terminated, [info])
        obs = env.reset()[0] if terminated or truncated else next_obs
        if step >= args.learning_starts:
            data = rb.sample(args.batch_size)
            batch = {"obs": data.observations, "next_obs": data.next_observations}
            batch |= {"action": data.actions, "reward": data.rewards.squeeze(1)}
            learner.update({**batch, "done": data.dones.squeeze(1)})


# -- the same with shmbuffer -----------------------------------------------------------------------


def collect(scratch_dir: str, index: int, options: dict[str, Any]) -> None:
    """Collects steps with the newest policy, in its own process."""
    args = Args(**options)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed * 1_000 + index)
    env = gym.make(args.env_id)
    env.action_space.seed(args.seed * 1_000 + index)
    actor, version = Actor(env), 0
    with attach(scratch_dir) as rb:
        obs, _ = env.reset(seed=args.seed * 1_000 + index)
        while True:
            if (newer := rb.newest(than=version)) is not None:
                actor.load_state_dict(newer.state_dict)
                version = newer.version
            action = actor.act(obs)
            if rb.write_count < args.learning_starts:
                action = env.action_space.sample()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            item = {"obs": obs, "next_obs": next_obs, "action": action}
            rb.add(item | {"reward": np.float32(reward), "done": np.float32(terminated)})
            obs = env.reset()[0] if terminated or truncated else next_obs


def shared_loop(learner: Learner, args: Args) -> None:
    """Updates and publishes the policy.

    The rate limiter keeps CleanRL's ratio of updates to steps.
    """
    ratio = RateLimiter(
        args.batch_size,
        min_size=args.learning_starts,
        error_buffer=20 * args.batch_size,  # one side may be ahead by 20 steps
        when_no_peer="wait",  # collectors write nothing while the learner is dead
    )
    with Coordinator(
        args.scratch_dir,
        capacity=args.buffer_size,
        alpha=None,
        rate_limiter=ratio,
        on_existing="recover",
    ) as run:
        run.spawn(collect, args.collectors, asdict(args), restart=True)
        for update in range(args.total_timesteps - args.learning_starts):
            if update % 4 == 0:
                run.buffer.publish(learner.actor.state_dict(), update)
            learner.update(run.buffer.sample(args.batch_size))


def evaluate(actor: Actor, env: Any, episodes: int) -> float:
    """Returns the mean return of episodes with greedy actions."""
    total = 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=1_000_000 + episode)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(actor.act(obs, greedy=True))
            total, over = total + float(reward), terminated or truncated
    return total / episodes


def main() -> None:
    """Trains, and prints one line with the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Args):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    args = Args(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    env = gym.make(args.env_id)
    env.action_space.seed(args.seed)
    learner, began_s, cpu_s = Learner(env, args), time.monotonic(), time.process_time()
    if args.collectors:
        shared_loop(learner, args)
    else:
        own_loop(learner, env, args)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    mean_return = evaluate(learner.actor, env, args.eval_episodes)
    print(f"{learner.updates} updates in {took_s:.0f} s ({cpu_s:.0f} s CPU): {mean_return:.0f}")


if __name__ == "__main__":
    main()

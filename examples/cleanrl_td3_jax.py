"""Trains TD3 in JAX, in one file in CleanRL's style, with collectors and a learner. Needs no torch.

    pip install . "gymnasium>=1.0" jax
    python examples/cleanrl_td3_jax.py               # two collectors and a learner, on run/td3

Losses and the ratio of updates to steps are those of CleanRL's file. Collectors compute actions
with NumPy. They write arrays to the buffer through `shmbuffer.numpy`, and the learner samples
arrays. The learner publishes its policy with `publish`, and collectors receive it with `newest`.
The program can be killed at any time. When restarted, it continues with the transitions in the
buffer.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import shmbuffer.numpy
from shmbuffer import Coordinator, RateLimiter


@dataclass(frozen=True)
class Args:
    """CleanRL's arguments, with ``collectors`` and ``scratch_dir`` in addition."""

    collectors: int = 2
    scratch_dir: str = "run/td3"
    env_id: str = "Pendulum-v1"
    seed: int = 1
    total_timesteps: int = 10_000
    buffer_size: int = 100_000
    learning_rate: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005
    batch_size: int = 256
    policy_noise: float = 0.2
    noise_clip: float = 0.5
    exploration_noise: float = 0.1
    learning_starts: int = 1_000
    policy_frequency: int = 2
    eval_episodes: int = 20


def network(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, Any]:
    """Returns the initial parameters of a network with three layers."""
    sizes = (inputs, 256, 256, outputs)
    drawn: dict[str, Any] = {}
    for at, (into, out) in enumerate(pairwise(sizes)):
        bound = 1 / np.sqrt(into)
        drawn[f"w{at}"] = rng.uniform(-bound, bound, (into, out)).astype(np.float32)
        drawn[f"b{at}"] = rng.uniform(-bound, bound, out).astype(np.float32)
    return drawn


def forward(net: dict[str, Any], x: Any) -> Any:
    """Returns the outputs of a network for inputs ``[n, inputs]`` of NumPy or JAX."""
    for at in range(2):
        x = x @ net[f"w{at}"] + net[f"b{at}"]
        x = x * (x > 0)
    return x @ net["w2"] + net["b2"]


class Policy:
    """Computes actions for single observations with NumPy."""

    def __init__(self, env: Any, seed: int) -> None:
        space = env.action_space
        self.low, self.high = space.low, space.high
        self.rng = np.random.default_rng(seed)
        self.net = network(self.rng, env.observation_space.shape[0], space.shape[0])

    def act(self, obs: np.ndarray, noise: float = 0.0) -> np.ndarray:
        """Returns the action plus normal noise, whose deviation is relative to half the range."""
        scale, bias = (self.high - self.low) / 2, (self.high + self.low) / 2
        action = np.tanh(forward(self.net, obs)) * scale + bias
        return (action + self.rng.normal(0, scale * noise)).clip(self.low, self.high, dtype="f")


# -- the learner, in JAX ---------------------------------------------------------------------------


def adam(params: Any, grads: Any, state: Any, rate: float) -> tuple[Any, Any]:
    """Returns the parameters and the state ``(step, means, squares)`` after a step of Adam."""
    step, mean, square = state
    step += 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, grads)
    size = rate * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    moved = jax.tree.map(lambda p, m, v: p - size * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
    return moved, (step, mean, square)


class Learner:
    """Networks, targets and optimizers. CleanRL has the code of `update` in its training loop."""

    def __init__(self, env: Any, args: Args) -> None:
        rng, self.key = np.random.default_rng(args.seed), jax.random.key(args.seed)
        space, obs = env.action_space, env.observation_space.shape[0]
        self.args, self.updates = args, 0
        self.low, self.high = space.low, space.high
        self.actor = network(rng, obs, space.shape[0])
        self.critics = [network(rng, obs + space.shape[0], 1) for _ in range(2)]
        self.targets = self.actor, self.critics
        zeros = jax.tree.map(jnp.zeros_like, self.targets)
        self.optimizers = [(jnp.zeros((), jnp.int32), one, one) for one in zeros]

    def update(self, batch: dict[str, np.ndarray]) -> None:
        """Updates the critics, and in every second call also the actor and all targets."""
        self.updates += 1
        self.key, key = jax.random.split(self.key)
        self.critics, self.optimizers[1] = self._step_critics(
            self.critics, self.optimizers[1], self.targets, batch, key
        )
        if self.updates % self.args.policy_frequency == 0:
            self.actor, self.optimizers[0], self.targets = self._step_actor(
                self.actor, self.optimizers[0], self.critics, self.targets, batch["obs"]
            )

    def _action(self, actor: Any, obs: Any) -> Any:
        scale, bias = (self.high - self.low) / 2, (self.high + self.low) / 2
        return jnp.tanh(forward(actor, obs)) * scale + bias

    @partial(jax.jit, static_argnums=0)  # it reads only constant attributes of the learner
    def _step_critics(
        self, critics: Any, optimizer: Any, targets: Any, batch: Any, key: Any
    ) -> Any:
        args, (slow_actor, slow_critics) = self.args, targets
        noise = jax.random.normal(key, batch["action"].shape) * args.policy_noise
        noise = noise.clip(-args.noise_clip, args.noise_clip) * (self.high - self.low) / 2
        after = (self._action(slow_actor, batch["next_obs"]) + noise).clip(self.low, self.high)
        after = jnp.concatenate([batch["next_obs"], after], 1)
        value = jnp.minimum(*(forward(net, after)[:, 0] for net in slow_critics))
        wanted = batch["reward"] + (1 - batch["done"]) * args.gamma * value
        now = jnp.concatenate([batch["obs"], batch["action"]], 1)

        def loss(critics: Any) -> Any:
            return sum(((forward(net, now)[:, 0] - wanted) ** 2).mean() for net in critics)

        return adam(critics, jax.grad(loss)(critics), optimizer, args.learning_rate)

    @partial(jax.jit, static_argnums=0)
    def _step_actor(self, actor: Any, optimizer: Any, critics: Any, targets: Any, obs: Any) -> Any:
        def loss(actor: Any) -> Any:
            now = jnp.concatenate([obs, self._action(actor, obs)], 1)
            return -forward(critics[0], now).mean()

        args = self.args
        actor, optimizer = adam(actor, jax.grad(loss)(actor), optimizer, args.learning_rate)
        slower = jax.tree.map(lambda s, p: s + args.tau * (p - s), targets, (actor, critics))
        return actor, optimizer, slower


# -- the processes ---------------------------------------------------------------------------------


def collect(scratch_dir: str, index: int, options: dict[str, Any]) -> None:
    """Collects steps with the newest policy, in its own process."""
    args = Args(**options)
    seed, version = args.seed * 1_000 + index, 0
    env = gym.make(args.env_id)
    env.action_space.seed(seed)
    policy = Policy(env, seed)
    with shmbuffer.numpy.attach(scratch_dir) as rb:
        obs, _ = env.reset(seed=seed)
        while True:
            if (newer := rb.newest(than=version)) is not None:
                policy.net, version = newer.state_dict, newer.version
            action = policy.act(obs, args.exploration_noise)
            if len(rb) < args.learning_starts:
                action = env.action_space.sample()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            item = {"obs": np.float32(obs), "next_obs": np.float32(next_obs), "action": action}
            rb.add(item | {"reward": np.float32(reward), "done": np.float32(terminated)})
            obs = env.reset()[0] if terminated or truncated else next_obs


def learn(learner: Learner, args: Args) -> None:
    """Updates and publishes the policy.

    The rate limiter keeps CleanRL's ratio of updates to steps.
    """
    ratio = RateLimiter(
        args.batch_size,
        min_size=args.learning_starts,
        error_buffer=20 * args.batch_size,  # one side may be ahead by 20 steps
        when_no_peer="wait",  # collectors write nothing while the learner is dead
    )
    options = {"alpha": None, "rate_limiter": ratio, "on_existing": "recover"}
    path, used = args.scratch_dir, ("obs", "next_obs", "action", "reward", "done")
    with (
        Coordinator(path, capacity=args.buffer_size, **options) as run,
        shmbuffer.numpy.attach(path, rng=args.seed) as rb,
    ):
        run.spawn(collect, args.collectors, asdict(args), restart=True)
        for update in range(args.total_timesteps - args.learning_starts):
            if update % 4 == 0:
                rb.publish(learner.actor, update)
            batch = rb.sample(args.batch_size)
            learner.update({key: batch[key] for key in used})


def evaluate(policy: Policy, env: Any, episodes: int) -> float:
    """Returns the mean return of episodes without exploration noise."""
    total = 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=1_000_000 + episode)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
            total, over = total + float(reward), terminated or truncated
    return total / episodes


def main() -> None:
    """Trains, and prints one line with the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in fields(Args):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default)
    args = Args(**vars(parser.parse_args()))
    env = gym.make(args.env_id)
    learner, began_s, cpu_s = Learner(env, args), time.monotonic(), time.process_time()
    learn(learner, args)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    policy = Policy(env, args.seed)
    policy.net = jax.tree.map(np.asarray, learner.actor)
    mean_return = evaluate(policy, env, args.eval_episodes)
    print(f"{learner.updates} updates in {took_s:.0f} s ({cpu_s:.0f} s CPU): {mean_return:.0f}")


if __name__ == "__main__":
    main()

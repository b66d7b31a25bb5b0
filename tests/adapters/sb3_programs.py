"""Environments, models and fields for the tests of buffers under Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from shmbuffer.sb3 import SharedReplayBuffer

FIELDS = {
    "observations": "observation",
    "next_observations": ("next", "observation"),
    "actions": "action",
    "rewards": ("next", "reward"),
    "dones": ("next", "done"),
    "timeouts": ("next", "truncated"),
}
"""Stable-Baselines3's arrays, with the corresponding entries of our items."""


class Signs(gym.Env[Any, Any]):
    """Episodes of six steps, truncated or terminated in turn, with the given observation space."""

    def __init__(self, space: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = space, actions
        self._steps = self._episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps, self._episode = 0, self._episode + 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        over, cut = self._steps == 6, self._episode % 2 == 0
        obs = self.observation_space.sample()
        return obs, self.np_random.random(), over and not cut, over and cut, {}


BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "box": BOX,
    "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
    "discrete": spaces.Discrete(5),
    "dict": spaces.Dict({"pixels": spaces.Box(0, 255, (2, 2), np.uint8), "place": BOX}),
    "dict of discrete": spaces.Dict({"room": spaces.Discrete(5), "place": BOX}),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-2, 2, (2,), np.float32),
    "box of float64": spaces.Box(-2, 2, (2,), np.float64),
}


def envs_of(space: spaces.Space[Any], actions: spaces.Space[Any], count: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: Signs(space, actions) for _ in range(count)])


@contextmanager
def model_of(
    algorithm: Any, path: Path, kind: type[SharedReplayBuffer] = SharedReplayBuffer, **options: Any
) -> Iterator[Any]:
    """Makes a model on our buffer, which is closed at the end."""
    more = options.pop("replay_buffer_kwargs", {})
    model = algorithm(
        options.pop("policy", "MlpPolicy"),
        device="cpu",
        replay_buffer_class=kind,
        replay_buffer_kwargs={"scratch_dir": str(path), **more},
        **options,
    )
    try:
        yield model
    finally:
        model.replay_buffer.buffer.close()
        model.env.close()


def fill(buffer: Any, envs: Any, steps: int, seed: int = 0) -> None:
    """Writes the transitions of random steps, as Stable-Baselines3 does."""
    rng = np.random.default_rng(seed)
    envs.seed(seed)
    envs.action_space.seed(seed)
    obs = envs.reset()
    normalizes = isinstance(envs, VecNormalize)
    original = envs.get_original_obs() if normalizes else obs
    for _ in range(steps):
        action = np.stack([envs.action_space.sample() for _ in range(envs.num_envs)])
        if action.dtype.kind == "f":
            action = rng.uniform(-1, 1, action.shape)
        after, reward, done, infos = envs.step(action)
        if normalizes:
            after, reward = envs.get_original_obs(), envs.get_original_reward()
        last = deepcopy(after)
        for at in np.flatnonzero(done):
            final = infos[at]["terminal_observation"]
            final = envs.unnormalize_obs(final) if normalizes else final
            for row, one in zip(arrays_of(last), arrays_of(final), strict=True):
                row[at] = one
        buffer.add(deepcopy(original), last, action, reward, done, infos)
        original = deepcopy(after)


def arrays_of(obs: Any) -> list[Any]:
    return [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]


def ours_of(buffer: SharedReplayBuffer, field: str) -> Any:
    """Returns a field of all items in the order of the ring."""
    found = buffer.buffer[:].get(FIELDS[field])
    return found if isinstance(found, torch.Tensor) else found.to_dict()


def theirs_of(buffer: buffers.ReplayBuffer, field: str) -> Any:
    """Returns a field of Stable-Baselines3's buffer in the same order."""
    found = getattr(buffer, field)
    if isinstance(found, dict):
        return {key: one[: buffer.pos].reshape(-1, *one.shape[2:]) for key, one in found.items()}
    return found[: buffer.pos].reshape(-1, *found.shape[2:])


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, one in theirs.items():
            assert_same(ours[key], one)
    else:
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def assert_row(ours: Any, at: int, theirs: Any, fields: tuple[str, ...]) -> None:
    """Checks that a row of our sample equals their sample of one row, with dtypes and device."""
    for field in fields:
        pairs = zip(arrays_of(getattr(ours, field)), arrays_of(getattr(theirs, field)), strict=True)
        for mine, its in pairs:
            assert (mine.dtype, mine.shape[1:], mine.device) == (
                its.dtype,
                its.shape[1:],
                its.device,
            )
            torch.testing.assert_close(mine[at], its[0], rtol=1e-6, atol=1e-6)


def the_row(theirs: Any, row: int, env_index: int, env: Any = None) -> Any:
    """Returns Stable-Baselines3's sample of one row of one environment, without randomness."""
    drawn = np.random.randint
    np.random.randint = lambda *args, size, **more: np.full(size, env_index)  # type: ignore[assignment]
    try:
        return theirs._get_samples(np.array([row]), env)
    finally:
        np.random.randint = drawn

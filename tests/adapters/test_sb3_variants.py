"""Stable-Baselines3's kinds of buffers compared with ours: n steps, memory, stacks, hindsight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3", reason="the extra sb3")

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack
from stable_baselines3.her import HerReplayBuffer

from shmbuffer.sb3 import SharedHerReplayBuffer, SharedReplayBuffer
from tests.adapters.sb3_programs import (
    ACTIONS,
    BOX,
    SPACES,
    Signs,
    assert_row,
    envs_of,
    fill,
    model_of,
    the_row,
)

SAMPLED = ("observations", "actions", "next_observations", "dones", "rewards")
FRAMES = spaces.Box(0, 255, (4, 4, 1), np.uint8)
FLAT_FRAMES = spaces.Box(0, 255, (4, 5), np.uint8)


pytestmark = pytest.mark.usefixtures("one_thread_and_no_logs")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., SharedReplayBuffer]]:
    """Makes a buffer for some environments, and closes it at the end."""
    buffers: list[SharedReplayBuffer] = []

    def make(size: int, envs: Any, kind: Any = SharedReplayBuffer, **more: Any) -> Any:
        place = envs.observation_space, envs.action_space
        more |= {"n_envs": envs.num_envs, "scratch_dir": tmp_path / f"replay-{len(buffers)}"}
        buffers.append(kind(size, *place, device="cpu", **more))
        return buffers[-1]

    yield make
    for one in buffers:
        one.buffer.close()


def like_it(ours: SharedReplayBuffer, kind: Any, **more: Any) -> Any:
    """Makes Stable-Baselines3's own buffer for the same environments."""
    place = ours.observation_space, ours.action_space
    return kind(ours.buffer_size * ours.n_envs, *place, device="cpu", n_envs=ours.n_envs, **more)


def places(ours: SharedReplayBuffer, sample: Any) -> list[tuple[int, int]]:
    """Returns the row and environment of each sampled item of a ring that has not wrapped."""
    return [divmod(index, ours.n_envs) for index in sample.indices.tolist()]


# -- n steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_steps", [2, 4])
def test_transitions_of_n_steps_are_those_of_its_own_buffer(
    made: Callable[..., Any], n_steps: int
) -> None:
    ours = made(100, envs_of(BOX, ACTIONS["box"], 2), n_steps=n_steps, gamma=0.9)
    theirs = like_it(ours, buffers.NStepReplayBuffer, n_steps=n_steps, gamma=0.9)
    for one in (ours, theirs):
        fill(one, envs_of(BOX, ACTIONS["box"], 2), 27)
    sample = ours.sample(200)
    assert sample.discounts.unique().numel() == n_steps  # an episode may end earlier
    for at, (row, env_index) in enumerate(places(ours, sample)):
        assert_row(sample, at, the_row(theirs, row, env_index), (*SAMPLED, "discounts"))


# -- observations once -------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["box", "image", "dict"])
def test_observations_that_are_stored_once_come_back_as_if_stored_twice(
    made: Callable[..., Any], space: str
) -> None:
    place = SPACES[space], ACTIONS["discrete"]
    ours = made(100, envs_of(*place, 2), optimize_memory_usage=True)
    theirs = like_it(ours, buffers.DictReplayBuffer if space == "dict" else buffers.ReplayBuffer)
    once = None
    if space != "dict":  # Stable-Baselines3 does not support these in its memory-efficient variant
        more = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        once = like_it(ours, buffers.ReplayBuffer, **more)
    for one in (ours, theirs, once):
        if one is not None:
            fill(one, envs_of(*place, 2), 27)
    sample = ours.sample(200)
    for at, (row, env_index) in enumerate(places(ours, sample)):
        assert_row(sample, at, the_row(theirs, row, env_index), SAMPLED)
        if once is not None and not theirs.dones[row, env_index]:
            assert_row(sample, at, the_row(once, row, env_index), SAMPLED)


def test_large_observations_take_half_the_space(made: Callable[..., Any]) -> None:
    envs = envs_of(spaces.Box(0, 255, (84, 84, 1), np.uint8), ACTIONS["discrete"], 1)
    twice, once = made(1000, envs), made(1000, envs, optimize_memory_usage=True)
    for one in (twice, once):
        fill(one, envs, 3)
    assert once.buffer.stats()["bytes"] < 0.6 * twice.buffer.stats()["bytes"]


# -- stacks of frames --------------------------------------------------------------------------


def black_at_first(count: int) -> Any:
    return VecFrameStack(envs_of(FRAMES, ACTIONS["discrete"], count), 3)


def copies_at_first(count: int) -> Any:
    def make() -> Any:
        return gym.wrappers.FrameStackObservation(Signs(FLAT_FRAMES, ACTIONS["discrete"]), 3)

    return DummyVecEnv([make for _ in range(count)])


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("envs_like", [black_at_first, copies_at_first])
def test_single_frames_come_back_as_the_stacks_of_the_environment(
    made: Callable[..., Any], envs_like: Callable[[int], Any], once: bool
) -> None:
    ours = made(100, envs_like(2), frame_stack=3, optimize_memory_usage=once)
    theirs = like_it(ours, buffers.ReplayBuffer)
    for one in (ours, theirs):
        for seed in (0, 1):  # the second time in the middle of an episode, as in `learn`
            fill(one, envs_like(2), 16, seed)
    sample = ours.sample(300)
    for at, (row, env_index) in enumerate(places(ours, sample)):
        assert_row(sample, at, the_row(theirs, row, env_index), SAMPLED)
    assert ours.buffer[0]["observation"].numel() * 3 == np.prod(ours.obs_shape)


def test_learn_begins_anew_with_stacks_of_the_new_episode(tmp_path: Path) -> None:
    images = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    envs = VecFrameStack(envs_of(images, ACTIONS["discrete"], 2), 4)
    options = {"env": envs, "policy": "CnnPolicy", "seed": 0, "buffer_size": 200, "batch_size": 8}
    options |= {"learning_starts": 20, "optimize_memory_usage": True, "train_freq": 5}
    kwargs = {"frame_stack": 4, "alpha": 0.6}
    with model_of(DQN, tmp_path / "replay", replay_buffer_kwargs=kwargs, **options) as model:
        model.replay_buffer.prioritize(model.q_net)
        model.learn(50)
        with pytest.warns(UserWarning, match="will be truncated"):
            model.learn(50)
        ours = model.replay_buffer
        assert (ours.size(), model._n_updates > 0) == (50, True)
        sample = ours.sample(400)
        seen = {at: sample.observations[row] for row, at in enumerate(sample.indices.tolist())}
        first = [seen[at] for at in (50, 51)]  # of the second call, in the middle of an episode
        assert [one[:3].any().item() for one in first] == [False, False]
        assert all(one[3].any() for one in first)
        assert sample.observations.shape[1:] == (4, 36, 36)


# -- hindsight ---------------------------------------------------------------------------------


def flips(count: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(n_bits=6, max_steps=7) for _ in range(count)])


@pytest.mark.parametrize("alpha", [None, 0.6])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_relabelled_transitions_are_those_of_its_own_buffer(
    made: Callable[..., Any], strategy: str, alpha: float | None
) -> None:
    envs = flips(2)
    more = {"env": envs, "n_sampled_goal": 3, "goal_selection_strategy": strategy}
    ours = made(100, envs, SharedHerReplayBuffer, alpha=alpha, **more)
    theirs = like_it(ours, HerReplayBuffer, **more)
    for one in (ours, theirs):
        fill(one, flips(2), 28)
    sample = ours.sample(200)
    assert (sample.weights is None) == (alpha is None)
    changed = int(ours.her_ratio * 200)
    assert changed == int(theirs.her_ratio * 200) == 150
    reached, done = theirs.next_observations["achieved_goal"], theirs.dones
    for at, (row, env_index) in enumerate(places(ours, sample)):
        of_one = np.array([row]), np.array([env_index])
        if at >= changed:
            assert_row(sample, at, theirs._get_real_samples(*of_one), SAMPLED)
            continue
        goal = sample.observations["desired_goal"][at].numpy()
        last = row + int(np.argmax(done[row:, env_index]))
        first = last - 6
        choice = {"future": range(row, last + 1), "final": [last]}.get(
            strategy, range(first, last + 1)
        )
        assert any((goal == reached[step, env_index]).all() for step in choice)
        theirs._sample_goals = lambda *_, goal=goal: goal[None]
        assert_row(sample, at, theirs._get_virtual_samples(*of_one), SAMPLED)
    assert (sample.rewards[:changed] == 0).any()


def test_what_hindsight_cannot_do_is_refused(made: Callable[..., Any]) -> None:
    envs = flips(1)
    for more in ({"copy_info_dict": True}, {"n_steps": 3}):
        with pytest.raises(NotImplementedError, match=f"does not support {next(iter(more))}"):
            made(10, envs, SharedHerReplayBuffer, env=envs, **more)
    ours = made(100, envs, SharedHerReplayBuffer, env=None)
    fill(ours, flips(1), 8)
    with pytest.raises(ValueError, match=r"no environment .*; call set_env\(env\)"):
        ours.sample(4)


def test_a_saved_hindsight_buffer_needs_only_its_environment(tmp_path: Path) -> None:
    path, options = tmp_path / "replay", {"env": flips(2), "policy": "MultiInputPolicy"}
    options |= {"buffer_size": 200, "learning_starts": 20, "batch_size": 8, "seed": 0}
    with model_of(DQN, path, SharedHerReplayBuffer, **options) as model:
        model.learn(64)
        assert model._n_updates > 0
        model.save_replay_buffer(tmp_path / "replay.pkl")
        model.replay_buffer.buffer.close()
        model.load_replay_buffer(tmp_path / "replay.pkl")
        assert model.replay_buffer.size() == 32
        model.learn(40, reset_num_timesteps=False)
        assert model.replay_buffer.size() == 52


# -- training ----------------------------------------------------------------------------------


def test_sac_trains_on_transitions_of_three_steps(tmp_path: Path) -> None:
    options = {"env": gym.make("Pendulum-v1"), "seed": 0, "learning_starts": 40, "batch_size": 8}
    kwargs = {"n_steps": 3, "gamma": 0.99, "alpha": 0.6}
    with model_of(SAC, tmp_path / "replay", replay_buffer_kwargs=kwargs, **options) as model:
        model.replay_buffer.prioritize(model.critic)
        before = [one.clone() for one in model.critic.parameters()]
        model.learn(60)
        after = model.critic.parameters()
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert model.replay_buffer.buffer.stats()["updates_applied"] == 8 * 20

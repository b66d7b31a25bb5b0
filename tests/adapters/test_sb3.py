"""Stable-Baselines3 with our buffer instead of its own: the same items, samples and algorithms."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmbuffer
from shmbuffer import EmptyBufferError, SchemaMismatchError
from shmbuffer.extras import MissingExtra
from tests.kit.programs import Program

pytest.importorskip("stable_baselines3", reason="the extra sb3")

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common import buffers
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecNormalize
from torch.nn import functional

from shmbuffer.sb3 import SharedReplayBuffer, SharedSamples
from tests.adapters.sb3_programs import (
    ACTIONS,
    BOX,
    FIELDS,
    SPACES,
    assert_row,
    assert_same,
    envs_of,
    fill,
    model_of,
    ours_of,
    the_row,
    theirs_of,
)

SAMPLED = ("observations", "actions", "next_observations", "dones", "rewards")


pytestmark = pytest.mark.usefixtures("one_thread_and_no_logs")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., SharedReplayBuffer]]:
    """Makes buffers on one directory, opens them, and closes them."""
    opened: list[shmbuffer.TensorDictReplayBuffer] = []

    def make(
        size: int, space: spaces.Space[Any] = BOX, actions: Any = ACTIONS["discrete"], **more: Any
    ) -> SharedReplayBuffer:
        more.setdefault("scratch_dir", tmp_path / "replay")
        one = SharedReplayBuffer(size, space, actions, device="cpu", **more)
        opened.append(one.buffer)
        return one

    yield make
    for rb in opened:
        rb.close()


# -- what is stored ----------------------------------------------------------------------------


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    ("algorithm", "policy", "space", "actions"),
    [
        (DQN, "MlpPolicy", "box", "discrete"),
        (DQN, "CnnPolicy", "discrete", "discrete"),
        (DQN, "MultiInputPolicy", "dict", "discrete"),
        (SAC, "MlpPolicy", "box", "box"),
        (SAC, "MultiInputPolicy", "dict of discrete", "box of float64"),
    ],
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_an_algorithm_stores_in_it_what_it_stores_in_its_own(
    tmp_path: Path, algorithm: Any, policy: str, space: str, actions: str, n_envs: int
) -> None:
    policy = "MlpPolicy" if space == "discrete" else policy
    options = {"buffer_size": 300, "seed": 3, "gradient_steps": 0, "policy": policy}
    options |= {"train_freq": 1, "learning_starts": 20}
    theirs = algorithm(
        env=envs_of(SPACES[space], ACTIONS[actions], n_envs), device="cpu", **options
    )
    theirs.learn(90)
    own = theirs.replay_buffer
    envs = envs_of(SPACES[space], ACTIONS[actions], n_envs)
    with model_of(algorithm, tmp_path / "replay", env=envs, **options) as model:
        model.learn(90)
        ours = model.replay_buffer
        assert (
            (ours.size(), ours.pos, ours.full)
            == (own.size(), own.pos, own.full)
            == (
                90 // n_envs,
                90 // n_envs,
                False,
            )
        )
        for field in FIELDS:
            assert_same(ours_of(ours, field), theirs_of(own, field))
        cut = ours_of(ours, "timeouts")
        assert cut.any()
        assert (ours_of(ours, "dones") & ~cut).any()


def test_a_full_buffer_says_so_and_loses_the_oldest(
    made: Callable[..., SharedReplayBuffer],
) -> None:
    ours, theirs = made(10, n_envs=2), buffers.ReplayBuffer(10, BOX, ACTIONS["discrete"], n_envs=2)
    for one in (ours, theirs):
        fill(one, envs_of(BOX, ACTIONS["discrete"], 2), 7)
    assert (ours.buffer_size, ours.size(), ours.pos, ours.full) == (5, 5, 2, True)
    assert (theirs.buffer_size, theirs.size(), theirs.pos, theirs.full) == (5, 5, 2, True)
    assert_same(ours_of(ours, "rewards"), theirs.rewards.reshape(-1))
    ours.reset()
    assert (ours.size(), ours.pos, ours.full) == (0, 0, False)


def test_what_is_given_may_change_afterwards(made: Callable[..., SharedReplayBuffer]) -> None:
    ours, obs = made(4), np.zeros((1, 3), np.float32)
    ours.add(obs, obs, np.array([1]), np.array([0.5]), np.array([False]), [{}])
    obs[:] = 9
    assert not ours.sample(2).observations.any()


# -- what is sampled ---------------------------------------------------------------------------


@pytest.mark.product(few=3)
@pytest.mark.parametrize(
    ("space", "actions", "normalizes"),
    [
        *(("box", name, False) for name in ACTIONS),
        *((name, "discrete", False) for name in SPACES if name != "box"),
        *((name, "discrete", True) for name in ("box", "image", "dict")),
    ],
)
def test_a_sample_is_as_one_of_its_own_would_be(
    made: Callable[..., SharedReplayBuffer], space: str, actions: str, normalizes: bool
) -> None:
    place = SPACES[space], ACTIONS[actions]
    kind = buffers.DictReplayBuffer if "dict" in space else buffers.ReplayBuffer
    ours, theirs = made(60, *place, n_envs=2), kind(60, *place, device="cpu", n_envs=2)
    env = None
    for one in (ours, theirs):
        envs: Any = envs_of(*place, 2)
        if normalizes:
            keys = ["place"] if space == "dict" else None
            envs = env = VecNormalize(envs, norm_obs_keys=keys)
        fill(one, envs, 25)
    by_reward = {float(reward): at for at, reward in enumerate(theirs_of(theirs, "rewards"))}
    sample = ours.sample(16, env)
    assert isinstance(sample, SharedSamples)
    assert sample.indices is not None
    assert (sample.discounts, sample.weights) == (None, None)
    for at, index in enumerate(sample.indices.tolist()):
        row, env_index = divmod(by_reward[float(ours.buffer[index]["next", "reward"])], 2)
        assert_row(sample, at, the_row(theirs, row, env_index, env), SAMPLED)


@pytest.mark.parametrize("handles", [True, False])
def test_an_episode_that_was_cut_off_is_not_done(
    made: Callable[..., SharedReplayBuffer], handles: bool
) -> None:
    ours, obs = made(4, handle_timeout_termination=handles), np.zeros((1, 3), np.float32)
    for reward, info in enumerate([{"TimeLimit.truncated": True}, {}]):
        ours.add(obs, obs, np.array([1]), np.array([reward]), np.array([True]), [info])
    sample = ours.sample(32)
    done = dict(
        zip(sample.rewards.flatten().tolist(), sample.dones.flatten().tolist(), strict=True)
    )
    assert done == {0.0: 0.0 if handles else 1.0, 1.0: 1.0}


def test_a_seed_decides_the_draws_and_a_rank_makes_others(
    made: Callable[..., SharedReplayBuffer],
) -> None:
    fill(made(100), envs_of(BOX, ACTIONS["discrete"], 1), 100)

    def drawn(**options: Any) -> list[int]:
        torch.manual_seed(5)
        index = made(100, **options).sample(8).indices
        assert index is not None
        return index.tolist()

    assert drawn(rank=0) == drawn(rank=0) != drawn(rank=1)


# -- priorities --------------------------------------------------------------------------------


def loss_of(model: Any, batch: Any, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the critic's loss with weights as in the paper, and the size of the TD errors."""
    with torch.no_grad():
        if isinstance(model, DQN):
            values = model.q_net_target(batch.next_observations).max(1).values[:, None]
        else:
            actions = model.actor_target(batch.next_observations)
            both = torch.cat(model.critic_target(batch.next_observations, actions), 1)
            values = both.min(1, keepdim=True).values
        target = batch.rewards + (1 - batch.dones) * model.gamma * values
    if isinstance(model, DQN):
        value = model.q_net(batch.observations.clone()).gather(1, batch.actions)
        huber = functional.smooth_l1_loss(value, target, reduction="none")
        return (weights * huber).mean(), (value - target).abs().clamp(max=1).detach()
    both = model.critic(batch.observations.clone(), batch.actions)
    loss = sum((weights * (one - target) ** 2).mean() for one in both)
    errors = torch.stack([(one - target).abs() for one in both]).mean(0)
    return loss, 2 * errors.detach()  # TD3's loss has no 1/2 before the square


@pytest.mark.parametrize(("algorithm", "actions"), [(DQN, "discrete"), (TD3, "box")])
def test_the_loss_of_an_algorithm_is_weighted_and_its_errors_become_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any, actions: str
) -> None:
    options = (
        {"max_grad_norm": 1e9}
        if algorithm is DQN
        else {"policy_delay": 99, "target_policy_noise": 0.0}
    )
    options |= {"env": envs_of(BOX, ACTIONS[actions], 1), "buffer_size": 200, "seed": 0}
    prioritized = {"alpha": 0.7, "beta": 1.0}
    with model_of(
        algorithm, tmp_path / "replay", replay_buffer_kwargs=prioritized, **options
    ) as model:
        ours, critic = model.replay_buffer, model.q_net if algorithm is DQN else model.critic
        fill(ours, model.env, 100)
        uneven = torch.from_numpy(np.random.default_rng(0).random(100))
        ours.buffer.update_priority(torch.arange(100), uneven)
        model.set_logger(configure(None, []))
        expected: list[Any] = []
        draw = ours.sample

        def sample(count: int, env: Any = None) -> SharedSamples:
            batch = draw(count, env)
            loss, errors = loss_of(model, batch, batch.weights)
            gradients = torch.autograd.grad(loss, list(critic.parameters()))
            expected.append((batch, errors.flatten(), gradients))
            return batch

        monkeypatch.setattr(ours, "sample", sample)
        ours.prioritize(critic)
        model.train(gradient_steps=1, batch_size=16)
        ((batch, errors, gradients),) = expected
        assert batch.weights.min() < 0.9 * batch.weights.max()
        for parameter, gradient in zip(critic.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(priorities_of(ours)[batch.indices], errors, rtol=1e-4, atol=1e-6)


def priorities_of(ours: SharedReplayBuffer) -> torch.Tensor:
    """Returns the raw priorities, without alpha."""
    sampler: Any = ours.buffer.sampler
    return (sampler._sum_tree ** (1 / sampler.alpha)).float()


def test_sac_is_prioritized_by_its_critics_and_its_actor_is_not(tmp_path: Path) -> None:
    envs = envs_of(BOX, ACTIONS["box"], 2)
    with model_of(
        SAC,
        tmp_path / "replay",
        env=envs,
        seed=0,
        learning_starts=20,
        train_freq=10,
        gradient_steps=2,
        replay_buffer_kwargs={"alpha": 1.0},
        buffer_size=200,
        batch_size=8,
    ) as model:
        handle = model.replay_buffer.prioritize(model.critic)
        model.learn(60)
        applied = model.replay_buffer.buffer.stats()["updates_applied"]
        assert applied == 8 * model._n_updates > 0
        assert len(priorities_of(model.replay_buffer)[:60].unique()) > 10
        handle.remove()
        model.learn(20)
        assert model.replay_buffer.buffer.stats()["updates_applied"] == applied


@pytest.mark.parametrize("algorithm", [TD3, DDPG])
def test_algorithms_with_deterministic_actors_train_on_it(tmp_path: Path, algorithm: Any) -> None:
    options = {"learning_starts": 20, "train_freq": 10, "gradient_steps": 2, "batch_size": 8}
    options |= {"env": envs_of(BOX, ACTIONS["box"], 2), "buffer_size": 200, "seed": 0}
    with model_of(algorithm, tmp_path / "replay", **options) as model:
        before = [one.clone() for one in model.critic.parameters()]
        model.learn(60)
        sampled = model.replay_buffer.buffer.stats()["items_sampled"]
        assert sampled == 8 * model._n_updates > 0
        after = model.critic.parameters()
        assert not any(torch.equal(*both) for both in zip(before, after, strict=True))


def test_what_was_prioritized_is_freed(tmp_path: Path) -> None:
    """A hook that held its own tensor would keep each batch and its graph."""
    envs = envs_of(BOX, ACTIONS["box"], 1)
    with model_of(
        SAC, tmp_path / "replay", env=envs, buffer_size=50, replay_buffer_kwargs={"alpha": 0.6}
    ) as model:
        ours = model.replay_buffer
        fill(ours, envs, 20)
        ours.prioritize(model.critic)
        model.set_logger(configure(None, []))
        model.train(gradient_steps=2, batch_size=4)
        drawn = weakref.ref(ours._last_sample.observations)
        ours.sample(4)
        gc.collect()
        assert drawn() is None


def test_a_train_of_ones_own_sends_priorities_and_late_ones_are_counted(
    made: Callable[..., SharedReplayBuffer],
) -> None:
    ours, envs = made(40, alpha=0.5), envs_of(BOX, ACTIONS["discrete"], 1)
    fill(ours, envs, 40)
    batch = ours.sample(8)
    assert ours.update_priorities(batch, torch.full((8, 1), -3.0)) == (8, 0)
    assert batch.indices is not None
    torch.testing.assert_close(priorities_of(ours)[batch.indices], torch.full((8,), 3.0))
    fill(ours, envs, 40)
    assert ours.update_priorities(batch, torch.ones(8)) == (0, 8)


# -- processes ---------------------------------------------------------------------------------

TRAIN = """
import sys, torch
from stable_baselines3 import DQN
from shmbuffer.sb3 import SharedReplayBuffer

torch.set_num_threads(1)
path, seed = sys.argv[1], int(sys.argv[2])
model = DQN(
    "MlpPolicy", "CartPole-v1", learning_starts=50, buffer_size=100_000, seed=seed, device="cpu",
    replay_buffer_class=SharedReplayBuffer,
    replay_buffer_kwargs={"scratch_dir": path + "/replay", "alpha": 0.6, "rank": seed},
)
model.replay_buffer.prioritize(model.q_net)
model.learn(160)
model.save(path + f"/model-{seed}.zip")
print("saved", flush=True)
model.learn(10_000_000, reset_num_timesteps=False)
"""


@pytest.mark.full
def test_models_in_several_processes_learn_from_what_all_of_them_do(tmp_path: Path) -> None:
    with Program.python(TRAIN, tmp_path, 0) as first, Program.python(TRAIN, tmp_path, 1) as second:
        assert (first.line(), second.line()) == ("saved", "saved")
        with shmbuffer.attach(tmp_path / "replay") as rb:
            assert len(rb) >= 320
            stats = rb.stats()
    assert stats["clients_alive"] == 3
    assert stats["updates_applied"] > 0


@pytest.mark.full
def test_a_model_that_was_killed_goes_on_with_its_transitions(tmp_path: Path) -> None:
    with Program.python(TRAIN, tmp_path, 0) as program:
        assert program.line() == "saved"
        with shmbuffer.attach(tmp_path / "replay") as rb:
            while len(rb) < 200:  # it continues to learn past its save
                time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.wait()
    model = DQN.load(tmp_path / "model-0.zip", env=gym.make("CartPole-v1"), device="cpu")
    try:
        ours = model.replay_buffer
        assert isinstance(ours, SharedReplayBuffer)
        left = ours.size()
        assert (model.num_timesteps, left >= 200) == (160, True)
        # no other client was left, so the buffer was recovered
        assert ours.buffer.stats()["epoch"] == 1
        ours.prioritize(model.q_net)
        model.learn(60, reset_num_timesteps=False)
        assert (model.num_timesteps, ours.size()) == (220, left + 60)
    finally:
        model.replay_buffer.buffer.close()
        model.env.close()


def test_a_saved_replay_buffer_names_its_directory(tmp_path: Path) -> None:
    with model_of(
        DQN, tmp_path / "replay", env=envs_of(BOX, ACTIONS["discrete"], 1), buffer_size=50
    ) as model:
        fill(model.replay_buffer, model.env, 20)
        model.save_replay_buffer(tmp_path / "replay.pkl")
        assert (tmp_path / "replay.pkl").stat().st_size < 10_000
        model.replay_buffer.buffer.close()
        model.load_replay_buffer(tmp_path / "replay.pkl")
        assert model.replay_buffer.size() == 20


def test_a_model_that_only_predicts_opens_no_directory(tmp_path: Path) -> None:
    path, options = tmp_path / "replay", {"buffer_size": 50, "learning_starts": 10}
    with model_of(DQN, path, env=envs_of(BOX, ACTIONS["discrete"], 1), **options) as model:
        model.learn(12)
        model.save(tmp_path / "model.zip")
        loaded = DQN.load(tmp_path / "model.zip", device="cpu", buffer_size=1)
        obs = np.zeros(3, np.float32)
        assert loaded.predict(obs, deterministic=True) == model.predict(obs, deterministic=True)
        assert model.replay_buffer.buffer.stats()["clients_alive"] == 1
        with pytest.raises(SchemaMismatchError, match=r"has max_size 50 .* with max_size 1 "):
            loaded.replay_buffer.size()


def test_a_collector_follows_a_learner_that_has_no_environment(tmp_path: Path) -> None:
    envs, path = envs_of(BOX, ACTIONS["box"], 1), tmp_path / "replay"
    options = {"env": envs, "buffer_size": 100, "learning_starts": 10}
    with (
        model_of(SAC, path, gradient_steps=0, seed=0, **options) as collector,
        model_of(SAC, path, seed=1, **options) as learner,
    ):
        seen = [0]

        def follow(now: dict[str, Any], _: Any) -> bool:
            newest = now["self"].replay_buffer.buffer.newest(than=seen[-1])
            if newest is not None:
                now["self"].policy.load_state_dict(newest.state_dict)
                seen.append(newest.version)
            return True

        learner.set_logger(configure(None, []))
        for step in range(1, 4):
            collector.learn(20 * step, follow, reset_num_timesteps=False)
            learner.train(gradient_steps=2, batch_size=8)
            learner.replay_buffer.buffer.publish(learner.policy.state_dict(), step)
        assert (seen, learner.replay_buffer.size()) == ([0, 1, 2], 100)
        assert (collector._n_updates, learner._n_updates) == (0, 6)


# -- errors ------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(made: Callable[..., SharedReplayBuffer]) -> None:
    with pytest.raises(ValueError, match=r"n_steps together with frame_stack; store whole"):
        made(10, n_steps=2, frame_stack=3)
    with pytest.raises(ValueError, match=r"frame_stack=2 does not divide the 3 channels .*; pass"):
        made(10, frame_stack=2)
    with pytest.raises(ValueError, match=r"frame_stack=2 needs observations that are arrays"):
        made(10, SPACES["dict"], frame_stack=2)
    ours = made(10)
    with pytest.raises(EmptyBufferError):
        ours.sample(2)
    with pytest.raises(
        ValueError, match=r'has no priorities; create it with alpha: .*"alpha": 0.6'
    ):
        ours.prioritize(torch.nn.Linear(1, 1))
    fill(ours, envs_of(BOX, ACTIONS["discrete"], 1), 3)
    with pytest.raises(
        SchemaMismatchError, match=r"max_size 10 .* but this storage was created with max_size 20"
    ):
        made(20)
    made(10, alpha=0.6)
    with pytest.raises(ValueError, match=r"priorities of this buffer use alpha=0\.6"):
        made(10, alpha=0.7)
    other = made(10, SPACES["image"])
    with pytest.raises(SchemaMismatchError, match="observation"):
        fill(other, envs_of(SPACES["image"], ACTIONS["discrete"], 1), 1)
    assert ours.size() == 3


def test_without_stable_baselines3_the_message_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shmbuffer.sb3")
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.buffers", None)
    with pytest.raises(MissingExtra, match=r"needs stable-baselines3, .*: pip install .*\[sb3\]"):
        importlib.import_module("shmbuffer.sb3")

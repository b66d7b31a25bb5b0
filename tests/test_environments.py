"""Steps of gymnasium environments become transitions, with one stream for each environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gym = pytest.importorskip("gymnasium")
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

from shmbuffer import (  # noqa: E402
    Coordinator,
    LazyMemmapStorage,
    Recorder,
    ReplayBuffer,
    SchemaMismatchError,
    SliceSampler,
    TensorDictReplayBuffer,
    attach,
)

GAMMA = 0.5
STEPS = 23
ENVS = 3


class Counting(gym.Env[Any, Any]):
    """An environment that observes [environment, episode, step] and rewards the total step count.

    Episode e has 2 + (environment + e) % 4 steps. Every third episode is truncated.
    """

    def __init__(self, number: int = 0, nested: bool = False) -> None:
        box = gym.spaces.Box(-1, 1_000, (3,), np.float32)
        self.observation_space = box
        if nested:
            self.observation_space = gym.spaces.Dict({"where": box, "in": gym.spaces.Dict(at=box)})
        self.action_space = gym.spaces.Discrete(1_000)
        self.number, self.nested = number, nested
        self.episode, self.at, self.total = -1, 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.at = self.episode + 1, 0
        return self.seen(), {}

    def seen(self) -> Any:
        seen = np.array([self.number, self.episode, self.at], np.float32)
        return {"where": seen, "in": {"at": seen + 1}} if self.nested else seen

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at, self.total = self.at + 1, self.total + 1
        last = self.at == 2 + (self.number + self.episode) % 4
        cut = self.episode % 3 == 2
        return self.seen(), float(self.total), last and not cut, last and cut, {}


def expected(number: int, steps: int, n_step: int) -> list[tuple[Any, ...]]:
    """Computes the items of one environment: first, last, reward, gamma, flags."""
    items, total, episode = [], 0, 0
    while total < steps:
        length = 2 + (number + episode) % 4
        taken = min(length, steps - total)
        rewards = [total + k + 1 for k in range(taken)]
        for first in range(taken):
            last = min(first + n_step, taken)
            reward = sum(GAMMA**k * r for k, r in enumerate(rewards[first:last]))
            ended = last == length
            cut = episode % 3 == 2
            flags = (ended and not cut, ended and cut, ended)
            gamma = GAMMA ** (last - first)
            items.append((episode, first, last, total + first + 1, reward, gamma, *flags))
        total, episode = total + taken, episode + 1
    return items


def written(buffer: ReplayBuffer, number: int) -> list[tuple[Any, ...]]:
    """Returns the stored items of one environment, in order and in the form of `expected`."""
    data = buffer[:]
    mine = data[data["observation"][:, 0] == number]
    after = mine["next"]
    assert (after["observation"][:, :2] == mine["observation"][:, :2]).all()
    columns = (
        *(mine["observation"][:, 1], mine["observation"][:, 2], after["observation"][:, 2]),
        *(mine["action"], after["reward"], mine["gamma"]),
        *(after["terminated"], after["truncated"], after["done"]),
    )
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with Coordinator(tmp_path / "buffer", capacity=1_000, batch_size=16) as run:
        yield run.buffer


def play(recorder: Recorder, env: Any, vector: bool, resets: bool) -> list[int]:
    """Plays at least STEPS steps of each environment.

    An action is the number of the step, from 1.
    """
    obs, _ = env.reset()
    recorder.reset(obs)
    taken = np.zeros(ENVS if vector else 1, np.int64)
    over = np.zeros_like(taken, np.bool_)
    while taken.min() < STEPS:
        if over.any() and resets:
            mask = {"options": {"reset_mask": over}} if vector else {}
            recorder.reset(env.reset(**mask)[0], *([over] if vector else []))
            over = np.zeros_like(over)
        skipped = over if not resets and _resets_next(env) else np.zeros_like(over)
        taken += ~skipped
        obs, reward, terminated, truncated, info = env.step(taken if vector else int(taken[0]))
        recorder.step(obs, taken if vector else int(taken[0]), reward, terminated, truncated, info)
        over = np.atleast_1d(np.logical_or(terminated, truncated))
    recorder.close()
    return list(taken)


def _resets_next(env: Any) -> bool:
    return env.metadata.get("autoreset_mode") in (None, AutoresetMode.NEXT_STEP)


@pytest.mark.product(few=4)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_a_vector_environment_of_every_mode_gives_the_transitions_of_its_episodes(
    buffer: ReplayBuffer, kind: Any, mode: AutoresetMode, n_step: int
) -> None:
    envs = kind(
        [lambda number=number: Counting(number) for number in range(ENVS)], autoreset_mode=mode
    )
    recorder = Recorder(buffer, num_envs=ENVS, n_step=n_step, gamma=GAMMA)
    taken = play(recorder, envs, vector=True, resets=mode is AutoresetMode.DISABLED)
    envs.close()
    for number, steps in enumerate(taken):
        assert written(buffer, number) == expected(number, steps, n_step)


@pytest.mark.parametrize("n_step", [1, 4])
@pytest.mark.parametrize("resets", [True, False])
def test_a_single_environment_gives_the_transitions_of_its_episodes(
    buffer: ReplayBuffer, n_step: int, resets: bool
) -> None:
    env: Any = Counting() if resets else gym.wrappers.Autoreset(Counting())
    recorder = Recorder(buffer, n_step=n_step, gamma=GAMMA)
    (steps,) = play(recorder, env, vector=False, resets=resets)
    assert written(buffer, 0) == expected(0, steps, n_step)


def test_observations_may_be_dicts_and_final_ones_are_whole(buffer: ReplayBuffer) -> None:
    envs = SyncVectorEnv(
        [lambda number=number: Counting(number, nested=True) for number in range(ENVS)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    recorder = Recorder(buffer, num_envs=ENVS)
    recorder.reset(envs.reset()[0])
    for _ in range(9):
        action = np.zeros(ENVS, np.int64)
        obs, reward, *ends, info = envs.step(action)
        recorder.step(obs, action, reward, *ends, info)
    items = buffer[:]
    before, after = items["observation"], items["next", "observation"]
    assert (after["where"] == before["where"] + torch.tensor([0.0, 0.0, 1.0])).all()
    assert (after["in", "at"] == after["where"] + 1).all()
    assert items["next", "done"].any()


def test_slices_are_of_one_environment(buffer: ReplayBuffer, tmp_path: Path) -> None:
    envs = SyncVectorEnv([lambda number=number: Counting(number) for number in range(ENVS)])
    play(Recorder(buffer, num_envs=ENVS), envs, vector=True, resets=False)
    sampler = SliceSampler(slice_len=2, strict_length=True)
    with attach(tmp_path / "buffer", sampler=sampler, batch_size=200) as learner:
        slices = learner.sample().reshape(-1, 2)["observation"]
    assert (slices[:, 0, :2] == slices[:, 1, :2]).all()
    assert (slices[:, 0, 2] + 1 == slices[:, 1, 2]).all()
    assert set(slices[:, 0, 0].tolist()) == {0, 1, 2}


def test_items_have_the_policy_version_of_their_first_step_and_extra_entries(
    buffer: ReplayBuffer,
) -> None:
    recorder = Recorder(buffer, n_step=2, gamma=GAMMA)
    env = Counting(2)
    recorder.reset(env.reset()[0])
    for step in range(4):
        recorder.policy_version = 10 + step
        obs, *rest = env.step(0)
        recorder.step(obs, 0, *rest, extra={"log_prob": np.float32(-step)})
    recorder.close()
    items = buffer[:]
    assert items["policy_version"].tolist() == [10, 11, 12, 13]
    assert items["log_prob"].tolist() == [0, -1, -2, -3]
    assert items["next", "truncated"].tolist() == [False] * 4
    assert items["next", "terminated"].tolist() == [False, False, True, True]


def test_close_writes_the_steps_of_an_open_episode(buffer: ReplayBuffer) -> None:
    env = Counting(2)
    with Recorder(buffer, n_step=3, gamma=GAMMA) as recorder:
        recorder.reset(env.reset()[0])
        for _ in range(2):
            recorder.step(env.step(0)[0], 0, 1.0, False, False)
        assert len(buffer) == 0
    items = buffer[:]
    assert items["gamma"].tolist() == [0.25, 0.5]
    assert items["next", "reward"].tolist() == [1.5, 1.0]
    assert not items["next", "done"].any()


def test_an_interrupted_block_writes_nothing_more(buffer: ReplayBuffer) -> None:
    with pytest.raises(SystemExit), Recorder(buffer, n_step=3) as recorder:  # noqa: PT012 - ends it
        recorder.reset(Counting(2).reset()[0])
        recorder.step(np.zeros(3, np.float32), 0, 1.0, False, False)
        raise SystemExit
    assert len(buffer) == 0


def test_a_reset_in_an_episode_ends_its_windows(buffer: ReplayBuffer) -> None:
    recorder = Recorder(buffer, num_envs=2, n_step=3, gamma=GAMMA)
    recorder.reset(np.zeros((2, 1)))
    zeros, off = np.zeros(2), np.zeros(2, np.bool_)
    recorder.step(np.ones((2, 1)), zeros, np.ones(2), off, off)
    recorder.reset(np.full((2, 1), 7.0), mask=[False, True])
    recorder.step(np.full((2, 1), 8.0), zeros, np.ones(2), off, off)
    recorder.close()
    items = buffer[:]
    assert items["observation"].flatten().tolist() == [0, 0, 1, 7]
    assert items["next", "observation"].flatten().tolist() == [1, 8, 8, 8]
    assert items["gamma"].tolist() == [0.5, 0.25, 0.5, 0.5]


def test_a_step_that_was_refused_can_be_given_again(buffer: ReplayBuffer) -> None:
    env, steps = Counting(3), 7
    recorder = Recorder(buffer, n_step=2, gamma=GAMMA)
    recorder.reset(env.reset()[0])
    for step in range(1, steps + 1):
        obs, *rest = env.step(step)
        if step == 4:
            with pytest.raises(SchemaMismatchError, match="observation"):
                recorder.step(obs[:2], step, *rest)
        recorder.step(obs, step, *rest)
        if rest[1] or rest[2]:
            recorder.reset(env.reset()[0])
    recorder.close()
    assert written(buffer, 3) == expected(3, steps, 2)


def test_what_is_missing_is_said_and_nothing_is_written(buffer: ReplayBuffer) -> None:
    recorder = Recorder(buffer, num_envs=2)
    zeros, off = np.zeros(2), np.zeros(2, np.bool_)
    with pytest.raises(RuntimeError, match=r"no first observations .* to Recorder\.reset\(obs\)"):
        recorder.step(np.zeros((2, 3)), zeros, zeros, off, off)
    with pytest.raises(ValueError, match="the first call must reset all environments"):
        recorder.reset(np.zeros((2, 3)), mask=[True, False])
    with pytest.raises(ValueError, match=r"obs has shape \[3\].*leave num_envs out"):
        recorder.reset(np.zeros(3))
    recorder.reset(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"action has shape \[3\].*the number of environments, 2"):
        recorder.step(np.zeros((2, 3)), np.zeros(3), zeros, off, off)
    with pytest.raises(ValueError, match="reward must contain one number per environment"):
        recorder.step(np.zeros((2, 3)), zeros, np.zeros((2, 1)), off, off)
    assert len(buffer) == 0
    recorder.step(np.zeros((2, 3)), zeros, zeros, [True, False], off)
    with pytest.raises(ValueError, match=r"environment 0 ends again .*did not reset it.*final_obs"):
        recorder.step(np.zeros((2, 3)), zeros, zeros, [True, False], off)
    assert len(buffer) == 2


@pytest.mark.parametrize("cut", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_an_environment_that_resets_in_the_same_step_needs_final_observations(
    buffer: ReplayBuffer, n_step: int, cut: bool
) -> None:
    recorder = Recorder(buffer, num_envs=2, n_step=n_step)
    episode, step = np.zeros(2), np.zeros(2)
    recorder.reset(np.stack([episode, step], 1))
    off, action = np.zeros(2, np.bool_), np.zeros(2, np.int64)

    def outcome() -> tuple[Any, ...]:
        nonlocal episode, step
        step = step + 1
        ended, reward = step >= np.array([4, 5]), step.copy()
        episode, step = episode + ended, np.where(ended, 0, step)
        flags = (off, ended) if cut else (ended, off)
        return np.stack([episode, step], 1), action, reward, *flags, {}

    for _ in range(4):
        recorder.step(*outcome())
    after = outcome()
    with pytest.raises(ValueError, match=r"environment 0 has the reward 1 .*final_obs.*NEXT_STEP"):
        recorder.step(*after)
    written = len(buffer)
    recorder.step(after[0], action, np.array([0.0, 5.0]), off, off, {})
    assert len(buffer) > written  # a step that only resets has the reward 0


def test_a_single_environment_that_was_reset_beside_the_recorder_is_refused(
    buffer: ReplayBuffer,
) -> None:
    env = Counting()
    recorder = Recorder(buffer)
    recorder.reset(env.reset()[0])
    over = False
    while not over:
        obs, *rest = env.step(1)
        recorder.step(obs, 1, *rest)
        over = rest[1] or rest[2]
    env.reset()
    with pytest.raises(ValueError, match=r"not a step that only resets.*to Recorder\.reset"):
        recorder.step(*_with_action(env.step(1)))
    assert len(buffer) == 2


def _with_action(outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    obs, *rest = outcome
    return obs, 1, *rest


def test_parts_of_a_tuple_space_are_not_taken_for_environments(buffer: ReplayBuffer) -> None:
    space = gym.spaces.Tuple([gym.spaces.Discrete(9), gym.spaces.Discrete(9)])
    obs = gym.vector.utils.batch_space(space, 2).sample()
    recorder = Recorder(buffer, num_envs=2)
    with pytest.raises(
        ValueError, match=r"obs is a tuple of arrays.*pass the components as a dict"
    ):
        recorder.reset(obs)
    recorder.reset(dict(zip("ab", obs, strict=True)))


@pytest.mark.parametrize(
    ("action", "extra", "message"),
    [
        (0.5, {"log_prob": 0.0}, r"'action' is float32\[\], but was int64\[\]"),
        (1, {}, r"'log_prob' is missing, but was float64\[\]"),
        (1, {"log_prob": 0.0, "value": 1}, r"'value' is int64\[\], but was missing"),
    ],
)
def test_a_step_with_other_entries_is_refused_before_its_window_is_whole(
    buffer: ReplayBuffer, action: Any, extra: dict[str, Any], message: str
) -> None:
    env = Counting(2)
    recorder = Recorder(buffer, n_step=3, gamma=GAMMA)
    recorder.reset(env.reset()[0])
    for step in range(1, 5):
        obs, *rest = env.step(step)
        if step == 2:
            with pytest.raises(SchemaMismatchError, match=message):
                recorder.step(obs, action, *rest, extra=extra)
        recorder.step(obs, step, *rest, extra={"log_prob": 0.0})
    assert written(buffer, 2) == expected(2, 4, 3)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_observations_stored_once_are_not_mixed_with_what_an_autoreset_gives(
    mode: AutoresetMode,
) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(1000, share_next=True), batch_size=64)
    envs = SyncVectorEnv(
        [lambda number=number: Counting(number) for number in range(ENVS)], autoreset_mode=mode
    )
    taken = play(Recorder(rb, num_envs=ENVS), envs, True, mode is AutoresetMode.DISABLED)
    envs.close()
    ends = 0
    for number, count in enumerate(taken):
        wanted = expected(number, count, 1)
        assert [row[:3] for row in written(rb, number)] == [row[:3] for row in wanted]
        ends += sum(row[-1] for row in wanted[:-1])
    used = rb.stats()["own_rows_used"]
    assert used == ends + ENVS, "the end of each episode, and the newest of each stream"


def test_an_observation_of_another_dtype_than_that_of_reset_is_refused(
    buffer: ReplayBuffer,
) -> None:
    recorder = Recorder(buffer, dtype=None)
    recorder.reset(np.zeros(3, np.float32))
    with pytest.raises(SchemaMismatchError, match=r"'observation' is float64\[3\].*was float32"):
        recorder.step(np.zeros(3), 0, 1.0, False, False)
    assert len(buffer) == 0
    recorder.step(np.zeros(3, np.float32), 0, 1.0, False, False)
    assert len(buffer) == 1


def steps_of(recorder: Recorder, count: int = 3) -> None:
    """Records steps of two environments with float64 observations, actions and extra entries."""
    obs = {"state": np.full((2, 3), 1 / 3), "frame": np.zeros((2, 2), np.uint8)}
    recorder.reset(obs)
    action, off = np.full((2, 1), 1 / 7), np.zeros(2, np.bool_)
    for step in range(count):
        ended = np.array([step == 1, False])
        final = {"final_obs": np.array([obs, None]), "_final_obs": ended}
        final["final_obs"][0] = {"state": np.full(3, 2 / 3), "frame": np.ones(2, np.uint8)}
        info = final if ended.any() else {}
        extra = {"log_prob": np.full(2, 1 / 3)}
        recorder.step(obs, action, np.full(2, 1 / 3), ended, off, info, extra=extra)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (np.float32, torch.float32),
        ("float16", torch.float16),
        (torch.float32, torch.float32),
        (np.float64, torch.float64),
        (None, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_step", [1, 2])
def test_float64_is_stored_as_the_dtype_of_the_recorder(
    buffer: ReplayBuffer,
    caplog: pytest.LogCaptureFixture,
    dtype: Any,
    stored: torch.dtype,
    n_step: int,
) -> None:
    steps_of(Recorder(buffer, num_envs=2, n_step=n_step, gamma=0.5, dtype=dtype), 5)
    items = buffer[:]
    for key in (("observation", "state"), ("next", "observation", "state"), "action"):
        assert items[key].dtype == stored
    assert items["observation", "state"][0, 0] == torch.tensor(1 / 3, dtype=torch.double).to(stored)
    final = torch.tensor(2 / 3, dtype=torch.double).to(stored)
    assert items["next", "observation", "state"].max() == final
    assert items["next", "reward"].dtype == stored
    assert items["log_prob"].dtype == torch.float64
    assert items["observation", "frame"].dtype == torch.uint8
    assert items["gamma"].dtype == torch.float32
    lines = [
        one.getMessage() for one in caplog.records if one.name.startswith("shmbuffer.environments")
    ]
    if stored is torch.float64:
        assert lines == []
        return
    (line,) = lines
    assert line.startswith("Recorder: obs and action are float64 and are stored as float")
    assert "dtype=None" in line


def test_other_dtypes_stay_and_nothing_is_logged(
    buffer: ReplayBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    env = Counting()
    recorder = Recorder(buffer)
    recorder.reset(env.reset()[0].astype(np.float16))
    obs, *rest = env.step(1)
    recorder.step(obs.astype(np.float16), 1, *rest)
    assert buffer[:]["observation"].dtype == torch.float16
    assert buffer[:]["action"].dtype == torch.int64
    assert buffer[:]["next", "reward"].dtype == torch.float32
    assert not [one for one in caplog.records if one.name.startswith("shmbuffer.environments")]


def test_rewards_keep_their_dtype_without_one(tmp_path: Path) -> None:
    for reward, stored in ((np.float32(1), "float32"), (1.0, "float64"), (1, "float64")):
        with Coordinator(tmp_path / f"{type(reward).__name__}", capacity=8) as run:
            recorder = Recorder(run.buffer, dtype=None)
            recorder.reset(np.zeros(3))
            recorder.step(np.zeros(3), 0, reward, False, False)
            assert str(run.buffer[:]["next", "reward"].dtype) == f"torch.{stored}"


@pytest.mark.parametrize("dtype", ["int64", "complex64", torch.bfloat16, "text"], ids=str)
def test_a_dtype_that_is_no_floating_point_dtype_is_refused(
    buffer: ReplayBuffer, dtype: Any
) -> None:
    with pytest.raises(TypeError, match="dtype must be float16, float32, float64, or None"):
        Recorder(buffer, dtype=dtype)


def test_a_directory_of_another_dtype_says_how_to_replace_it(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=8) as run:
        steps_of(Recorder(run.buffer, num_envs=2, dtype=None), 1)
    with (
        Coordinator(tmp_path / "buffer", on_existing="recover") as run,
        pytest.raises(SchemaMismatchError, match=r'float32.*on_existing="overwrite"'),
    ):
        steps_of(Recorder(run.buffer, num_envs=2), 1)
    with Coordinator(tmp_path / "buffer", capacity=8, on_existing="overwrite") as run:
        steps_of(Recorder(run.buffer, num_envs=2), 1)
        assert len(run.buffer) == 2


def test_a_final_observation_of_a_single_environment_is_whole(buffer: ReplayBuffer) -> None:
    recorder = Recorder(buffer)
    recorder.reset(np.zeros(3))
    final = np.array([1.0, 2.0, 3.0])
    recorder.step(np.zeros(3), 0, 1.0, True, False, {"final_observation": final})
    assert buffer[:]["next", "observation"].tolist() == [final.tolist()]


def test_a_list_of_infos_is_refused(buffer: ReplayBuffer) -> None:
    recorder = Recorder(buffer, num_envs=2)
    recorder.reset(np.zeros((2, 3)))
    zeros, off = np.zeros(2), np.zeros(2, np.bool_)
    infos: Any = [{}, {"terminal_observation": np.ones(3)}]
    with pytest.raises(TypeError, match="info must be a dict, as returned by gymnasium, not a"):
        recorder.step(np.zeros((2, 3)), zeros, zeros, off, off, infos)
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs and n_step must be at least 1"),
        ({"n_step": 0}, "num_envs and n_step must be at least 1"),
        ({"gamma": 1.5}, "gamma must be from 0 to 1, got 1.5"),
        ({"n_step": 1.5}, "num_envs and n_step must be at least 1, got None and 1.5"),
        ({"num_envs": "2"}, "num_envs and n_step must be at least 1"),
    ],
)
def test_numbers_are_checked(buffer: ReplayBuffer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recorder(buffer, **arguments)

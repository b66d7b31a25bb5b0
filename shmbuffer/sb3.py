"""Replay buffers for Stable-Baselines3 that several processes can share.

    DQN, SAC, TD3 ──add──▶ SharedReplayBuffer ──extend──▶ scratch_dir ◀── other processes
          ▲ └──loss──▶ gradient of the critic ──TD errors──▶ priorities ──┘
          └────────── sample, with weights ──────────────────────┘

The algorithms of Stable-Baselines3 are not changed. They have no priorities, and their losses have
no weights. `SharedReplayBuffer.prioritize` adds both through the gradient at the critic's output,
which is the TD error of each item.

Items have TorchRL's keys: "observation", "action", and, below "next", "observation", "reward",
"done", "terminated" and "truncated". With ``frame_stack``, an observation is one frame, and "blank"
is the number of black frames at the start of the step's stack.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch.utils.hooks import RemovableHandle

from shmbuffer.buffers.hindsight import HERReplayBuffer, HindsightStrategy
from shmbuffer.buffers.prioritized_buffers import TensorDictPrioritizedReplayBuffer
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.extras import missing
from shmbuffer.items.raw_priorities import PriorityUpdate
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.storages.lazy_memmap import LazyMemmapStorage
from shmbuffer.tensors.form import cpu
from shmbuffer.units.frame_stack import FrameStack
from shmbuffer.units.n_step import NStep

try:
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.preprocessing import (
        is_image_space,
        is_image_space_channels_first,
    )
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
    from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer
except ModuleNotFoundError as error:
    raise missing("shmbuffer.sb3 needs stable-baselines3", "sb3", name=error.name) from error

__all__ = ["SharedHerReplayBuffer", "SharedReplayBuffer", "SharedSamples"]

Observations = Any
"""An array or tensor ``[n, ...]``, or a dict of arrays or tensors."""


class SharedSamples(NamedTuple):
    """A sample of a `SharedReplayBuffer`.

    The first five fields are those of Stable-Baselines3.
    """

    observations: Observations
    """``[n, ...]`` with the dtype of the space, or a dict. Normalized if ``env`` normalizes."""
    actions: torch.Tensor
    """``[n, action_dim]``, int64 for a ``Discrete`` space, never float64."""
    next_observations: Observations
    dones: torch.Tensor
    """``[n, 1]`` float32. 0 if a time limit ended the episode."""
    rewards: torch.Tensor
    """``[n, 1]`` float32. With ``n_steps``, the discounted sum of the rewards."""
    discounts: torch.Tensor | None = None
    """``[n, 1]`` float32, discount of the value after n steps. None without ``n_steps``."""
    weights: torch.Tensor | None = None
    """``[n, 1]`` float32, factors for the losses. None without priorities."""
    indices: torch.Tensor | None = None
    """``[n]`` int64, on the CPU. Indices of the items."""
    generations: torch.Tensor | None = None
    """``[n]`` int64, on the CPU. Generations of the items."""


class SharedReplayBuffer(ReplayBuffer):
    """A replay buffer for Stable-Baselines3 in a directory that several processes can share.

        model = DQN(
            "MlpPolicy",
            "CartPole-v1",
            replay_buffer_class=SharedReplayBuffer,
            replay_buffer_kwargs={"scratch_dir": "run/replay", "alpha": 0.6},
        )
        model.replay_buffer.prioritize(model.q_net)
        model.learn(50_000)

    The first process creates the buffer. Any process that opens the same directory, at the same
    time or after a crash, gets the stored transitions. ``DQN.load`` opens the buffer with the same
    arguments, so a loaded model has its transitions again. Sampling uses torch's default generator,
    which is seeded by the ``seed`` of the model.

    The directory is opened when the buffer is first used, which is at the start of ``learn``. A
    model that is loaded only for ``predict`` does not open the directory.

    Args:
        buffer_size: maximum number of transitions of all environments and processes together. Must
            be the same in each process.
        observation_space: any space that Stable-Baselines3 supports, including ``Dict``.
        action_space: action space, passed by Stable-Baselines3.
        device: device of the samples.
        n_envs: number of environments of this process, which may differ between processes.
        optimize_memory_usage: if True, an observation that is also the next observation of the
            previous step is stored once (``share_next`` of `LazyMemmapStorage`). Must be the same
            in each process. Samples do not change, and ``handle_timeout_termination`` can remain
            True.
        handle_timeout_termination: if True, ``TimeLimit.truncated`` is stored, so that samples do
            not mark truncated episodes as done.
        scratch_dir: directory of the buffer.
        alpha: priority exponent, or None for uniform sampling.
        beta: exponent of the importance weights.
        rank: number of this learner among several learners with the same seed, as in
            `ReplayBuffer`.
        n_steps: number of steps per transition, which are combined when they are sampled (`NStep`).
            With 1, the default, samples have no ``discounts``.
        gamma: discount factor for ``n_steps``. Must equal the discount factor of the model.
        frame_stack: number of frames in an observation. The frames are stacked along the channels
            (``VecFrameStack``) or the first dimension (``FrameStackObservation``). Only the newest
            frame of each observation is stored, but samples contain stacks. Must be the same in
            each process.

    Attributes:
        buffer: the underlying `TensorDictReplayBuffer` or, with ``alpha``,
            `TensorDictPrioritizedReplayBuffer`, with ``stats()``, ``rate_limiter``, ``publish``,
            ``close`` and so on.

    Raises:
        ValueError: ``frame_stack`` does not divide the channels, or is used with ``Dict``
            observations or ``n_steps``. Also raised at the first use if the directory has
            priorities with a different ``alpha``.
        SchemaMismatchError: raised at the first use if the directory contains a buffer with a
            different ``buffer_size``, and by the first ``add`` if its items have different spaces.

    Cost: ``add`` and ``sample`` make one native call each. Stable-Baselines3 also converts the
        arrays.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        scratch_dir: str | os.PathLike[str],
        alpha: float | None = None,
        beta: float = 0.4,
        rank: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        frame_stack: int | None = None,
    ) -> None:
        if frame_stack is not None and n_steps > 1:
            raise ValueError(
                "SharedReplayBuffer does not support n_steps together with frame_stack; store "
                "whole stacks (leave frame_stack out), and pass optimize_memory_usage=True to "
                "store each frame once"
            )
        # The constructor of ReplayBuffer is skipped because it would allocate the arrays.
        super(ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs
        )
        self._capacity = buffer_size
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.scratch_dir, self.alpha, self.beta, self.rank = scratch_dir, alpha, beta, rank
        self.n_steps, self.gamma = n_steps, gamma
        self._stacks = None if frame_stack is None else _Stacks(observation_space, frame_stack)
        self._action_dtype = self._maybe_cast_dtype(action_space.dtype)
        self._streams = np.arange(n_envs)
        self._expected: list[NDArray[Any]] | None = None
        self._last_sample: SharedSamples | None = None

    @cached_property
    def buffer(self) -> TensorDictReplayBuffer:
        """Buffer in the directory. The first access creates or opens it."""
        storage = LazyMemmapStorage(
            self._capacity,
            scratch_dir=self.scratch_dir,
            shared_init=True,
            share_next=self.optimize_memory_usage,
        )
        options: dict[str, Any] = {"storage": storage, "rank": self.rank}
        if self._stacks is not None:
            options["sample_unit"] = FrameStack(self._stacks.count)
        elif self.n_steps > 1:
            options["sample_unit"] = NStep(self.n_steps, self.gamma)
        return self._create_buffer(options)

    def _create_buffer(self, options: dict[str, Any]) -> TensorDictReplayBuffer:
        """Creates a buffer with or without priorities, with these options."""
        if self.alpha is None:
            return TensorDictReplayBuffer(**options)
        return TensorDictPrioritizedReplayBuffer(alpha=self.alpha, beta=self.beta, **options)

    @property
    def pos(self) -> int:
        """Row of ``n_envs`` transitions to which the next ``add`` writes."""
        return self.buffer.write_count // self.n_envs % self.buffer_size

    @pos.setter
    def pos(self, value: int) -> None:
        """Ignores the value. `BaseBuffer` sets 0, but the number of writes determines the row."""

    @property
    def full(self) -> bool:
        """True if the next ``add`` overwrites older transitions."""
        return self.size() >= self.buffer_size

    @full.setter
    def full(self, value: bool) -> None:
        """Ignores the value, like the setter of `pos`."""

    @property
    def dones(self) -> _Dones:  # type: ignore[override]
        """Object that ends the current episodes when ``learn`` sets one of its elements."""
        return _Dones(self)

    def size(self) -> int:
        """Returns the number of stored transitions of all processes, divided by ``n_envs``."""
        return len(self.buffer) // self.n_envs

    def reset(self) -> None:
        """Removes all transitions, including those of other processes."""
        self._start_trajectories()
        self.buffer.empty()

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Writes one step of all environments, each as a separate stream.

        If the observation of an environment differs from the next observation of the previous step,
        a new trajectory starts, even if the previous step was not done. This is the case when
        ``learn`` resets the environments.

        Raises:
            RingOverrunError, RateLimitTimeout: raised by ``extend`` of the buffer.
        """
        cuts = [self.handle_timeout_termination and i.get("TimeLimit.truncated") for i in infos]
        ended, truncated = np.array(done, np.bool_).reshape(self.n_envs), np.array(cuts, np.bool_)
        now, then = self._to_arrays(obs), self._to_arrays(next_obs)
        if self._follows_trajectories:
            self._detect_resets(now, then)
        after: dict[str, Any] = {
            "reward": np.asarray(reward, np.float32).reshape(self.n_envs),
            "done": ended,
            "terminated": ended & ~truncated,
            "truncated": truncated,
        }
        rows: dict[str, Any] = {
            "action": np.asarray(action, self._action_dtype).reshape(self.n_envs, self.action_dim),
            "next": after,
        }
        if self._stacks is not None:
            stacks = self._stacks.split(now)
            rows["blank"] = self._stacks.blank(stacks)
            now, then = stacks[:, -1], self._stacks.split(then)[:, -1]
        rows["observation"], after["observation"] = now, then
        self.buffer.extend(rows, streams=self._streams)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> SharedSamples:  # type: ignore[override]
        """Samples transitions from all processes, by priority if the buffer has priorities.

        Args:
            batch_size: number of transitions.
            env: environment that normalizes observations and rewards, or None.

        Raises:
            EmptyBufferError: the buffer is empty.
        """
        batch = self.buffer.sample(batch_size)
        after = batch["next"]
        weights = discounts = None
        if self.alpha is not None:
            weights = self.to_torch(batch["_weight"].unsqueeze(1), copy=False)
        if self.n_steps > 1:
            discounts = self.to_torch(batch["gamma"].unsqueeze(1), copy=False)
        rewards = self._normalize_reward(after["reward"].numpy()[:, None], env)
        now, then = batch["observation"], after["observation"]
        if self._stacks is not None:
            now, then = self._stacks.join(now, then, batch["blank"])
        drawn = SharedSamples(
            observations=self._to_observations(now, env),
            actions=self.to_torch(batch["action"], copy=False),
            next_observations=self._to_observations(then, env),
            dones=self.to_torch(after["terminated"].float().unsqueeze(1), copy=False),
            rewards=self.to_torch(rewards, copy=False),
            discounts=discounts,
            weights=weights,
            indices=batch["index"],
            generations=batch["index_generation"],
        )
        self._last_sample = drawn
        return drawn

    def update_priorities(self, samples: SharedSamples, errors: torch.Tensor) -> PriorityUpdate:
        """Sets the priorities of a sample to the absolute values of its TD errors.

        This is for a custom ``train`` method, which must also multiply the losses by
        ``samples.weights``.

        Args:
            samples: the result of `sample`.
            errors: tensor of any shape with n TD errors.

        Returns:
            The number of applied priorities, and of stale ones whose items have been overwritten.
        """
        priority = errors.detach().abs().reshape(-1).cpu()
        return self.buffer.update_priority(  # type: ignore[no-any-return]
            samples.indices, priority, generation=samples.generations
        )

    def prioritize(self, critic: torch.nn.Module) -> RemovableHandle:
        """Weights the losses of a critic and updates the priorities in each training step.

        The loss must be a mean over the items, as it is in DQN (``model.q_net``), and in SAC, TD3
        and DDPG (``model.critic``). In ``backward``, the gradient at the critic's output is then
        the derivative of each item's loss, divided by the number of items. This derivative is the
        TD error. In DQN, which uses the Huber loss, it is clipped to 1. Its absolute value,
        averaged over several critics, becomes the priority. The gradient is multiplied by the
        importance weight before it reaches the parameters. The logged loss and the actor's loss are
        not weighted.

        Args:
            critic: the network that is trained. Call this method again after ``load``.

        Returns:
            A handle whose ``remove()`` ends the weighting and the updates.

        Raises:
            ValueError: the buffer has no priorities.
        """
        if self.alpha is None:
            raise ValueError(
                "SharedReplayBuffer.prioritize: this buffer has no priorities; create it with "
                'alpha: replay_buffer_kwargs={"scratch_dir": ..., "alpha": 0.6}'
            )
        return critic.register_forward_hook(self._watch)

    def _watch(self, critic: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        """Registers a hook on the critic's output if its input is the last sample."""
        drawn = self._last_sample
        if drawn is None or inputs[0] is not drawn.observations or not torch.is_grad_enabled():
            return
        if len(inputs) > 1 and inputs[1] is not drawn.actions:
            return  # the actions come from the actor, so this is the actor's loss
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # The hook must not refer to the tensor on which it is registered.
        critics, weights = len(outputs), drawn.weights
        assert weights is not None
        errors: list[torch.Tensor] = []

        def weighted(gradient: torch.Tensor) -> torch.Tensor:
            errors.append(gradient.sum(1).abs() * len(gradient))
            if len(errors) == critics:
                self.update_priorities(drawn, torch.stack(errors).mean(0))
            return gradient * weights

        for output in outputs:
            output.register_hook(weighted)

    @property
    def _follows_trajectories(self) -> bool:
        """True if samples include the steps before or after an item in its trajectory."""
        return self._stacks is not None or self.n_steps > 1

    def _detect_resets(self, now: Any, then: Any) -> None:
        """Starts a new trajectory in each environment that was reset.

        These are the environments whose observation (``now``) differs from the next observation of
        the previous step. ``then`` contains the next observations of this step.
        """
        given = _leaves(now)
        if self._expected is not None:
            pairs = zip(given, self._expected, strict=True)
            other = np.array([(_bytes(a) != _bytes(b)).any(1) for a, b in pairs]).any(0)
            self._streams = np.where(other, self._streams + self.n_envs, self._streams)
        self._expected = [np.array(one) for one in _leaves(then)]

    def _start_trajectories(self) -> None:
        """Starts a new trajectory in each environment."""
        self._streams = self._streams + self.n_envs
        self._expected = None

    def _to_arrays(self, obs: Any) -> Any:
        """Converts observations to arrays ``[n_envs, ...]`` with the dtype of the space."""
        space, shape = self.observation_space, cast("Any", self.obs_shape)
        if isinstance(space, spaces.Dict):
            return {
                key: np.asarray(obs[key], one.dtype).reshape(self.n_envs, *shape[key])
                for key, one in space.spaces.items()
            }
        return np.asarray(obs, space.dtype).reshape(self.n_envs, *shape)

    def _to_observations(self, stored: Any, env: VecNormalize | None) -> Observations:
        """Normalizes the observations of a sample and moves them to the device."""
        if isinstance(stored, torch.Tensor):
            arrays: Any = self._normalize_obs(stored.numpy(), env)
            return self.to_torch(arrays, copy=False)
        arrays = self._normalize_obs({key: one.numpy() for key, one in stored.items()}, env)
        return {key: self.to_torch(one, copy=False) for key, one in arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Returns only the arguments, because the transitions are in the directory."""
        state = {**self.__dict__, "_last_sample": None, "_expected": None}
        state.pop("buffer", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the arguments. The first use opens the directory again."""
        self.__dict__.update(state)


class SharedHerReplayBuffer(SharedReplayBuffer, HerReplayBuffer):  # type: ignore[misc]
    """A `SharedReplayBuffer` with hindsight relabelling, like ``HerReplayBuffer``.

        model = SAC(
            "MultiInputPolicy",
            env,
            replay_buffer_class=SharedHerReplayBuffer,
            replay_buffer_kwargs={"scratch_dir": "run/goals", "n_sampled_goal": 4},
        )

    In each sample, the first ``n_sampled_goal / (n_sampled_goal + 1)`` of the transitions are
    relabelled with goals that were achieved in the same episode of the same environment and
    process. Stored items do not change. The environment's method ``compute_reward`` computes the
    rewards.

    Unlike Stable-Baselines3's ``HerReplayBuffer``, this class also samples steps of episodes that
    have not ended. The newest step then counts as the last step of the episode.

    Args:
        buffer_size: as in `SharedReplayBuffer`. The same applies to ``action_space``, ``device``,
            ``n_envs``, ``optimize_memory_usage`` and ``handle_timeout_termination``.
        observation_space: a ``Dict`` with ``observation``, ``achieved_goal`` and ``desired_goal``.
        action_space: action space, passed by Stable-Baselines3.
        env: environment that computes the rewards. The model passes its own environment.
        n_sampled_goal: number of relabelled transitions per transition that is not relabelled.
        goal_selection_strategy: ``"future"``, ``"final"`` or ``"episode"``.
        copy_info_dict: must be False, because the ``info`` of a step is not stored.
        **options: ``scratch_dir``, ``alpha``, ``beta`` and ``rank``, as in `SharedReplayBuffer`.

    Raises:
        NotImplementedError: ``copy_info_dict``, ``n_steps`` or ``frame_stack`` is used.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv | None,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        given = {**options, "copy_info_dict": copy_info_dict}
        refused = [name for name in ("n_steps", "frame_stack", "copy_info_dict") if given.get(name)]
        if refused:
            raise NotImplementedError(
                f"SharedHerReplayBuffer does not support {' and '.join(refused)}, because it "
                "relabels single steps and stores no info dictionaries; leave the argument out"
            )
        self.env = env
        self.copy_info_dict = False
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        name = getattr(goal_selection_strategy, "name", goal_selection_strategy)
        self.goal_selection_strategy = GoalSelectionStrategy[str(name).upper()]
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )

    def _create_buffer(self, options: dict[str, Any]) -> TensorDictReplayBuffer:
        if self.alpha is not None:
            options["sampler"] = PrioritizedSampler(self._capacity, self.alpha, self.beta)
        return HERReplayBuffer(
            self._rewards,
            her_ratio=self.her_ratio,
            strategy=HindsightStrategy[self.goal_selection_strategy.name],
            goal_key=("observation", "desired_goal"),
            achieved_goal_key=("observation", "achieved_goal"),
            **options,
        )

    @property
    def _follows_trajectories(self) -> bool:
        return True

    def _rewards(self, rows: TensorDictBase) -> torch.Tensor:
        """Computes the rewards of relabelled rows with the environment's ``compute_reward``."""
        if self.env is None:
            raise ValueError(
                "SharedHerReplayBuffer has no environment after unpickling, so it cannot compute "
                "rewards; call set_env(env)"
            )
        reached = rows["next", "observation", "achieved_goal"].numpy()
        goals = rows["observation", "desired_goal"].numpy()
        infos: list[dict[str, Any]] = [{} for _ in goals]
        (rewards,) = self.env.env_method("compute_reward", reached, goals, infos, indices=[0])
        return cpu.as_tensor(np.asarray(rewards, np.float32))

    def truncate_last_trajectory(self) -> None:
        """Ends the current episodes. ``load_replay_buffer`` calls this method by default."""
        self._start_trajectories()

    def __getstate__(self) -> dict[str, Any]:
        """Returns only the arguments, without the environment, which cannot be pickled."""
        return {**super().__getstate__(), "env": None}


class _Dones:
    """Replaces the array of flags in which ``learn`` marks the newest row as done.

    Setting an element starts a new trajectory in each environment.
    """

    def __init__(self, buffer: SharedReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, row: Any, done: Any) -> None:
        self._buffer._start_trajectories()


class _Stacks:
    """Splits observations that are stacks of frames, and joins frames to observations.

    ``VecFrameStack`` starts an episode with black frames, and ``FrameStackObservation`` with copies
    of the first frame. The sample unit `FrameStack` always returns copies. Therefore each step
    stores the number of black frames at the start of its stack, and `join` makes these frames black
    again.
    """

    def __init__(self, space: spaces.Space[Any], count: int) -> None:
        shape = space.shape
        if not shape or not isinstance(space, spaces.Box):
            raise ValueError(
                f"frame_stack={count} needs observations that are arrays, got {space}; leave "
                "frame_stack out"
            )
        first = shape[0] == count or (
            is_image_space(space) and is_image_space_channels_first(space)
        )
        self.count, self.axis = count, 0 if first else len(shape) - 1
        self.channels, rest = divmod(shape[self.axis], count)
        if count < 1 or rest or not self.channels:
            raise ValueError(
                f"frame_stack={count} does not divide the {shape[self.axis]} channels of "
                f"observations {list(shape)}; pass the number of frames that the environment stacks"
            )

    def split(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Converts observations ``[n, ...]`` to ``[n, count, *frame]``, oldest frame first."""
        axis, shape = self.axis + 1, observations.shape
        apart = observations.reshape(*shape[:axis], self.count, self.channels, *shape[axis + 1 :])
        return np.moveaxis(apart, axis, 1)

    def blank(self, stacks: NDArray[Any]) -> NDArray[np.uint8]:
        """Returns the number of black (all-zero) frames at the start of each stack."""
        found = np.zeros(len(stacks), np.uint8)
        still = np.ones(len(stacks), np.bool_)
        for at in range(self.count):
            still &= ~stacks[:, at].reshape(len(stacks), -1).any(1)
            if not still.any():
                break
            found += still
        return found

    def join(
        self, now: torch.Tensor, then: torch.Tensor, blank: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts stacks ``[n, count, *frame]`` to observations and next observations.

        ``blank`` contains the number of black frames of each stack, ``[n]``.
        """
        count = blank.unsqueeze(1).int()
        if count.any():
            at = cpu.arange(self.count)
            now[at < count], then[at < count - 1] = 0, 0
        return self._merge_frames(now), self._merge_frames(then)

    def _merge_frames(self, stacks: torch.Tensor) -> torch.Tensor:
        moved = stacks.movedim(1, self.axis + 1)
        return moved.flatten(self.axis + 1, self.axis + 2)


def _leaves(observations: Any) -> list[NDArray[Any]]:
    """Returns a list of the arrays in observations, which are an array or a dict of arrays."""
    return list(observations.values()) if isinstance(observations, dict) else [observations]


def _bytes(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Converts each row to its bytes ``[n, bytes]``, so that identical NaNs compare equal."""
    return np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)

"""Stable-Baselines3 on a buffer of ours: its algorithms as they are, its replay buffer shared.

    DQN, SAC, TD3 ──add──▶ SharedReplayBuffer ──extend──▶ scratch_dir ◀── other processes
          ▲ └──loss──▶ gradient of the critic ──TD errors──▶ priorities ──┘
          └────────── sample, with weights ──────────────────────┘

Stable-Baselines3 has no priorities, so neither have its losses weights. Both follow from the
gradient that reaches the critic's output, which is the TD error of each item: see `prioritize`.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from shmbuffer.buffers import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from shmbuffer.extras import missing
from shmbuffer.samplers import PriorityUpdate
from shmbuffer.storages import LazyMemmapStorage

try:
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.vec_env import VecNormalize
except ModuleNotFoundError as error:
    raise missing("shmbuffer.sb3 needs stable-baselines3", "sb3", name=error.name) from error

__all__ = ["SharedReplayBuffer", "SharedSamples"]

Observations = Any
"""An array or tensor ``[n, ...]``, or a dict of them."""


class SharedSamples(NamedTuple):
    """What a `SharedReplayBuffer` gives: Stable-Baselines3's samples, and what priorities need."""

    observations: Observations
    """``[n, ...]`` of the space's dtype, or a dict of them; normalized where ``env`` does so."""
    actions: torch.Tensor
    """``[n, action_dim]``; int64 of a ``Discrete`` space, never float64."""
    next_observations: Observations
    dones: torch.Tensor
    """``[n, 1]`` float32; 0 where a time limit ended the episode."""
    rewards: torch.Tensor
    """``[n, 1]`` float32."""
    discounts: None = None
    """Of n steps: there are none."""
    weights: torch.Tensor | None = None
    """``[n, 1]`` float32, to multiply the losses by; None without priorities."""
    indices: torch.Tensor | None = None
    """``[n]`` int64, on the CPU: where the items are."""
    generations: torch.Tensor | None = None
    """``[n]`` int64, on the CPU: which item of that place it was."""


class SharedReplayBuffer(ReplayBuffer):
    """A replay buffer for Stable-Baselines3 in a directory, which processes share.

        model = DQN(
            "MlpPolicy",
            "CartPole-v1",
            replay_buffer_class=SharedReplayBuffer,
            replay_buffer_kwargs={"scratch_dir": "run/replay", "alpha": 0.6},
        )
        model.replay_buffer.prioritize(model.q_net)
        model.learn(50_000)

    The first process makes the buffer; one that names the same directory gets what is in it, at
    the same time or after a crash. ``DQN.load`` makes the buffer again from these arguments, so a
    saved model comes back with its transitions. It draws from torch's default generator, which the
    ``seed`` of the model decides.

    Args:
        buffer_size: transitions of all environments and processes; the same in each process.
        observation_space: also a ``Dict``, for ``MultiInputPolicy``.
        action_space: as Stable-Baselines3 gives it.
        device: where samples are sent.
        n_envs: environments of this process; others may have another number.
        optimize_memory_usage: not possible: what follows in the ring is another process's.
        handle_timeout_termination: store ``TimeLimit.truncated``, so that an episode that was cut
            off is not done in a sample.
        scratch_dir: the directory.
        alpha: priority exponent; None: no priorities, uniform draws.
        beta: exponent of the importance weights.
        rank: which of several learners this is, so that one seed gives each draws of its own; see
            `ReplayBuffer`.

    Attributes:
        buffer: the buffer inside, a `TensorDictReplayBuffer` or, with ``alpha``, a
            `TensorDictPrioritizedReplayBuffer`: ``stats()``, ``rate_limiter``, ``publish``,
            ``close`` and so on.

    Raises:
        ValueError: ``optimize_memory_usage``; or the directory has priorities, and ``alpha`` is
            None, or another one.
        SchemaMismatchError: the directory holds a buffer of another ``buffer_size``; at the first
            ``add`` of other spaces.

    Cost: an ``add`` or a ``sample`` is one native call, and what Stable-Baselines3 does with the
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
    ) -> None:
        if optimize_memory_usage:
            raise ValueError(
                "SharedReplayBuffer has no optimize_memory_usage: processes write in turns, so the "
                "next observation is not in the next place; leave it out, or use a "
                "smaller buffer_size"
            )
        # Not ReplayBuffer's own: it makes the arrays.
        super(ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs
        )
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self._action_dtype = self._maybe_cast_dtype(action_space.dtype)
        self._streams = np.arange(n_envs)
        self._drawn: SharedSamples | None = None
        storage = LazyMemmapStorage(buffer_size, scratch_dir=scratch_dir, shared_init=True)
        self.buffer: TensorDictReplayBuffer
        if alpha is None:
            self.buffer = TensorDictReplayBuffer(storage=storage, rank=rank)
        else:
            self.buffer = TensorDictPrioritizedReplayBuffer(
                storage=storage, alpha=alpha, beta=beta, rank=rank
            )

    @property
    def pos(self) -> int:
        """The row that is written next, by the next caller."""
        return self.buffer.write_count // self.n_envs % self.buffer_size

    @pos.setter
    def pos(self, value: int) -> None:
        """It follows from what is written: `BaseBuffer` begins with 0."""

    @property
    def full(self) -> bool:
        """True if an ``add`` takes the place of an older one."""
        return self.size() >= self.buffer_size

    @full.setter
    def full(self, value: bool) -> None:
        """See `pos`."""

    def size(self) -> int:
        """Rows of ``n_envs`` transitions that are there, of all processes."""
        return len(self.buffer) // self.n_envs

    def reset(self) -> None:
        """Forget every transition, those of other processes too."""
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
        """Write a step of all environments, each as a stream of its own.

        Raises:
            RingOverrunError, RateLimitTimeout: as ``extend`` of the buffer.
        """
        cuts = [self.handle_timeout_termination and i.get("TimeLimit.truncated") for i in infos]
        rows = {
            "observations": self._stored(obs),
            "next_observations": self._stored(next_obs),
            "actions": np.asarray(action, self._action_dtype).reshape(self.n_envs, self.action_dim),
            "rewards": np.asarray(reward, np.float32).reshape(self.n_envs),
            "dones": np.asarray(done, np.bool_).reshape(self.n_envs),
            "timeouts": np.array(cuts, np.bool_),
        }
        self.buffer.extend(rows, streams=self._streams)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> SharedSamples:  # type: ignore[override]
        """Draw transitions, of any process; by priority, where there are any.

        Args:
            batch_size: how many.
            env: normalizes observations and rewards.

        Raises:
            EmptyBufferError: nothing was written yet.
        """
        batch = self.buffer.sample(batch_size)
        weights = None
        if self._prioritized:
            weights = self.to_torch(batch["_weight"].unsqueeze(1), copy=False)
        rewards = self._normalize_reward(batch["rewards"].numpy()[:, None], env)
        dones = batch["dones"] & ~batch["timeouts"]
        drawn = SharedSamples(
            observations=self._given(batch["observations"], env),
            actions=self.to_torch(batch["actions"], copy=False),
            next_observations=self._given(batch["next_observations"], env),
            dones=self.to_torch(dones.float().unsqueeze(1), copy=False),
            rewards=self.to_torch(rewards, copy=False),
            weights=weights,
            indices=batch["index"],
            generations=batch["index_generation"],
        )
        self._drawn = drawn
        return drawn

    def update_priorities(self, samples: SharedSamples, errors: torch.Tensor) -> PriorityUpdate:
        """Send the TD errors of a sample back, from a ``train`` of your own.

        Multiply its losses by ``samples.weights``.

        Args:
            samples: what `sample` gave.
            errors: of each item, in any form of n numbers; their absolute values count.

        Returns:
            How many were applied; the others came too late: their items have been written over.
        """
        priority = errors.detach().abs().reshape(-1).cpu()
        return self.buffer.update_priority(  # type: ignore[no-any-return]
            samples.indices, priority, generation=samples.generations
        )

    def prioritize(self, critic: torch.nn.Module) -> RemovableHandle:
        """Weight the losses of a critic, and send its TD errors back, in each training step.

        For algorithms whose loss is a mean over the items, as it is in DQN (``model.q_net``), and
        in SAC, TD3 and DDPG (``model.critic``). What reaches the critic's output in ``backward`` is
        then the derivative of each item's loss, divided by their number: the TD error; in DQN,
        whose loss is Huber's, the TD error clipped to 1. It becomes the priority, a mean where
        there are several critics, and is multiplied by the weight on its way to the parameters.
        The loss in the log stays the one without weights, and the loss of the actor has none.

        Args:
            critic: the network that is trained. Call this again after ``load``.

        Returns:
            Its ``remove()`` ends it.

        Raises:
            ValueError: the buffer has no priorities.
        """
        if not self._prioritized:
            raise ValueError(
                "SharedReplayBuffer.prioritize: this buffer has no priorities; make it with alpha, "
                'replay_buffer_kwargs={"scratch_dir": ..., "alpha": 0.6}'
            )
        return critic.register_forward_hook(self._watch)

    def _watch(self, critic: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        """After a forward of the critic: if it is that of the last sample, wait for its loss."""
        drawn = self._drawn
        if drawn is None or inputs[0] is not drawn.observations or not torch.is_grad_enabled():
            return
        if len(inputs) > 1 and inputs[1] is not drawn.actions:
            return  # actions of the actor, whose loss this is
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        critics, weights = len(outputs), drawn.weights  # a hook may not hold its own tensor
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
    def _prioritized(self) -> bool:
        return isinstance(self.buffer, TensorDictPrioritizedReplayBuffer)

    def _stored(self, obs: Any) -> Any:
        """Observations as they are stored, of the space's dtype and ``[n_envs, ...]``."""
        space, shape = self.observation_space, cast("Any", self.obs_shape)
        if isinstance(space, spaces.Dict):
            return {
                key: np.asarray(obs[key], one.dtype).reshape(self.n_envs, *shape[key])
                for key, one in space.spaces.items()
            }
        return np.asarray(obs, space.dtype).reshape(self.n_envs, *shape)

    def _given(self, stored: Any, env: VecNormalize | None) -> Observations:
        """Observations as they are given: normalized, and on the device."""
        if isinstance(stored, torch.Tensor):
            arrays: Any = self._normalize_obs(stored.numpy(), env)
            return self.to_torch(arrays, copy=False)
        arrays = self._normalize_obs({key: one.numpy() for key, one in stored.items()}, env)
        return {key: self.to_torch(one, copy=False) for key, one in arrays.items()}

    def __getstate__(self) -> dict[str, Any]:
        """The directory and the arguments, as ``save_replay_buffer`` pickles them."""
        return {**self.__dict__, "_drawn": None}

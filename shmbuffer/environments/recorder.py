"""Records the steps of environments as transitions in a buffer.

    reset(obs) ──▶ the observations for the first actions
    step(...)  ──▶ windows of up to n steps, one stream per environment ──▶ buffer.extend

A step is written as an item when the n - 1 steps after it are known, or when its episode has ended.
Torch is not required. The buffer can be one of TensorDicts or one of `shmbuffer.numpy`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shmbuffer.environments.trees import (
    Tree,
    beside,
    final_observations,
    floating,
    has_parts,
    mapped,
    require_form,
)

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)

_NOT_RESET = (
    "If you reset the environment, pass the observation from reset to Recorder.reset. If the "
    "environment resets itself in the same step, pass the last observation of the episode in "
    'info["final_obs"], or use AutoresetMode.NEXT_STEP, and empty the buffer, because the last '
    "item of that episode contains the first observation of the next episode"
)


class Buffer(Protocol):
    """Method that a buffer must have to be used by a recorder."""

    def extend(self, data: Any, *, streams: Any) -> Any:
        """Writes a batch. ``streams`` contains the number of the environment of each row."""


class _Step(NamedTuple):
    """A step of all environments."""

    before: dict[str, Tree]  # observation, action, extra entries and policy version of the step
    reward: NDArray[np.float64]


class Recorder:
    """Writes the steps of gymnasium environments to a buffer, as n-step transitions.

        recorder = Recorder(buffer, num_envs=8, n_step=3, gamma=0.99)
        obs, _ = envs.reset(seed=0)
        recorder.reset(obs)
        while True:
            action = policy(obs)
            obs, reward, terminated, truncated, info = envs.step(action)
            recorder.step(obs, action, reward, terminated, truncated, info)

    A batch of n items has these entries, with the dtypes and shapes of the environment's arrays,
    except that float64 is stored as ``dtype``:

    - ``observation`` and ``action``, ``[n, ...]``: a state and the action taken in it. An
      observation can be a dict. Pass the observations of a ``Tuple`` space as a dict.
    - ``next``: ``observation`` after up to ``n_step`` steps, and ``reward``, which is the
      discounted sum of their rewards with the dtype ``dtype``. The bools ``terminated``,
      ``truncated`` and ``done`` are those of the last of these steps.
    - ``gamma``, float32: the discount of the next value, which is gamma ** steps. The n-step target
      (Sutton and Barto 2018, equation 7.1) is
      ``reward + gamma * ~terminated * value(next observation)``.
    - ``policy_version``, int64: value of `policy_version` when the action was taken.

    Windows become shorter at the end of an episode and never extend into the next one. An episode
    that is truncated, for example by a ``TimeLimit``, is not terminated. Its last observation is
    stored, and the value of that observation is part of the target.

    All autoreset modes of gymnasium's vector environments are supported. With SAME_STEP, the final
    observations are in ``info``. With NEXT_STEP and the wrapper ``Autoreset``, the step after the
    end of an episode only resets the environment, with reward 0, and is not stored. With DISABLED,
    and for a single environment, call `reset`. An environment that resets in the same step must
    provide ``info["final_obs"]``, because the last observation of the episode would otherwise be
    lost. If it does not, the first step of an episode with a nonzero reward raises an error.

    Each environment is a separate stream, so slices never contain steps of several environments.
    Use only one recorder per handle, because the environments of two recorders would have the same
    streams. For sequences use ``n_step=1``. With more steps, the last ``n_step`` items of an
    episode are all marked as done.

    Args:
        buffer: a ``ReplayBuffer`` or a related class, or a buffer from ``shmbuffer.numpy.attach``.
        num_envs: number of environments of a vector environment, whose arrays are
            ``[num_envs, ...]``. With None, the environment is a single one, whose arrays do not
            have this dimension.
        n_step: number of steps per transition, at least 1.
        gamma: discount per step, from 0 to 1.
        dtype: floating-point dtype of the rewards, and of observations and actions that are
            float64, as in every MuJoCo environment. A warning lists these entries once. With None,
            all dtypes are kept. Entries of ``extra`` always keep their dtype.

    Attributes:
        policy_version: version of the weights with which the actions are chosen, initially 0. Set
            it to the ``version`` of the weights from ``newest``.

    Raises:
        ValueError: a number is out of range.
        TypeError: ``dtype`` is not float16, float32 or float64.

    Cost: a copy of the observations, and one ``extend`` per step. A collector that is killed loses
    the last n_step - 1 steps of each environment, which have not been written yet.
    """

    def __init__(
        self,
        buffer: Buffer,
        num_envs: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        *,
        dtype: Any = np.float32,
    ) -> None:
        counts: tuple[Any, ...] = (1 if num_envs is None else num_envs, n_step)
        if not all(isinstance(count, (int, np.integer)) and count >= 1 for count in counts):
            raise ValueError(f"num_envs and n_step must be at least 1, got {num_envs} and {n_step}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be from 0 to 1, got {gamma}")
        self.policy_version = 0
        self._buffer = buffer
        self._single, self._num_envs = num_envs is None, num_envs or 1
        self._n_step, self._gamma = n_step, gamma
        self._dtype = None if dtype is None else floating(dtype)
        self._reward_dtype = self._dtype  # if None, set to the dtype of the first reward
        self._narrowed: set[str] = set()  # float64 entries that the log has not mentioned yet
        self._now: Tree = None  # observations for which the next action is chosen
        self._recent: list[_Step] = []  # at most the last n_step steps, oldest first
        # Number of these steps that are not written yet, for each environment.
        self._open = np.zeros(self._num_envs, np.int64)
        # True for each environment whose episode has ended and that has not been reset yet.
        self._over = np.zeros(self._num_envs, np.bool_)

    def reset(self, obs: Tree, mask: ArrayLike | None = None) -> None:
        """Starts new episodes with their first observations.

        Windows of the previous episodes that are still open are shortened and written.

        Args:
            obs: the observations that ``reset`` of the environment returned.
            mask: bool ``[num_envs]``, True for each environment that was reset. None stands for all
                environments.

        Raises:
            ValueError: ``obs`` or ``mask`` does not have one row per environment, or the first call
                has a mask.
        """
        new = self._rows("obs", obs, narrow=True)
        which = np.ones(self._num_envs, np.bool_)
        if mask is not None:
            which = self._numbers("mask", mask, np.bool_)
            if self._now is None:
                raise ValueError(
                    "Recorder.reset: the first call must reset all environments; call it "
                    "without a mask"
                )
            new = mapped(lambda new, old: np.where(beside(which, new), new, old), new, self._now)
        if self._now is not None:
            self._write(self._recent, self._open, which, self._now)
        self._now = new
        self._open, self._over = self._open * ~which, self._over & ~which

    def step(
        self,
        obs: Tree,
        action: Tree,
        reward: ArrayLike,
        terminated: ArrayLike,
        truncated: ArrayLike,
        info: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[str, Tree] | None = None,
    ) -> None:
        """Records one step of all environments, and writes the items that are now complete.

        The call can wait and raise errors like ``extend`` of the buffer. A step that was not
        written can be recorded again.

        Args:
            obs: observations that ``step`` of the environment returned. Arrays of a vector
                environment are ``[num_envs, ...]``.
            action: actions that were passed to ``step``.
            reward: rewards that ``step`` returned.
            terminated: flags that ``step`` returned, bool.
            truncated: flags that ``step`` returned, bool.
            info: dict that ``step`` returned. If the environment resets in the same call, it must
                contain the final observations under ``"final_obs"``.
            extra: further entries of the items, ``[num_envs, ...]`` each, such as the log
                probability of the action.

        Raises:
            RuntimeError: `reset` has not been called yet.
            ValueError: an array does not have one row per environment. Also raised if an
                environment whose episode has ended continues without a reset, or resets in the same
                call without final observations. Nothing was written.
            SchemaMismatchError: an entry is missing, unknown, or differs in dtype or shape from the
                previous step. Nothing was written.
            TypeError: ``info`` is not a dict.
        """
        if self._now is None:
            raise RuntimeError(
                "Recorder.step: no first observations were recorded; pass those that the "
                "environment's reset returned to Recorder.reset(obs) before the first step"
            )
        rewards = self._numbers("reward", reward, np.float64)
        ends = self._numbers("terminated", terminated, np.bool_)
        cuts = self._numbers("truncated", truncated, np.bool_)
        done = ends | cuts
        waiting = self._over
        if (waiting & done).any():
            raise ValueError(
                f"Recorder.step: environment {int(np.argmax(waiting & done))} ends again in the "
                "step after the end of its episode, so this step did not reset it. Nothing was "
                f"written. {_NOT_RESET}"
            )
        if (moved := waiting & (rewards != 0)).any():
            raise ValueError(
                f"Recorder.step: environment {int(np.argmax(moved))} has the reward "
                f"{rewards[np.argmax(moved)]:g} in the step after the end of its episode, so this "
                f"is not a step that only resets. Nothing was written. {_NOT_RESET}. If a wrapper "
                "returns a reward for a step that only resets, pass 0 for that step"
            )
        now = self._rows("obs", obs, narrow=True)
        info = {} if info is None else info
        if not isinstance(info, Mapping):
            raise TypeError(
                "Recorder.step: info must be a dict, as returned by gymnasium, not a "
                f"{type(info).__name__}"
            )
        final, replaced = final_observations(now, done, info, self._single)
        action = self._rows("action", action, narrow=True)
        before = {"observation": self._now, "action": action}
        before |= {key: self._rows(key, value) for key, value in (extra or {}).items()}
        before["policy_version"] = np.full(self._num_envs, self.policy_version, np.int64)
        if self._recent:
            require_form(before, self._recent[-1].before)
        require_form({"observation": now}, {"observation": self._now})
        if self._reward_dtype is None:
            self._reward_dtype = np.result_type(np.asarray(reward).dtype, np.float32)
        if self._narrowed and not self._recent:
            self._say_what_is_narrowed()
        recent = [*self._recent, _Step(before, rewards)][-self._n_step :]
        unwritten = self._open + ~waiting
        self._write(recent, unwritten, done, final, ends, cuts)
        self._recent, self._now = recent, now
        self._open = np.where(done, 0, np.minimum(unwritten, self._n_step - 1))
        self._over = done & ~replaced

    def close(self) -> None:
        """Writes the remaining steps as shorter windows. Does not close the buffer.

        The recorder calls this method at the end of its ``with`` block, unless an exception or a
        signal ends the block. A process that is being stopped must not wait for a learner that has
        already stopped.
        """
        if self._now is not None:
            self._write(self._recent, self._open, np.ones_like(self._over), self._now)
            self._open[:] = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _write(
        self,
        recent: list[_Step],
        unwritten: NDArray[np.int64],
        ending: NDArray[np.bool_],
        final: Tree,
        terminated: NDArray[np.bool_] | bool = False,
        truncated: NDArray[np.bool_] | bool = False,
    ) -> None:
        """Writes all windows that are complete after the last step.

        Args:
            recent: the last steps, at most ``n_step``.
            unwritten: number of these steps that are not written yet, for each environment.
            ending: True for each environment whose remaining windows are written although they are
                shorter.
            final: observations after the last step.
            terminated: flags of the last step.
            truncated: flags of the last step.
        """
        # The longer windows of a stream begin earlier and are therefore written first.
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        after = {name: np.broadcast_to(flag, self._num_envs) for name, flag in flags.items()}
        after["observation"] = final
        items, streams = [], []
        for steps in range(len(recent), 0, -1):
            complete = ending | (steps == self._n_step)
            rows = np.flatnonzero(complete & (unwritten >= steps))
            if len(rows):
                items.append(self._windows(recent[-steps:], rows, after))
                streams.append(rows)
        if len(items) == 1:  # the case in most steps
            self._buffer.extend(items[0], streams=streams[0])
        elif items:
            batch = mapped(lambda *parts: np.concatenate(parts), *items)
            self._buffer.extend(batch, streams=np.concatenate(streams))

    def _windows(
        self, steps: list[_Step], rows: NDArray[np.intp], after: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Returns a batch with one window per environment in ``rows``."""
        rewards = sum(self._gamma**k * step.reward[rows] for k, step in enumerate(steps))
        item: dict[str, Tree] = mapped(lambda leaf: leaf[rows], {**steps[0].before, "next": after})
        item["next"]["reward"] = np.asarray(rewards, self._reward_dtype)
        item["gamma"] = np.full(len(rows), self._gamma ** len(steps), np.float32)
        return item

    def _numbers(self, name: str, values: ArrayLike, dtype: Any) -> NDArray[Any]:
        rows = self._rows(name, values)
        if isinstance(rows, Mapping) or rows.ndim != 1:
            raise ValueError(f"Recorder: {name} must contain one number per environment")
        return np.asarray(rows, dtype)

    def _say_what_is_narrowed(self) -> None:
        """Logs once which float64 entries are stored with another dtype."""
        names = " and ".join(sorted(self._narrowed, reverse=True))
        verb = "is" if len(self._narrowed) == 1 else "are"
        self._narrowed.clear()
        _log.warning(
            "Recorder: %s %s float64 and %s stored as %s, which most networks use. Pass "
            "dtype=None to store all entries without conversion",
            names,
            verb,
            verb,
            self._dtype,
        )

    def _rows(self, name: str, values: Tree, *, narrow: bool = False) -> Tree:
        """Returns a copy of observations or other values, with one row per environment.

        A copy is needed because the caller may reuse its arrays. If ``narrow`` is set, float64 is
        converted to the recorder's dtype. ``name`` is the name of the argument for messages.
        """

        def rows(values: ArrayLike) -> NDArray[Any]:
            if isinstance(values, tuple) and any(map(has_parts, values)):
                raise ValueError(
                    f"Recorder: {name} is a tuple of arrays, which could be the components of a "
                    "Tuple space or one array per environment; pass the components as a dict, or "
                    "stack the arrays of the environments with np.stack()"
                )
            array = np.asarray(values)
            if narrow and self._dtype is not None and array.dtype.name == "float64":
                if self._dtype != np.float64:
                    self._narrowed.add(name)
                array = array.astype(self._dtype)
            else:
                array = np.array(array)
            if self._single:
                return array[None]
            if array.shape[:1] != (self._num_envs,):
                raise ValueError(
                    f"Recorder: {name} has shape {list(array.shape)}, but its first dimension must "
                    f"be the number of environments, {self._num_envs}; for a single environment "
                    "leave num_envs out"
                )
            return array

        return mapped(rows, values)

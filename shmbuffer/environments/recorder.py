"""Recording of environment steps as transitions in a buffer.

    reset(obs) ──▶ the observations for the first actions
    step(...)  ──▶ windows of up to n steps, one stream an environment ──▶ buffer.extend

A step becomes an item once the n - 1 steps after it are known, or its episode has ended. Torch is
not needed: the buffer may hold TensorDicts or be one of `shmbuffer.numpy`.
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
    'info["final_obs"], or use AutoresetMode.NEXT_STEP, and empty the buffer: the item at that end '
    "holds the first observation of the next episode"
)


class Buffer(Protocol):
    """The buffer of a recorder."""

    def extend(self, data: Any, *, streams: Any) -> Any:
        """Writes a batch; ``streams`` has the environment of each row."""


class _Step(NamedTuple):
    """A step of all environments."""

    before: dict[str, Tree]  # observation, action, extra entries and version before the step
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

    An item has these entries, in arrays ``[n, ...]`` as the environment gives them, except that
    float64 is stored as ``dtype``:

    - ``observation`` and ``action``: a state, and the action there. An observation may be a dict,
      as which the parts of a ``Tuple`` space are given.
    - ``next``: ``observation`` after up to n steps; ``reward``, their discounted sum, of ``dtype``;
      ``terminated``, ``truncated`` and ``done`` there, bool.
    - ``gamma``: the discount of the next value, gamma ** steps, float32. The n-step target (Sutton
      and Barto 2018, equation 7.1) is ``reward + gamma * ~terminated * value(next observation)``.
    - ``policy_version``: int64, `policy_version` when the action was taken.

    At the end of an episode the windows get shorter, and none reaches into the next episode. An
    episode that is truncated (by a ``TimeLimit``, say) is not terminated: its last observation is
    stored, and its value counts. All autoreset modes of gymnasium's vector environments are
    recognized. SAME_STEP has final observations in ``info``. NEXT_STEP, and the wrapper
    ``Autoreset``, have a step after the end that only resets, with reward 0, which is not stored.
    DISABLED and single environments call `reset`. An environment that resets in the same step
    needs ``info["final_obs"]``: without it the last observation of an episode is lost. That is an
    error at the first step of an episode that has another reward than 0.

    Each environment is a stream, so slices never mix them. Use one recorder for each handle: two
    would give their environments the same streams. For sequences use ``n_step=1``: with more steps
    the last n items of an episode are all marked as done.

    Args:
        buffer: ``ReplayBuffer`` or a related class, or the buffer of ``shmbuffer.numpy.attach``.
        num_envs: number of environments of a vector environment, with arrays ``[num_envs, ...]``;
            None: a single environment, with arrays without that dimension.
        n_step: steps of a transition, from 1.
        gamma: discount of one step, from 0 to 1.
        dtype: floating point dtype of the rewards, and of observations and actions that are
            float64, as in every MuJoCo environment. The log names these once. None keeps all
            dtypes. Entries of ``extra`` always keep their dtype.

    Attributes:
        policy_version: version of the weights that choose the actions, at first 0. Set it to the
            ``version`` of the weights from ``newest``.

    Raises:
        ValueError: a number is out of range.
        TypeError: ``dtype`` is not float16, float32 or float64.

    Cost: a copy of the observations, and one ``extend`` a step. A collector that is killed loses
    the last n - 1 steps of each environment, which are not items yet.
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
        self._reward_dtype = self._dtype  # with None that of the first reward
        self._narrowed: set[str] = set()  # entries that were float64; one line of the log says so
        self._now: Tree = None  # observations that the next action is chosen from
        self._recent: list[_Step] = []  # the last n_step steps at most, oldest first
        self._open = np.zeros(self._num_envs, np.int64)  # how many of them are in no item yet
        self._over = np.zeros(self._num_envs, np.bool_)  # ended, and not reset yet

    def reset(self, obs: Tree, mask: ArrayLike | None = None) -> None:
        """Takes the first observations of episodes.

        Args:
            obs: the observations from ``reset`` of the environment.
            mask: bool ``[num_envs]``: the environments that were reset; None: all of them. Their
                unfinished windows are written shorter.

        Raises:
            ValueError: the observations or the mask are not of ``num_envs`` environments.
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
        """Records one step of all environments, and writes the items that it completes.

        Args:
            obs: from ``step`` of the environment, as are the next ones but ``action``; of a vector
                environment ``[num_envs, ...]``.
            action: the action in the observations before.
            reward: real numbers.
            terminated: bool.
            truncated: bool.
            info: has the final observations under ``"final_obs"``, if the environment resets in
                the same call.
            extra: further entries of the items, ``[num_envs, ...]`` each, such as the logarithm of
                the action's probability.

        Raises:
            RuntimeError: no `reset` came first.
            ValueError: the arrays are not of ``num_envs`` environments, or an environment that has
                ended continues without a reset, or resets in the same call without final
                observations. Nothing was written.
            SchemaMismatchError: an entry is missing, unknown, or of another dtype or shape than in
                the step before. Nothing was written.
            TypeError: ``info`` is not a dict.

        The call waits and raises errors like ``extend`` of the buffer; a step that was not written
        may be recorded again.
        """
        if self._now is None:
            raise RuntimeError(
                "Recorder.step: pass the first observations to Recorder.reset(obs); step() takes "
                "the observation that the environment's step returned, after the action"
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
                "gives rewards to steps that only reset, pass 0 there"
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
        """Writes the remaining steps as shorter windows. The buffer stays open.

        The end of a ``with`` block calls this, unless an exception or a signal ends the block. A
        process that is to stop must not wait for a learner that has stopped.
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
        """Writes the windows that the last step completes, and the shorter ones of ``ending``."""
        # Of a stream the longer window begins earlier, and is written first.
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
        if len(items) == 1:  # as in most steps
            self._buffer.extend(items[0], streams=streams[0])
        elif items:
            batch = mapped(lambda *parts: np.concatenate(parts), *items)
            self._buffer.extend(batch, streams=np.concatenate(streams))

    def _windows(
        self, steps: list[_Step], rows: NDArray[np.intp], after: dict[str, Tree]
    ) -> dict[str, Tree]:
        rewards = sum(self._gamma**k * step.reward[rows] for k, step in enumerate(steps))
        item: dict[str, Tree] = mapped(lambda leaf: leaf[rows], {**steps[0].before, "next": after})
        item["next"]["reward"] = np.asarray(rewards, self._reward_dtype)
        item["gamma"] = np.full(len(rows), self._gamma ** len(steps), np.float32)
        return item

    def _numbers(self, name: str, values: ArrayLike, dtype: Any) -> NDArray[Any]:
        rows = self._rows(name, values)
        if isinstance(rows, Mapping) or rows.ndim != 1:
            raise ValueError(f"Recorder: {name} must have one number for each environment")
        return np.asarray(rows, dtype)

    def _say_what_is_narrowed(self) -> None:
        """Logs, once, which entries are stored in fewer bits."""
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
        """Returns a copy with a row for each environment, because the caller may reuse its arrays.

        With ``narrow``, float64 becomes the recorder's dtype.
        """

        def rows(values: ArrayLike) -> NDArray[Any]:
            if isinstance(values, tuple) and any(map(has_parts, values)):
                raise ValueError(
                    f"Recorder: {name} is a tuple of arrays, which could be the parts of a Tuple "
                    "space or one array for each environment; pass the parts as a dict, or "
                    "np.stack() of the environments' arrays"
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
                    f"Recorder: {name} has shape {list(array.shape)}, which does not begin with "
                    f"the number of environments, {self._num_envs}; for a single environment leave "
                    "num_envs out"
                )
            return array

        return mapped(rows, values)

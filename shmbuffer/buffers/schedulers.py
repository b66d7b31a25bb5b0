"""Schedules of a sampler's parameters: alpha and beta over the time of training.

``step()`` is called once for each step of the training loop, and sets one attribute of the sampler.
A change of alpha recomputes every mass from the raw priorities: exact, O(capacity).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shmbuffer.buffers.replay_buffer import ReplayBuffer
from shmbuffer.buffers.view import BufferView
from shmbuffer.samplers.sampler import Sampler
from shmbuffer.tensors.form import cpu

Number = int | float
_NOT_STATE = ("sampler", "lambda_fn")  # what a constructor is given, and no file can hold


class ParameterScheduler(ABC):
    """Sets a parameter of a sampler, one step after another.

    A schedule of your own implements ``_step``, which returns the value of step number
    ``_step_cnt`` (1 at the first call).

    Args:
        obj: the sampler, or the buffer whose sampler it is at this moment.
        param_name: the attribute, for example ``"beta"``.
        min_value: the parameter never goes below; 0 is a bound as any other. None: no bound.
        max_value: it never goes above. None: no bound.

    Raises:
        TypeError: ``obj`` is something else.
        ValueError: the sampler has no such attribute, or ``min_value`` is above ``max_value``.

    Source: ``torchrl.data.replay_buffers.scheduler.ParameterScheduler``.
    """

    def __init__(
        self,
        obj: BufferView | Sampler,
        param_name: str,
        min_value: Number | None = None,
        max_value: Number | None = None,
    ) -> None:
        if not isinstance(obj, (ReplayBuffer, Sampler)):
            raise TypeError(
                f"{type(self).__name__} needs a ReplayBuffer or a Sampler, got {type(obj).__name__}"
            )
        self.sampler: Sampler = obj.sampler if isinstance(obj, ReplayBuffer) else obj
        self.param_name = param_name
        self._min_val = float("-inf") if min_value is None else min_value
        self._max_val = float("inf") if max_value is None else max_value
        if self._min_val > self._max_val:
            raise ValueError(f"min_value={min_value} is larger than max_value={max_value}")
        if not hasattr(self.sampler, param_name):
            raise ValueError(
                f"{type(self.sampler).__name__} has no attribute {param_name!r} that could be "
                "scheduled"
            )
        initial = getattr(self.sampler, param_name)
        self.initial_val = initial.clone() if isinstance(initial, torch.Tensor) else initial
        self._step_cnt = 0

    def step(self) -> None:
        """Sets the parameter to the value of the next step.

        Raises:
            ValueError: the sampler refuses it; the step was not taken.
        """
        self._step_cnt += 1
        try:
            setattr(self.sampler, self.param_name, self._within_bounds(self._step()))
        except BaseException:
            self._step_cnt -= 1
            raise

    @abstractmethod
    def _step(self) -> Any:
        """The value of step ``_step_cnt``, before it is brought within the bounds."""

    def _within_bounds(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clamp(self._min_val, self._max_val)
        return min(max(value, self._min_val), self._max_val)

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, and its numbers. The parameter is in the state of the sampler."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. The parameter itself is loaded with the sampler.

        Raises:
            ValueError: it is the state of another kind of schedule; nothing was changed.
        """
        own = self.state_dict()
        if set(own) != set(state_dict):
            raise ValueError(
                f"the state of a {type(self).__name__} has the entries {sorted(own)}, but this "
                f"state has {sorted(state_dict)}"
            )
        vars(self).update(state_dict)


class LinearScheduler(ParameterScheduler):
    """From the value that the parameter has now to ``final_value``, in equal steps.

    Args:
        obj, param_name: see `ParameterScheduler`.
        final_value: reached at step ``num_steps``, and kept.
        num_steps: how many, at least 1.

    Example:
        >>> from shmbuffer import LinearScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(10, alpha=0.7, beta=0.5)
        >>> schedule = LinearScheduler(sampler, "beta", 1.0, num_steps=2)
        >>> for _ in range(3):
        ...     schedule.step()
        ...     print(sampler.beta)
        0.75
        1.0
        1.0

    Source: ``torchrl.data.replay_buffers.scheduler.LinearScheduler``.
    """

    def __init__(
        self, obj: BufferView | Sampler, param_name: str, final_value: Number, num_steps: int
    ) -> None:
        super().__init__(obj, param_name)
        _at_least_one("num_steps", num_steps)
        self.final_val: Any = final_value
        if isinstance(self.initial_val, torch.Tensor):
            self.final_val = cpu.as_tensor(final_value).to(self.initial_val)
        self.num_steps = num_steps
        self._delta = (self.final_val - self.initial_val) / num_steps

    def _step(self) -> Any:
        if self._step_cnt < self.num_steps:
            return self.initial_val + self._delta * self._step_cnt
        return self.final_val


class StepScheduler(ParameterScheduler):
    """A factor, or a summand, every ``n_steps``.

    It is applied to the value that the parameter has by then.

    Args:
        obj, param_name, min_value, max_value: see `ParameterScheduler`.
        gamma: the factor, or what is added.
        n_steps: steps from one change to the next, at least 1.
        mode: ``"multiplicative"`` or ``"additive"``.

    Example:
        >>> from shmbuffer import PrioritizedSampler, StepScheduler
        >>> sampler = PrioritizedSampler(10, alpha=0.7, beta=0.5)
        >>> schedule = StepScheduler(
        ...     sampler, "beta", 0.25, 2, mode="additive", max_value=1.0
        ... )
        >>> for _ in range(8):
        ...     schedule.step()
        >>> sampler.beta
        1.0

    Source: ``torchrl.data.replay_buffers.scheduler.StepScheduler``.
    """

    def __init__(
        self,
        obj: BufferView | Sampler,
        param_name: str,
        gamma: Number = 0.9,
        n_steps: int = 1,
        mode: str = "multiplicative",
        min_value: Number | None = None,
        max_value: Number | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        if mode not in ("multiplicative", "additive"):
            raise ValueError(
                f"Invalid mode: {mode}; it must be 'multiplicative' (value * gamma) or 'additive' "
                "(value + gamma)"
            )
        _at_least_one("n_steps", n_steps)
        self.gamma = gamma
        self.n_steps = n_steps
        self.mode = mode

    def _step(self) -> Any:
        value = getattr(self.sampler, self.param_name)
        if self._step_cnt % self.n_steps:
            return value
        return value + self.gamma if self.mode == "additive" else value * self.gamma


class LambdaScheduler(ParameterScheduler):
    """The value that the parameter has now, times a function of the number of the step.

    Args:
        obj, param_name, min_value, max_value: see `ParameterScheduler`.
        lambda_fn: called with 1 at the first step. It is no part of the state.

    Example:
        >>> from shmbuffer import LambdaScheduler, PrioritizedSampler
        >>> sampler = PrioritizedSampler(10, alpha=0.5, beta=0.4)
        >>> LambdaScheduler(sampler, "alpha", lambda step: 1 / (1 + step)).step()
        >>> sampler.alpha
        0.25

    Source: ``torchrl.data.replay_buffers.scheduler.LambdaScheduler``.
    """

    def __init__(
        self,
        obj: BufferView | Sampler,
        param_name: str,
        lambda_fn: Callable[[int], Number],
        min_value: Number | None = None,
        max_value: Number | None = None,
    ) -> None:
        super().__init__(obj, param_name, min_value, max_value)
        self.lambda_fn = lambda_fn

    def _step(self) -> Any:
        return self.initial_val * self.lambda_fn(self._step_cnt)


class SchedulerList:
    """Several schedules that take their steps together, in order.

    Args:
        schedulers: several, or one.

    Source: ``torchrl.data.replay_buffers.scheduler.SchedulerList``.
    """

    def __init__(self, schedulers: Iterable[ParameterScheduler] | ParameterScheduler) -> None:
        if isinstance(schedulers, ParameterScheduler):
            schedulers = [schedulers]
        self.schedulers = list(schedulers)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Adds one at the end."""
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Step every scheduler."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of all, in order."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`.

        Raises:
            ValueError: another number of schedules, or schedules of another kind.
        """
        states = state_dict["schedulers"]
        if len(states) != len(self.schedulers):
            raise ValueError(
                f"the state has {len(states)} schedulers, but this one has {len(self.schedulers)}"
            )
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _at_least_one(name: str, value: int) -> None:
    if not value >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}")

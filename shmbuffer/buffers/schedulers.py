"""Schedules that change parameters of a sampler, such as alpha and beta, during training.

Call ``step()`` once per step of the training loop. Each call sets one attribute of the sampler. A
change of alpha recomputes all sampling masses exactly from the raw priorities, in O(capacity).
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
_NOT_STATE = ("sampler", "lambda_fn")  # attributes that cannot be saved to a file


class ParameterScheduler(ABC):
    """Base class for schedules that change a parameter of a sampler step by step.

    A subclass implements ``_step``, which returns the value of step number ``_step_cnt`` (1 at the
    first call).

    Args:
        obj: the sampler, or a buffer, whose current sampler is used.
        param_name: name of the sampler's attribute, for example ``"beta"``.
        min_value: lower bound of the parameter. None means no bound.
        max_value: upper bound of the parameter. None means no bound.

    Raises:
        TypeError: ``obj`` is neither a buffer nor a sampler.
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
            raise ValueError(
                f"min_value={min_value} is larger than max_value={max_value}; pass a min_value of "
                "at most max_value"
            )
        if not hasattr(self.sampler, param_name):
            raise ValueError(
                f"{type(self.sampler).__name__} has no attribute {param_name!r} that could be "
                "scheduled"
            )
        initial = getattr(self.sampler, param_name)
        self.initial_val = initial.clone() if isinstance(initial, torch.Tensor) else initial
        self._step_cnt = 0

    def step(self) -> None:
        """Sets the parameter to its value at the next step.

        Raises:
            ValueError: the sampler rejects the value. The step was not counted.
        """
        self._step_cnt += 1
        try:
            setattr(self.sampler, self.param_name, self._within_bounds(self._step()))
        except BaseException:
            self._step_cnt -= 1
            raise

    @abstractmethod
    def _step(self) -> Any:
        """Returns the value at step ``_step_cnt``, before the value is clamped to the bounds."""

    def _within_bounds(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clamp(self._min_val, self._max_val)
        return min(max(value, self._min_val), self._max_val)

    def state_dict(self) -> dict[str, Any]:
        """Returns the current step and the settings of the schedule.

        The value of the parameter belongs to the sampler's state instead.
        """
        return {name: value for name, value in vars(self).items() if name not in _NOT_STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`. The value of the parameter is loaded with the sampler.

        Raises:
            ValueError: the state belongs to another kind of schedule. Nothing was changed.
        """
        own = self.state_dict()
        if set(own) != set(state_dict):
            raise ValueError(
                f"the state of a {type(self).__name__} has the entries {sorted(own)}, but this "
                f"state has {sorted(state_dict)}; pass the state of the same kind of schedule"
            )
        vars(self).update(state_dict)


class LinearScheduler(ParameterScheduler):
    """Changes a parameter linearly from its current value to ``final_value``.

    Args:
        obj, param_name: see `ParameterScheduler`.
        final_value: value at step ``num_steps`` and at all later steps.
        num_steps: number of steps, at least 1.

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
    """Multiplies a parameter by a factor, or adds a number to it, every ``n_steps`` steps.

    Each change starts from the current value of the parameter, even if the user has changed it.

    Args:
        obj, param_name, min_value, max_value: see `ParameterScheduler`.
        gamma: the factor, or the number to add.
        n_steps: number of steps between changes, at least 1.
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
                "mode must be 'multiplicative' (value * gamma) or 'additive' (value + gamma), got "
                f"{mode!r}"
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
    """Sets a parameter to its initial value times a function of the step number.

    Args:
        obj, param_name, min_value, max_value: see `ParameterScheduler`.
        lambda_fn: function of the step number, which is 1 at the first step. The function is not
            part of the state.

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
    """Executes several schedules together, in the order in which they were passed.

    Args:
        schedulers: one schedule or several.

    Source: ``torchrl.data.replay_buffers.scheduler.SchedulerList``.
    """

    def __init__(self, schedulers: Iterable[ParameterScheduler] | ParameterScheduler) -> None:
        if isinstance(schedulers, ParameterScheduler):
            schedulers = [schedulers]
        self.schedulers = list(schedulers)

    def append(self, scheduler: ParameterScheduler) -> None:
        """Appends a schedule."""
        self.schedulers.append(scheduler)

    def step(self) -> None:
        """Executes the next step of every schedule."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns a dict with the list of the schedules' states under ``"schedulers"``."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`.

        Raises:
            ValueError: the state does not have the same number and kinds of schedules.
        """
        states = state_dict["schedulers"]
        if len(states) != len(self.schedulers):
            raise ValueError(
                f"the state has {len(states)} schedulers, but this SchedulerList has "
                f"{len(self.schedulers)}; create it with the same schedulers as before"
            )
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)


def _at_least_one(name: str, value: int) -> None:
    if not value >= 1:
        raise ValueError(f"{name} must be at least 1, got {value}")

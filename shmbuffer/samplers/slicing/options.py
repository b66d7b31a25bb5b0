"""Options of slice samplers: where trajectories end, and how long slices are."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key

Side = bool | int


class SliceArgumentsError(TypeError, ValueError):
    """Raised unless exactly one of ``num_slices`` and ``slice_len`` is given."""


class Span(NamedTuple):
    """Number of steps by which a slice can be shorter at each end of its trajectory.

    True instead of a number allows any length down to one step.
    """

    left: Side
    right: Side

    @classmethod
    def from_argument(cls, span: Side | tuple[Side, Side] | list[Side]) -> Span:
        """Converts the argument ``span`` of a sampler. Raises ValueError if it is invalid."""
        sides: tuple[Any, ...] = tuple(span) if isinstance(span, (tuple, list)) else (span, span)
        if len(sides) != 2 or any(not isinstance(side, int) or side < 0 for side in sides):
            raise ValueError(
                "span must be a bool, a non-negative int, or a pair of them (left, right), got "
                f"{span!r}"
            )
        return cls(*sides)

    def check(self, steps: int) -> None:
        """Raises ValueError if ``span`` could remove every step from a slice of ``steps`` steps."""
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not True and side >= steps > 0:
                raise ValueError(
                    f"the {name} span must be at most {steps - 1} for slices of {steps} steps, got "
                    f"{side}; pass a smaller span, or True to allow slices of any length"
                )

    def off(self, side: Side, lengths: Ints) -> Ints:
        """Returns how many steps can be cut off at one side of slices, int64 ``[slices]``.

        Args:
            side: the ``left`` or ``right`` span.
            lengths: lengths of the slices, int64 ``[slices]``.
        """
        return lengths - 1 if side is True else np.minimum(int(side), lengths - 1)


@dataclass(frozen=True, kw_only=True)
class TrajectoryOptions:
    """Options that define where trajectories end. `SliceSampler` documents them."""

    end_key: Key | None = None
    end_keys: Sequence[Key] | None = None
    traj_key: Key | None = None
    step_key: Key | None = None
    fragmented: bool = False
    ends: torch.Tensor | None = None
    trajectories: torch.Tensor | None = None
    cache_values: bool = False
    begins: Sequence[Key] = ()
    """Keys of flags on the first items of trajectories. Keys that items lack are ignored."""

    @property
    def are_given(self) -> bool:
        """True if the user passed an array with a flag or an id for each item."""
        return self.ends is not None or self.trajectories is not None


@dataclass(frozen=True, kw_only=True)
class SliceOptions(TrajectoryOptions):
    """Arguments of a `SliceSampler`.

    Raises:
        SliceArgumentsError, TypeError, ValueError, RuntimeError: in the cases that `SliceSampler`
            documents.
    """

    num_slices: int | None = None
    slice_len: int | None = None
    step_key: Key | None = "step_count"
    truncated_key: Key | None = ("next", "truncated")
    init_key: Key | None = "is_init"
    strict_length: bool = True
    pad_output: bool = False
    compile: bool | dict[str, Any] = False
    span: Side | tuple[Side, Side] = False
    use_gpu: torch.device | bool = False

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self:
        """Creates the options from a constructor's arguments by name, such as ``locals()``.

        Arguments that are not options are ignored.
        """
        names = [one.name for one in fields(cls)]
        return cls(**{name: arguments[name] for name in names if name in arguments})

    def attributes(self) -> dict[str, Any]:
        """Returns the options that a sampler has as attributes, by name."""
        inner = ("ends", "trajectories", "begins")
        return {name: value for name, value in vars(self).items() if name not in inner}

    def __post_init__(self) -> None:
        if (self.num_slices is None) == (self.slice_len is None):
            raise SliceArgumentsError(
                f"pass exactly one of num_slices and slice_len, got num_slices={self.num_slices} "
                f"and slice_len={self.slice_len}"
            )
        keys = None if self.end_keys is None else tuple(self.end_keys)
        numbers = ("num_slices", "slice_len")
        checked: dict[str, Any] = {one: _at_least_one(one, getattr(self, one)) for one in numbers}
        checked |= {"end_keys": keys, "span": Span.from_argument(self.span)}
        for name in ("fragmented", "cache_values", "strict_length", "pad_output"):
            checked[name] = bool(getattr(self, name))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        end_key, end_keys, traj_key = self.end_key, self.end_keys, self.traj_key
        if end_key is not None and end_keys is not None:
            raise RuntimeError(
                f"end_key and end_keys cannot be combined, got {end_key!r} and {end_keys!r}; "
                "end_keys takes any number of keys"
            )
        for name, given in (("ends", self.ends), ("trajectories", self.trajectories)):
            if given is None:
                continue
            if not self.cache_values:
                raise RuntimeError(
                    f"{name} cannot change after writes, so cache_values must be True, got "
                    "cache_values=False"
                )
            if end_key is not None or end_keys is not None or traj_key is not None:
                raise RuntimeError(
                    f"{name} cannot be combined with end_key, end_keys and traj_key, because they "
                    f"already define where trajectories end; got end_key={end_key!r}, "
                    f"end_keys={end_keys!r}, traj_key={traj_key!r}"
                )
        if self.ends is not None and self.trajectories is not None:
            raise RuntimeError("ends and trajectories cannot be combined; pass one of them")
        if self.pad_output and self.strict_length:
            raise ValueError(
                "pad_output=True pads slices of short trajectories, which strict_length=True never "
                "samples; pass strict_length=False with pad_output=True"
            )
        if self.fragmented and (self.step_key is None or self.are_given):
            raise ValueError(
                "fragmented=True orders the items by traj_key and step_key, so step_key must be a "
                f"key (got {self.step_key!r}), and ends and trajectories must not be passed"
            )
        if end_keys is not None and not len(end_keys):
            raise ValueError("end_keys is empty; pass at least one key, or omit end_keys")


def refuse(cls: type, arguments: dict[str, Any], *names: str) -> None:
    """Raises TypeError if ``arguments`` contains one of ``names``, which ``cls`` rejects."""
    for name in names:
        if name in arguments:
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}")


def _at_least_one(name: str, value: int | None) -> int | None:
    """Returns ``value`` as an int, or None if it is None.

    Raises TypeError if it is not an integer, and ValueError if it is below 1. Both messages contain
    ``name``.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return number

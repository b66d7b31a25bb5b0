"""Checks of the arguments of slice samplers."""

from __future__ import annotations

import operator
from typing import Any

import torch


def check_together(
    sampler: Any, ends: torch.Tensor | None, trajectories: torch.Tensor | None
) -> None:
    """RuntimeError, ValueError if arguments of a `SliceSampler` exclude each other."""
    end_key, end_keys = sampler.end_key, sampler.end_keys
    traj_key, step_key = sampler.traj_key, sampler.step_key
    if end_key is not None and end_keys is not None:
        raise RuntimeError(
            f"end_key and end_keys exclude each other, got {end_key!r} and {end_keys!r}; "
            "end_keys takes any number of them"
        )
    for name, given in (("ends", ends), ("trajectories", trajectories)):
        if given is None:
            continue
        if not sampler.cache_values:
            raise RuntimeError(
                f"{name} never change, so they need cache_values=True; got cache_values=False"
            )
        if end_key is not None or end_keys is not None or traj_key is not None:
            raise RuntimeError(
                f"{name} exclude end_key, end_keys and traj_key: they say already where "
                f"trajectories end; got end_key={end_key!r}, end_keys={end_keys!r}, "
                f"traj_key={traj_key!r}"
            )
    if ends is not None and trajectories is not None:
        raise RuntimeError("ends and trajectories exclude each other; give one of the two")
    if sampler.pad_output and sampler.strict_length:
        raise ValueError(
            "pad_output=True fills up slices of short trajectories, which strict_length=True "
            "never draws; give strict_length=False"
        )
    if sampler.fragmented and (step_key is None or ends is not None or trajectories is not None):
        raise ValueError(
            "fragmented=True puts items in order by traj_key and step_key: it needs a "
            f"step_key, got {step_key!r}, and takes neither ends nor trajectories"
        )
    if end_keys is not None and not len(end_keys):
        raise ValueError("end_keys is empty; give at least one key, or leave it out")


def refuse(cls: type, given: dict[str, Any], *names: str) -> None:
    """TypeError for arguments that a derived class does not have."""
    for name in names:
        if name in given:
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}")


def at_least_one(name: str, value: int | None) -> int | None:
    """The number, as an int; TypeError, ValueError if it is not one."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} has to be an integer, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name} has to be at least 1, got {value}")
    return number

"""Where slices are cut out of trajectories, and which rows they are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.samplers.slicing.trajectories import Trajectories

Side = bool | int


class Cuts(NamedTuple):
    """Where slices begin."""

    trajectories: Ints
    """int64 ``[slices]``."""
    begins: Ints
    """int64 ``[slices]``: step of the trajectory; below 0 the slice is cut off at the left."""
    weights: torch.Tensor | None = None
    """``[slices]``, where there are any."""


class SliceRows(NamedTuple):
    """The rows of slices, one slice behind the other."""

    rows: Ints
    """int64 ``[n]``, of the table of trajectories."""
    lengths: Ints
    """int64 ``[slices]``, padding included."""
    first: Flags
    """bool ``[n]``: the first step of each slice."""
    last: Flags
    """bool ``[n]``: the last real step of each slice."""
    mask: Flags | None
    """bool ``[n]``: False for padding; None without padding."""


class Span(NamedTuple):
    """How much may be cut off a slice, at the beginning and at the end of a trajectory."""

    left: Side
    right: Side

    @classmethod
    def of(cls, span: Side | tuple[Side, Side] | list[Side]) -> Span:
        """From what the user gives."""
        sides: tuple[Any, ...] = tuple(span) if isinstance(span, (tuple, list)) else (span, span)
        if len(sides) != 2 or any(not isinstance(side, int) or side < 0 for side in sides):
            raise ValueError(
                f"span is a bool, or an int from 0, or two of them (left, right), got {span!r}"
            )
        return cls(*sides)

    def check(self, steps: int) -> None:
        """ValueError if nothing would be left of a slice of ``steps``."""
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not True and side >= steps > 0:
                raise ValueError(
                    f"the {name} span of {side} would leave nothing of slices of {steps} steps; "
                    f"give at most {steps - 1}, or True for as much as possible"
                )

    def off(self, side: Side, lengths: Ints) -> Ints:
        """How many steps may be cut off slices of these lengths, int64 ``[slices]``."""
        return lengths - 1 if side is True else np.minimum(int(side), lengths - 1)


def places(lengths: Ints, steps: int, span: Span) -> tuple[Ints, Ints]:
    """The first step that a slice can begin at (below 0: cut off at the left), and how many."""
    whole = np.minimum(lengths, steps)
    left = span.off(span.left, whole)
    return -left, lengths - whole + 1 + left + span.off(span.right, whole)


def rows_of(table: Trajectories, cuts: Cuts, steps: int, *, pad: bool) -> SliceRows:
    """The rows of slices of at most ``steps`` steps."""
    lengths = table.lengths(cuts.trajectories)
    end = np.minimum(cuts.begins + np.minimum(lengths, steps), lengths)
    begin = np.maximum(cuts.begins, 0)
    first, count = table.starts(cuts.trajectories) + begin, end - begin
    if pad:
        step = np.arange(steps)
        rows = first[:, None] + np.minimum(step, count[:, None] - 1)
        return SliceRows(
            rows.ravel(),
            np.full(len(count), steps),
            np.tile(step == 0, len(count)),
            (step == count[:, None] - 1).ravel(),
            (step < count[:, None]).ravel(),
        )
    rows, stops = consecutive(first, count)
    is_first, is_last = np.zeros((2, len(rows)), np.bool_)
    is_first[stops - count] = True
    is_last[stops - 1] = True
    return SliceRows(rows, count, is_first, is_last, None)


def windows_of(elements: Ints, steps: int, *, pad: bool) -> SliceRows:
    """Rows of windows, one behind the other, all of them of so many steps."""
    step = np.arange(len(elements)) % steps
    mask = np.ones(len(elements), np.bool_) if pad else None
    lengths = np.full(len(elements) // steps, steps)
    return SliceRows(elements, lengths, step == 0, step == steps - 1, mask)


def consecutive(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Runs of so many numbers from each first one on, and where each run stops."""
    stops = np.cumsum(counts)
    rows = np.arange(counts.sum()) + np.repeat(first - (stops - counts), counts)
    return rows, stops

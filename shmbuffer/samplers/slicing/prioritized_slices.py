"""Sampling of trajectory slices by the priority of their first step."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch

from shmbuffer.items.keys import WEIGHT_KEYS
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.ring.tree import PriorityTree
from shmbuffer.samplers.priority.prioritized import PrioritizedSampler
from shmbuffer.samplers.sampler import drawn_by, lanes_of
from shmbuffer.samplers.slicing.cuts import Cuts, consecutive, places
from shmbuffer.samplers.slicing.options import refuse
from shmbuffer.samplers.slicing.slices import SliceSampler
from shmbuffer.samplers.slicing.trajectories import Long, Trajectories
from shmbuffer.storages.indexing import ravel
from shmbuffer.tensors.form import cpu

_ROUNDS = 4  # rounds of rejection sampling before an exact draw in O(items)
_SPARE = 2  # number of items drawn per slice
_PIECE = 1024  # number of trajectories checked per step


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices like a `SliceSampler`, with first items in proportion to their mass.

    Priorities, masses and weights, and the sharing of priorities, are as in a `PrioritizedSampler`.
    With ``strict_length``, a slice never starts at one of the last ``slice length - 1`` steps of a
    trajectory, regardless of their priority. A trajectory whose priorities are all zero is never
    drawn, unless all priorities are zero. Every step of a slice has the weight of the first step.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: see
            `PrioritizedSampler`.
        **slices: arguments of `SliceSampler` except ``pad_output`` and ``use_gpu``. With a
            ``span``, short trajectories are drawn despite ``strict_length``. The left side of
            ``span`` is ignored with a warning, because a slice always starts at an item.

    Raises:
        SliceArgumentsError, ValueError, NotImplementedError: in the same cases as the two classes.
        RuntimeError: in the same cases as the two classes. With ``eps=0``, a sample also raises
            RuntimeError if all possible first items have priority 0 but other items do not.

    Cost: O(log capacity) per slice, or O(items) if few items can start a slice. See also
        `SliceSampler`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, PrioritizedSliceSampler
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(6),
        ...     sampler=PrioritizedSliceSampler(6, alpha=1, beta=1, num_slices=2),
        ...     batch_size=4,
        ... )
        >>> step = torch.arange(6)
        >>> index = rb.extend(TensorDict({"step": step, "episode": step // 3}, [6]))
        >>> rb.update_priority(index, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
        PriorityUpdate(applied=6, stale=0)
        >>> rb.sample()["step"].tolist()
        [4, 5, 4, 5]

    Source: ``torchrl.data.PrioritizedSliceSampler``.
    """

    _in_core = False

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        max_priority_within_buffer: bool = False,
        **slices: Any,
    ) -> None:
        refuse(type(self), slices, "pad_output", "use_gpu")
        SliceSampler.__init__(self, **slices)
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer
        )
        if self.span.left:
            warnings.warn(
                f"span={slices['span']!r}: slices of a PrioritizedSliceSampler begin at the "
                "sampled item, so nothing is cut off at the left; pass (False, ...)",
                stacklevel=3,
            )
            self.span = self.span._replace(left=False)

    def _choose(self, storage: Any, table: Trajectories, count: int, steps: int) -> Cuts:
        """Chooses the next slices."""
        self._allowed(table, steps)
        chosen, weights = self._by_rejection(storage, table, count, steps)
        if len(chosen) < count:
            more, their = self._exactly(table, count - len(chosen), steps)
            chosen, weights = np.concatenate((chosen, more)), torch.cat((weights, their))
        trajectories = table.of_rows(chosen)
        return Cuts(trajectories, chosen - table.starts(trajectories), weights)

    def _by_rejection(
        self, storage: Any, table: Trajectories, count: int, steps: int
    ) -> tuple[Ints, torch.Tensor]:
        """Draws rows that can start a slice from the tree. May return fewer than ``count`` rows."""
        rows, weights, missing = [], [], count
        for _ in range(_ROUNDS):
            index, info = PrioritizedSampler.sample(self, storage, _SPARE * missing)
            drawn = table.rows_of(ravel(index, lanes_of(storage)))
            kept = self._can_begin(table, drawn, steps)[:missing]
            rows.append(drawn[kept])
            weights.append(info[WEIGHT_KEYS[0]][torch.from_numpy(kept)])
            missing -= len(kept)
            if not missing:
                break
        return np.concatenate(rows), torch.cat(weights)

    def _can_begin(self, table: Trajectories, drawn: Ints, steps: int) -> Ints:
        """Returns the positions in ``drawn`` of rows that can start a slice. Rows may be -1."""
        at = np.flatnonzero(drawn >= 0)
        rows = drawn[at]
        trajectories = table.of_rows(rows)
        room = self._room(table.lengths(trajectories), steps)
        kept = rows - table.starts(trajectories) < room
        zero = kept & (self._tree.priorities(table.elements_of(rows)) == 0)
        if zero.any():
            wanted = self._wanted(table, trajectories[zero], steps)
            kept[zero] = wanted if (kept & ~zero).any() else self._or_all(table, wanted, steps)
        return at[kept]

    def _exactly(self, table: Trajectories, count: int, steps: int) -> tuple[Ints, torch.Tensor]:
        """Draws rows that can start a slice, by the cumulative sum of their masses. O(items)."""
        rows, mass = self._candidates(table, steps)
        before = np.cumsum(mass)
        if not before[-1] > 0:
            raise RuntimeError(
                f"no slice of {steps} steps can begin at an item with a positive priority: the "
                f"priorities of all {len(rows)} possible first items are 0, and eps is 0; sample "
                "shorter slices, or use eps > 0"
            )
        numbers = drawn_by(self, partial(cpu.rand, dtype=torch.float64), count).numpy()
        at = np.searchsorted(before, numbers * before[-1], side="right")
        at = np.minimum(at, np.flatnonzero(mass)[-1])  # rounding may exceed the last positive mass
        least = self._tree.p_min
        weights = (mass[at] / least) ** -self.beta if least > 0 else np.ones(count)
        return rows[at], torch.from_numpy(weights).to(self.dtype)

    def _candidates(self, table: Trajectories, steps: int) -> tuple[Ints, Floats]:
        """Returns all rows that can start a slice, and their masses. O(items)."""
        allowed = self._allowed(table, steps)
        trajectories = allowed[np.arange(len(allowed))]
        wanted = self._or_all(table, self._wanted(table, trajectories, steps), steps)
        trajectories = trajectories[wanted]
        room = self._room(table.lengths(trajectories), steps)
        rows, _ = consecutive(table.starts(trajectories), room)
        if not self._tree.p_sum > 0:  # all masses are zero: uniform, as in `PrioritizedSampler`
            return rows, np.ones(len(rows))
        return rows, self._tree.mass(table.elements_of(rows))

    def _suffice(self, table: Trajectories, allowed: Long, count: int, steps: int) -> bool:
        """True if these trajectories suffice for a batch. With ``eps=0``, ignores priority 0."""
        if not len(allowed) or self.eps or self.ring() is None:
            return len(allowed) > 0
        return bool(self._candidates(table, steps)[1].any())

    def _room(self, lengths: Ints, steps: int) -> Ints:
        """Returns how many steps of trajectories of these lengths can start a slice."""
        room = places(lengths, steps, self.span)[1]
        return np.where(lengths < self._shortest(steps), 0, room)

    def _shortest(self, steps: int) -> int:
        """Returns the minimum trajectory length, or 1 if slices may be cut off, as in TorchRL."""
        return 1 if self.span.right else super()._shortest(steps)

    def _wanted(self, table: Trajectories, trajectories: Ints, steps: int) -> Flags:
        """Returns True for each trajectory with a positive priority, bool ``[n]``. O(items)."""
        each, at = np.unique(trajectories, return_inverse=True)
        lengths = table.lengths(each)
        rows, stops = consecutive(table.starts(each), lengths)
        some = self._tree.priorities(table.elements_of(rows)) != 0
        return np.logical_or.reduceat(some, stops - lengths)[at]

    def _or_all(self, table: Trajectories, wanted: Flags, steps: int) -> Flags:
        """Returns the wanted trajectories, or all if none has a priority above 0. O(items)."""
        if wanted.any():
            return wanted
        allowed = self._allowed(table, steps)
        for begin in range(0, len(allowed), _PIECE):
            piece = np.arange(begin, min(begin + _PIECE, len(allowed)))
            if self._wanted(table, allowed[piece], steps).any():
                return wanted
        return ~wanted

    def __repr__(self) -> str:
        priorities = f"alpha={self.alpha}, beta={self.beta}, eps={self.eps}"
        return f"{SliceSampler.__repr__(self)[:-1]}, {priorities})"

    @property
    def _tree(self) -> PriorityTree:
        ring = self.ring()
        assert ring is not None  # a draw has already used the ring
        return ring.tree

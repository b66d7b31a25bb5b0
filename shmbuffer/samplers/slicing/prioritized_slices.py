"""Sampler of trajectory slices, in proportion to the priority of their first step."""

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
from shmbuffer.samplers.slicing.trajectories import LongTrajectories, Trajectories
from shmbuffer.storages.indexing import ravel
from shmbuffer.tensors.form import cpu

_ROUNDS = 4  # rounds of rejection sampling before an exact draw, which costs O(items)
_SPARE = 2  # items drawn in each round for each missing slice
_PIECE = 1024  # trajectories whose priorities are read together


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices whose first items are chosen with probability proportional to their mass.

    Trajectories and slices are defined as for a `SliceSampler`. Priorities, masses and weights are
    those of a `PrioritizedSampler`, and processes share the priorities in the same way. With
    ``strict_length``, a slice never starts at one of the last ``slice length - 1`` steps of a
    trajectory, whatever their priorities are. A trajectory whose priorities are all zero is not
    drawn unless all priorities are zero. Every step of a slice has the weight of the first step.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer: see
            `PrioritizedSampler`.
        **slices: arguments of `SliceSampler` except ``pad_output`` and ``use_gpu``. With a
            ``span``, short trajectories are drawn even if ``strict_length`` is True. The left side
            of ``span`` is ignored with a warning, because a slice always starts at an item.

    Raises:
        SliceArgumentsError, ValueError, NotImplementedError: in the same cases as the two classes.
        RuntimeError: in the same cases as the two classes. With ``eps=0``, `sample` also raises
            RuntimeError if all items that can start a slice have priority 0 but other items do not.

    Cost: O(log capacity) per slice, or O(items) per batch if few items can start a slice. See also
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
                f"the left side of span={slices['span']!r} is ignored, because each slice of a "
                "PrioritizedSliceSampler begins at the sampled item; pass span=(False, ...)",
                stacklevel=3,
            )
            self.span = self.span._replace(left=False)

    def _choose(self, storage: Any, table: Trajectories, count: int, steps: int) -> Cuts:
        """Chooses ``count`` slices of ``steps`` steps by priority."""
        self._allowed(table, steps)  # raises RuntimeError if no trajectory is long enough
        chosen, weights = self._by_rejection(storage, table, count, steps)
        if len(chosen) < count:
            more, more_weights = self._exactly(table, count - len(chosen), steps)
            chosen, weights = np.concatenate((chosen, more)), torch.cat((weights, more_weights))
        trajectories = table.of_rows(chosen)
        return Cuts(trajectories, chosen - table.starts(trajectories), weights)

    def _by_rejection(
        self, storage: Any, table: Trajectories, count: int, steps: int
    ) -> tuple[Ints, torch.Tensor]:
        """Draws rows from the priority tree and keeps those that can start a slice.

        Returns:
            Up to ``count`` rows, int64 ``[n]``, and their weights ``[n]``.
        """
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
        """Returns the positions in ``drawn`` of the rows that can start a slice, int64 ``[n]``.

        A row of -1 means that the element belongs to no trajectory.
        """
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
        """Draws rows by the cumulative sum of the masses of all rows that can start a slice.

        Takes O(items). Returns ``count`` rows, int64, and their weights. Raises RuntimeError if all
        these masses are 0 while other items have a positive mass.
        """
        rows, mass = self._candidates(table, steps)
        before = np.cumsum(mass)
        if not before[-1] > 0:
            raise RuntimeError(
                f"no slice of {steps} steps can begin at an item with a positive priority, because "
                f"all {len(rows)} items where a slice could begin have priority 0 and eps is 0; "
                "sample shorter slices, or use eps > 0"
            )
        numbers = drawn_by(self, partial(cpu.rand, dtype=torch.float64), count).numpy()
        at = np.searchsorted(before, numbers * before[-1], side="right")
        at = np.minimum(at, np.flatnonzero(mass)[-1])  # rounding can exceed the last positive mass
        least = self._tree.p_min
        weights = (mass[at] / least) ** -self.beta if least > 0 else np.ones(count)
        return rows[at], torch.from_numpy(weights).to(self.dtype)

    def _candidates(self, table: Trajectories, steps: int) -> tuple[Ints, Floats]:
        """Returns all rows that can start a slice, and their masses. Takes O(items).

        If all masses in the buffer are zero, each of these rows has mass 1.
        """
        allowed = self._allowed(table, steps)
        trajectories = allowed[np.arange(len(allowed))]
        wanted = self._or_all(table, self._wanted(table, trajectories, steps), steps)
        trajectories = trajectories[wanted]
        room = self._room(table.lengths(trajectories), steps)
        rows, _ = consecutive(table.starts(trajectories), room)
        if not self._tree.p_sum > 0:  # all masses are zero: uniform, as in `PrioritizedSampler`
            return rows, np.ones(len(rows))
        return rows, self._tree.mass(table.elements_of(rows))

    def _suffice(
        self, table: Trajectories, allowed: LongTrajectories, count: int, steps: int
    ) -> bool:
        """True if a batch can be drawn from the trajectories ``allowed``.

        With ``eps=0``, at least one item that can start a slice must have a positive priority.
        """
        if not len(allowed) or self.eps or self.ring() is None:
            return len(allowed) > 0
        return bool(self._candidates(table, steps)[1].any())

    def _room(self, lengths: Ints, steps: int) -> Ints:
        """Returns how many steps of each trajectory can start a slice, int64 ``[n]``.

        Args:
            lengths: lengths of the trajectories, int64 ``[n]``.
            steps: number of steps in a slice.
        """
        room = places(lengths, steps, self.span)[1]
        return np.where(lengths < self._shortest(steps), 0, room)

    def _shortest(self, steps: int) -> int:
        """Returns the minimum length of a trajectory to draw from.

        The length is 1 if ``span`` allows slices to be cut off at the end, as in TorchRL.
        """
        return 1 if self.span.right else super()._shortest(steps)

    def _wanted(self, table: Trajectories, trajectories: Ints, steps: int) -> Flags:
        """Returns True for each trajectory with an item of positive priority, bool ``[n]``.

        Takes O(items in these trajectories).
        """
        each, at = np.unique(trajectories, return_inverse=True)
        lengths = table.lengths(each)
        rows, stops = consecutive(table.starts(each), lengths)
        is_positive = self._tree.priorities(table.elements_of(rows)) != 0
        return np.logical_or.reduceat(is_positive, stops - lengths)[at]

    def _or_all(self, table: Trajectories, wanted: Flags, steps: int) -> Flags:
        """Selects every trajectory if no trajectory in the buffer has a positive priority.

        Otherwise returns ``wanted`` unchanged. Takes O(items) if ``wanted`` is False everywhere.
        """
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
        assert ring is not None  # it is set by the draw that precedes any use of the tree
        return ring.tree

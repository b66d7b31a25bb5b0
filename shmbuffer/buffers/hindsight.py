"""Hindsight relabeling: replaces goals in samples with goals that the agent has reached.

    sampler ──▶ rows ──▶ their trajectories ──▶ another step for each of the first rows
                 │                                  │ only the column with the goal is read
                 └─ tickets of both, one snapshot ──┘
    read the rows, if they still have these tickets ──▶ new goals, new rewards ──▶ transforms

Stored items do not change, so each learner of a buffer can use its own goals, rewards and strategy
(Andrychowicz et al., Hindsight Experience Replay, NeurIPS 2017).

Invariants:
  1. A row and the step that provides its goal belong to the same trajectory, collector and stream.
     The ticket of the row is compared again when the row is read. The ticket of the step is
     compared after its goal is copied. If one of the items was removed, the sampler draws again.
  2. When a batch is ordered, the sampler draws its rows, and then one random number per new goal.
     Both happen in the caller's thread and use the sampler's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from shmbuffer.buffers.data_path.drawing import Choice
from shmbuffer.buffers.data_path.plan import Plan
from shmbuffer.buffers.tensordict import TensorDictReplayBuffer
from shmbuffer.items.keys import GENERATION
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key, KeyPath, key_of, path_of
from shmbuffer.samplers.sampler import ATTEMPTS, Sampler, ask_rank, lanes_of, random_numbers
from shmbuffer.samplers.slicing.boundaries import Boundaries
from shmbuffer.samplers.slicing.options import TrajectoryOptions
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.samplers.taking import Taking
from shmbuffer.storages.indexing import ravel
from shmbuffer.storages.storage import ring_of
from shmbuffer.units.unit import Transition

Judge = Callable[[TensorDictBase], torch.Tensor]

_GOALS = "_goals"  # key of the chosen goals in ``info``, until they are written into the batch


class HindsightStrategy(StrEnum):
    """Set of steps from which a row's new goal is chosen, with equal probabilities.

    Attributes:
        FUTURE: the row itself and all later steps of its trajectory.
        FINAL: the last step of the row's trajectory.
        EPISODE: all steps of the row's trajectory.
        RANDOM: all steps in the buffer.

    Source: ``torchrl.data.HindsightStrategy``.
    """

    FUTURE = "future"
    FINAL = "final"
    EPISODE = "episode"
    RANDOM = "random"


class Goals:
    """Chooses new goals for rows of a batch, and relabels these rows.

    `HERReplayBuffer` documents the arguments.
    """

    def __init__(
        self,
        reward_fn: Judge,
        terminated_fn: Judge | None,
        her_ratio: float,
        strategy: HindsightStrategy,
        goal_key: Key,
        achieved_goal_key: Key,
        reward_key: Key,
        end_key: Key,
    ) -> None:
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        self.her_ratio, self.strategy = her_ratio, strategy
        self.goal_key, self.achieved_goal_key = goal_key, achieved_goal_key
        self.reward_key, self.end_key = reward_key, end_key
        beside = path_of(end_key)[:-1]
        self._terminated, self._truncated = (*beside, "terminated"), (*beside, "truncated")
        self._reached: KeyPath = path_of(achieved_goal_key)
        if self._reached[0] != "next" and beside[:1] == ("next",):
            self._reached = ("next", *self._reached)
        ends = [end_key, self._terminated]
        # With cached values, a sample does not read the flags of old items again.
        options = TrajectoryOptions(end_keys=ends, cache_values=True)
        self._boundaries = Boundaries(options, [self._reached])

    def forget(self) -> None:
        """Discards all trajectories, because the buffer was emptied."""
        self._boundaries.forget()

    # -- choosing ------------------------------------------------------------------------------

    def with_goals(self, plan: Plan, index: Any, known: dict[Any, Any], *taking: Taking) -> Choice:
        """Adds goals for the first rows to a choice of the sampler.

        Args:
            plan: the current plan of the buffer.
            index: index of the chosen rows.
            known: the sampler's ``info`` for these rows.
            taking: the claim of a consumer, or nothing if the sampler has no consumer.

        Returns:
            The index and ``info`` with the goals. If rows or goals were overwritten, the sampler
            has chosen other rows.
        """
        for _ in range(ATTEMPTS):
            rows = len(index[0] if isinstance(index, tuple) else index)
            count = int(rows * self.her_ratio)
            if not count:
                return index, known
            ask_rank(plan.sampler, plan.storage)
            numbers = random_numbers(plan.sampler, count)
            with self._boundaries.lock:
                found = self._choose_goals(plan.storage, index, known.get(GENERATION), numbers)
            if found is not None:
                return index, {**known, **found}
            index, known = plan.sampler._again(plan.storage, index, *taking)
        raise RuntimeError(
            "sampled rows, or the steps that provide their new goals, were overwritten during each "
            f"of {ATTEMPTS} attempts; use a larger buffer, or write more slowly"
        )

    def _choose_goals(
        self, storage: Any, index: Any, tickets: torch.Tensor | None, numbers: Ints
    ) -> dict[str, torch.Tensor] | None:
        """Chooses and reads goals for the first rows.

        Args:
            storage: the storage.
            index: index of the rows.
            tickets: tickets of the rows when they were chosen, or None.
            numbers: one random number per goal, int64.

        Returns:
            A dict with the goals and, with a ring, the tickets of all rows. None if a row or a step
            with a goal was removed.
        """
        elements = ravel(index, lanes_of(storage))
        found = self._boundaries.find(storage)
        table = found.table
        if not found.entries.has(self._reached):
            raise _missing_entry("achieved_goal_key", self._reached)
        rows = table.rows_of(elements)
        if (rows < 0).any():
            return None
        others = table.elements_of(self._rows_with_goals(table, rows[: len(numbers)], numbers))
        goals = found.entries.take(self._reached, others)
        ring = ring_of(storage)
        if ring is None:
            return {_GOALS: goals}
        current = table.are_there(ring, np.concatenate((elements, others)))
        if current is None:
            return None
        now = torch.from_numpy(current[: len(elements)])
        if tickets is not None and not torch.equal(now, tickets.reshape(-1)):
            return None
        return {_GOALS: goals, GENERATION: now}

    def _rows_with_goals(self, table: Trajectories, rows: Ints, numbers: Ints) -> Ints:
        """Returns the row of the table that provides the goal for each of ``rows``."""
        strategy = self.strategy
        if strategy == HindsightStrategy.RANDOM:
            return table.rows_at(numbers % table.rows)
        which = table.of_rows(rows)
        first = table.starts(which)
        last = first + table.lengths(which) - 1
        if strategy == HindsightStrategy.FUTURE:
            first = rows
        elif strategy == HindsightStrategy.FINAL:
            first = last
        return first + numbers % (last - first + 1)

    # -- relabelling ---------------------------------------------------------------------------

    def relabelled(self, data: Any, info: dict[Any, Any]) -> Any:
        """Sets new goals, rewards and end flags in the first rows of a batch.

        Removes the goals from ``info``. Without goals, returns the batch unchanged.
        """
        goals = info.pop(_GOALS, None)
        if goals is None:
            return data
        if isinstance(data, LazyStackedTensorDict):
            data = data.clone()  # its items can share memory with the stored items
        rows = data[: len(goals)]
        _set(rows, "goal_key", path_of(self.goal_key), goals)
        after = ("next", *path_of(self.goal_key))
        if rows.get(after, None) is not None:
            _set(rows, "goal_key", after, goals)
        _set(rows, "reward_key", path_of(self.reward_key), self.reward_fn(rows))
        if self.terminated_fn is not None:
            self._set_end_flags(rows, info, self.terminated_fn(rows))
        return data

    def _set_end_flags(
        self, rows: TensorDictBase, info: dict[Any, Any], ended: torch.Tensor
    ) -> None:
        """Sets the end flags of relabeled rows in the data and in ``info``.

        Args:
            rows: the relabeled rows.
            info: the sampler's ``info``, which can contain flags of slices.
            ended: True for each row that ends its episode. Truncated rows also stay done.
        """
        end = path_of(self.end_key)
        flags: dict[KeyPath, torch.Tensor] = {}
        for path in (self._truncated, self._terminated, end):
            flag = info[path][: len(rows)] if path in info else rows.get(path, None)
            if flag is not None:
                flags[path] = flag
        cut_off = flags.get(self._truncated)
        if cut_off is None and self._terminated in flags and end in flags:
            cut_off = flags[end] & ~flags[self._terminated]
        done = ended if cut_off is None else cut_off | _reshape_like(end, ended, cut_off)
        for path, values in ((end, done), (self._terminated, ended)):
            if rows.get(path, None) is not None:
                _set(rows, "end_key", path, values)
            if path in info:
                info[path][: len(rows)] = _reshape_like(path, values, flags[path])


def _goals_property(name: str) -> Any:
    """Returns a property of the buffer that reads and sets an attribute of its `Goals`."""
    return property(
        lambda rb: getattr(rb._parts.goals, name),
        lambda rb, value: setattr(rb._parts.goals, name, value),
    )


class HERReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that relabels samples with achieved goals and their rewards.

    The first ``int(n * her_ratio)`` rows of a sample are relabeled. Each row receives a goal that a
    step of its trajectory has reached (``("next", achieved_goal_key)``), and the corresponding
    reward. The other rows and ``rb[i]`` are unchanged. Any sampler can draw the rows. Items must be
    single steps.

    A trajectory ends at a step whose ``end_key`` is set, at a step whose ``"terminated"`` (at the
    level of ``end_key``) is set, or when its collector ends. Steps from different collectors,
    streams or lanes never belong to the same trajectory. The last step of an open trajectory is its
    newest step. Changes to flags through a view (``rb[:]``) are not detected.

    The options for goals belong to this handle. The directory of a shared buffer records a
    `TensorDictReplayBuffer`, and an ensemble samples the rows of this buffer without new goals.

    Args:
        reward_fn: function that computes rewards. It is called before the transforms with the rows
            that have a new goal, a TensorDict ``[m, ...]`` without ``"index"``. It returns rewards
            of shape ``[m]`` or of the stored shape. With ``prefetch`` it can be called in another
            thread.
        her_ratio: fraction of the rows to relabel, from 0 to 1.
        strategy: a `HindsightStrategy` or its value.
        goal_key: key of the goal. ``("next", goal_key)`` is also set if it exists.
        achieved_goal_key: key of the achieved goal within ``"next"``. If ``end_key`` is not in
            ``"next"``, it is a key of the item itself (``"next_achieved_goal"``).
        reward_key: key of the reward.
        end_key: key of the flag on the last step of a trajectory.
        sampler: sampler that draws the rows. If None, creates a `RandomSampler`.
        terminated_fn: function that returns, as bool, which rows end their episode under the new
            goal. It is called after ``reward_fn`` with the same rows. The result is stored in
            ``"terminated"`` at the level of ``end_key``, and ``end_key`` is set for rows that are
            terminated or truncated. If None, keeps both flags as stored, which is correct if
            reaching a goal does not end the episode.
        **kwargs: see `TensorDictReplayBuffer`.

    Raises:
        ValueError: ``her_ratio`` is not from 0 to 1, or ``strategy`` is unknown.
        NotImplementedError: ``sample_unit`` was passed.

    The method ``sample`` raises:
        KeyError: the items lack one of these entries.
        ValueError: rewards, flags or goals do not have the shapes of their entries.

    Cost: one gather of goals per sample. After writes, the trajectories are updated at the cost
        that `SliceSampler` documents.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import HERReplayBuffer, LazyTensorStorage
        >>> def reward_fn(rows):
        ...     return (rows["next", "at"] == rows["goal"]).float()
        >>> rb = HERReplayBuffer(
        ...     reward_fn,
        ...     strategy="final",
        ...     her_ratio=1.0,
        ...     goal_key="goal",
        ...     achieved_goal_key="at",
        ...     storage=LazyTensorStorage(10),
        ... )
        >>> steps = torch.arange(3).unsqueeze(-1)
        >>> after = {"at": steps + 1, "done": steps == 2}
        >>> after["reward"] = torch.zeros(3, 1)
        >>> _ = rb.extend({"goal": steps * 0 + 9, "next": after})
        >>> rb.sample(4)["goal"].flatten()
        tensor([3, 3, 3, 3])

    Source: ``torchrl.data.HERReplayBuffer``.
    """

    _own_options = (*TensorDictReplayBuffer._own_options, "goals")

    reward_fn = _goals_property("reward_fn")
    terminated_fn = _goals_property("terminated_fn")
    her_ratio = _goals_property("her_ratio")
    strategy = _goals_property("strategy")
    goal_key = _goals_property("goal_key")
    achieved_goal_key = _goals_property("achieved_goal_key")
    reward_key = _goals_property("reward_key")
    end_key = _goals_property("end_key")

    def __init__(
        self,
        reward_fn: Judge,
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | Literal["future", "final", "episode", "random"] = "future",
        goal_key: Key = "desired_goal",
        achieved_goal_key: Key = "achieved_goal",
        reward_key: Key = ("next", "reward"),
        end_key: Key = ("next", "done"),
        sampler: Sampler | Callable[[], Sampler] | None = None,
        terminated_fn: Judge | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0.0 <= her_ratio <= 1.0:
            raise ValueError(
                "her_ratio must be from 0 to 1 (the fraction of rows that are relabeled), got "
                f"{her_ratio}"
            )
        if type(kwargs.get("sample_unit")) not in (type(None), Transition):
            raise NotImplementedError(
                "HERReplayBuffer relabels single steps, so sample_unit is not supported; sample "
                "windows from a TensorDictReplayBuffer"
            )
        goals = Goals(
            reward_fn,
            terminated_fn,
            her_ratio,
            HindsightStrategy(strategy),
            goal_key,
            achieved_goal_key,
            reward_key,
            end_key,
        )
        super().__init__(sampler=sampler, goals=goals, **kwargs)

    def empty(self, empty_write_count: bool = True) -> None:
        """Removes all items, and discards their trajectories; see `ReplayBuffer.empty`."""
        super().empty(empty_write_count)
        self._parts.goals.forget()

    def __repr__(self) -> str:
        how = f"strategy={self.strategy.value!r}, her_ratio={self.her_ratio}"
        return super().__repr__().replace("(", f"(\n    {how},", 1)


def _set(rows: TensorDictBase, argument: str, path: KeyPath, values: torch.Tensor) -> None:
    """Overwrites the entry at ``path`` in rows.

    Raises KeyError if there is no such entry. The message contains the name of the constructor's
    ``argument``.
    """
    present = rows.get(path, None)
    if present is None:
        raise _missing_entry(argument, path)
    rows.set_(path, _reshape_like(path, values, present))


def _reshape_like(path: KeyPath, values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Reshapes new values of the entry at ``path`` to the shape of its ``present`` values.

    Raises TypeError if they are not a tensor, and ValueError if their number differs.
    """
    if not isinstance(values, torch.Tensor):
        raise TypeError(
            f"the new values of the entry {key_of(path)!r} must be a tensor, got a "
            f"{type(values).__name__}; return a tensor with one value per row from reward_fn and "
            "terminated_fn"
        )
    if values.numel() != present.numel():
        raise ValueError(
            f"the new values of the entry {key_of(path)!r} must have the shape "
            f"{list(present.shape)} of the rows, got {list(values.shape)}; return one value per row"
        )
    return values.reshape(present.shape)


def _missing_entry(argument: str, path: KeyPath) -> KeyError:
    return KeyError(
        f"hindsight relabeling needs the entry {key_of(path)!r}, which the items do not have; "
        f"write it with every item, or pass the key of another entry as {argument}"
    )

"""Transitions over n steps, built from single steps when they are sampled.

    item t     observation, action, ...                          │
    t .. last  rewards ──▶ next.reward = r + gamma r' + ...      ├─▶ one transition
    last       next: observation, done, terminated, ...          │

``last`` is n - 1 steps later, at the end of the episode, or the newest step of the stream,
whichever is first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils._pytree import tree_map

from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.memory.format.leaf import Key, path_of
from shmbuffer.units.anchors import Anchors, AnchorTrajectories, AroundAnchors, at_least
from shmbuffer.units.batch_entries import get_entry, own_node, rows_of, set_entry
from shmbuffer.units.unit import Expanded

_GAMMA, _STEPS = "gamma", "steps_to_next_obs"
_REWARD = "n_step_reward"  # passed from `_around` to `assemble`


class NStep(AroundAnchors):
    """Sample unit that returns a transition over up to n steps for each sampled step.

    The buffer always stores single steps, so that n can be changed and can differ between learners.
    A sample is the same as if transitions over n steps had been written:

    - ``next`` comes from the last step, with all its entries: observation, ``done``,
      ``terminated``, ``truncated``.
    - ``reward_key`` contains the discounted sum of the rewards.
    - ``"gamma"`` is the discount of the value after the last step, ``gamma ** steps``, and
      ``"steps_to_next_obs"`` is the number of steps. Both have the shape of a reward. The target is
      ``reward + gamma * ~terminated * value(next observation)``. TorchRL's losses read
      ``"steps_to_next_obs"``.

    The steps come from one episode and one stream of one collector, without a restart in between.
    If a step is overwritten during the read, another item is drawn. A transition has fewer steps
    near the end of an episode, near the newest step of a stream, and before a slot that a crash
    left empty. A sum never includes missing steps.

    ``index``, weights and priorities are those of the first step. For complete episodes, the result
    equals the transitions that `Recorder` writes with ``n_step=n``.

    Args:
        n: number of steps in a transition, at least 1.
        gamma: discount per step, from 0 to 1.
        reward_key: key of the reward of a step.
        done_key: key of the flag that is True for the last step of an episode, terminated or
            truncated. With None, only the end of a stream ends an episode.

    Raises:
        ValueError: a number is out of range, or ``reward_key`` is not below ``next``.

    Cost: the search for episode boundaries costs the same as in `SliceSampler`. The first steps,
        the last steps and the rewards are read once.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, NStep
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4),
        ...     sample_unit=NStep(3, gamma=0.5),
        ...     batch_size=2,
        ... )
        >>> step = torch.arange(4)
        >>> after = {"obs": step + 1, "reward": torch.ones(4), "done": step == 3}
        >>> index = rb.extend(TensorDict({"obs": step, "next": after}, [4]))
        >>> sample = rb.sample()
        >>> steps = sample["steps_to_next_obs"]
        >>> bool((sample["next", "obs"] == sample["obs"] + steps).all())
        True
    """

    def __init__(
        self,
        n: int,
        gamma: float,
        *,
        reward_key: Key = ("next", "reward"),
        done_key: Key | None = ("next", "done"),
    ) -> None:
        self.n = at_least("n", n, 1)
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be from 0 to 1, got {gamma!r}")
        self.gamma = float(gamma)
        self.reward_key, self.done_key = reward_key, done_key
        self._reward = path_of(reward_key)
        if len(self._reward) < 2:
            raise ValueError(
                "reward_key must be an entry below 'next', such as ('next', 'reward'), got "
                f"{reward_key!r}"
            )
        self._trajectories = AnchorTrajectories(done_key, [self._reward])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n={self.n}, gamma={self.gamma})"

    def _around(self, anchors: Anchors, info: dict[Any, Any]) -> Expanded | None:
        """Returns the first steps of all transitions, followed by their last steps.

        The sums of the rewards, the discounts and the numbers of steps are added to ``info``.
        """
        entries = anchors.found.entries
        if not entries.has(self._reward):
            raise KeyError(
                f"the items have no entry {self.reward_key!r}; pass the name of the reward as "
                "reward_key"
            )
        count, n = len(anchors.rows), self.n
        steps = np.minimum(anchors.last - anchors.rows + 1, n)
        rows = anchors.rows[:, None] + np.minimum(np.arange(n), steps[:, None] - 1)
        rewards = entries.take(self._reward, anchors.found.table.elements_of(rows.ravel()))
        items = anchors.items(rows.ravel())  # validates the rewards that were just read
        if items is None:
            return None
        dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
        each = rewards.double().numpy().reshape(count, n, *rewards.shape[1:])
        each[np.arange(n) >= steps[:, None]] = 0.0  # rewards of repeated last steps
        powers = np.array([self.gamma**k for k in range(n + 1)])
        total = np.zeros_like(each[:, 0])
        for k in range(n):
            total += powers[k] * each[:, k]
        number = np.empty(total.shape, np.int64)
        number.T[...] = steps
        added = {
            _REWARD: torch.from_numpy(total).to(dtype),
            _STEPS: torch.from_numpy(number),
            _GAMMA: torch.from_numpy(powers[number]).to(dtype),
        }
        first = np.arange(0, count * n, n)
        ends = items.select(np.concatenate((first, first + n - 1)))
        return anchors.named(ends, {**info, **added})

    def assemble(self, data: Any, info: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
        """Builds the transitions from the first and last steps."""
        added = {key: info[key] for key in (_REWARD, _STEPS, _GAMMA)}
        others = {key: value for key, value in info.items() if key not in added}
        count = len(added[_REWARD])
        *inside, name = self._reward
        first = rows_of(data, slice(count), inside[0])
        into, last = first, data
        for at, key in enumerate(inside):
            last = get_entry(last, key)
            last = own_node(last) if at else rows_of(last, slice(count, None))
            into = set_entry(into, key, last)
        device = getattr(get_entry(last, name), "device", None)
        set_entry(into, name, added[_REWARD].to(device))
        for key in (_GAMMA, _STEPS):
            if isinstance(first, (TensorDictBase, dict)) or hasattr(first, key):
                set_entry(first, key, added[key].to(device))
            else:
                others[key] = added[key]  # a tensorclass accepts no additional fields
        for key in (INDEX, GENERATION):
            if key in others:
                others[key] = tree_map(lambda one: one[:count], others[key])
        return first, others

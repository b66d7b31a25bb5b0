"""Sampler of whole groups of items, such as all completions of one prompt."""

from __future__ import annotations

import time
import warnings
from typing import Any, Literal, NamedTuple

import numpy as np

from shmbuffer._native._core import address
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.leaf import Key, path_of
from shmbuffer.samplers.claiming import ClaimingSampler
from shmbuffer.samplers.labelled import strategies
from shmbuffer.samplers.labelled.group_keys import GroupKeys
from shmbuffer.samplers.labelled.index import LabelIndex
from shmbuffer.samplers.labelled.source import WholeGroups
from shmbuffer.samplers.passes import described
from shmbuffer.samplers.sampler import draw_key, lanes_of, unchanged
from shmbuffer.samplers.taking import Taking

_STRATEGIES = ("random", "recency", "reward", "variance")
_SHOWN = ("num_groups", "samples_per_group", "group_key", "strategy", "group_size")


class GroupCounts(NamedTuple):
    """Numbers of groups in a buffer, as counted by one sampler."""

    whole: int
    """Number of complete groups, which can be sampled."""
    open: int
    """Number of groups that are still incomplete."""
    withdrawn: int
    """Number of groups that were removed because an item was overwritten or evicted."""
    given_up: int
    """Number of groups that were abandoned.

    A group is abandoned if it is incomplete after ``give_up_after`` seconds, or if it blocks the
    writers of a consumer's buffer and can never be complete.
    """


class PromptGroupSampler(ClaimingSampler):
    """Samples whole groups of items that share a key, such as all completions of one prompt.

    A batch is the concatenation of its groups. Groups are chosen uniformly without replacement. If
    a group has more items than requested, ``strategy`` decides which of them are drawn.

    With ``group_size``, a group can be sampled once it has that many items. Its items may come from
    any writer and in any order. The group is removed permanently when one of its items is
    overwritten or evicted. An incomplete group is abandoned ``give_up_after`` seconds after its
    first item was written. The death of a writer alone does not abandon a group, because another
    writer may finish it. Each process decides independently which groups to abandon, and counts
    them in `groups`. With a consumer, no learner receives the items of an abandoned group, and a
    group that blocks writers and can never be complete is also abandoned. After ``group_size``
    items, the next item with the same key starts a new group.

    Without ``group_size``, a group consists of all items that currently have the key, as in
    TorchRL. If there are too few items, some are drawn twice, and the sampler warns once.

    Args:
        num_groups: number of groups in a batch. Must divide the batch size.
        samples_per_group: number of items from each group. Must divide the batch size. Pass exactly
            one of ``num_groups`` and ``samples_per_group``. With ``group_size`` you can omit both,
            and then receive ``group_size`` items from each group.
        group_key: key of the entry that identifies the group of an item. The entry is a number, a
            string, or a row of numbers.
        strategy: ``"random"`` draws at random, ``"recency"`` draws the newest items, and
            ``"reward"`` draws the items with the largest rewards. ``"variance"`` draws the items
            whose rewards have the largest variance (RePO).
        reward_key: key of the reward. If a reward has several numbers, their mean is used.
        cache_groups: has no effect, because a draw only reads items written since the last draw.
        group_size: number of items in a complete group.
        give_up_after: seconds after which an incomplete group is abandoned. None means never.
        consumer: name of a consumer. All learners with this name share the groups under leases, as
            with a `ConsumingSampler`. Requires ``group_size``. Learners receive whole groups.
        start: where a new consumer starts: with the ``"oldest"`` item in the buffer, or after the
            ``"newest"``.

    Raises:
        TypeError: a number is not an int, or ``num_groups`` and ``samples_per_group`` were both
            passed. Without ``group_size``, also raised if neither of them or ``give_up_after`` was
            passed.
        ValueError: a number is below 1, ``strategy`` is unknown, or ``samples_per_group`` is larger
            than ``group_size``. With ``consumer``, also raised without ``group_size`` or with
            another ``strategy`` than ``"random"``.

    Cost: 50 ns per tensor item and 1 µs per record written since the last draw. A batch of 256
        items in groups of 8 takes 80 µs. The first draw reads every item, which takes 100 ms per
        million items, or one second per million items for text keys in tensor storages. With text
        keys, new records are read completely. The index takes 20 bytes of memory per item.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, PromptGroupSampler
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> sampler = PromptGroupSampler(
        ...     num_groups=2, group_key="prompt", group_size=2
        ... )
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(8), sampler=sampler, batch_size=4
        ... )
        >>> prompt = torch.tensor([7, 8, 9, 8, 7])
        >>> index = rb.extend(TensorDict({"prompt": prompt}, [5]))
        >>> sorted(rb.sample()["prompt"].tolist())
        [7, 7, 8, 8]
        >>> sampler.groups
        GroupCounts(whole=2, open=1, withdrawn=0, given_up=0)

    Source: ``torchrl.data.replay_buffers.PromptGroupSampler``; Li et al., RePO, 2025.
    """

    def __init__(
        self,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        group_key: Key = "query",
        strategy: Literal["random", "recency", "reward", "variance"] = "random",
        reward_key: Key = ("next", "reward"),
        cache_groups: bool = True,
        group_size: int | None = None,
        give_up_after: float | None = None,
        consumer: str | None = None,
        start: Start = "oldest",
    ) -> None:
        super().__init__(consumer, start)
        argument_count = (num_groups is not None) + (samples_per_group is not None)
        if argument_count > 1 or not (argument_count or group_size is not None):
            raise TypeError(
                "Exactly one of num_groups or samples_per_group must be provided, or only "
                f"group_size; got num_groups={num_groups} and samples_per_group={samples_per_group}"
            )
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy must be one of {_STRATEGIES}, got {strategy!r}")
        self.num_groups = _positive("num_groups", num_groups)
        self.samples_per_group = _positive("samples_per_group", samples_per_group)
        self.group_size = _positive("group_size", group_size)
        if not argument_count:
            self.samples_per_group = self.group_size
        self._require_enough(self.samples_per_group or 0)
        self.group_key = group_key
        self.strategy = strategy
        self.reward_key = reward_key
        self.cache_groups = cache_groups
        self.give_up_after = None if give_up_after is None else float(give_up_after)
        if self.give_up_after is not None and (
            self.group_size is None or not 0 < self.give_up_after < 1e9
        ):
            raise (TypeError if self.group_size is None else ValueError)(
                "give_up_after must be a positive number of seconds below 1e9, and requires "
                f"group_size, got {give_up_after} (group_size={group_size})"
            )
        if consumer is not None and (self.group_size is None or self.strategy != "random"):
            raise ValueError(
                "a consumer only gets whole groups, so group_size is required and strategy must be "
                f"'random', got group_size={group_size} and strategy={strategy!r}"
            )
        self._keys = GroupKeys()
        self._index = LabelIndex(
            path_of(group_key),
            self._keys.labels_of,
            value=path_of(reward_key) if strategy in ("reward", "variance") else None,
            limit=self.group_size or 0,
            by_age=True,
            trim=self._keys.trim,
        )
        self._index.is_claimed = consumer is not None
        self._warned = False

    # -- drawing -------------------------------------------------------------------------------

    @property
    def groups(self) -> GroupCounts:
        """Numbers of groups at the last draw. Removed and abandoned groups are counted in total."""
        with self._index.lock:
            if (table := self._index.table) is None:
                return GroupCounts(0, 0, 0, 0)
            return GroupCounts(table.marked, table.open, table.withdrawn, table.given_up)

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws a batch of whole groups; see `Consumes.sample`.

        Args:
            storage: the storage to draw from.
            batch_size: total number of items.
            taking: see `Consumes.sample`.

        Returns:
            Element indices, int64 ``[n]``, ordered by group, and a dict with additional entries of
                the sample.

        Raises:
            EmptyBufferError: the storage is empty. With ``group_size``, also raised if there are
                too few complete groups for a batch. With a consumer, raised if no complete group is
                left and no writer is attached.
            KeyError: items have no entry ``group_key`` or no reward.
            ValueError: ``batch_size`` is not a multiple of ``num_groups`` or
                ``samples_per_group``, or requests more items than a group has.
            NotImplementedError: the storage has several dimensions.
        """
        if lanes_of(storage):
            raise NotImplementedError(
                f"a {type(self).__name__} requires a storage with ndim=1, got ndim={storage.ndim}"
            )
        groups, wanted = self._shape(batch_size)
        if self.consumer is not None:
            if wanted != self.group_size:
                raise ValueError(
                    f"a consumer gets whole groups of group_size={self.group_size}, but a batch of "
                    f"{batch_size} would have {wanted} items from each group; use batch_size="
                    f"{groups * (self.group_size or 0)}"
                )
            return self._claimed(storage, groups, wanted, taking)

        def draw() -> tuple[Ints, Ints | None] | None:
            ring = self._look(storage)
            elements = self._choose(draw_key(self, storage), groups, wanted)
            tickets = None if ring is None else self._index.tickets(elements)
            return None if ring is not None and tickets is None else (elements, tickets)

        with self._index.lock:
            return described(storage, *unchanged(storage, draw, "groups"))

    @property
    def _lock(self) -> Any:
        return self._index.lock

    def _source(self, storage: Any, consumer: Consumer) -> WholeGroups:
        ring = self._look(storage)
        assert ring is not None  # a consumer requires a ring
        return WholeGroups(self, self._index, storage, ring)

    def _exhausted(self) -> str:
        return f"was given every complete group ({self._describe_others()})"

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if the storage has items or, with ``group_size``, enough complete groups.

        With a consumer, other learners must not have claimed these groups.
        """
        groups, _ = self._shape(batch_size)
        if not len(storage):
            return False
        if (consumer := self.bind(storage)) is not None:
            return self._can_claim(storage, consumer, groups)
        with self._index.lock:
            try:
                self._look(storage)
            except EmptyBufferError:
                return False
            return int(self._index.table.marked) >= (1 if self.group_size is None else groups)

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """Returns the number of groups in a batch, and the number of items from each group.

        Raises ValueError if they do not divide the batch size, or if a group has fewer items.
        """
        name = "samples_per_group" if self.num_groups is None else "num_groups"
        value = self.samples_per_group if self.num_groups is None else self.num_groups
        assert value is not None
        if batch_size % value:
            raise ValueError(
                f"batch_size={batch_size} is not divisible by {name}={value}; use a multiple of "
                f"{value}"
            )
        other = batch_size // value
        groups, wanted = (other, value) if self.num_groups is None else (value, other)
        self._require_enough(wanted)
        return groups, wanted

    def _require_enough(self, wanted: int) -> None:
        if self.group_size is not None and wanted > self.group_size:
            raise ValueError(
                f"{wanted} items of each group were requested, but a group only has "
                f"group_size={self.group_size} items; request at most {self.group_size} per group"
            )

    def _look(self, storage: Any) -> Ring | None:
        ring = self._index.update(storage)
        if self.give_up_after is not None:
            before = time.monotonic_ns() - int(self.give_up_after * 1e9)
            self._index.table.give_up(max(0, before))
        return ring

    def _choose(self, key: int, groups: int, wanted: int) -> Ints:
        """Chooses groups and items in each group.

        Args:
            key: seed of the draw.
            groups: number of groups.
            wanted: number of items from each group.

        Returns:
            The elements of the items, int64 ``[groups * wanted]``, ordered by group.
        """
        table = self._index.table
        numbers = self._numbers(key, table.marked, groups)
        elements = np.empty((groups, wanted), np.int64)
        at = address(numbers), groups
        if self.strategy == "random":
            self._warn_if(table.choose_members(*at, wanted, key ^ 1, address(elements)) < wanted)
            return elements.reshape(-1)
        sizes = np.empty(groups, np.int64)
        table.read_sizes(*at, address(sizes))
        for size in np.unique(sizes).tolist():
            which = np.flatnonzero(sizes == size)
            members = np.empty((len(which), size), np.int64)
            chosen = np.ascontiguousarray(numbers[which])
            table.read_members(address(chosen), len(which), size, address(members))
            elements[which, : min(size, wanted)] = self._select_members(members, min(size, wanted))
            if size < wanted:
                self._warn_if(True)
                rest = np.empty((len(which), wanted), np.int64)
                table.choose_members(address(chosen), len(which), wanted, key ^ size, address(rest))
                elements[which, size:] = rest[:, size:]
        return elements.reshape(-1)

    def _numbers(self, key: int, available: int, groups: int) -> Ints:
        """Chooses the numbers of ``groups`` groups out of ``available``, int64 ``[groups]``.

        Groups are numbered by the age of their first item. If there are too few groups, groups are
        chosen repeatedly without ``group_size``, and EmptyBufferError is raised with it.
        """
        numbers = np.empty(groups, np.int64)
        if available < groups and (self.group_size is not None or not available):
            raise self._too_few(groups, available)
        if groups:
            once = min(available, groups)
            self._index.table.choose(key, available, once, address(numbers))
            if once < groups:
                self._warn_if(True)
                numbers[once:] = np.resize(numbers[:once], groups - once)
        return numbers

    def _too_few(self, groups: int, available: int) -> EmptyBufferError:
        return EmptyBufferError(
            f"{groups} complete groups were requested, but only {available} exist: "
            f"{self._describe_others()}; write more groups before you sample, or request fewer"
        )

    def _describe_others(self) -> str:
        """Returns the numbers of groups that cannot be sampled, for a message."""
        counts = self.groups
        return (
            f"{counts.open} are incomplete, {counts.withdrawn} have lost items, {counts.given_up} "
            "were abandoned"
        )

    def _select_members(self, members: Ints, wanted: int) -> Ints:
        """Selects ``wanted`` items from each group according to ``strategy``.

        Args:
            members: elements of the items in each group, oldest first, int64 ``[groups, items]``.
            wanted: number of items to select from each group.

        Returns:
            The elements of the selected items, int64 ``[groups, wanted]``.
        """
        if self.strategy == "recency":
            return strategies.last(members, wanted)
        assert self._index.values is not None
        rewards: Floats = self._index.values[members]
        chosen = strategies.best if self.strategy == "reward" else strategies.most_different
        return chosen(members, rewards, wanted)

    def _warn_if(self, short: bool) -> None:
        if short and not self._warned:
            self._warned = True
            warnings.warn(
                "a batch needs more groups, or more items from a group, than the buffer has, so "
                "some items are sampled more than once. Write more items before you sample, use a "
                "smaller batch, or pass group_size to sample only complete groups",
                stacklevel=4,
            )

    # -- the rest ------------------------------------------------------------------------------

    def _empty(self) -> None:
        self._index.forget()
        self._warned = False
        super()._empty()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, because the groups are found again from the items in the storage."""

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SHOWN)
        return f"{type(self).__name__}({values})"


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)

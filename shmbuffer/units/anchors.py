"""Locates drawn items in their trajectories, and checks that their neighbours are still present.

A table of trajectories has one row per item. The rows of a trajectory come from one stream of one
collector, without a restart in between. They are in time order, regardless of their positions in
the ring. If the items of a window have not been overwritten since the table was built, the window
is consistent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shmbuffer.items.indices import as_int, ravel
from shmbuffer.items.keys import GENERATION
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key, KeyPath
from shmbuffer.samplers.sampler import ATTEMPTS, in_storage, lanes_of, wait_for_marks
from shmbuffer.samplers.slicing.boundaries import Boundaries, Found
from shmbuffer.samplers.slicing.options import TrajectoryOptions
from shmbuffer.samplers.slicing.trajectories import TrajectoryItems
from shmbuffer.storages.storage import ring_of
from shmbuffer.units.unit import Expanded, SampleUnit


class Anchors(NamedTuple):
    """Drawn items, and the trajectory that contains each of them at one point in time."""

    storage: Any
    ring: Ring | None
    found: Found
    elements: Ints
    """Elements of the items, int64 ``[n]``. The next four fields have the same shape and dtype."""
    rows: Ints
    """Rows of the items in the table of trajectories."""
    first: Ints
    """First row of each item's trajectory."""
    last: Ints
    """Last row of each item's trajectory."""
    tickets: Ints | None
    """Tickets of the items, or None without a ring."""

    def items(self, rows: Ints) -> TrajectoryItems | None:
        """Returns the items in these rows of the table, or None if an item was overwritten."""
        table = self.found.table
        elements = table.elements_of(rows)
        tickets = None if self.ring is None else table.are_there(self.ring, elements)
        return (
            None
            if self.ring is not None and tickets is None
            else TrajectoryItems(elements, tickets)
        )

    def named(self, items: TrajectoryItems, info: dict[Any, Any]) -> Expanded:
        """Converts items to the result of `SampleUnit.expand`, and adds their tickets to it."""
        if items.tickets is not None:
            info = {**info, GENERATION: torch.from_numpy(items.tickets)}
        return in_storage(self.storage, torch.from_numpy(items.elements)), info


class AnchorTrajectories:
    """Finds the trajectories of anchors.

    ``others`` are the paths of entries that are read together with the ends of episodes.
    """

    def __init__(self, done_key: Key | None, others: Sequence[KeyPath] = ()) -> None:
        self._done_key = done_key
        ends = () if done_key is None else (done_key,)
        self._boundaries = Boundaries(TrajectoryOptions(end_keys=ends), others)

    @property
    def lock(self) -> Any:
        """Lock that must be held while rows are used, because other threads update the table."""
        return self._boundaries.lock

    def locate(self, index: Any, info: dict[Any, Any], storage: Any) -> Anchors | None:
        """Locates anchors in their trajectories.

        Returns None if an anchor is missing, or if its item was overwritten after it was drawn.
        """
        elements = ravel(index, lanes_of(storage))
        ring: Ring | None = ring_of(storage)
        found = self.look_up(storage)
        table = found.table
        rows = table.rows_of(elements)
        if (rows < 0).any():
            return None
        held = None if ring is None else table.are_there(ring, elements)
        drawn = info.get(GENERATION)
        if ring is not None and held is None:
            return None
        if held is not None and drawn is not None and (held != drawn.numpy().reshape(-1)).any():
            return None
        trajectories = table.of_rows(rows)
        first = table.starts(trajectories)
        last = first + table.lengths(trajectories) - 1
        return Anchors(storage, ring, found, elements, rows, first, last, held)

    def histories(
        self, index: Any, info: dict[Any, Any], storage: Any, steps: int
    ) -> TrajectoryItems | None:
        """Returns the last ``steps`` items up to and including each anchor, concatenated.

        If a trajectory has too few steps before an anchor, its first step is repeated. Returns None
        if an item is missing, or if an anchor was overwritten after it was drawn.
        """
        elements = ravel(index, lanes_of(storage))
        found, drawn = self.look_up(storage), info.get(GENERATION)
        tickets = None if drawn is None else drawn.numpy().reshape(-1)
        follower = None if found.following is None else found.following.follower
        return found.table.histories(follower, elements, tickets, steps)

    def look_up(self, storage: Any) -> Found:
        """Returns the current trajectories in the storage.

        Raises:
            KeyError: the items have no entry ``done_key``.
        """
        try:
            return self._boundaries.find(storage)
        except KeyError as error:
            raise KeyError(
                f"the items have no entry {self._done_key!r}, which marks the end of an episode; "
                "pass its name as done_key, or pass done_key=None"
            ) from error


class OfTrajectories(SampleUnit):
    """Base class for units that expand an anchor into items from its trajectory."""

    _trajectories: AnchorTrajectories

    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded:
        """Returns the items of a batch.

        Raises:
            IndexError: an anchor is missing or has been overwritten.
        """
        for attempt in range(ATTEMPTS):
            if attempt > 1:
                wait_for_marks(storage)
            found = self._expand(index, info, storage)
            if found is not None:
                return found
        raise IndexError(
            f"{type(self).__name__}: an anchor is not an item of this storage, or it has been "
            "overwritten; sample again"
        )

    @abstractmethod
    def _expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded | None:
        """Returns the items of a batch, or None if an item was overwritten."""


class AroundAnchors(OfTrajectories):
    """Base class for units that select rows around each anchor in its trajectory."""

    @abstractmethod
    def _around(self, anchors: Anchors, info: dict[Any, Any]) -> Expanded | None:
        """Returns the items around each anchor, or None if an item was overwritten."""

    def _expand(self, index: Any, info: dict[Any, Any], storage: Any) -> Expanded | None:
        """Returns the items of a batch, or None if an item was overwritten."""
        with self._trajectories.lock:
            anchors = self._trajectories.locate(index, info, storage)
            return None if anchors is None else self._around(anchors, info)


def at_least(name: str, value: Any, least: int) -> int:
    """Checks that an argument is an integer of at least ``least``, and returns it as an int.

    ``name`` is the name of the argument for the error message.
    """
    number = as_int(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number

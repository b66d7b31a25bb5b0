"""The trajectories of a ring, kept up to date with writes: a look costs what has changed.

    ring ──▶ Follower            what was committed and what went, since the last look
                 └──▶ cuts           between which of the new items a trajectory ends (boundaries)
                          └──▶ Trajectories

Items that several collectors, or streams of one, have written in turn are followed source by
source: an item only ever follows one of the same collector, the same life of it, and the same
stream. A slot without an item cuts all trajectories, because its source is unknown. Nothing follows
the newest item, and the end of the ring's memory cuts nothing.

Writers go on during a look. Later writes have tickets from the head that was seen, so a draw checks
its own tickets: where all are older, nothing that was seen of these items has changed. Other items
do not matter: a cut is between two items, and only a draw of both can cross it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native import _core
from shmbuffer.items.indices import elements_of
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.samplers.slicing.cuts import Shown
from shmbuffer.samplers.slicing.trajectories import Trajectories

_PIECE = 2**15  # items to follow together, so that the arrays stay in the second-level cache
_MOVED = 64  # trajectories that may make room for an item; beyond that items are sorted first


class Fresh(NamedTuple):
    """New items of a ring, oldest first."""

    slots: Ints
    """int64 ``[n]``."""
    sources: NDArray[np.uint64]
    """``[n]``."""
    reach: Ints
    """int64 ``[n]``: how many slots before each hold items."""


class Following:
    """The trajectories of one ring; `SliceSampler` has the costs of a look."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.native = ring.seat.native
        self.follower = _core.Follower(self.native)
        self.table = Trajectories(ring.capacity, ring.width)
        self._again = False
        self._is_mixed = False  # steps arrive unordered
        self._cuts: tuple[Ints, int] | None = None  # and the address
        self.shown: Shown | None = None

    def forget(self) -> None:
        """Look at everything again the next time."""
        self.follower.forget()

    def cut_by(self, windows: _core.Windows) -> None:
        """Cut new items into windows, in ticket order: none beyond an unfinished write."""
        self.follower.in_turn()
        self.table.cut_by(windows)

    def cut_at(self, columns: Ints | None) -> None:
        """Cut by these columns, see `cut_columns`; None: by what `catch_up` is given."""
        self._cuts = None if columns is None else (columns, columns.ctypes.data)

    @property
    def pending(self) -> int:
        """Writes in progress at the last look."""
        return self.follower.pending

    def catch_up(self, cuts: Callable[[Ints, Ints], Flags]) -> None:
        """Follow items in write order; ``cuts(slots, before)`` says where a trajectory begins."""
        table, seen = self.table, None
        if self._cuts is not None:
            columns, at = self._cuts
            told = table.follow(self.follower, at, len(columns))
            if isinstance(told, int):
                self._seen(told)
                return
            seen = told
        for changed, fresh in self._looks(seen):
            if len(changed):
                around = None
                if table.windows is None:
                    around = table.around(changed, self.ring.live.sources[changed])
                if around is None:  # another source's item, or a lap of them: begin again
                    self.follower.forget()
                    self._again = True
                    continue
                items, before = around
                reach = np.empty_like(items)
                self.follower.reach(items.ctypes.data, len(items), reach.ctypes.data)
                apart = (items - before) % self.ring.capacity > reach
                table.cut(items, cuts(items, np.where(apart, -1, before)))
            for slots, sources, reach in fresh:
                follows = table.before(slots, sources, reach)
                table.append(slots, sources, cuts(slots, follows), self.follower.settled)

    def catch_up_by_step(self, steps_of: Callable[[Ints], tuple[Ints, Ints, str]]) -> None:
        """Follow items by ``steps_of(slots)``: ids, steps, and the names of both."""
        table, width = self.table, self.ring.width
        for changed, fresh in self._looks():
            table.drop(changed)
            parts: Iterable[Fresh] = fresh
            if self._is_mixed:
                parts = _as_one(list(fresh))
            if len(changed):
                found = Fresh(changed, self.ring.live.sources[changed], changed)
                parts = itertools.chain(parts, (found,))
            before, moved = table.rows, table.moved
            for slots, sources, _ in parts:
                elements = elements_of(slots, width)
                ids, steps, what = steps_of(slots)
                by_lane = sources.repeat(width)
                if self._is_mixed:
                    order = np.lexsort((steps, by_lane, ids))
                    ids, steps, elements = ids[order], steps[order], elements[order]
                    by_lane = by_lane[order]
                put_in_order(table, elements, by_lane, ids, steps, what)
                too_much = _MOVED * (table.rows - before) + _PIECE
                if not self._is_mixed and table.moved - moved > too_much:
                    self._is_mixed = True
                    self.follower.forget()
                    self._again = True
                    break

    # -- inside --------------------------------------------------------------------------------

    def _seen(self, head: int) -> None:
        table, ring = self.table, self.ring
        table.head = head
        table.first = head % ring.capacity * ring.width if head >= ring.capacity else 0

    def flags(
        self, elements: torch.Tensor, steps: int
    ) -> tuple[dict[Any, torch.Tensor], torch.Tensor] | None:
        """The flags of slices; see `Shown.read`."""
        assert self.shown is not None
        return self.shown.read(self.follower, elements, steps)

    def _looks(
        self, seen: tuple[bool, bytes, bytes] | None = None
    ) -> Iterator[tuple[Ints, Iterator[Fresh]]]:
        """Changes until there are none, from ``seen`` on; after an error all is looked at again."""
        follower, table = self.follower, self.table
        try:
            while True:
                if seen is None:
                    seen = follower.poll()
                if seen is None:
                    return
                is_first, gone, changed = seen
                self._again = is_first  # which is slow, and others have written meanwhile
                if is_first:
                    table.clear()
                table.drop(np.frombuffer(gone, np.int64))
                seen = None
                self._seen(follower.seen)
                if table.windows is not None:
                    table.windows.seen = follower.seen
                yield np.frombuffer(changed, np.int64).copy(), self._fresh()
                if not self._again:
                    return
        except BaseException:
            follower.forget()
            raise

    def _fresh(self) -> Iterator[Fresh]:
        slots, reach = np.empty((2, _PIECE), np.int64)
        while count := self.follower.next(slots.ctypes.data, reach.ctypes.data, _PIECE):
            new = slots[:count]
            yield Fresh(new.copy(), self.ring.live.sources[new], reach[:count].copy())


def put_in_order(
    table: Trajectories,
    elements: Ints,
    sources: NDArray[np.uint64],
    ids: Ints,
    steps: Ints,
    what: str,
) -> None:
    """Insert items by step; RuntimeError, with the names in ``what``, if a step is there twice."""
    twice = table.insert(elements, sources, ids, steps)
    if twice is not None:
        at, there = twice
        raise RuntimeError(
            f"step {steps[at]} of trajectory {ids[at]} is there twice ({what}): "
            f"items {there} and {elements[at]}; ids of trajectories that are stored at the "
            "same time have to differ"
        )


def _as_one(parts: list[Fresh]) -> list[Fresh]:
    return [Fresh(*map(np.concatenate, zip(*parts, strict=True)))] if parts else []

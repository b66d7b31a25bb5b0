"""The trajectories of a storage: its items in order, cut where one of them ends.

rows            the items of all pieces (pieces.py), put in order: lane, source, age
trajectories    rows, cut where a flag says so, an id changes, or a piece ends after which
                something is missing
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shmbuffer.memory import slots as slot_words
from shmbuffer.replay.samplers.slicing.pieces import Grid, Ordered, Pieces, TrajectoryPieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.replay.samplers.arrays import Flags, Ints


class Ends(NamedTuple):
    """What the items say about where trajectories end; elements, in their order."""

    ends: Ints
    """int64: the last of a trajectory."""
    changes: Ints
    """int64: the next slot of its lane has the id of another trajectory; the first slot comes after
    the last one. Of several sources: the next slot of the same one."""
    ids: NDArray[Any] | None
    """``[slots, lanes, numbers]``."""


class Steps(NamedTuple):
    """Where items belong whose trajectory does not lie in order."""

    ids: NDArray[Any]
    """``[slots, lanes, 1]``: of the trajectory."""
    steps: NDArray[Any]
    """``[slots, lanes, 1]``: number of the step in it."""
    what: str
    """The names of the two, for messages."""


class Trajectories:
    """Every trajectory of a storage at one moment.

    Args:
        grid: where the cells are.
        pieces: the cells of the rows, in order.
        stops: int64, increasing: the last row of each trajectory.
        head: of the ring when it was looked at: items with tickets from there on are not of this
            moment. None where there is no ring.

    Attributes:
        rows: how many there are. The rows of a trajectory follow each other in the order of time.
        starts: int64 ``[trajectories]``: first row of each, increasing.
        lengths: int64 ``[trajectories]``: rows of each.
    """

    def __init__(self, grid: Grid, pieces: Pieces, stops: Ints, head: int | None) -> None:
        self._grid = grid
        self._pieces = pieces
        self._first_rows = pieces.first_rows()
        self.head = head
        self.rows = int(stops[-1]) + 1 if len(stops) else 0
        self.starts = np.concatenate((np.zeros(1, np.int64), stops[:-1] + 1))[: len(stops)]
        self.lengths = stops - self.starts + 1
        self._long: tuple[int, Ints] | None = None

    def __len__(self) -> int:
        """How many trajectories there are."""
        return len(self.lengths)

    def long(self, steps: int) -> Ints:
        """Trajectories of at least ``steps`` items, int64. Remembered for the last ``steps``."""
        if self._long is None or self._long[0] != steps:
            self._long = steps, np.flatnonzero(self.lengths >= steps)
        return self._long[1]

    def of_rows(self, rows: Ints) -> Ints:
        """The trajectory that each row belongs to, int64 ``[n]``."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def elements_of(self, rows: Ints) -> Ints:
        """The element of each row, int64 ``[n]``."""
        return self._grid.elements(self._pieces.cells_of(rows, self._first_rows))

    def rows_of(self, elements: Ints) -> Ints:
        """The row of each element, int64 ``[n]``; -1 where there is none."""
        return self._pieces.rows_of(self._grid.cells(elements), self._first_rows)

    def are_there(self, ring: Ring, elements: Ints) -> Ints | None:
        """Tickets of items of this table, int64 ``[n]``.

        Returns:
            None where one of them has been written over since.
        """
        words = ring.live.words[elements // ring.width]
        tickets = slot_words.tickets(words)
        there = slot_words.committed(words) & (tickets < (self.head or 0))
        return tickets if there.all() else None


def scan(
    flags: list[NDArray[Any]],
    ids: NDArray[Any] | None,
    slots: int,
    order: NDArray[Any] | None = None,
) -> Ends:
    """Look for ends; ``order`` has the slots as they follow each other, where it is another one.

    Cost: one look at each number: 0.1 ms for a million flags, 1 ms for a million ids.
    """
    ends = changes = np.zeros(0, np.int64)
    if flags:
        found = any_of(flags[0][:slots])
        for more in flags[1:]:
            found = found | any_of(more[:slots])
        ends = np.flatnonzero(found)
    if ids is not None:
        ids = ids[:slots]
        seen = ids if order is None else ids[order]
        changes = np.flatnonzero(any_of(seen[1:] != seen[:-1]))
        if order is not None:
            row, lane = np.divmod(changes, ids.shape[1])
            changes = order[row].astype(np.int64) * ids.shape[1] + lane
        elif len(ids):
            last = np.flatnonzero(any_of(ids[:1] != ids[-1:]))
            changes = np.concatenate((changes, (len(ids) - 1) * ids.shape[1] + last))
    return Ends(ends, changes, ids)


def cut(grid: Grid, pieces: Pieces, ends: Ends, head: int | None) -> Trajectories:
    """Cut the items of all lanes where a trajectory ends."""
    if not len(pieces.counts):
        return Trajectories(grid, pieces, np.zeros(0, np.int64), head)
    rows = pieces.first_rows()
    last = rows + pieces.counts - 1
    at_end = pieces.rows_of(grid.cells(ends.ends), rows)
    before = pieces.rows_of(grid.cells(ends.changes), rows)
    inside = before < last[np.searchsorted(rows, before, side="right") - 1]  # the next row is too
    cuts = pieces.cut
    if ends.ids is not None and isinstance(pieces, TrajectoryPieces) and not cuts.all():
        flat = ends.ids.reshape(-1, ends.ids.shape[-1])
        one = flat[grid.elements(pieces.first[:-1] + pieces.counts[:-1] - 1)]
        cuts = cuts.copy()
        cuts[:-1] |= (one != flat[grid.elements(pieces.first[1:])]).any(-1)
    stops = np.concatenate((at_end[at_end >= 0], before[inside & (before >= 0)], last[cuts]))
    stops = np.sort(stops, kind="stable")  # of some increasing runs: quick
    if len(stops):
        stops = stops[np.append(stops[1:] != stops[:-1], True)]
    return Trajectories(grid, pieces, stops, head)


def cut_in_circle(grid: Grid, pieces: Pieces, ends: Ends, head: int | None) -> Trajectories:
    """`cut`, of slots of which the first one comes after the last one, where all hold items."""
    size = grid.capacity
    if int(pieces.counts.sum()) < size:
        return cut(grid, pieces.in_lanes(grid), ends, head)
    if head is not None and head % size:  # where the ring writes next
        there = (head % size - 1) * grid.width + np.arange(grid.width)
        ends = ends._replace(ends=np.concatenate((ends.ends, there)))
    slot, lane = np.divmod(np.concatenate((ends.ends, ends.changes)), grid.width)
    behind = np.zeros(grid.width, np.int64)  # each lane begins behind its last end
    np.maximum.at(behind, lane, slot + 1)
    first = np.stack((behind, np.zeros_like(behind)), 1) + np.arange(grid.width)[:, None] * size
    count = np.stack((size - behind, behind), 1)
    cuts = np.stack((behind == 0, np.ones(grid.width, np.bool_)), 1)
    some = count > 0
    first = first[some]
    return cut(
        grid, TrajectoryPieces(first, count[some], cuts[some], np.argsort(first)), ends, head
    )


def cut_by_step(
    grid: Grid,
    pieces: Pieces,
    sources: NDArray[np.uint64] | None,
    said: Steps,
    head: int | None,
) -> Trajectories:
    """Trajectories whose items do not follow each other: by id and number of the step.

    A step that is missing cuts. Of each source for itself.

    Cost: O(n log n) in the number of items.
    """
    ids, steps, what = said
    for values in (ids, steps):
        if values.dtype.kind not in "iu" or values.shape[2] != 1:
            raise TypeError(
                f"fragmented=True needs one integer an item in {what}, found "
                f"{values.shape[2]} of {values.dtype}"
            )
    at = (pieces.cells()[:, None] * grid.width + np.arange(grid.width)).ravel()
    identity, step = (values.reshape(-1)[at].astype(np.int64) for values in (ids, steps))
    if len(step) and step.min() < 0:
        raise ValueError(f"fragmented=True: a step is not negative, found {step.min()} ({what})")
    source = np.zeros(len(at), np.uint64) if sources is None else sources[at // grid.width]
    order = np.lexsort((step, source, identity))
    at, identity, step, source = at[order], identity[order], step[order], source[order]
    same = (identity[1:] == identity[:-1]) & (source[1:] == source[:-1])
    twice = np.flatnonzero(same & (step[1:] == step[:-1]))
    if len(twice):
        raise RuntimeError(
            f"step {step[twice[0]]} of trajectory {identity[twice[0]]} is there twice ({what}): "
            f"items {at[twice[0]]} and {at[twice[0] + 1]}; ids of trajectories that are stored at "
            "the same time have to differ"
        )
    cuts = np.ones(len(at), np.bool_)
    cuts[:-1] = ~same | (step[1:] != step[:-1] + 1)
    cells, stops = grid.cells(at), np.flatnonzero(cuts)
    rows = np.full(grid.capacity * grid.width, -1)
    rows[cells] = np.arange(len(cells))
    alone = Ordered(cells, rows, np.diff(stops, prepend=-1))
    return Trajectories(grid, alone, stops, head)


def any_of(numbers: NDArray[Any]) -> Flags:
    """Where any number of an item is not 0: ``[slots, lanes]``."""
    if numbers.shape[-1] != 1:
        return np.asarray(numbers.any(-1))
    return numbers[..., 0] if numbers.dtype == np.bool_ else numbers[..., 0] != 0

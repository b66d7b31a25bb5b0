"""What ends a trajectory, as the user says it, and the trajectories that follow from it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.replay.samplers.passes import wait_for_items
from shmbuffer.replay.samplers.sampler import ATTEMPTS, lanes_of
from shmbuffer.replay.samplers.slicing.entries import (
    Entries,
    Key,
    LeafEntries,
    ObjectEntries,
    RecordEntries,
    path_of,
)
from shmbuffer.replay.samplers.slicing.pieces import Grid, Ordered, Pieces, in_order, look
from shmbuffer.replay.samplers.slicing.trajectories import (
    Ends,
    Steps,
    Trajectories,
    cut,
    cut_by_step,
    cut_in_circle,
    scan,
)
from shmbuffer.replay.storages.record_store import RecordStore
from shmbuffer.replay.storages.ring_backed import RingBacked
from shmbuffer.replay.storages.rows import Rows
from shmbuffer.replay.storages.storage import ring_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.numpy.nodes import KeyPath

_EMPTY = "the storage is empty: write something before sampling"
DONE: KeyPath = ("next", "done")
#: Where ids of trajectories are looked for; the first one is what TorchRL's collectors write.
USUAL_IDS: tuple[KeyPath, ...] = (("collector", "traj_ids"), ("episode",))


class Found(NamedTuple):
    """The trajectories of a storage, and what it was like when they were found."""

    table: Trajectories
    entries: Entries
    """How to read the flags of its items."""
    said: Ends | Steps
    """By its items, without what is live memory."""
    slots: int
    """How many were looked at."""
    storage: weakref.ref[Any]
    mover: Any
    moment: tuple[int, int, int] | None


class Boundaries:
    """Where trajectories end.

    - ``end_key`` or ``end_keys``: at an item with a flag that is set.
    - ``traj_key``: where the id changes. Together with end keys: at both.
    - neither: at the ids under ``("collector", "traj_ids")`` or ``"episode"``, else at
      ``("next", "done")``.
    - ``ends`` or ``trajectories``: as these tensors say, whatever is stored.
    - ``step_key``: an id's items lie anywhere, and this is their order.

    Args:
        end_key: see above.
        end_keys: those that the items have, combined with or; empty: none ends one.
        traj_key: see above. Where the items have it not, end keys are used.
        step_key: None where items lie in their order.
        ends: bool ``[slots, *lanes]``.
        trajectories: integers ``[slots, *lanes]``.
        cache_values: while nothing is written the stored flags are not looked at again.
        others: entries that will be asked for as well.
    """

    def __init__(
        self,
        *,
        end_key: Key | None,
        end_keys: Sequence[Key] | None,
        traj_key: Key | None,
        step_key: Key | None,
        ends: torch.Tensor | None,
        trajectories: torch.Tensor | None,
        cache_values: bool,
        others: Sequence[KeyPath],
    ) -> None:
        self._all_ends = end_keys is not None
        given = () if end_keys is None else tuple(path_of(key) for key in end_keys)
        self._ends = given if end_key is None else (path_of(end_key),)
        self._ids = None if traj_key is None else path_of(traj_key)
        self._step = None if step_key is None else path_of(step_key)
        self._given_ends = ends
        self._given_ids = trajectories
        self._cache_values = cache_values
        self._others = tuple(others)
        self._seen: Found | None = None
        self._records: tuple[weakref.ref[Any], RecordEntries] | None = None  # of a storage

    def of(self, storage: Any) -> Found:
        """The trajectories of a storage as it is now.

        What was found before is found again if nothing was written since and, unless
        ``cache_values``, the flags still have the same bytes.

        Cost: where nothing was written, a look at the flags: 0.1 ms for a million; nothing with
            ``cache_values``. Else `look` and `cut`, too. Of objects, and of a storage of somebody
            else's, every item is read each time, unless ``cache_values``; of records each once.
        """
        ring: Ring | None = ring_of(storage)
        mover = storage.mover() if isinstance(storage, RingBacked) else None
        rows = mover if isinstance(mover, Rows) else None
        wait_for_items(storage, ring, _EMPTY)
        # Read before anything else: what is written from here on makes another moment.
        moment = None if ring is None else (ring.head, ring.write_count, ring.length)
        seen = self._seen
        if seen is not None and (seen.storage() is not storage or seen.mover is not mover):
            seen = None
        if seen is not None and moment is not None and seen.moment == moment:
            entries = seen.entries
            if self._cache_values or (rows is not None and self._says_the_same(seen)):
                return seen
            if isinstance(entries, RecordEntries) and ring is not None and entries.is_current(ring):
                return seen
        for attempt in range(ATTEMPTS):
            try:
                found = self._find(storage, ring, mover, moment)
                break
            except IndexError:  # an object that another thread began to write over meanwhile
                if rows is not None or ring is None or attempt == ATTEMPTS - 1:
                    raise
        self._seen = found
        return found

    def forget(self) -> None:
        """Look again."""
        self._seen = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None, "_records": None}

    # -- inside --------------------------------------------------------------------------------

    def _find(
        self, storage: Any, ring: Ring | None, mover: Any, moment: tuple[int, int, int] | None
    ) -> Found:
        head: int | None = None
        if ring is None:
            grid, pieces = cast(tuple[Grid, Pieces], in_order(len(storage)))
        else:
            by_age = not self._static and self._step is None
            grid, pieces, head = look(ring, by_age=by_age)
        if not pieces.counts.any():
            raise EmptyBufferError(_EMPTY)
        slots = pieces.reach() if not grid.start else grid.capacity
        if isinstance(mover, Rows):
            entries: Entries = LeafEntries(mover)
        elif isinstance(mover, RecordStore) and ring is not None:
            entries = self._of_records(storage, mover)
            entries.look(ring)
        else:
            entries = self._objects(storage, grid, pieces)
        order = pieces.order if isinstance(pieces, Ordered) else None
        said = self._said(entries, slots, grid, order)
        if isinstance(said, Steps):
            sources = None if ring is None else ring.live.sources
            table = cut_by_step(grid, pieces, sources, said, head)
        else:
            if self._static:
                table = cut_in_circle(grid, pieces, said, head)
            else:
                table = cut(grid, pieces.in_lanes(grid), said, head)
            said = said if order is not None else said._replace(ids=None)  # live memory
        return Found(table, entries, said, slots, weakref.ref(storage), mover, moment)

    def _said(
        self,
        entries: Entries,
        slots: int,
        grid: Grid | None = None,
        order: NDArray[Any] | None = None,
    ) -> Ends | Steps:
        """What the items say, or what was given for them."""
        if self._given_ends is not None:
            return scan([_given("ends", self._given_ends, slots, grid)], None, slots)
        if self._given_ids is not None:
            return scan([], _given("trajectories", self._given_ids, slots, grid), slots)
        id_path, ends = self._keys(entries)
        ids = None if id_path is None else entries.column(id_path)
        if self._step is not None:
            assert ids is not None
            steps = entries.column(self._step)
            what = f"traj_key {_names([id_path])}, step_key {_names([self._step])}"
            return Steps(ids[:slots].copy(), steps[:slots].copy(), what)
        if ids is not None and order is not None:
            ids = ids[:slots].copy()  # to be compared with, which is quicker than their order
        return scan([entries.column(path) for path in ends], ids, slots, order)

    def _says_the_same(self, seen: Found) -> bool:
        """Whether the items say what they said before."""
        said, entries = seen.said, seen.entries
        if isinstance(said, Steps) or said.ids is None:
            return _same(said, self._said(entries, seen.slots))
        id_path, ends = self._keys(entries)
        assert id_path is not None
        now = scan([entries.column(path) for path in ends], None, seen.slots)
        return np.array_equal(entries.column(id_path)[: seen.slots], said.ids) and np.array_equal(
            now.ends, said.ends
        )

    def _objects(self, storage: Any, grid: Grid, pieces: Pieces) -> Entries:
        if lanes_of(storage):
            raise TypeError(
                f"slices of a {type(storage).__name__} need one with ndim=1, or a storage of "
                "tensors of this package"
            )
        return ObjectEntries(storage, np.sort(grid.elements(pieces.cells())), self._paths)

    def _of_records(self, storage: Any, store: RecordStore) -> RecordEntries:
        """What is known of the records of a storage, from looks before."""
        if self._records is None or self._records[0]() is not storage:
            self._records = weakref.ref(storage), RecordEntries(store, self._paths)
        return self._records[1]

    @property
    def _paths(self) -> tuple[KeyPath, ...]:
        """Every entry that may be asked for."""
        named = tuple(path for path in (self._ids, self._step) if path is not None)
        return tuple(dict.fromkeys((*self._ends, *USUAL_IDS, DONE, *self._others, *named)))

    @property
    def _static(self) -> bool:
        return self._given_ends is not None or self._given_ids is not None

    def _keys(self, entries: Entries) -> tuple[KeyPath | None, tuple[KeyPath, ...]]:
        """The entries that are looked at, of those that the items have."""
        if self._all_ends and not self._ends:
            return None, ()
        wanted = () if self._ends else USUAL_IDS
        wanted = wanted if self._ids is None else (self._ids,)
        ids = next((path for path in wanted if entries.has(path)), None)
        if self._step is not None:
            if ids is None or not entries.has(self._step):
                raise RuntimeError(
                    "fragmented=True needs an id of the trajectory and the number of the step with "
                    f"every item: traj_key {_names(wanted)}, step_key {_names([self._step])}; one "
                    "of them is not there"
                )
            return ids, ()
        ends = tuple(path for path in self._ends or (DONE,) if entries.has(path))
        if ids is not None or ends:
            return ids, ends if self._ends or ids is None else ()
        if self._all_ends:
            raise KeyError(f"the items have none of the end_keys {_names(self._ends)}")
        raise RuntimeError(
            "nothing says where a trajectory ends: the items have neither an id of it under "
            f"{_names(wanted or USUAL_IDS)} nor a flag under {_names(self._ends or (DONE,))}; name "
            "an entry of theirs with traj_key or end_key"
        )


def _given(name: str, given: torch.Tensor, slots: int, grid: Grid | None) -> NDArray[Any]:
    """What the user has given for each item, ``[slots, width, 1]``."""
    assert grid is not None
    values = torch.as_tensor(given).detach().cpu().numpy().reshape(-1)
    count, rest = divmod(len(values), grid.width)
    if rest or not slots <= count <= grid.capacity:
        raise ValueError(
            f"{name} has {len(values)} entries for a storage with {slots * grid.width} items and "
            f"room for {grid.capacity * grid.width}; give one for each item, in the order of the "
            "storage"
        )
    return values.reshape(count, grid.width, 1)


def _same(said: Ends | Steps, before: Ends | Steps) -> bool:
    """Whether the items say what they said before."""
    return all(np.array_equal(one, other) for one, other in zip(said[:2], before[:2], strict=True))


def _names(paths: Sequence[KeyPath | None]) -> str:
    return ", ".join(repr(path[0] if len(path) == 1 else path) for path in paths if path)

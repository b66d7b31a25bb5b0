"""Finds the trajectories in a storage from ids, end flags, step numbers or the user's arrays."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.leaf import KeyPath, key_of, path_of
from shmbuffer.memory.system.fork_lock import ForkLock
from shmbuffer.samplers.item_entries import Entries, ForeignItems, KeptEntries, RowEntries, any_of
from shmbuffer.samplers.passes import wait_for_items
from shmbuffer.samplers.sampler import ATTEMPTS, lanes_of
from shmbuffer.samplers.slicing.following import Following, insert_by_step
from shmbuffer.samplers.slicing.interleaved import Interleaved
from shmbuffer.samplers.slicing.options import TrajectoryOptions
from shmbuffer.samplers.slicing.trajectories import Trajectories, build_trajectories
from shmbuffer.samplers.slicing.windows import Windows
from shmbuffer.storages.movers.record_store import RecordStore
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form.tensors import as_numbers

_EMPTY = "the storage is empty; write items before sampling"
DONE: KeyPath = ("next", "done")
#: Keys that are tried for trajectory ids by default. TorchRL's collectors write the first key.
USUAL_IDS: tuple[KeyPath, ...] = (("collector", "traj_ids"), ("episode",))
_ENDS, _BEGINS, _IDS = range(3)  # roles of a column, as numbered by the C core

Keys = tuple[KeyPath | None, tuple[KeyPath, ...]]  # key of the id, and keys of the end flags


class _OtherKeysError(Exception):
    """Raised if new items have other keys than earlier items. All trajectories are cut again."""


class Found(NamedTuple):
    """The trajectories in a storage at one point in time."""

    table: Trajectories
    entries: Entries
    """Reads the ids and flags of the items in ``table``."""
    storage: weakref.ref[Any]
    mover: Any
    following: Following | None
    """Updates ``table``, or None if the table is rebuilt from all items each time."""
    counters: tuple[int, int, int] | None
    """Head, write count and length of the ring at that point, or None without a ring."""


class Boundaries:
    """Finds the trajectories in a storage, and updates them after writes.

    Args:
        options: the user's rules for the ends of trajectories.
        others: keys of additional entries that the sampler reads.
        windows: windows into which the trajectories in a ring are cut, or None.
    """

    def __init__(
        self,
        options: TrajectoryOptions,
        others: Sequence[KeyPath] = (),
        windows: Windows | None = None,
    ) -> None:
        self._options = options
        self._all_ends = options.end_keys is not None
        ends = options.end_keys or () if options.end_key is None else (options.end_key,)
        self._ends = tuple(path_of(key) for key in ends)
        self._ids = None if options.traj_key is None else path_of(options.traj_key)
        # With None, the items of a trajectory are stored in order.
        step_key = options.step_key if options.fragmented else None
        self._step = None if step_key is None else path_of(step_key)
        self._begins = tuple(path_of(key) for key in options.begins)
        self._others = (*others, *self._begins)
        self._windows = windows
        self._interleaved = Interleaved()
        self._seen: Found | None = None
        self._used_keys: Keys | None = None  # keys with which the earlier items were cut

    def find(self, storage: Any) -> Found:
        """Returns the current trajectories in a storage.

        Detects writes and assignments, but no changes through a view of the memory.
        """
        with self.lock:
            for attempt in range(ATTEMPTS):
                try:
                    return self._find_current(storage)
                except IndexError:  # another thread overwrote an object during the read
                    if attempt == ATTEMPTS - 1 or ring_of(storage) is None:
                        raise
                except _OtherKeysError:
                    if attempt == ATTEMPTS - 1:
                        raise
        raise AssertionError("not reached")

    def forget(self) -> None:
        """Discards all trajectories. The next call to `find` reads every item."""
        self._seen = None

    def _in_child(self, _: bool) -> None:
        """Discards all trajectories and windows in a forked child process.

        The child therefore delivers every window again.
        """
        self.forget()
        if self._windows is not None:
            self._windows.forget()

    #: Must be held while a table is used, because another thread could update the table.
    lock = ForkLock(_in_child)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_seen": None}
        state.pop("lock", None)
        return state

    # -- inside --------------------------------------------------------------------------------

    def _find_current(self, storage: Any) -> Found:
        ring: Ring | None = ring_of(storage)
        mover = storage.mover() if isinstance(storage, RingBacked) else None
        wait_for_items(storage, ring, _EMPTY)
        # These values are read before the items, so that any later write changes them.
        counters = None if ring is None else (ring.head, ring.write_count, ring.length)
        seen = self._seen
        if seen is not None and (seen.storage() is not storage or seen.mover is not mover):
            seen = None
        is_followed = ring is not None and isinstance(mover, Rows | RecordStore)
        if seen is not None and (self._options.are_given or not is_followed):
            if self._options.cache_values and counters is not None and seen.counters == counters:
                return seen
            seen = None
        following: Following | None = None
        if ring is None:
            count = len(storage)
            entries = self._cached_entries(storage, ForeignItems(storage), count)
            entries.read(np.arange(count))
            table = self._cut_foreign(entries, count)
        elif self._options.are_given:
            used_slots = ring.live.committed_slots()
            entries = self._entries(storage, mover)
            entries.read(used_slots)
            assert counters is not None
            sizes = ring.capacity, ring.width
            table = build_trajectories(self._options, used_slots, *sizes, counters[0])
        else:
            following = seen.following if seen is not None else None
            if following is None or following.native is not ring.seat.native:
                following, self._used_keys, seen = Following(ring), None, None
                if self._windows is not None:
                    self._windows.follow(ring, following)
            entries = self._entries(storage, mover) if seen is None else seen.entries
            table = following.table
            if seen is None and self._step is None and isinstance(mover, Rows):
                ids, ends = self._keys(entries)
                following.cut_at(cut_columns(entries, ids, ends, self._begins))
            self._catch_up(following, entries)
            if self._step is None:
                self._interleaved.check(storage, ring)
        if not table.rows:
            raise EmptyBufferError(_EMPTY)
        if seen is None or not is_followed:
            seen = Found(table, entries, weakref.ref(storage), mover, following, counters)
        self._seen = seen
        return seen

    def _catch_up(self, following: Following, entries: Entries) -> None:
        if self._step is not None:
            following.catch_up_by_step(partial(self._steps, entries))
        else:
            following.catch_up(partial(self._cuts, entries, following.ring.width))

    def _cuts(self, entries: Entries, lanes: int, slots: Ints, before: Ints) -> Flags:
        """Returns True for each item that starts a trajectory, bool ``[n, lanes]``.

        ``before`` contains the slot of the previous item for each of ``slots``, or -1 if there is
        no previous item.
        """
        follow = before >= 0
        entries.read(slots)
        entries.read(before[follow])
        ids, ends = self._unchanged_keys(entries)
        cuts = np.ones((len(slots), lanes), np.bool_)
        if follow.any():
            one, other = slots[follow], before[follow]
            found = [any_of(entries.at(path, other)) for path in ends]
            if ids is not None:
                found.append(any_of(entries.at(ids, one) != entries.at(ids, other)))
            begins = [path for path in self._begins if entries.has(path)]
            found += [any_of(entries.at(path, one)) for path in begins]
            cuts[follow] = np.logical_or.reduce(found) if found else False
        return cuts

    def _steps(self, entries: Entries, slots: Ints) -> tuple[Ints, Ints, str]:
        """Returns the trajectory ids and step numbers of the items in ``slots``.

        Returns:
            Ids and step numbers, int64 ``[n * lanes]`` each, and a text that names the keys of both
            for error messages.
        """
        entries.read(slots)
        id_path, _ = self._unchanged_keys(entries)
        assert id_path is not None
        assert self._step is not None
        what = f"traj_key {_names([id_path])}, step_key {_names([self._step])}"
        found = []
        for path in (id_path, self._step):
            values = entries.at(path, slots)
            if values.dtype.kind not in "iu" or values.shape[2] != 1:
                raise TypeError(
                    f"with fragmented=True, the entry {key_of(path)!r} must be one integer per "
                    f"item, got dtype {values.dtype} and size {values.shape[2]} ({what})"
                )
            found.append(values.reshape(-1).astype(np.int64))
        ids, steps = found
        if len(steps) and steps.min() < 0:
            raise ValueError(
                f"with fragmented=True, step numbers must be at least 0, got {steps.min()} ({what})"
            )
        return ids, steps, what

    def _cut_foreign(self, entries: Entries, count: int) -> Trajectories:
        """Returns the trajectories of a storage without a ring, in the order of its indices."""
        if self._options.are_given:
            return build_trajectories(self._options, np.arange(count), max(count, 1), 1, None)
        table, slots = Trajectories(max(count, 1), 1), np.arange(count)
        nothing = np.zeros(count, np.uint64)
        if self._step is not None:
            ids, steps, what = self._steps(entries, slots)
            insert_by_step(table, slots, nothing, ids, steps, what)
        else:
            table.append(slots, nothing, self._cuts(entries, 1, slots, slots - 1))
        return table

    def _entries(self, storage: Any, mover: Any) -> Entries:
        if isinstance(mover, Rows):
            return RowEntries(mover)
        items = mover if isinstance(mover, RecordStore) else ForeignItems(storage)
        return self._cached_entries(storage, items, mover.ring.capacity)

    def _cached_entries(self, storage: Any, items: Any, capacity: int) -> Entries:
        if not isinstance(items, RecordStore):
            self._used_keys = None
            if lanes_of(storage):
                raise TypeError(
                    f"slices can be sampled from a {type(storage).__name__} only with ndim=1; use "
                    "ndim=1, or a tensor storage of this package"
                )
        return KeptEntries(items, capacity, self._paths)

    @property
    def _paths(self) -> tuple[KeyPath, ...]:
        """Paths of all entries that an update can read."""
        steps = () if self._step is None else (self._step,)
        return tuple(
            dict.fromkeys((*self._ids_to_try, *steps, *(self._ends or (DONE,)), *self._others))
        )

    @property
    def _ids_to_try(self) -> tuple[KeyPath, ...]:
        if self._ids is not None:
            return (self._ids,)
        return () if self._ends else USUAL_IDS

    def _unchanged_keys(self, entries: Entries) -> Keys:
        """Returns the keys from `_keys`; raises _OtherKeysError if an earlier call found others."""
        keys = self._keys(entries)
        before, self._used_keys = self._used_keys, keys
        if before is not None and before != keys:
            raise _OtherKeysError
        return keys

    def _keys(self, entries: Entries) -> Keys:
        """Returns the key of the trajectory id, or None, and the keys of the end flags.

        The id is the first candidate key that all items have. Raises RuntimeError or KeyError if
        the items lack the entries that the options require.
        """
        if self._all_ends and not self._ends:
            return None, ()
        wanted = self._ids_to_try
        ids = next((path for path in wanted if entries.has(path)), None)
        if self._step is not None:
            if ids is None or not entries.has(self._step):
                raise RuntimeError(
                    "with fragmented=True, every item must have a trajectory id and a step number "
                    f"(traj_key {_names(wanted)}, step_key {_names([self._step])}), but at least "
                    "one of these entries is missing"
                )
            return ids, ()
        ends = tuple(path for path in self._ends or (DONE,) if entries.has(path))
        if ids is not None or ends:
            return ids, ends if self._ends or ids is None else ()
        if self._all_ends:
            raise KeyError(
                f"the items have none of the end_keys {_names(self._ends)}; pass at least one key "
                "that all items have"
            )
        raise RuntimeError(
            "the sampler cannot find the ends of trajectories: the items have neither a trajectory "
            f"id under {_names(wanted or USUAL_IDS)} nor a flag under "
            f"{_names(self._ends or (DONE,))}; pass the name of such an entry as traj_key or "
            "end_key"
        )


def cut_columns(
    entries: Entries, ids: KeyPath | None, ends: Sequence[KeyPath], begins: Sequence[KeyPath]
) -> Ints | None:
    """Returns the columns from which the C core can cut trajectories itself.

    Args:
        entries: reader of the items' entries.
        ids: path of the trajectory id, or None.
        ends: paths of the end flags.
        begins: paths of the flags on first items. Paths that the items lack are ignored.

    Returns:
        Address, bytes per element and role of each column, int64 ``[columns, 3]``. None if one of
        the entries is not a contiguous column of booleans or integers.
    """
    if not isinstance(entries, RowEntries):
        return None
    wanted = [(path, _ENDS) for path in ends] + ([] if ids is None else [(ids, _IDS)])
    wanted += [(path, _BEGINS) for path in begins if entries.has(path)]
    found = []
    for path, role in wanted:
        column = entries.column(path)
        if column is None or as_numbers(column[:0]).dtype.kind not in "biu":
            return None
        elements = max(1, entries.elements)
        found.append((column.data_ptr(), column.nbytes // elements, role))
    return np.array(found, np.int64).reshape(-1, 3)


def _names(paths: Sequence[KeyPath | None]) -> str:
    return ", ".join(repr(key_of(path)) for path in paths if path)

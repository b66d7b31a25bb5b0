"""Items as records in a ring of bytes, in a directory that processes share.

    item(s) ──encode──▶ records ──one native call──▶ byte ring
    byte ring ──one native call──▶ records ──decode──▶ item(s)

What is read is a copy that was validated. What changes in an item is written as a new record, if
the item is still the one that was read; its priority stays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.errors import EmptyBufferError, SpaceError
from shmbuffer.memory import RecordBatch, Schema, Settings
from shmbuffer.memory.bodies import locate
from shmbuffer.memory.progress import Progress
from shmbuffer.replay.checkpointers.record_image import RecordImage
from shmbuffer.replay.storages.fetched import Fetched
from shmbuffer.replay.storages.indexing import holds
from shmbuffer.replay.storages.location import Location, unmade
from shmbuffer.replay.storages.placing import is_int, slots_of
from shmbuffer.replay.storages.replacing import whole_or_empty
from shmbuffer.replay.storages.shelf import Contents, Edit, Shelf

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Engine, Moment, Records, Ring
    from shmbuffer.replay.storages.record_codec import RecordCodec
    from shmbuffer.replay.storages.serving import Drawn

_ATTEMPTS = 16  # at reading what other processes keep writing over
_PIECE = 256  # items that are loaded at once
_NOTHING = "nothing was written yet, so there is nothing to read"


class RecordShelf(Shelf):
    """Items as records.

    Args:
        name: of the storage's class.
        max_size: see `Shelf`.
        max_bytes: of all records together, headers included; rounded up to whole pages.
        location: a directory.
        codec: items to records and back.
        recorded: what the directory remembers of the storage; JSON.
        engine: of the directory, if it is open already; the shelf owns it from now on.
    """

    shares = True

    def __init__(
        self,
        name: str,
        max_size: int,
        max_bytes: int,
        location: Location,
        codec: RecordCodec,
        recorded: dict[str, Any],
        engine: Engine | None = None,
    ) -> None:
        super().__init__(name, max_size)
        self.codec = codec
        self._location = location
        self._settings = Settings(
            capacity=max_size, record_bytes=max_bytes, extra={"storage": recorded}
        )
        self._engine: Engine | None = None
        self._pid = os.getpid()
        self._opening = threading.RLock()
        if engine is not None:
            self._meet(engine)
        elif location.opens_at_once:
            self.open()

    @property
    def engine(self) -> Engine | None:
        """See `Shelf.engine`."""
        return self._engine

    @property
    def ring(self) -> Ring | None:
        """See `Shelf.ring`."""
        return None if self._engine is None else self._engine.ring

    @property
    def records(self) -> Records | None:
        """The byte ring; None as long as nobody has written."""
        ring = self.ring
        return None if ring is None else ring.records

    @property
    def path(self) -> Any:
        """The directory; None as long as it has no name."""
        return self._location.scratch_dir if self._engine is None else self._engine.path

    def open(self) -> Records:
        """The byte ring, made if nobody has.

        Raises:
            BufferExistsError: there is a buffer, and it was not to be opened.
            SpaceError: bytes needed and free; nothing is left behind.
            RuntimeError: in the child of a fork, where nothing had been written before it: parent
                and child would have a buffer each.
        """
        with self._opening:
            if self._engine is None:
                if os.getpid() != self._pid:
                    raise RuntimeError(f"{self._not_yet()}; this is the child of a fork")
                self._meet(self._location.open(self._settings))
        records = self.records
        assert records is not None
        return records

    def open_there(self) -> None:
        """Open what the directory has, whether or not it was to be free."""
        with self._opening:
            if self._engine is None:
                self._meet(self._location.taken_as_it_is.open(self._settings))

    def _meet(self, engine: Engine) -> None:
        schema = Schema(
            (), self.max_size, (), {"kind": "records"}, record_bytes=engine.settings.record_bytes
        )
        try:
            engine.define(schema)
        except SpaceError:
            unmade(engine)
            raise
        except BaseException:
            engine.close()
            raise
        self.codec.join(engine)
        self._engine = engine

    # -- writing -------------------------------------------------------------------------------

    def prepare(self, data: Any, single: bool) -> None:
        """See `Serving.prepare`; what cannot be stored makes no directory."""
        if self._engine is None:
            self.codec.encode(data, single)
            self.open()

    def append(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> tuple[int, int]:
        """See `Shelf.append`."""
        batch = self.codec.encode(data, single)
        if not len(batch):
            return 0, 0
        ticket = self.open().write(batch, priorities)
        return ticket % self.max_size, len(batch)

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> NDArray[np.int64]:
        """See `Shelf.put`."""
        single = is_int(cursor)
        batch = self.codec.encode(
            list(data) if type(data) is tuple and not single else data, single, apart=True
        )
        records, ring = self.open(), self.ring
        assert ring is not None
        slots = slots_of(cursor, ring)
        if len(slots) != len(batch):
            raise ValueError(f"{len(batch)} items cannot be written to {len(slots)} places")
        last = _last_of_each(slots)
        slots, batch = slots[last], _rows(batch, last)
        present = holds(ring, slots)
        for which, keeps in ((present, in_place), (~present, False)):
            if which.any():
                records.place(slots[which], _rows(batch, which), in_place=keeps)
        return slots

    def change(self, index: Any, edit: Edit) -> None:
        """See `Shelf.change`. What others change in them meanwhile is not lost."""
        ring = self._need_ring(index)
        selection = self.select(index, ring)
        at = _last_of_each(selection.elements)
        for _ in range(_ATTEMPTS):
            slots = selection.elements[at]
            drawn = self.open().read(slots)
            held = drawn.tickets >= 0
            if not held.all():
                if not selection.skips:
                    raise IndexError(f"there is no item at {slots[~held][0]} (asked for {index!r})")
                at = at[held]
            changed = self._edit(
                at, _rows(drawn.batch, held), drawn.tickets[held], slots[held], edit
            )
            at = at[~changed]
            if not len(at):
                return
        raise IndexError(
            f"what {index!r} names was written over each of the {_ATTEMPTS} times that it was "
            "read and changed"
        )

    def change_held(
        self, slots: NDArray[np.int64], tickets: NDArray[np.int64], edit: Edit
    ) -> NDArray[np.bool_]:
        """Change those items that still have these tickets.

        Args:
            slots: int64[n]; of one that is named twice, the last row counts.
            tickets: int64[n].
            edit: see `change`.

        Returns:
            bool[n]: what was changed.
        """
        unique, row_of = np.unique(slots, return_inverse=True)
        last = _last_of_each(slots)
        last = last[np.argsort(slots[last])]  # in the order of ``unique``
        drawn = self.open().read(unique)
        held = drawn.tickets == tickets[last]
        done = np.zeros(len(unique), np.bool_)
        if held.any():
            batch = _rows(drawn.batch, held)
            done[held] = self._edit(last[held], batch, tickets[last][held], unique[held], edit)
        changed: NDArray[np.bool_] = done[row_of] & (tickets == tickets[last][row_of])
        return changed

    def _edit(
        self,
        at: NDArray[np.int64],
        batch: RecordBatch,
        tickets: NDArray[np.int64],
        slots: NDArray[np.int64],
        edit: Edit,
    ) -> NDArray[np.bool_]:
        """Change these items, if they are still there; which of them were."""
        items = self.codec.decoder.items(batch)
        edited = [edit(row, item) for row, item in zip(at.tolist(), items, strict=True)]
        batch = self.codec.encode(edited, False, apart=True)
        placed: NDArray[np.bool_] = self.open().place(slots, batch, in_place=True, tickets=tickets)
        return placed

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, index: Any) -> Any:
        """See `Shelf.fetch`: `Fetched`, where it is not one item."""
        ring = self._need_ring(index)
        for _ in range(_ATTEMPTS):
            selection = self.select(index, ring)
            drawn = self.open().read(selection.elements)
            held = drawn.tickets >= 0
            if held.all() or selection.skips:
                found = Fetched(_rows(drawn.batch, held), self.codec.decoder)
                return found if selection.lead else found.items()[0]
        raise IndexError(
            f"what {index!r} names was written over each of the {_ATTEMPTS} times that it was read"
        )

    def fetch_held(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """See `Shelf.fetch_held`."""
        drawn = self.open().read(index.reshape(-1).numpy())
        if not np.array_equal(drawn.tickets, tickets.reshape(-1).numpy()):
            return None
        return Fetched(drawn.batch, self.codec.decoder)

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Shelf.draw`."""
        records = self.records
        if records is None:
            raise EmptyBufferError("the buffer is empty: write something before sampling")
        drawn = records.sample(count, key, beta=beta)
        weights = None if drawn.weights is None else torch.from_numpy(drawn.weights)
        found = Fetched(drawn.batch, self.codec.decoder)
        return found, torch.from_numpy(drawn.index), torch.from_numpy(drawn.tickets), weights

    def entries(
        self, slots: NDArray[np.int64], paths: Sequence[tuple[str, ...]]
    ) -> tuple[list[list[Any]], NDArray[np.int64]]:
        """Some entries of items, without the rest of them; see `Decoder.entries`.

        Returns:
            For each path one leaf a slot; and the tickets, -1 where there is no item.
        """
        drawn = self.open().read(slots)
        held = drawn.tickets >= 0
        found = iter(zip(*self.codec.decoder.entries(_rows(drawn.batch, held), paths), strict=True))
        nothing = (None,) * len(paths)
        rows = [next(found) if there else nothing for there in held.tolist()]
        return [list(column) for column in zip(*rows, strict=True)], drawn.tickets

    def _need_ring(self, index: Any) -> Ring:
        ring = self.ring
        if ring is None:
            if isinstance(index, slice) or index is Ellipsis:
                raise EmptyBufferError(f"{self._where}: {_NOTHING}")
            raise IndexError(f"{self._where}: there is no item at {index!r}: {_NOTHING}")
        return ring

    @property
    def _where(self) -> str:
        return "this buffer" if self.path is None else str(self.path)

    # -- everything ----------------------------------------------------------------------------

    def copy_out(self) -> Contents:
        """See `Shelf.copy_out`: the items, all of them in memory."""
        image, moment = self._image()
        items = [item for part in image.items(self.codec) for item in part]
        return Contents(items, image.slots, moment)

    def copy_in(
        self,
        kept: list[Any],
        slots: NDArray[np.int64],
        *,
        cursor: int,
        write_count: int,
        priorities: NDArray[np.float64] | None = None,
        max_priority: float | None = None,
    ) -> None:
        """See `Shelf.copy_in`."""
        self._require_slots(slots)
        order = np.argsort((slots - cursor) % self.max_size, kind="stable")  # the oldest first
        batches = []
        with Progress("load", len(order), "items") as progress:
            for start in range(0, len(order), _PIECE):
                part = order[start : start + _PIECE]
                batch = self.codec.encode([kept[at] for at in part.tolist()], False, apart=True)
                batches.append((part, batch))
                progress.advance(len(part))
        self._require_bytes(sum(len(batch.data) for _, batch in batches))
        records, ring = self.open(), self.ring
        assert ring is not None
        ring.empty()
        with whole_or_empty(ring, self._where):
            for part, batch in batches:
                records.place(slots[part], batch, in_place=False)
        ring.restore(cursor % self.max_size, write_count, max_priority)
        if priorities is not None:
            known = ~np.isnan(priorities)
            ring.update(slots[known], np.ascontiguousarray(priorities[known]))

    def load(
        self, image: RecordImage, slots: NDArray[np.int64], *, cursor: int, write_count: int
    ) -> None:
        """Replace everything in here with records, as they are.

        Args:
            image: the records.
            slots: int64[n]: where each of them goes.
            cursor: slot of the next item.
            write_count: items written so far.

        Raises:
            CorruptBufferError: one of them is no record; nothing was changed.
            IndexError, ValueError: there is no room for them; nothing was changed.

        Cost: the bytes twice, some megabytes at a time.
        """
        self._require_slots(slots)
        capacity = self.max_size
        needed, nbytes = 0, int(image.sizes.sum())
        with Progress("check", nbytes) as progress:
            for run in image.runs(slots, capacity):
                locate(run.batch, image.where)  # it is a record, as far as can be seen
                needed += len(run.batch.data if run.closed else image.batch(run.rows).data)
                progress.advance(int(image.sizes[run.rows].sum()))
        self._require_bytes(needed)
        records, ring = self.open(), self.ring
        assert ring is not None
        if image.dictionary is not None and self._engine is not None:
            found = self._engine.publish_dictionary(image.dictionary)
            if found != image.dictionary:
                codec = self.codec.with_dictionary(image.dictionary)
                items = [item for part in image.items(codec) for item in part]
                self.copy_in(items, slots, cursor=cursor, write_count=write_count)
                return
            self.codec.use(found)
        ring.empty()
        with whole_or_empty(ring, self._where), Progress("load", nbytes) as progress:
            for run in image.runs(slots, capacity):
                if run.closed:
                    ring.restore(int(slots[run.rows[0]]), 0, None)
                    records.write(run.batch)
                else:
                    records.place(slots[run.rows], image.batch(run.rows), in_place=False)
                progress.advance(int(image.sizes[run.rows].sum()))
        ring.restore(cursor % capacity, write_count, None)

    def state_dict(self) -> dict[str, Any]:
        """See `ListStorage.state_dict`: records as they are."""
        if self.records is None:
            return {"_list": [], "_index": torch.empty(0, dtype=torch.int64)} | {
                "_cursor": 0,
                "_capacity": self.max_size,
            }
        image, moment = self._image()
        return {
            "_records": image.state_dict(),
            "_index": torch.from_numpy(image.slots),
            "_cursor": moment.head % self.max_size,
            "_capacity": self.max_size,
        }

    def _image(self) -> tuple[RecordImage, Moment]:
        engine = self._engine
        assert engine is not None
        return RecordImage.in_memory(self.open(), engine.dictionary())

    def _require_slots(self, slots: NDArray[np.int64]) -> None:
        if len(slots) and int(slots.max()) >= self.max_size:
            raise IndexError(
                f"{len(slots)} items cannot be loaded into a {self.name} of max_size "
                f"{self.max_size}"
            )

    def _require_bytes(self, nbytes: int) -> None:
        room = self._settings.record_bytes
        if nbytes > room:
            raise ValueError(
                f"{self._where}: records of {nbytes} bytes cannot be loaded into a {self.name} of "
                f"max_bytes {room}; load them into a larger one. Nothing was changed"
            )

    # -- the rest ------------------------------------------------------------------------------

    def forget(self, *, keep_write_count: bool) -> None:
        """See `Shelf.forget`."""
        if self.ring is not None:
            self.ring.empty(keep_write_count=keep_write_count)

    def close(self) -> None:
        """See `Shelf.close`."""
        if self._engine is not None:
            self._engine.close()

    def _not_yet(self) -> str:
        return (
            f"nothing was written to this {self.name} yet: it cannot be handed to another process "
            "before the first write, unless it is made with shared_init=True"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is None:
            raise RuntimeError(f"{self._not_yet()}, and would be another buffer there")
        return {name: value for name, value in self.__dict__.items() if name != "_opening"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = threading.RLock()
        assert self._engine is not None
        self.codec.join(self._engine)


def _rows(batch: RecordBatch, which: NDArray[Any]) -> RecordBatch:
    """Some records of a batch."""
    if len(which) == len(batch) and which.dtype == np.bool_ and which.all():
        return batch
    return RecordBatch(batch.data, batch.starts[which], batch.sizes[which])


def _last_of_each(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of slots, each once: of one that is named twice, the last."""
    _, first = np.unique(slots[::-1], return_index=True)
    return np.sort(len(slots) - 1 - first)

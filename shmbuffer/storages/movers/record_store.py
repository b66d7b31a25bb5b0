"""Writes and reads records in a ring of bytes, in a directory that processes share.

A read returns validated copies. To change an item, the store reads it and writes a new record with
the same priority, unless another process has replaced the item in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer.items.mover import require_one_each
from shmbuffer.items.record_rows import RecordRows
from shmbuffer.memory import Engine, ItemSnapshot, Ring, record_format
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.record_format import Form
from shmbuffer.saves.checkpointers.record_image import RecordImage
from shmbuffer.storages.indexing import slots_of, tickets_at
from shmbuffer.storages.movers.item_store import Changes, Edit, ItemStore, edits
from shmbuffer.storages.movers.record_codec import TensorRecordCodec
from shmbuffer.storages.movers.storage_mover import ATTEMPTS, last_of_each
from shmbuffer.tensors.form.tensor_kit import TENSORS
from shmbuffer.tensors.records.tensor_building import chunks_at
from shmbuffer.tensors.records.tensor_decoder import RawBatch


class RecordStore(RecordRows, ItemStore):
    """Writes and reads the items of a storage as records."""

    codec: TensorRecordCodec

    def __init__(self, name: str, engine: Engine, ring: Ring, codec: TensorRecordCodec) -> None:
        super().__init__(TENSORS, engine, ring, codec)
        self.name = name
        self.max_size: int = ring.capacity
        self._engine = engine

    # -- writing -------------------------------------------------------------------------------

    def write_at(self, cursor: Any, items: Any, *, in_place: bool) -> Ints:
        """Writes items to the slots that ``cursor`` selects. Returns the distinct slots."""
        slots = slots_of(cursor, self.ring)
        require_one_each(slots, len(items))
        return self.put(slots, items, in_place=in_place) if len(slots) else slots

    def place(self, slots: Ints, data: Any, *, in_place: bool) -> None:
        """Writes record i of ``data`` to ``slots[i]``.

        With ``in_place`` the items keep their priorities, and the write is not counted.
        """
        self.records.place(slots, data, in_place=in_place)

    def select_rows(self, data: Any, which: NDArray[Any]) -> Any:
        """Returns the records of ``data`` that a mask or row numbers select."""
        if len(which) == len(data) and which.dtype == np.bool_ and which.all():
            return data
        return data.rows(which)

    def change(self, index: Any, changes: Changes) -> None:
        """Changes entries of the items at ``index``.

        An item that another process changes at the same time is read and changed again, so that no
        change is lost.
        """
        selection = self.select(index)
        edit = edits(changes, index, len(selection.elements))
        at = last_of_each(selection.elements)
        for _ in range(ATTEMPTS):
            slots = selection.elements[at]
            tickets = tickets_at(self.ring, slots)
            held = tickets >= 0
            if not held.all():
                if not selection.skips:
                    raise IndexError(
                        f"there is no item at {slots[~held][0]} (the index was {index!r})"
                    )
                at, slots, tickets = at[held], slots[held], tickets[held]
            rows = at.tolist()
            changed = self.change_held(slots, tickets, lambda row, item: edit(rows[row], item))  # noqa: B023
            at = at[~changed]
            if not len(at):
                return
        raise IndexError(
            f"items at {index!r} were overwritten during each of {ATTEMPTS} attempts to change "
            "them; change them again"
        )

    def change_held(self, slots: Ints, tickets: Ints, edit: Edit) -> Flags:
        """Applies ``edit`` to the items in ``slots`` whose tickets have not changed.

        Returns bool ``[n]``, True for each item that was changed.
        """
        meant = np.flatnonzero(tickets >= 0)
        if len(meant) < len(tickets):
            changed = np.zeros(len(slots), np.bool_)
            if len(meant):
                changed[meant] = self.change_held(
                    slots[meant], tickets[meant], lambda row, item: edit(int(meant[row]), item)
                )
            return changed
        unique, row_of = np.unique(slots, return_inverse=True)
        last = last_of_each(slots)
        last = last[np.argsort(slots[last])]  # in the order of ``unique``
        drawn = self.records.read(unique)
        held = drawn.tickets == tickets[last]
        if held.any():
            items = self.codec.decoder.items(self.select_rows(drawn.batch, held))
            rows = last[held].tolist()
            edited = [edit(row, item) for row, item in zip(rows, items, strict=True)]
            batch = self.codec.encode(edited, False)
            held[held] = self.records.place(
                unique[held], batch, in_place=True, tickets=tickets[last][held]
            )
        found: Flags = held[row_of] & (tickets == tickets[last][row_of])
        return found

    # -- reading -------------------------------------------------------------------------------

    def read_chosen(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """Copies the chosen items for `build`. Returns None if one of them was replaced."""
        drawn = self.records.read(index.numpy())
        return drawn.batch if drawn.tickets.tobytes() == tickets.numpy().tobytes() else None

    def build(self, found: Any, lead: tuple[int, ...]) -> Any:
        """Decodes one item if ``lead`` is empty. Otherwise returns a `RawBatch` of all records."""
        fetched = RawBatch(found, self.codec.decoder)
        return fetched if lead else fetched.items()[0]

    def entries(
        self, slots: Ints, paths: Sequence[tuple[str, ...]]
    ) -> tuple[list[Sequence[Any] | NDArray[Any]], Ints]:
        """Reads entries of the items that are present.

        Returns the result of `TensorDecoder.entries`, and the ticket of each slot, which is -1 if
        the slot is empty.
        """
        drawn = self.records.read(slots)
        held = self.select_rows(drawn.batch, drawn.tickets >= 0)
        return self.codec.decoder.entries(held, paths), drawn.tickets

    def form_and_chunk(self, path: tuple[str, ...]) -> tuple[Form, int] | None:
        """Returns the form of some item in the ring, and the number of its leaf at ``path``.

        Returns None if the ring is empty or the item has no such leaf.
        """
        held = self.ring.live.committed_slots()[:1]
        drawn = self.records.read(held)
        located = record_format.locate(
            self.select_rows(drawn.batch, drawn.tickets >= 0), self.where
        )
        number = chunks_at(located[0].form.tree).get(path) if located else None
        return None if number is None else (located[0].form, number)

    # -- all items -----------------------------------------------------------------------------

    def copy_out(self) -> tuple[list[Any], ItemSnapshot]:
        """Decodes all items. Returns them with a snapshot of the ring."""
        image, moment = self._image()
        return [item for part in image.items(self.codec) for item in part], moment

    def _state(self) -> tuple[dict[str, Any], ItemSnapshot]:
        image, moment = self._image()
        return {"_records": image.state_dict()}, moment

    def _image(self) -> tuple[RecordImage, ItemSnapshot]:
        return RecordImage.in_memory(self.records, self._engine.seat.dictionary())

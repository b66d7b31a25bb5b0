"""The storage that the caller brings along: tensors that are there already."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmbuffer.memory import Engine, Schema, Settings
from shmbuffer.replay.form.leaves import Leaves
from shmbuffer.replay.form.nodes import TensorDictNode, fields, is_collection
from shmbuffer.replay.storages.held_rows import HeldRows
from shmbuffer.replay.storages.placing import widened
from shmbuffer.replay.storages.ring_storage import RingStorage
from shmbuffer.replay.storages.rows import Rows


class TensorStorage(RingStorage):
    """A storage over the caller's tensors: full from the start, written in place.

    Args:
        storage: a TensorDict, tensorclass, tensor or PyTree ``[slots, *lanes, ...]``. It is used,
            not copied: a write changes it, and a change of it is seen by the next sample. A
            TensorDict without entries gets those of the first write, zero elsewhere.
        max_size: has to be what ``storage`` has, if it is given.
        device: where samples are; ``storage`` is used on the device where it is.
        ndim: how many of its leading dimensions belong to the storage.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.

    Raises:
        TypeError: something in there is not a tensor.
        ValueError: None; another ``max_size``; sizes of the leading dimensions differ between
            leaves.

    It cannot be passed to another process (RuntimeError): the tensors are this process's own.

    Cost: nothing is copied at construction. Reads and writes are torch's indexing, not the C
        core's.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import TensorStorage
        >>> storage = TensorStorage(TensorDict({"a": torch.arange(4)}, [4]))
        >>> len(storage), storage[1]["a"].item()
        (4, 1)

    Source: ``torchrl.data.TensorStorage``.
    """

    _given: Any = None  # by the caller: it gets the columns that are added later

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if storage is None:
            raise ValueError(
                "TensorStorage(None): the tensors to write into are needed; LazyTensorStorage and "
                "LazyMemmapStorage make their own"
            )
        columns: list[Any] = []
        if is_collection(storage) and not fields(storage):
            slots, *lanes = storage.batch_size[:ndim]
            leaves = Leaves(TensorDictNode({}), (), tuple(lanes))
        else:
            leaves = Leaves.of_data(
                storage, ndim=ndim, single=False, mapping="dict", where="this buffer"
            )
            columns, (slots, *_) = leaves.values(storage)
        if max_size is not None and max_size != slots:
            raise ValueError(
                f"TensorStorage(max_size={max_size}): the tensors have {slots} places; leave "
                "max_size out, or give as many"
            )
        capacity = Schema((), slots, leaves.lanes).elements
        super().__init__(capacity, ndim=ndim, device=device, compilable=compilable)
        self._engine = Engine.anonymous(
            Settings(capacity=capacity, ndim=ndim, checksum=False, reserve=False)
        )
        self._hold(leaves, slots, columns)
        self._given = storage
        rows = self._need_rows()
        # In place: what was there before us was not written through a buffer, and write_count says
        # so.
        rows.ring.claim_slots(np.arange(slots, dtype=np.int64), in_place=True)
        rows.ring.commit()

    def _takes_another_form(self, data: Any, single: bool) -> bool:
        rows = self._rows
        if rows is None or rows.leaves.leaves:
            return super()._takes_another_form(data, single)
        wider = widened(rows, self._described(data, single))
        if wider is not None:
            self._settle(wider)
        return wider is not None

    def _settle(self, rows: Rows) -> Rows:
        if isinstance(rows, HeldRows) and is_collection(self._given):
            lead = (rows.ring.capacity, *rows.leaves.lanes)
            self._given.update(rows.leaves.build(rows.columns, lead))
        return super()._settle(rows)

    def to_device(self, data: Any) -> Any:
        """``data`` on the storage's device."""
        rows = self._rows
        if self.device is None or rows is None or rows.leaves.device == self.device:
            return data
        return to_device(data, self.device)

    def _hold(self, leaves: Leaves, slots: int, columns: list[Any]) -> Rows:
        """Rows of tensors that this process holds, on a ring that has no leaves of its own."""
        tensors = [column for column in columns if isinstance(column, torch.Tensor)]
        leaves.device = tensors[0].device if tensors else torch.device("cpu")
        ring = self.engine.define(Schema((), slots, leaves.lanes, {"kind": "held"}))
        return self._settle(HeldRows(ring, leaves, columns))


def to_device(data: Any, device: torch.device | None) -> Any:
    """``data`` of any form on ``device``; what cannot be moved as it is."""
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    if not isinstance(data, (tuple, list)):
        return data
    parts = [to_device(value, device) for value in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)

"""Storage of tensors, with one column per leaf. The base class uses the caller's tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer.errors import SchemaMismatchError, SpaceError
from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.keys import OWN_KEYS
from shmbuffer.memory import Ring, Schema, Settings
from shmbuffer.memory.format.array_types import Flags, Floats, Ints
from shmbuffer.memory.format.streams import GivenStreams
from shmbuffer.saves.checkpointers.tensor_checkpointer import TensorStorageCheckpointer
from shmbuffer.saves.checkpoints import has_its_own
from shmbuffer.storages.indexing import is_int, slots_of
from shmbuffer.storages.location import Location, remove_new_buffer
from shmbuffer.storages.movers.held_rows import HeldRows
from shmbuffer.storages.movers.native_rows import NativeRows
from shmbuffer.storages.movers.sharing_rows import SharingRows
from shmbuffer.storages.movers.storage_mover import to_device
from shmbuffer.storages.movers.tensor_rows import Rows
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.storages.state import example_of, load_state, state_of
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensor_batches import stack
from shmbuffer.tensors.form.tensor_kit import TENSORS, values_of
from shmbuffer.tensors.form.tensor_nodes import TensorDictNode, fields, is_collection


class TensorStorage(RingBacked):
    """A storage that reads and writes the caller's tensors in place. It is full from the start.

    Args:
        storage: a TensorDict, tensorclass, tensor or PyTree ``[slots, *lanes, ...]``. The tensors
            are not copied: writes change them, and samples contain changes that the caller makes. A
            TensorDict without entries gets the entries of the first write, with zeros in all other
            items.
        max_size: number of slots in ``storage``, or None.
        device: device of the samples. The tensors in ``storage`` stay on their device.
        ndim: number of leading dimensions of ``storage`` that belong to the storage.
        compilable: has no effect, because `torch.compile` never compiles the native calls.

    Raises:
        TypeError: ``storage`` contains an object that is not a tensor.
        ValueError: ``storage`` is None, ``max_size`` differs from its size, or the leading
            dimensions differ between leaves.

    Passing the storage to another process raises RuntimeError, because the tensors belong to this
    process.

    Cost: nothing is copied at construction. Reads and writes use torch's indexing instead of the C
        core.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import TensorStorage
        >>> storage = TensorStorage(TensorDict({"a": torch.arange(4)}, [4]))
        >>> len(storage), storage[1]["a"].item()
        (4, 1)

    Source: ``torchrl.data.TensorStorage``.
    """

    _default_checkpointer = TensorStorageCheckpointer
    _is_lazy = False  # True if the storage creates its own tensors
    _memory_mapped = False  # True if views are `MemoryMappedTensor`
    _caller_data: Any = None  # the caller's tensors, to which later columns are added
    _mover: Rows | None

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | None = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        capacity: Any = max_size
        if storage is not None:
            leaves, slots, columns = _columns_of(storage, ndim)
            if max_size is not None and max_size != slots:
                raise ValueError(
                    f"TensorStorage(max_size={max_size}): the tensors have {slots} rows; leave "
                    f"max_size out, or pass max_size={slots}"
                )
            capacity = Schema((), slots, leaves.lanes).elements
            self._location = Location()
        elif not self._is_lazy:
            raise ValueError(
                "TensorStorage(None): pass the tensors that the storage should use, or use a "
                "LazyTensorStorage or a LazyMemmapStorage, which create their own"
            )
        super().__init__(capacity, compilable=compilable)
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        self.ndim = int(ndim)
        self.device: torch.device | None = (
            None if device is None or device == "auto" else torch.device(device)
        )
        self.mapping = "dict"  # structure kind of plain dicts; "tensordict" in a TensorDict buffer
        self.optional: frozenset[str] = OWN_KEYS  # root keys that are not stored
        self._emptied = False
        # True if the storage was sent to another process before a write. All of its columns must
        # then be shared.
        self._handed_over = False
        if storage is not None:
            ring = self._create_held_rows(leaves, slots, columns).ring
            self._caller_data = storage
            # In place, because write_count must not include items that no buffer has written.
            ring.claims.claim_slots(np.arange(slots, dtype=np.int64), in_place=True)
            ring.claims.commit()
        elif self._location is not None and self._location.opens_at_once:
            self._open()

    @property
    def shape(self) -> torch.Size | None:
        """Shape ``[slots, *lanes]``, or None before the first write."""
        rows: Rows | None = self._mover or self.mover()
        return None if rows is None else torch.Size((rows.ring.capacity, *rows.lanes))

    @property
    def max_size(self) -> int:
        """Capacity in elements.

        If ``ndim > 1``, the first write rounds it up to a multiple of the number of lanes.
        """
        rows: Rows | None = self._mover or self.mover()
        return self._max_size if rows is None else rows.ring.elements

    @property
    def initialized(self) -> bool:
        """True if the leaves are defined, usually by the first write."""
        return self.mover() is not None

    @property
    def _storage(self) -> Any:
        """The stored data, under the name of TorchRL's attribute.

        If the storage is in a directory, the result contains every slot, and its entries have a
        ``filename``. Otherwise, the result contains the stored items, as views.
        """
        if self._directory is None:
            return self[:]
        return TensorDict.load_memmap(self._directory)

    @property
    def appends_natively(self) -> bool:
        """True unless a subclass overrides ``append`` or ``written``."""
        return not has_its_own(self, "append") and not has_its_own(self, "written")

    @property
    def supports_conditional_update(self) -> bool:
        """True, because the ticket of a slot shows whether its item was replaced."""
        return True

    @property
    def tracks_generations(self) -> bool:
        """True unless a subclass overrides ``get``."""
        return self.draws_natively

    def __repr__(self) -> str:
        rows: Rows | None = self._mover or self.mover()
        data = "<empty>"
        if rows is not None:
            leaves = (f"{leaf.name}: {leaf.dtype}{list(leaf.shape)}" for leaf in rows.leaves.leaves)
            data = f"{rows.leaves.node.kind}({', '.join(leaves)})"
        shape = None if self.shape is None else list(self.shape)
        return (
            f"{type(self).__name__}(data={data}, shape={shape}, len={len(self)}, "
            f"max_size={self.max_size})"
        )

    def allow(self, keys: frozenset[str]) -> None:
        """Allows root entries under these keys in a write. They are not stored."""
        self.optional = keys
        if self._mover is not None:
            self._mover.leaves.allow(keys)

    # -- writing -------------------------------------------------------------------------------

    def append(
        self,
        data: Any,
        single: bool = False,
        priorities: Floats | None = None,
        streams: GivenStreams = None,
    ) -> tuple[int, int]:
        """Appends a batch or an item; see `RingBacked.append`.

        Cost: one native call, and 0.25 µs per leaf.
        """
        rows = self._mover or self.mover() or self._define(data, single)
        try:
            first, count = rows.write(data, single, priorities, streams)
        except SchemaMismatchError:
            first, count = self._redefine(data, single).write(data, single, priorities, streams)
        if self._watchers and count:
            self.notify(self.written(first, count))
        return first, count

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """Writes ``data`` to ``cursor``. With ``in_place``, items keep their priorities."""
        single = is_int(cursor)
        rows: Rows | None = self._mover or self.mover()
        if type(data) is list and not single and (rows is None or rows.leaves.node.kind != "list"):
            data = stack(data, self.mapping)
        if rows is None:
            rows = self._define(data, single)
        slots = slots_of(cursor, rows.ring)
        if not self.shared and rows.leaves.new_keys(data):
            rows = self._add_columns(rows, data, single) or rows
        try:
            rows.put(slots, rows.as_batch(data) if single else data, in_place=in_place)
        except SchemaMismatchError:
            rows = self._redefine(data, single)
            slots = slots_of(cursor, rows.ring)
            rows.put(slots, rows.as_batch(data) if single else data, in_place=in_place)
        if self._watchers and not in_place:
            width = rows.ring.width
            elements = torch.from_numpy((slots[:, None] * width + np.arange(width)).ravel())
            self.notify(self.index(elements))

    def knows(self, path: tuple[str, ...]) -> bool:
        """True if the items have an entry at ``path``. If not, writing it adds a column."""
        return any(leaf.path[: len(path)] == path for leaf in self._require_mover().leaves.leaves)

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """Changes the entry at ``path`` of some items, or whole items if ``path`` is None."""
        self._require_mover().change(index, value, path, dim_extend)

    def change_if_present(
        self, index: Any, generation: Any, patch: Any, *, dim_extend: int = 0
    ) -> Flags:
        """Changes entries of items that have not been overwritten. Returns bool ``[n]``."""
        rows = self._require_mover()
        changed: Flags = rows.change_if_present(index, generation, patch, dim_extend=dim_extend)
        return changed

    def entry(self, index: Any, path: tuple[str, ...]) -> tuple[Ints, torch.Tensor, Ints]:
        """Reads one entry of some items; see `Storage.entry`."""
        return self._require_mover().entry(index, path)  # type: ignore[no-any-return]

    def prepare(self, data: Any, single: bool) -> None:
        """Defines the structure of the items from ``data``, without writing ``data``."""
        if self.mover() is None:
            self._define(data, single)

    def define(self, example: Any) -> None:
        """Defines the structure of the items and allocates memory before the first write.

        Args:
            example: a batch, or one item if it is a TensorDict with fewer batch dimensions than the
                storage.

        Raises:
            SchemaMismatchError: the storage is already defined with a different structure.
            SpaceError: there is too little space. The message contains the numbers of needed and
                free bytes, and no files remain.
        """
        single = is_collection(example) and len(example.batch_size) < self.ndim
        rows: Rows = self.mover() or self._define(example, single)
        values_of(rows.leaves, example, torch.Size(()) if single else None)

    def flatten(self) -> Any:
        """Copies all items to a batch with a single batch dimension, regardless of ``ndim``."""
        rows = self._require_mover()
        index, tensors, _ = rows.everything()
        return self.to_device(rows.build(tensors, (len(index),)))

    def to_device(self, data: Any) -> Any:
        """Moves ``data`` to the device of the storage if necessary."""
        rows = self._mover
        if self.device is None or rows is None or rows.leaves.device == self.device:
            return data
        return to_device(data, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Copies all items, with their indices and their structure; see `state_of`."""
        return state_of(self.mover())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the contents with a `state_dict` of a storage of the same size and structure."""
        rows: Rows | None = self._mover or self.mover()
        if state_dict["initialized"]:
            load_state(rows or self._define(example_of(state_dict), False), state_dict)
        elif rows is not None:
            rows.ring.empty()

    # -- the structure of an item --------------------------------------------------------------

    def forget(self, *, keep_write_count: bool) -> None:
        """Removes all items. The next write can define a new structure; see `_forget_form`."""
        super().forget(keep_write_count=keep_write_count)
        self._emptied = True

    def _redefine(self, data: Any, single: bool) -> Rows:
        """Returns rows for data whose structure differs from that of the storage.

        This is possible if the storage has no leaves, or if `_forget_form` returns True. Otherwise
        the SchemaMismatchError that the caller handles is raised again.
        """
        rows = self._mover
        if rows is not None and not rows.leaves.leaves:  # the caller passed an empty TensorDict
            wider = self._add_columns(rows, data, single)
            if wider is not None:
                return wider
        if not self._forget_form():
            raise  # the caller calls this method in an except clause
        return self.mover() or self._define(data, single)

    def _forget_form(self) -> bool:
        """Discards the structure of the items, so that the next write can define a new one.

        This requires that this handle has emptied the buffer, and that no process has written to
        the buffer or joined it since then. Otherwise returns False without any change.
        """
        if not self._emptied or self._mover is None:
            return False
        ring = self._mover.ring
        exponents = ring.tree.alpha, ring.tree.eps
        if not self.engine().undefine():
            return False
        owner = None if self._table_owner is None else self._table_owner()
        if owner is not None:
            owner.lose_ring(*exponents)
        self._mover, self._emptied = None, False
        return True

    def _settings(self) -> Settings:
        return Settings(capacity=self._max_size, ndim=self.ndim)

    def _describe(self, data: Any, single: bool) -> Leaves:
        return Leaves.of_data(
            TENSORS, data, ndim=self.ndim, single=single, mapping=self.mapping, where=self.where
        )

    def _define(self, data: Any, single: bool) -> Rows:
        return self._create_native_rows(self._describe(data, single))

    def _create_native_rows(self, leaves: Leaves) -> Rows:
        """Creates a ring with memory for the leaves, and returns rows that use the ring."""
        opened_here, engine = self._engine is None, self.engine()
        try:
            return self._attach_ring(engine.define(leaves.schema(self._slots(leaves))))
        except SpaceError:
            if opened_here and remove_new_buffer(engine):
                self._engine = None
            raise

    def _create_held_rows(self, leaves: Leaves, slots: int, columns: list[Any]) -> Rows:
        """Creates rows whose columns are tensors of this process. Their ring has no leaves."""
        tensors = [column for column in columns if isinstance(column, torch.Tensor)]
        leaves.device = tensors[0].device if tensors else cpu.DEVICE
        ring = self.engine().define(Schema((), slots, leaves.lanes, {"kind": "held"}))
        return self._use_rows(HeldRows(ring, leaves, columns))

    def _slots(self, leaves: Leaves) -> int:
        return -(-self._max_size // max(1, math.prod(leaves.lanes)))

    def _add_columns(self, rows: Rows, data: Any, single: bool) -> Rows | None:
        """Returns rows to which the new columns of the data have been added.

        Returns None if the data differ from the rows in any other respect.
        """
        wider = HeldRows.widened(rows, self._describe(data, single))
        return None if wider is None else self._use_rows(wider)

    def _attach_ring(self, ring: Ring) -> Rows:
        leaves = Leaves.of_schema(TENSORS, ring.schema, self.where)
        rows = SharingRows if ring.schema.sharing else NativeRows
        return self._use_rows(rows(ring, leaves, memory_mapped=self._memory_mapped))

    def _use_rows(self, rows: Rows) -> Rows:
        """Makes the storage use these rows for all later reads and writes, and returns them."""
        if isinstance(rows, HeldRows) and is_collection(self._caller_data):
            self._caller_data.update(rows.build(rows.columns, (rows.ring.capacity, *rows.lanes)))
        self._mover = rows
        self.allow(self.optional)
        return rows

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._mover, HeldRows):
            raise RuntimeError(
                f"this {type(self).__name__} contains data that only this process can access (on a "
                "GPU, passed by the caller, a column that was added later, or text and other "
                "objects), so it cannot be sent to another process; use a LazyMemmapStorage or a "
                "LazyTensorStorage whose first write has all keys, with tensors only"
            )
        state = super().__getstate__()  # can raise an error, so it is called before any change
        self._handed_over |= self._forget_form()
        return {**state, "_handed_over": self._handed_over, "_emptied": False}


def _columns_of(storage: Any, ndim: int) -> tuple[Leaves, int, list[Any]]:
    """Returns the leaves, the number of slots and the columns of the caller's tensors."""
    if is_collection(storage) and not fields(storage):
        slots, *lanes = storage.batch_size[:ndim]
        return Leaves(TENSORS, TensorDictNode({}), (), tuple(lanes)), slots, []
    leaves = Leaves.of_data(TENSORS, storage, ndim=ndim)
    columns, (slots, *_) = values_of(leaves, storage)
    return leaves, slots, columns

"""Storage for a list of arbitrary Python objects, and the base of lists of records."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from shmbuffer.memory import Engine, ItemSnapshot
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.streams import GivenStreams
from shmbuffer.saves.checkpointers.list_checkpointer import ListStorageCheckpointer
from shmbuffer.saves.checkpointers.record_image import RecordImage
from shmbuffer.saves.checkpointers.restoring import sources_from_state
from shmbuffer.saves.checkpoints import has_its_own
from shmbuffer.saves.tickets import Tickets
from shmbuffer.storages.indexing import is_int
from shmbuffer.storages.movers.item_codec import ItemCodec
from shmbuffer.storages.movers.item_store import ItemStore
from shmbuffer.storages.movers.object_store import ObjectStore
from shmbuffer.storages.movers.record_codec import TensorRecordCodec
from shmbuffer.storages.ring_backed import RingBacked
from shmbuffer.tensors.form.tensor_batches import collate
from shmbuffer.tensors.records.tensor_decoder import RawBatch

UNLIMITED: int = torch.iinfo(torch.int64).max
"""``max_size`` of a list without a limit, as in TorchRL."""


class ListStorage(RingBacked):
    """A list of arbitrary Python objects.

    The order and the priorities of the objects are stored in a ring without leaves, so every
    sampler can be used.

    Args:
        max_size: capacity in items. None means no limit, and the property `max_size` is then the
            largest int64.
        compilable: has no effect, because `torch.compile` never compiles the native calls.
        device: device to which tensors in the items are moved when they are written. None does not
            move them.

    The items have the indices ``0 .. len - 1``. They are not copied. Changing an item therefore
    changes the stored item, and a row of a batch keeps the memory of the whole batch alive.

    Passing the storage to another process, or using it in a forked child process, raises
    RuntimeError.

    Cost: one list access per item, and a call of ``collate_fn`` per batch, which stacks the items
        by default. Appending n items to an empty list takes O(n).

    Example:
        >>> from shmbuffer import ListStorage
        >>> storage = ListStorage()
        >>> storage.set(range(2), ["a", {"b": 1}])
        >>> storage.get([1, 0])
        [{'b': 1}, 'a']

    Source: ``torchrl.data.ListStorage``.
    """

    _default_checkpointer = ListStorageCheckpointer
    _write_hooks = ("get", "set", "append")
    _mover: ItemStore | None
    _instead = (
        "use a LazyMemmapStorage with a scratch_dir and shared_init=True, or a LazyTensorStorage, "
        "for tensors that processes share"
    )

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(UNLIMITED if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self._codec: ItemCodec | TensorRecordCodec
        if self.shared:
            self._codec = self._create_record_codec()
        else:
            self._codec = self._create_item_codec()
            self._mover = self._create_store()

    def _create_store(self) -> ObjectStore:
        """Creates an empty store for objects of this process."""
        assert isinstance(self._codec, ItemCodec)
        return ObjectStore(type(self).__name__, self._max_size, self._codec, self._instead)

    def _create_item_codec(self) -> ItemCodec:
        """Creates the codec for a list of Python objects."""
        return ItemCodec(self.device, self._create_record_codec())

    def _create_record_codec(self) -> TensorRecordCodec:
        """Creates the codec for a list of records."""
        return TensorRecordCodec(device=self.device)

    def engine(self) -> Engine:
        """Returns this process's handle of the buffer, and opens it on first use.

        Raises RuntimeError if the items are Python objects.
        """
        if not self.shared:
            raise RuntimeError(
                f"a {type(self).__name__} holds objects of this process; {self._instead}"
            )
        return super().engine()

    def _store(self) -> ItemStore:
        """Returns the store of the items, and creates it on first use."""
        if self._mover is None:
            self._open()
        store: ItemStore = self._mover or self.mover()
        return store

    def _selects_single_items(self, index: Any) -> bool:
        return not isinstance(index, slice) and index is not Ellipsis

    @property
    def draws_natively(self) -> bool:
        """True if the items are records, and no subclass overrides ``get``."""
        return self.shared and super().draws_natively

    # -- writing -------------------------------------------------------------------------------

    def append(
        self,
        data: Any,
        single: bool = False,
        priorities: Floats | None = None,
        streams: GivenStreams = None,
    ) -> tuple[int, int]:
        """Appends one item, or all items of a list or batch.

        Args:
            data: one item if ``single`` is True. Otherwise an iterable of items, a tensor, array or
                TensorDict, which is split along its first dimension, or a dict of these.
            single: True if ``data`` is one item.
            priorities: raw priorities, float64, one per item. If None, uses the largest so far.
            streams: see `RingBacked.append`.

        Returns:
            The first slot and the number of items.

        Raises:
            TypeError: ``data`` is not a batch, but a tuple or a number. Nothing was changed.
            ValueError: a priority is invalid, or entries of a dict differ in length. Nothing was
                changed.
        """
        items = self._codec.encode(data, single)
        if not len(items):
            return 0, 0
        first, count = (self._mover or self._store()).write(items, priorities, streams)
        if self._watchers:
            self.notify(self.written(first, count))
        return first, count

    def prepare(self, data: Any, single: bool) -> None:
        """Creates the store for the first write.

        If ``data`` is invalid, raises an error before a directory is created.
        """
        if self.mover() is None and len(self._codec.encode(data, single)):
            self._store()

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """Writes ``data`` to ``cursor``. With ``in_place``, items keep their priorities."""
        single = is_int(cursor)
        if type(data) is tuple and not single:
            data = list(data)
        items = self._codec.encode(data, single)
        slots = self._store().write_at(cursor, items, in_place=in_place)
        if self._watchers and not in_place and len(slots):
            self.notify(torch.from_numpy(slots))

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """Changes the entry at ``path`` of some items, or whole items if ``path`` is None."""
        if path is None:
            self[index] = value
            return
        self._require_mover(index).change(index, {path: value})

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """Returns one item for an int, or several items in a form that `collate` accepts."""
        if has_its_own(self, "get"):
            return self.get(index)
        return (self._mover or self._require_mover(index)).fetch(index)

    def collate(self, items: Any) -> Any:
        """Builds a batch from several items; see `tensor_batches.collate`."""
        return collate(self.uncollated(items))

    def uncollated(self, data: Any) -> Any:
        """Returns several items as a list."""
        return data.items() if isinstance(data, RawBatch) else data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """Yields all items in storage order. Skips slots that another process has emptied."""
        return filter(len, super().iter_in_order(chunk))

    def contains(self, item: Any) -> Any:
        """True if there is an item at an index. For a tensor of ints, returns a tensor of bools.

        Raises TypeError if the index is not an int or a tensor of ints.
        """
        if isinstance(item, torch.Tensor) or is_int(item):
            return super().contains(item)
        raise TypeError(
            f"indices of a {type(self).__name__} must be ints or a tensor of ints, got {item!r}"
        )

    # -- all items -----------------------------------------------------------------------------

    def copy_out(self) -> tuple[list[Any], ItemSnapshot]:
        """Returns all items in their stored form, without copying Python objects.

        Also returns a snapshot of their slots, tickets and priorities.
        """
        return self._store().copy_out()

    def copy_in(self, items: list[Any], slots: Ints, *, cursor: int, write_count: int) -> None:
        """Replaces the contents with items in their stored form.

        Args:
            items: items as returned by `copy_out`.
            slots: slot of each item, int64 ``[n]``.
            cursor: slot of the next write.
            write_count: number of writes so far.
        """
        assert isinstance(self._mover, ObjectStore)
        self._mover.copy_in(items, slots, cursor=cursor, write_count=write_count)

    @property
    def codec(self) -> ItemCodec:
        """The codec that converts loaded items to the form that `copy_in` accepts."""
        codec = self._codec
        return codec if isinstance(codec, ItemCodec) else ItemCodec(None, codec)

    def state_dict(self) -> dict[str, Any]:
        """Returns the items (not copies) or records, their slots, and the capacity."""
        return self._store().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the contents with a `state_dict`. Tensors in the items are copied.

        If a full ring is loaded into a larger storage, writing continues after its last item.
        Raises IndexError if the items do not fit, or ValueError if the bytes do not fit. In both
        cases nothing is changed.
        """
        slots, capacity = state_dict["_index"].numpy(), int(state_dict["_capacity"])
        cursor, count = int(state_dict["_cursor"]), len(slots)
        if count and int(slots.max()) >= self._max_size:
            raise IndexError(
                f"{count} items do not fit into a {type(self).__name__} of max_size "
                f"{self._max_size}; load them into a larger storage. Nothing was changed"
            )
        if count == capacity < self._max_size:
            cursor = capacity
        if "_records" in state_dict:
            image = RecordImage.of_state(state_dict["_records"], slots)
            self.load_image(image, slots, cursor=cursor, write_count=count)
        else:
            stored = list(map(self.codec.accept_state, state_dict["_list"]))
            self.copy_in(stored, slots, cursor=cursor, write_count=count)
        ring = self._store().ring
        sources_from_state(ring, state_dict, None if self.shared else ring.seat.incarnation)

    def load_image(
        self,
        image: RecordImage,
        slots: Ints,
        *,
        cursor: int,
        write_count: int,
        tickets: Tickets | None = None,
    ) -> None:
        """Replaces the contents with records or, in a list of objects, with the decoded items.

        Args:
            image: the records.
            slots: slot of each record, int64 ``[n]``.
            cursor: slot of the next write.
            write_count: number of writes so far.
            tickets: tickets that the items had, if they should keep them. None assigns new tickets.
        """
        codec = self.codec_for(image.dictionary)
        stored = [self.codec.keep(item) for part in image.items(codec) for item in part]
        self.copy_in(stored, slots, cursor=cursor, write_count=write_count)

    def codec_for(self, dictionary: bytes | None) -> TensorRecordCodec:
        """Creates a codec that can read records compressed with ``dictionary``."""
        codec = self._create_record_codec()
        if dictionary is not None:
            codec.use(dictionary)
        return codec

    def _empty(self) -> None:
        self.forget(keep_write_count=False)

    def close(self) -> None:
        """Releases the handle and the items. Can be called again."""
        if isinstance(self._mover, ObjectStore):
            self._mover.close()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        if not self.shared and (len(self) or get_spawning_popen() is not None):
            raise RuntimeError(
                f"a {type(self).__name__} holds objects of this process and cannot be sent to "
                f"another process; {self._instead}, or save it with state_dict() or dumps()"
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.shared:
            self._mover = self._create_store()

    def __repr__(self) -> str:
        limit = "None" if self._max_size == UNLIMITED else self._max_size
        return f"{type(self).__name__}(max_size={limit}, len={len(self)})"

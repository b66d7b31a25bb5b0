"""The storage for anything: items in a list, as they are, compressed, or as records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.replay.checkpointers.list import ListStorageCheckpointer
from shmbuffer.replay.checkpointers.record_image import RecordImage
from shmbuffer.replay.checkpoints import has_its_own
from shmbuffer.replay.eager import eager
from shmbuffer.replay.form.batches import collate
from shmbuffer.replay.storages.editing import changes_of, edited
from shmbuffer.replay.storages.fetched import Fetched
from shmbuffer.replay.storages.indexing import extent, is_one, meant
from shmbuffer.replay.storages.keeping import Keeping
from shmbuffer.replay.storages.object_shelf import ObjectShelf
from shmbuffer.replay.storages.on_ring import OnRing
from shmbuffer.replay.storages.placing import is_int
from shmbuffer.replay.storages.record_codec import RecordCodec
from shmbuffer.replay.storages.record_shelf import RecordShelf
from shmbuffer.replay.storages.serving import Drawn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Engine, Ring
    from shmbuffer.replay.storages.shelf import Contents, Shelf

UNLIMITED: int = torch.iinfo(torch.int64).max
"""What ``max_size`` shows where there is no limit, as in TorchRL."""


class ListStorage(OnRing):
    """Items as they are, in a list: any Python objects.

    A ring without leaves keeps their order and priorities, so that every sampler works here.

    Args:
        max_size: capacity; None is without a limit (`max_size` shows the largest int64 then).
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
        device: where tensors in the items are sent when they are written; None leaves them where
            they are.

    Items stand without gaps at ``0 .. len - 1``. They are kept as they are, not copied: what is
    changed in one of them is changed in the storage, and rows of a batch keep the batch in memory.

    It cannot be passed to another process, and not be used in the child of a fork (RuntimeError).

    Cost: a list access an item; ``collate_fn`` (by default a stack) makes the batch. Growing to n
        items moves each of them a constant number of times.

    Example:
        >>> from shmbuffer import ListStorage
        >>> storage = ListStorage()
        >>> storage.set(range(2), ["a", {"b": 1}])
        >>> storage.get([1, 0])
        [{'b': 1}, 'a']

    Source: ``torchrl.data.ListStorage``.
    """

    _default_checkpointer = ListStorageCheckpointer
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
        OnRing.__init__(self, UNLIMITED if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self._shelf: Shelf = self._made_shelf()

    def _made_shelf(self) -> Shelf:
        """Where the items are."""
        keeping = self._made_keeping()
        return ObjectShelf(type(self).__name__, self._max_size, keeping, self._instead)

    def _made_keeping(self) -> Keeping:
        """What is kept of an item in this process."""
        return Keeping(self.device)

    @property
    def engine(self) -> Engine:
        """The process's handle."""
        engine = self._shelf.engine
        if engine is None:
            raise RuntimeError(
                f"a {type(self).__name__} holds objects of this process; {self._instead}"
            )
        return engine

    @property
    def open_engine(self) -> Engine | None:
        """See `Serving.open_engine`."""
        return self._shelf.engine

    @property
    def ring(self) -> Ring | None:
        """The ring of the items. It is the same object also after it has grown.

        Raises:
            RuntimeError: in the child of a fork.
        """
        return self._shelf.ring

    @property
    def record_shelf(self) -> RecordShelf | None:
        """The records; None of a list in one process."""
        return self._shelf if isinstance(self._shelf, RecordShelf) else None

    @property
    def draws_natively(self) -> bool:
        """See `Serving.draws_natively`."""
        return self._shelf.shares and not has_its_own(self, "get")

    @property
    def writes_natively(self) -> bool:
        """See `Serving.writes_natively`."""
        return not any(has_its_own(self, name) for name in ("get", "set", "append"))

    # -- writing -------------------------------------------------------------------------------

    def append(
        self, data: Any, single: bool = False, priorities: NDArray[np.float64] | None = None
    ) -> tuple[int, int]:
        """Write behind what was written last: one item, or all of a list or batch.

        Args:
            data: one item where ``single``; else a list or other iterable of items, a tensor, array
                or TensorDict that is taken apart along its first dimension, or a dict of these,
                whose items are dicts.
            single: see there.
            priorities: raw, float64, one for each item; None gives the largest that the buffer has
                seen.

        Returns:
            The slot of the first, and how many.

        Raises:
            TypeError: a tuple or number, which has no items of its own; nothing was changed.
            ValueError: a priority is none, or entries of a dict differ in length; nothing was
                changed.
        """
        is_first = self._shelf.ring is None
        first, count = self._shelf.append(data, single, priorities)
        if is_first:
            self._is_open()
        if self._watchers and count:
            self.notify(self.written(first, count))
        return first, count

    def prepare(self, data: Any, single: bool) -> None:
        """See `Serving.prepare`."""
        if self._shelf.ring is None:
            self._shelf.prepare(data, single)
            self._is_open()

    def _is_open(self) -> None:
        """Tell who waits for the first write that it was done."""
        if self._shelf.ring is not None:
            self._tell_readers()

    def written(self, first: int, count: int, *, single: bool = False) -> int | torch.Tensor:
        """The index that a write returns, from what `append` gave: int64 ``[count]``, or an int."""
        if single:
            return first
        index = np.arange(first, first + count, dtype=np.int64)
        return torch.from_numpy(index if self._max_size == UNLIMITED else index % self._max_size)

    @eager
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Put one item at an int, or several at a sequence of ints.

        Args:
            cursor: int (negative from the end), slice, range, list, array or tensor of ints or of
                booleans. An index named twice: the last wins.
            data: one item; or items as `append` takes them, or a tuple of them.
            set_cursor: accepted as in TorchRL; the ring's own position never moves here.

        Raises:
            RuntimeError: a place behind the first free one, or beyond the capacity.
            ValueError: another number of items than places; or as `append`.
            TypeError: as `append`.

        Nothing is changed then.
        """
        self.put(cursor, data, in_place=False)

    def put(self, cursor: Any, data: Any, *, in_place: bool) -> None:
        """See `Serving.put`."""
        is_first = self._shelf.ring is None
        slots = self._shelf.put(cursor, data, in_place=in_place)
        if is_first:
            self._is_open()
        if self._watchers and not in_place and len(slots):
            self.notify(torch.from_numpy(slots))

    # -- reading -------------------------------------------------------------------------------

    @eager
    def get(self, index: Any) -> Any:
        """The item at an int; a list of items at anything else.

        Args:
            index: int, slice, range, list, array or tensor of ints or booleans, in one dimension;
                or a tuple with one of them. A mask has the length of the storage.

        Raises:
            IndexError: a place without an item. A slice leaves such places out.
            RuntimeError: more than one dimension.
        """
        return self.uncollated(self._shelf.fetch(index))

    def fetch(self, index: Any, *, dim_extend: int = 0, views: bool | None = None) -> Any:
        """See `Serving.fetch`; ``views`` has no meaning here."""
        return self.get(index) if has_its_own(self, "get") else self._shelf.fetch(index)

    def fetch_held(self, index: Any, tickets: torch.Tensor) -> Any:
        """See `Serving.fetch_held`."""
        return self._shelf.fetch_held(index, tickets)

    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Serving.draw`."""
        return self._shelf.draw(count, key, beta)

    def collate(self, items: Any) -> Any:
        """A batch from what `get` gives for several; see `batches.collate`."""
        return collate(self.uncollated(items))

    def uncollated(self, data: Any) -> Any:
        """See `Serving.uncollated`: a list of items."""
        return data.items() if isinstance(data, Fetched) else data

    def iter_in_order(self, chunk: int) -> Iterator[Any]:
        """See `Serving.iter_in_order`."""
        ring = self.ring
        for start in range(0, 0 if ring is None else extent(ring), chunk):
            found = self.fetch(slice(start, start + chunk))
            if len(found):  # there may be none in some places, where others write
                yield found

    def contains(self, item: Any) -> Any:
        """Whether there is an item at ``item``.

        Args:
            item: int (negative from the end); or a tensor of them.

        Returns:
            bool; for a tensor one for each, of its shape.

        Raises:
            TypeError: something else: it is places that are looked for, not items.
        """
        if isinstance(item, torch.Tensor) or is_int(item):
            return super().contains(item)
        raise TypeError(
            f"a {type(self).__name__} contains places, ints or a tensor of them, got {item!r}"
        )

    # -- changing ------------------------------------------------------------------------------

    def change(
        self, index: Any, value: Any, path: tuple[str, ...] | None, *, dim_extend: int = 0
    ) -> None:
        """See `Serving.change`."""
        if path is None:
            self[index] = value
            return
        single = is_one(index)
        self._shelf.change(
            index, lambda row, item: edited(item, {path: value}, None if single else row)
        )

    def change_if_present(self, index: Any, generation: Any, patch: Any) -> NDArray[np.bool_]:
        """See `Serving.change_if_present`."""
        if not isinstance(self._shelf, RecordShelf):
            return super().change_if_present(index, generation, patch)
        elements, tickets = meant(index, generation, ())
        changes = changes_of(patch)
        return self._shelf.change_held(
            elements, tickets, lambda row, item: edited(item, changes, row)
        )

    # -- the rest ------------------------------------------------------------------------------

    def copy_out(self) -> Contents:
        """Everything in here, of one moment. The items themselves, not copies."""
        return self._shelf.copy_out()

    def copy_in(
        self,
        items: list[Any],
        slots: NDArray[np.int64],
        *,
        cursor: int,
        write_count: int,
        priorities: NDArray[np.float64] | None = None,
        max_priority: float | None = None,
    ) -> None:
        """Replace everything in here.

        Args:
            items: as they are kept; see `copy_out`.
            slots: int64 ``[n]``: where each of them goes.
            cursor: slot of the next item.
            write_count: items written so far.
            priorities: raw, float64 ``[n]``; NaN, or None, is the default priority.
            max_priority: the largest raw priority ever given; None: none yet.

        Raises:
            IndexError: there is no room for them; nothing was changed.
        """
        self._shelf.copy_in(
            items,
            slots,
            cursor=cursor,
            write_count=write_count,
            priorities=priorities,
            max_priority=max_priority,
        )

    @property
    def keeping(self) -> Keeping:
        """What is kept of an item in this process: of records nothing, they are the items."""
        return self._shelf.keeping if isinstance(self._shelf, ObjectShelf) else Keeping(None)

    def state_dict(self) -> dict[str, Any]:
        """The items (not copies), or records; where they are, and the size of the ring."""
        return self._shelf.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave, in place of what is there. Tensors in the items are copied.

        A full ring that is loaded where there is more room goes on behind its last item.

        Raises:
            IndexError: it has more items than there is room for; nothing was changed.
            ValueError: its records have more bytes than there is room for; nothing was changed.
        """
        slots, capacity = state_dict["_index"].numpy(), int(state_dict["_capacity"])
        cursor, count = int(state_dict["_cursor"]), len(slots)
        if count == capacity < self._max_size:
            cursor = capacity
        self._shelf.make_room(capacity)
        if "_records" in state_dict:
            image = RecordImage.of_state(state_dict["_records"], slots)
            self.load_image(image, slots, cursor=cursor, write_count=count)
            return
        kept = self._loaded(state_dict["_list"])
        self._shelf.copy_in(kept, slots, cursor=cursor, write_count=count)

    def load_image(
        self, image: RecordImage, slots: NDArray[np.int64], *, cursor: int, write_count: int
    ) -> None:
        """Replace everything in here with records: as they are, or with the items that they are.

        Args:
            image: the records.
            slots: int64 ``[n]``: where each of them goes.
            cursor: slot of the next item.
            write_count: items written so far.
        """
        if isinstance(self._shelf, RecordShelf):
            self._shelf.load(image, slots, cursor=cursor, write_count=write_count)
            return
        codec = self.codec_for(image.dictionary)
        kept = [self.keeping.keep(item) for part in image.items(codec) for item in part]
        self._shelf.copy_in(kept, slots, cursor=cursor, write_count=write_count)

    def codec_for(self, dictionary: bytes | None) -> RecordCodec:
        """What reads records that were compressed with this dictionary."""
        codec = self._made_codec()
        if dictionary is not None:
            codec.use(dictionary)
        return codec

    def _loaded(self, saved: list[Any]) -> list[Any]:
        """What is kept of the items of a state."""
        return [self.keeping.loaded(item) for item in saved]

    def _made_codec(self) -> RecordCodec:
        """Items to records and back."""
        return RecordCodec(device=self.device)

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item."""
        self._shelf.forget(keep_write_count=keep_write_count)

    def _empty(self) -> None:
        self.forget(keep_write_count=False)

    def close(self) -> None:
        """Drop the items."""
        self._shelf.close()

    def __repr__(self) -> str:
        limit = "None" if self._max_size == UNLIMITED else self._max_size
        return f"{type(self).__name__}(max_size={limit}, len={len(self)})"

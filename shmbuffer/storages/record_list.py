"""Base class for lists. Their items are Python objects or, in a directory, shared records."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import torch

from shmbuffer.errors import SpaceError
from shmbuffer.memory import Engine, Ring, Schema, Settings
from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.mapped.extents import padded
from shmbuffer.memory.mapped.recorded import read_storage_settings
from shmbuffer.memory.record_format import locate
from shmbuffer.memory.system.progress import Progress
from shmbuffer.saves.checkpointers.record_image import RecordImage
from shmbuffer.saves.tickets import Tickets
from shmbuffer.storages.indexing import meant, ravel
from shmbuffer.storages.list import ListStorage
from shmbuffer.storages.location import Location, Place, remove_new_buffer
from shmbuffer.storages.movers.item_store import changes_of, edits
from shmbuffer.storages.movers.record_codec import TensorRecordCodec
from shmbuffer.storages.movers.record_store import RecordStore
from shmbuffer.storages.movers.storage_mover import whole_or_empty
from shmbuffer.storages.ragged_output import PadOutput, ragged_output
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import as_tensor, put_rows

_PIECE = 256  # items per step of a load


class RecordOptions(Place, total=False):
    """Arguments that `LazyStackStorage` and `CompressedListStorage` share."""

    compilable: bool
    max_bytes: int | None
    pad_output: PadOutput


class RecordList(ListStorage):
    """Base class for `LazyStackStorage` and `CompressedListStorage`.

    In a directory, each item is a record, which contains its structure and its leaves, raw or
    compressed. Any process can open the directory by path. If all processes are killed, the next
    process recovers the directory and continues. The differences from a list in one process are:

    - There are two capacities: items (``max_size``) and bytes (``max_bytes``). When either is
      reached, the oldest items are removed. Slots can therefore be empty, and slices skip empty
      slots.
    - An item is copied when it is written and when it is read. `rb[i] = item` and `set_at_` replace
      its record with a new one at the head of the ring, which can remove the oldest items.
    - An item consists of tensors, NumPy arrays and numbers, text, bytes, int, float, bool, None,
      and TensorDicts, tensorclasses, dicts, lists and tuples of these. Any other object raises
      TypeError, because nothing is pickled.

    A pickled storage contains its path and arguments, not its items.
    """

    family: ClassVar[str]
    """Name of this class and its subclasses in the files of a directory."""
    kinds: ClassVar[dict[str, type[RecordList]]] = {}
    """Classes by their `family`, to create the storage for a directory."""
    storage_options: ClassVar[frozenset[str]] = frozenset(("device", "pad_output"))
    """Arguments that are not recorded in the directory, and can be passed to `from_engine`."""

    _instead = (
        "pass max_size, max_bytes, a scratch_dir and shared_init=True, so that its items are "
        "records that processes share; or use a LazyMemmapStorage for tensors of one shape"
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "family" in cls.__dict__:
            RecordList.kinds[cls.family] = cls

    def __init__(
        self,
        max_size: int | None,
        *,
        device: torch.device | str | int | None = None,
        compilable: bool = False,
        max_bytes: int | None = None,
        pad_output: PadOutput = None,
        **place: Unpack[Place],
    ) -> None:
        location = self._location = Location(**place)
        if location.is_directory and (max_size is None or max_bytes is None):
            missing = "max_size (items)" if max_size is None else "max_bytes"
            raise ValueError(
                f"{type(self).__name__}: a shared list needs max_size (items) and max_bytes, got "
                f"{max_size} and {max_bytes}; pass {missing}"
            )
        if max_bytes is not None and not location.is_directory:
            raise ValueError(
                f"{type(self).__name__}(max_bytes={max_bytes}): a list in one process is only "
                "limited by max_size; pass scratch_dir or shared_init=True for a ring of bytes, or "
                "leave max_bytes out"
            )
        if location.prefault and not location.is_directory:
            raise ValueError(
                f"{type(self).__name__}(prefault={location.prefault.mode!r}): a list in one "
                "process has no pages of its own; pass scratch_dir or shared_init=True, or leave "
                "prefault out"
            )
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise ValueError(f"max_bytes must be an int of at least 1, got {max_bytes!r}")
        self.max_bytes = max_bytes
        self._output = ragged_output(pad_output)
        super().__init__(max_size, compilable=compilable, device=device)
        if location.opens_at_once:
            self._open()

    @classmethod
    def from_engine(cls, engine: Engine, **options: Any) -> Self:
        """Creates a storage for an open buffer, and takes ownership of its handle.

        ``options`` are the arguments that the directory does not contain; see `storage_options`.
        """
        settings = engine.settings
        storage = cls(
            settings.capacity,
            max_bytes=settings.record_bytes,
            scratch_dir=engine.path or engine.where,  # the handle of a save has no path
            **cls._arguments_from(read_storage_settings(settings, engine.where)),
            **options,
        )
        storage._location = Location.of_engine(engine)
        storage._engine = storage._prepare_engine(engine)
        return storage

    @classmethod
    @abstractmethod
    def _arguments_from(cls, recorded: dict[str, Any]) -> dict[str, Any]:
        """Converts a result of `_recorded_arguments` back to arguments of the constructor."""

    def _settings(self) -> Settings:
        assert self.max_bytes is not None
        recorded = {"kind": self.family, **self._recorded_arguments()}
        return Settings(self._max_size, record_bytes=self.max_bytes, extra={"storage": recorded})

    def _prepare_engine(self, engine: Engine) -> Engine:
        nbytes = engine.settings.record_bytes
        schema = Schema((), self._max_size, (), {"kind": "records"}, record_bytes=nbytes)
        try:
            engine.define(schema)
        except SpaceError:
            remove_new_buffer(engine)
            raise
        except BaseException:
            engine.close()
            raise
        return engine

    def _attach_ring(self, ring: Ring) -> RecordStore:
        assert isinstance(self._codec, TensorRecordCodec)
        store = RecordStore(type(self).__name__, self.engine(), ring, self._codec)
        self._mover = store
        return store

    @abstractmethod
    def _recorded_arguments(self) -> dict[str, Any]:
        """Returns the arguments that `attach` needs to create the same storage, as JSON."""

    @abstractmethod
    def _collate(self, data: Any) -> Any:
        """Builds a batch from a result of `fetch` if ``pad_output`` is None."""

    def _records(self) -> RecordStore:
        store = self._store()
        assert isinstance(store, RecordStore)
        return store

    def open_there(self) -> None:
        """Opens the buffer in ``scratch_dir`` for a load in place, regardless of ``existsok``."""
        if self.shared:
            super().open_there()
            self._store()

    @property
    def supports_conditional_update(self) -> bool:
        """True for records, because their tickets show whether an item was replaced."""
        return self.shared

    def change_if_present(
        self, index: Any, generation: Any, patch: Any, *, dim_extend: int = 0
    ) -> Flags:
        """Changes entries of items that have not been overwritten. Returns bool ``[n]``."""
        if not self.shared:
            return super().change_if_present(index, generation, patch)
        elements, tickets = meant(index, generation, ())
        changes, written = changes_of(patch), np.shape(index)
        for path, value in changes.items() if len(written) > 1 else ():
            size = tuple(getattr(value, "shape", ()))
            if size[: len(written)] == written:  # shaped like streams of items
                changes[path] = value.reshape(-1, *size[len(written) :])
        edit = edits(changes, elements, len(elements))
        return self._records().change_held(elements, tickets, edit)

    def entry(self, index: Any, path: tuple[str, ...]) -> tuple[Ints, torch.Tensor, Ints]:
        """Reads one entry of some items; see `Storage.entry`."""
        if not self.shared:
            return super().entry(index, path)
        elements = ravel(index, ())
        (column,), tickets = self._records().entries(elements, [path])
        present = tickets >= 0
        if any(one is None for one in column):
            raise KeyError(f"entry {'.'.join(path)!r} is not a scalar in every item")
        found = [as_tensor(one).cpu() for one in column]
        first = found[0] if found else cpu.zeros((), dtype=torch.float64)
        numbers = cpu.zeros((len(elements), *first.shape), dtype=first.dtype)
        if found:
            put_rows(numbers, torch.from_numpy(present.nonzero()[0]), torch.stack(found))
        return elements, numbers, tickets

    def collate(self, items: Any) -> Any:
        """Builds a batch, in the form of ``pad_output``, from a result of `fetch` or `get`."""
        return self._collate(items) if self._output is None else self._output(items)

    # -- all items -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the items or records, their slots, the cursor and the capacity."""
        if self.mover() is None:
            nothing = {"_list": [], "_index": cpu.empty(0, dtype=torch.int64)}
            return {**nothing, "_cursor": 0, "_capacity": self._max_size}
        return super().state_dict()

    def copy_in(self, items: list[Any], slots: Ints, *, cursor: int, write_count: int) -> None:
        """Replaces the contents with ``items``, and writes ``items[i]`` to ``slots[i]``."""
        if not self.shared:
            super().copy_in(items, slots, cursor=cursor, write_count=write_count)
            return
        order = np.argsort((slots - cursor) % self._max_size, kind="stable")  # oldest items first
        codec, batches = self._codec, []
        assert isinstance(codec, TensorRecordCodec)
        with Progress("load", len(order), "items") as progress:
            for start in range(0, len(order), _PIECE):
                part = order[start : start + _PIECE]
                batch = codec.encode([items[at] for at in part.tolist()], False)
                batches.append((part, batch))
                progress.advance(len(part))
        self._require_bytes(sum(int(padded(batch.sizes).sum()) for _, batch in batches))
        store = self._records()
        ring = store.ring
        ring.empty()
        with whole_or_empty(ring, self.where):
            for part, batch in batches:
                store.place(slots[part], batch, in_place=False)
        ring.restore(cursor % self._max_size, write_count, None)

    def load_image(
        self,
        image: RecordImage,
        slots: Ints,
        *,
        cursor: int,
        write_count: int,
        tickets: Tickets | None = None,
    ) -> None:
        """Replaces the contents with records; see `ListStorage.load_image`.

        If a record is damaged or the records do not fit, raises an error and changes nothing.

        Cost: two copies of the bytes, a few megabytes at a time.
        """
        if not self.shared:
            super().load_image(image, slots, cursor=cursor, write_count=write_count)
            return
        capacity, nbytes = self._max_size, int(image.sizes.sum())
        with Progress("check", nbytes) as progress:
            for rows in image.pieces():
                locate(image.batch(rows), image.where)  # raises an error for a damaged record
                progress.advance(int(image.sizes[rows].sum()))
        self._require_bytes(int(padded(image.sizes).sum()))
        store, codec = self._records(), self._codec
        assert isinstance(codec, TensorRecordCodec)
        if image.dictionary is not None:
            found = self.engine().seat.publish_dictionary(image.dictionary)
            if found != image.dictionary:
                other = self.codec_for(image.dictionary)
                items = [item for part in image.items(other) for item in part]
                self.copy_in(items, slots, cursor=cursor, write_count=write_count)
                return
            codec.use(found)
        ring = store.ring
        ring.empty()
        exact = tickets is not None and image.is_in_order(tickets.of_items)
        numbers, lap, head = slots, capacity, cursor % capacity
        if tickets is not None and exact:
            numbers, head = tickets.for_ring(ring)
            lap = head + 1  # tickets, unlike slots, do not wrap around
        with whole_or_empty(ring, self.where), Progress("load", nbytes) as progress:
            for rows in image.runs(numbers, lap) if len(image) else ():
                ring.restore(int(numbers[rows[0]]), 0, None)
                store.records.write(image.batch(rows))
                progress.advance(int(image.sizes[rows].sum()))
        ring.restore(head, write_count, None)

    def _require_bytes(self, nbytes: int) -> None:
        """Raises ValueError if the ring of bytes is smaller than ``nbytes``."""
        capacity = self._settings().record_bytes
        if nbytes > capacity:
            raise ValueError(
                f"{self.where}: records of {nbytes} bytes do not fit into a {type(self).__name__} "
                f"of max_bytes {capacity}; load them into a larger one. Nothing was changed"
            )

    def __repr__(self) -> str:
        if not self.shared:
            return super().__repr__()
        return (
            f"{type(self).__name__}(max_size={self._max_size}, max_bytes={self.max_bytes}, "
            f"len={len(self)}, scratch_dir={self._directory_name()!r})"
        )

"""A list whose items lie in one process, or, in a directory, as records that processes share."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shmbuffer.replay.storages.fetched import Fetched
from shmbuffer.replay.storages.list import UNLIMITED, ListStorage
from shmbuffer.replay.storages.location import Location
from shmbuffer.replay.storages.object_shelf import ObjectShelf
from shmbuffer.replay.storages.on_ring import OnRing
from shmbuffer.replay.storages.ragged_output import PadOutput, RaggedOutput
from shmbuffer.replay.storages.record_shelf import RecordShelf

if TYPE_CHECKING:
    from shmbuffer.memory import Engine
    from shmbuffer.replay.storages.shelf import Shelf


class RecordList(ListStorage):
    """What `LazyStackStorage` and `CompressedListStorage` have in common.

    In a directory an item is a record: its leaves, raw or compressed, and what it is made of. Any
    process may open the directory, by path; when all of them were killed, the next one recovers it
    and carries on. What differs from a list of one process:

    - There are two capacities: items (``max_size``) and bytes (``max_bytes``). As the ring comes
      round to either of them the oldest items go, in their order, so that places may be empty: a
      slice leaves them out.
    - An item is copied when it is written and when it is read. `rb[i] = item` and `set_at_` write a
      new record in its place, at the head of the ring: the oldest items may go for it.
    - An item holds tensors, numpy arrays and numbers, text, bytes, int, float, bool, None, and
      TensorDicts, tensorclasses, dicts, lists and tuples of them. Anything else is a TypeError:
      nothing is pickled.

    It pickles to its path and arguments, never to its contents.
    """

    family: ClassVar[str]
    """The name under which a directory remembers this class and those derived from it."""
    storage_options: ClassVar[frozenset[str]] = frozenset(("device", "pad_output"))
    """What cannot be recorded, so that `from_engine` takes it."""

    _location: Location
    _instead = (
        "give it max_size, max_bytes, a scratch_dir and shared_init=True, so that its items are "
        "records which processes share; or use a LazyMemmapStorage for tensors of one shape"
    )

    def _be(
        self,
        max_size: int | None,
        *,
        device: torch.device | str | int | None,
        compilable: bool,
        location: Location,
        max_bytes: int | None,
        pad_output: PadOutput,
        engine: Engine | None = None,
    ) -> None:
        """Be such a storage: what the constructors have in common."""
        if location.is_directory and (max_size is None or max_bytes is None):
            missing = "max_size (items)" if max_size is None else "max_bytes"
            raise ValueError(
                f"{type(self).__name__}: what processes share lies in a ring of {max_size} items "
                f"and {max_bytes} bytes; give {missing}, too"
            )
        if max_bytes is not None and not location.is_directory:
            raise ValueError(
                f"{type(self).__name__}(max_bytes={max_bytes}): a list in one process counts items "
                "alone; give scratch_dir or shared_init=True for a ring of bytes, or leave it out"
            )
        if location.prefault and not location.is_directory:
            raise ValueError(
                f"{type(self).__name__}(prefault={location.prefault.mode!r}): a list in one "
                "process has no pages of its own; give scratch_dir or shared_init=True, too"
            )
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise ValueError(f"max_bytes is a number of bytes, an int from 1, got {max_bytes!r}")
        OnRing.__init__(self, UNLIMITED if max_size is None else max_size, compilable=compilable)
        self.device = None if device is None else torch.device(device)
        self.max_bytes = max_bytes
        self._output = None if pad_output is None else RaggedOutput(pad_output)
        self._location = location
        self._shelf: Shelf = self._made_shelf(engine)

    def _be_at(self, engine: Engine, **options: Any) -> None:
        """Be the storage of a buffer that is open already."""
        settings = engine.settings
        self._be(
            settings.capacity,
            compilable=False,
            location=Location.of_engine(engine),
            max_bytes=settings.record_bytes,
            engine=engine,
            **options,
        )

    def _made_shelf(self, engine: Engine | None = None) -> Shelf:
        if not self._location.is_directory:
            keeping = self._made_keeping()
            return ObjectShelf(type(self).__name__, self._max_size, keeping, self._instead)
        assert self.max_bytes is not None
        return RecordShelf(
            type(self).__name__,
            self._max_size,
            self.max_bytes,
            self._location,
            self._made_codec(),
            {"kind": self.family, **self._recorded()},
            engine,
        )

    @abstractmethod
    def _recorded(self) -> dict[str, Any]:
        """Arguments that a directory remembers, so that ``attach`` makes the same storage; JSON."""

    @abstractmethod
    def _collate(self, data: Any) -> Any:
        """A batch from what `fetch` gives, without ``pad_output``."""

    @property
    def scratch_dir(self) -> Path | None:
        """The directory; None in one process, or as long as it has no name."""
        return self._shelf.path if isinstance(self._shelf, RecordShelf) else None

    @property
    def shared(self) -> bool:
        """Whether the items are in a directory, where any process may open them."""
        return self._location.is_directory

    @property
    def where(self) -> str:
        """The buffer's name in messages."""
        return "this buffer" if self.scratch_dir is None else str(self.scratch_dir)

    @property
    def engine(self) -> Engine:
        """The process's handle; opened on first use."""
        if isinstance(self._shelf, RecordShelf):
            self._shelf.open()
        return super().engine

    def open_there(self) -> None:
        """Open what ``scratch_dir`` has, whatever ``existsok`` says: for a load in place."""
        if isinstance(self._shelf, RecordShelf):
            is_first = self._shelf.ring is None
            self._shelf.open_there()
            if is_first:
                self._is_open()

    def collate(self, items: Any) -> Any:
        """A batch from what `fetch` or `get` gives for several; see ``pad_output``."""
        if self._output is None:
            return self._collate(items)
        if isinstance(items, Fetched):
            return self._output.of_records(items)
        return self._output.of_items(items)

    def __repr__(self) -> str:
        if not self.shared:
            return super().__repr__()
        return (
            f"{type(self).__name__}(max_size={self._max_size}, max_bytes={self.max_bytes}, "
            f"len={len(self)}, scratch_dir={str(self.scratch_dir)!r})"
        )

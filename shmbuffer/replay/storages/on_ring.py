"""A storage whose order, slot words, tickets and priorities are a ring's."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.replay.eager import eager
from shmbuffer.replay.storages.indexing import extent, holds
from shmbuffer.replay.storages.storage import Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Engine, Ring


class OnRing(Storage):
    """The common part of the storages of this package: columns (`RingStorage`) and lists of items.

    Args:
        max_size: capacity in elements.
        compilable: accepted; `torch.compile` leaves the native calls alone either way.
    """

    # The sampler whose priorities the ring keeps.
    _table_owner: weakref.ref[Any] | None = None

    def __init__(self, max_size: int, *, compilable: bool = False) -> None:
        super().__init__(max_size, compilable=compilable)
        self._readers: list[weakref.ref[Any]] = []  # buffers, told once the ring is there

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The process's handle; opened on first use."""

    @property
    @abstractmethod
    def ring(self) -> Ring | None:
        """The ring, or None as long as nobody has written."""

    @property
    def lanes(self) -> tuple[int, ...]:
        """Sizes of the dimensions after the first; ``()`` where it has one."""
        return ()

    @property
    def shared(self) -> bool:
        """Whether the bytes are in a directory, where any process may open them."""
        engine = self.open_engine
        return engine is not None and engine.shared

    @property
    def where(self) -> str:
        """The buffer's name in messages."""
        path = None if self.open_engine is None else self.open_engine.path
        return "this buffer" if path is None else str(path)

    @eager
    def __len__(self) -> int:
        """Elements that are there: committed, and not emptied since."""
        ring = self.ring
        return 0 if ring is None else ring.length

    def __iter__(self) -> Iterator[Any]:
        """The items that are there, in storage order; places without one are left out."""
        ring = self.ring
        held = () if ring is None else np.unique(ring.committed() // ring.lanes).tolist()
        for slot in held:
            try:
                yield self.get(slot)
            except IndexError:  # written over since
                if not self.shared:
                    raise

    @abstractmethod
    def append(
        self, data: Any, single: bool = False, priorities: NDArray[np.float64] | None = None
    ) -> tuple[int, int]:
        """Write at the ring's head.

        Args:
            data: a batch; or one item where ``single``.
            single: see there.
            priorities: raw, float64, one for each element; None gives the largest that the buffer
                has seen.

        Returns:
            The first place, as `written` takes it, and how many slots were written.
        """

    @abstractmethod
    def written(self, first: int, count: int, *, single: bool = False) -> int | torch.Tensor:
        """The index that a write returns, from what `append` gave."""

    def contains(self, item: Any) -> Any:
        """Whether there is an item in a slot.

        Args:
            item: int (negative from the end); or a tensor of them.

        Returns:
            bool; for a tensor one for each, of its shape.
        """
        asked = np.asarray(item, np.int64)
        ring = self.ring
        there = np.zeros(asked.shape, np.bool_)
        if ring is not None:
            slots = np.where(asked < 0, asked + extent(ring), asked)
            inside = (slots >= 0) & (slots < ring.capacity)
            there[inside] = holds(ring, slots[inside])
        return torch.from_numpy(there) if there.ndim else bool(there)

    def add_reader(self, buffer: Any) -> None:
        """Call ``buffer.ring_is_there()`` once the first write has defined the ring."""
        others = [one for one in self._readers if one() not in (None, buffer)]
        self._readers = [*others, weakref.ref(buffer)]
        if self.ring is not None:
            buffer.ring_is_there()

    def detach(self, buffer: Any) -> None:
        """Undo `attach` and `add_reader`."""
        super().detach(buffer)
        self._readers = [one for one in self._readers if one() not in (None, buffer)]

    def _tell_readers(self) -> None:
        """The ring is there now."""
        for reader in self._readers:
            if (buffer := reader()) is not None:
                buffer.ring_is_there()

    def cleanup(self) -> bool:
        """Remove the files of the storage from disk, those that we made and no others.

        Returns:
            True if something was removed; False if it is gone already, or was never on disk.
            Idempotent.

        Nothing can be read or written afterwards.
        """
        return False if self.open_engine is None else self.open_engine.cleanup()

    def close(self) -> None:
        """Leave the buffer and drop the mapping; what was committed stays in the directory.

        Idempotent.
        """
        if self.open_engine is not None:
            self.open_engine.close()

    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item; the leaves stay known."""
        if self.ring is not None:
            self.ring.empty(keep_write_count=keep_write_count)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_readers": [], "_table_owner": None}

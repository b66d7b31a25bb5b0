"""Entries of items that are records: read once, and remembered by the ticket of the write.

A record does not change, and what is written in its place has another ticket. So of a million
records only those are read that came since the last look; of each of them only the entries that are
asked for are decompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.memory import slots as slot_words
from shmbuffer.replay.samplers.slicing.entries import Entries, as_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shmbuffer.memory import Ring
    from shmbuffer.replay.form.nodes import Path
    from shmbuffer.replay.storages.record_shelf import RecordShelf

_PIECE_BYTES = 2**24  # of records that are read at once


class RecordEntries(Entries):
    """Entries of the items of a byte ring.

    Args:
        shelf: where the records are.
        paths: the entries that are wanted.
    """

    def __init__(self, shelf: RecordShelf, paths: Sequence[Path]) -> None:
        self._shelf = shelf
        self._paths = paths
        self._tickets = np.full(shelf.max_size, -1, np.int64)  # of what was read
        self._columns = {path: _Column(path, shelf.max_size) for path in paths}

    def is_current(self, ring: Ring) -> bool:
        """Whether every item that is there has been read. O(capacity): 0.5 ms for a million."""
        return not len(self._new(ring))

    def look(self, ring: Ring) -> None:
        """Read what came since the last look.

        Raises:
            CorruptBufferError: a record is damaged.
            RuntimeError: an entry differs in shape between items.
        """
        new = self._new(ring)
        if not len(new):
            return
        nbytes = self._shelf.open().extents["bytes"][new].astype(np.int64)
        piece = np.cumsum(np.clip(nbytes, 0, _PIECE_BYTES)) // _PIECE_BYTES
        for part in np.split(new, np.flatnonzero(np.diff(piece)) + 1):
            found, tickets = self._shelf.entries(part, self._paths)
            there = tickets >= 0
            for path, leaves in zip(self._paths, found, strict=True):
                kept = [leaf for leaf, held in zip(leaves, there.tolist(), strict=True) if held]
                self._columns[path].put(part[there], kept)
            self._tickets[part] = tickets  # only now: others look at them first

    def has(self, path: Path) -> bool:
        """See `Entries.has`."""
        return path in self._columns and self._columns[path].is_in(self._tickets >= 0)

    def column(self, path: Path) -> NDArray[Any]:
        """See `Entries.column`."""
        return self._columns[path].values

    def take(self, path: Path, elements: NDArray[np.int64]) -> torch.Tensor:
        """See `Entries.take`."""
        column = self._columns[path]
        found = torch.from_numpy(column.values[elements])
        return found.reshape(len(elements), *(column.shape or ()))

    def _new(self, ring: Ring) -> NDArray[np.int64]:
        """Slots whose item has not been read."""
        words = ring.words.copy()
        held = slot_words.committed(words)
        return np.flatnonzero(held & (slot_words.tickets(words) != self._tickets))


class _Column:
    """One entry of all slots."""

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self._there = np.zeros(capacity, np.bool_)
        self.values: NDArray[Any] = np.zeros((capacity, 1, 0), np.bool_)
        self.shape: tuple[int, ...] | None = None

    def put(self, slots: NDArray[np.int64], leaves: list[Any]) -> None:
        """Remember what the items in these slots have; None where one has nothing."""
        there = np.array([leaf is not None for leaf in leaves], np.bool_)
        self._there[slots] = there
        if not there.any():
            return
        tensors = [torch.as_tensor(leaf).detach().cpu() for leaf in leaves if leaf is not None]
        shape = tuple(tensors[0].shape) if self.shape is None else self.shape
        for tensor in tensors:
            if tensor.shape != shape:
                name = self._path[0] if len(self._path) == 1 else self._path
                raise RuntimeError(
                    f"the entry {name!r} says where trajectories end, and is of shape "
                    f"{list(tensor.shape)} in one item and {list(shape)} in another; give it one "
                    "shape in all of them"
                )
        numbers = as_numbers(torch.stack(tensors)).reshape(len(tensors), 1, -1)
        if self.shape is None:
            self.shape = shape
            self.values = np.zeros((len(self._there), *numbers.shape[1:]), numbers.dtype)
        dtype = np.result_type(self.values, numbers)
        if dtype != self.values.dtype:
            self.values = self.values.astype(dtype)
        self.values[slots[there]] = numbers

    def is_in(self, held: NDArray[np.bool_]) -> bool:
        """Whether all of these items have it."""
        return self.shape is not None and bool(self._there[held].all())

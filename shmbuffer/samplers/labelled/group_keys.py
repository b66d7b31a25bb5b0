"""Converts group keys to 64-bit labels. Integers below a limit are their own labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.item_entries import Column

_ITSELF = 2**61  # integers below this absolute value are their own labels
_FEW = 2**16  # number of new keys after which unused keys are discarded


class GroupKeys:
    """Assigns a 64-bit label to each group key: a number, a string, or a row of numbers."""

    def __init__(self) -> None:
        self._labels: dict[Any, int] = {}
        self._next = -_ITSELF
        self._kept = 0

    def labels_of(self, column: Column) -> Ints:
        """Returns the label of each key, int64 ``[n]``. Raises TypeError for an unhashable key."""
        if isinstance(column, np.ndarray):
            if column.shape[1] == 1 and column.dtype.kind in "biu":
                flat = column[:, 0]
                small = column.dtype.itemsize < 8 or not len(flat)
                if small or -_ITSELF < int(flat.min()) <= int(flat.max()) < _ITSELF:
                    return flat.astype(np.int64)
            rows = column.tolist()
            column = [row[0] if len(row) == 1 else tuple(row) for row in rows]
        return np.fromiter(map(self._label, column), np.int64, len(column))

    def _label(self, key: Any) -> int:
        if type(key) is int and -_ITSELF < key < _ITSELF:
            return key
        try:
            label = self._labels.get(key)
        except TypeError:
            raise TypeError(
                "group keys must be numbers, strings or rows of numbers, got a "
                f"{type(key).__name__}; choose another group_key"
            ) from None
        if label is None:
            self._next -= 1
            label = self._labels[key] = self._next
        return label

    def trim(self, live: Callable[[], Ints]) -> None:
        """Discards keys that no item in the buffer has, if many keys were added.

        Args:
            live: function that returns the labels of all items in the buffer.
        """
        if len(self._labels) > 2 * self._kept + _FEW:
            used_labels = set(live().tolist())
            self._labels = {key: one for key, one in self._labels.items() if one in used_labels}
            self._kept = len(self._labels)

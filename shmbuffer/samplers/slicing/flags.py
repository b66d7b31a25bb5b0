"""Flags in the columns of a ring, which the core reads in place.

    Boundaries ──▶ cuts     the columns by which trajectories are cut
    Marks      ──▶ Shown    the flags of a sample, and their memory

Flags that are not stored as numbers are read entry by entry instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key, KeyPath, key_of
from shmbuffer.samplers.slicing.marks import Marks
from shmbuffer.samplers.slicing.single_entries import Entries, LeafEntries
from shmbuffer.tensors.form import cpu
from shmbuffer.tensors.form.tensors import as_numbers

_ENDS, _BEGINS, _IDS = range(3)  # of the core
_AS_STORED, _AND_LAST, _AND_FIRST = range(3)


def cuts_of(
    entries: Entries, ids: KeyPath | None, ends: Sequence[KeyPath], begins: Sequence[KeyPath]
) -> Ints | None:
    """Addresses of the columns by which trajectories are cut; None if one is not a column."""
    if not isinstance(entries, LeafEntries):
        return None
    wanted = [(path, _ENDS) for path in ends] + ([] if ids is None else [(ids, _IDS)])
    wanted += [(path, _BEGINS) for path in begins if entries.has(path)]
    found = []
    for path, role in wanted:
        column = entries.column(path)
        if column is None or as_numbers(column[:0]).dtype.kind not in "biu":
            return None
        elements = max(1, entries.elements)
        found.append((column.data_ptr(), column.nbytes // elements, role))
    return np.array(found, np.int64).reshape(-1, 3)


class Shown:
    """The flags of a sample, by where they are stored."""

    # Of each flag: key, address or 0, shape, role.
    def __init__(self, forms: list[tuple[Key, int, tuple[int, ...], int]]) -> None:
        self._forms = [(key, shape) for key, _, shape, _ in forms]
        self._at = np.zeros((len(forms), 4), np.int64)
        self._address = self._at.ctypes.data
        for row, (_, base, shape, role) in zip(self._at, forms, strict=True):
            row[:] = base, int(np.prod(shape, dtype=np.int64)), 0, role

    @classmethod
    def of(cls, marks: Marks, entries: Entries) -> Shown | None:
        """None if a flag is not a column of booleans."""
        if not isinstance(entries, LeafEntries):
            return None
        stored: dict[KeyPath, torch.Tensor] = {}
        for path in marks.paths:
            column = entries.column(path) if entries.has(path) else None
            if column is not None and column.dtype is torch.bool:
                stored[path] = column
            elif entries.has(path):
                return None
        forms: list[tuple[Key, int, tuple[int, ...], int]] = []

        def form(path: KeyPath, shape: tuple[int, ...], role: int) -> None:
            column = stored.get(path)
            if column is not None:
                shape = entries.shape(path)
            address = 0 if column is None else column.data_ptr()
            forms.append((key_of(path), address, shape, role))

        if marks.truncated is not None:
            three = marks.truncated, marks.done, marks.terminated
            shape = next((entries.shape(path) for path in three if path in stored), (1,))
            for path, role in zip(three, (_AND_LAST, _AND_LAST, _AS_STORED), strict=True):
                form(path, shape, role)
        if marks.init is not None and marks.init in stored:
            form(marks.init, (), _AND_FIRST)
        return cls(forms)

    def read(
        self, follower: Any, elements: torch.Tensor, steps: int
    ) -> tuple[dict[Any, torch.Tensor], torch.Tensor] | None:
        """The flags of slices, and tickets; None if an item is gone."""
        count = elements.numel()
        found: dict[Any, torch.Tensor] = {
            key: cpu.empty((count, *shape), dtype=torch.bool) for key, shape in self._forms
        }
        tickets, at = torch.empty_like(elements), self._at
        at[:, 2] = [out.data_ptr() for out in found.values()]
        where = elements.data_ptr(), count, steps, self._address, len(at), tickets.data_ptr()
        return (found, tickets) if follower.flags(*where) else None

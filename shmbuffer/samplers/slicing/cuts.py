"""Computes the rows of slices, and the flags on their first and last steps.

Cuts ──rows_of──▶ SliceRows ──Marks──▶ flags, which Python reads entry by entry
elements of full slices ──MarkColumns──▶ flags, which the core reads from a ring's columns
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from shmbuffer.memory.format.array_types import Flags, Ints
from shmbuffer.memory.format.leaf import Key, KeyPath, key_of, path_of
from shmbuffer.samplers.item_entries import Entries, RowEntries
from shmbuffer.samplers.slicing.options import Span
from shmbuffer.samplers.slicing.trajectories import Trajectories
from shmbuffer.tensors.form import cpu

MASK: KeyPath = ("collector", "mask")
"""Entry of a sample that is True for steps and False for padding, as in TorchRL."""
_AS_STORED, _AND_LAST, _AND_FIRST = range(3)  # roles of a flag, as numbered by the C core


class Cuts(NamedTuple):
    """The start of each slice of a batch."""

    trajectories: Ints
    """Trajectory of each slice, int64 ``[slices]``."""
    begins: Ints
    """Position of the first step of each slice in its trajectory, int64 ``[slices]``.

    A negative position means that the slice begins before the trajectory and is cut off there.
    """
    weights: torch.Tensor | None = None
    """Importance-sampling weight of each slice, ``[slices]``, or None without priorities."""


class SliceRows(NamedTuple):
    """The concatenated rows of several slices."""

    rows: Ints
    """Row of each step in the table of trajectories, int64 ``[n]``."""
    lengths: Ints
    """Number of rows of each slice, including padding, int64 ``[slices]``."""
    first: Flags
    """True for the first step of each slice, bool ``[n]``."""
    last: Flags
    """True for the last step of each slice that is not padding, bool ``[n]``."""
    mask: Flags | None
    """False for padding, bool ``[n]``, or None if there is no padding."""


def places(lengths: Ints, steps: int, span: Span) -> tuple[Ints, Ints]:
    """Returns where slices of ``steps`` steps can start in trajectories of the given lengths.

    Returns:
        The first possible position of each slice and the number of possible positions, int64
        ``[slices]`` each. At a negative position, the slice is cut off at the left.
    """
    whole = np.minimum(lengths, steps)
    left = span.off(span.left, whole)
    return -left, lengths - whole + 1 + left + span.off(span.right, whole)


def rows_of(table: Trajectories, cuts: Cuts, steps: int, *, pad: bool) -> SliceRows:
    """Returns the rows of slices of at most ``steps`` steps, with padding if ``pad`` is True."""
    lengths = table.lengths(cuts.trajectories)
    end = np.minimum(cuts.begins + np.minimum(lengths, steps), lengths)
    begin = np.maximum(cuts.begins, 0)
    first, count = table.starts(cuts.trajectories) + begin, end - begin
    if pad:
        step = np.arange(steps)
        rows = first[:, None] + np.minimum(step, count[:, None] - 1)
        return SliceRows(
            rows.ravel(),
            np.full(len(count), steps),
            np.tile(step == 0, len(count)),
            (step == count[:, None] - 1).ravel(),
            (step < count[:, None]).ravel(),
        )
    rows, stops = consecutive(first, count)
    is_first, is_last = np.zeros((2, len(rows)), np.bool_)
    is_first[stops - count] = True
    is_last[stops - 1] = True
    return SliceRows(rows, count, is_first, is_last, None)


def window_rows(elements: Ints, steps: int, *, pad: bool) -> SliceRows:
    """Returns windows of ``steps`` steps as `SliceRows`, with elements in place of rows.

    With ``pad``, the result has a mask that is True everywhere.
    """
    step = np.arange(len(elements)) % steps
    mask = np.ones(len(elements), np.bool_) if pad else None
    lengths = np.full(len(elements) // steps, steps)
    return SliceRows(elements, lengths, step == 0, step == steps - 1, mask)


def consecutive(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Returns runs of consecutive integers, concatenated, and the end of each run.

    Run ``i`` contains ``counts[i]`` integers and starts at ``first[i]``. It ends before position
    ``stops[i]`` of the concatenation.
    """
    stops = np.cumsum(counts)
    rows = np.arange(counts.sum()) + np.repeat(first - (stops - counts), counts)
    return rows, stops


class Marks(NamedTuple):
    """Paths of the entries that mark the first and last steps of slices."""

    # ``truncated`` and ``done`` are True on the last step of a slice. ``init`` is True on the first
    # step if items have this entry. All other steps keep their stored values, and ``terminated``
    # is never changed. A mark has the shape of its stored entry. If the entry is not stored, the
    # mark has the shape of another of the first three entries, or ``[n, 1]`` if none is stored.

    truncated: KeyPath | None
    done: KeyPath
    terminated: KeyPath
    init: KeyPath | None

    @classmethod
    def from_keys(cls, truncated_key: Key | None, init_key: Key | None) -> Marks:
        """Creates the paths, with ``done`` and ``terminated`` at the level of ``truncated_key``."""
        truncated = None if truncated_key is None else path_of(truncated_key)
        beside = truncated[:-1] if truncated is not None else ()
        return cls(
            truncated,
            (*beside, "done"),
            (*beside, "terminated"),
            None if init_key is None else path_of(init_key),
        )

    @property
    def paths(self) -> tuple[KeyPath, ...]:
        """Paths of the stored entries from which the marks are computed."""
        flags = () if self.truncated is None else (self.truncated, self.done, self.terminated)
        return flags if self.init is None else (*flags, self.init)

    def of_rows(
        self, entries: Entries, elements: Ints, found: SliceRows
    ) -> dict[Any, torch.Tensor]:
        """Returns the marks of drawn items.

        Args:
            entries: reader of the stored flags.
            elements: element of each row of the sample, int64 ``[n]``.
            found: the slices that the rows form.

        Returns:
            A dict from key (string or tuple) to flags, bool ``[n, *shape]``.
        """
        stored = {
            path: entries.take(path, elements) != 0 for path in self.paths if entries.has(path)
        }
        marks: dict[Any, torch.Tensor] = {}
        if self.truncated is not None:
            forms = [stored[path] for path in self.paths[:3] if path in stored]
            form = forms[0] if forms else cpu.zeros(len(elements), 1, dtype=torch.bool)
            nothing = torch.zeros_like(form)
            last = torch.from_numpy(found.last)
            truncated = stored.get(self.truncated, nothing)
            if found.mask is not None:  # padding is never marked, because it is not a step
                truncated = truncated & _each(torch.from_numpy(found.mask), truncated)
            done, terminated = stored.get(self.done, nothing), stored.get(self.terminated, nothing)
            marks[key_of(self.truncated)] = truncated | _each(last, truncated)
            marks[key_of(self.done)] = done | _each(last, done)
            marks[key_of(self.terminated)] = terminated
        if self.init is not None and self.init in stored:
            init = stored[self.init]
            marks[key_of(self.init)] = init | _each(torch.from_numpy(found.first), init)
        if found.mask is not None:
            marks[MASK] = torch.from_numpy(found.mask)
        return marks


class MarkColumns:
    """Marks of slices that the core reads from the columns of a ring.

    Args:
        forms: key, address of the column (0 if the entry is not stored), shape per item, and role
            of each mark.
    """

    def __init__(self, forms: list[tuple[Key, int, tuple[int, ...], int]]) -> None:
        self._forms = [(key, shape) for key, _, shape, _ in forms]
        self._at = np.zeros((len(forms), 4), np.int64)
        self._address = self._at.ctypes.data
        for row, (_, base, shape, role) in zip(self._at, forms, strict=True):
            row[:] = base, int(np.prod(shape, dtype=np.int64)), 0, role

    @classmethod
    def create(cls, marks: Marks, entries: Entries) -> MarkColumns | None:
        """Creates an instance; returns None if a stored end flag is not a column of booleans."""
        if not isinstance(entries, RowEntries):
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
        """Reads the marks and tickets of slices of ``steps`` steps each.

        Returns:
            A dict from key to marks, bool ``[n, *shape]``, and tickets, int64 ``[n]``. None if an
            item was removed in the meantime.
        """
        count = elements.numel()
        found: dict[Any, torch.Tensor] = {
            key: cpu.empty((count, *shape), dtype=torch.bool) for key, shape in self._forms
        }
        tickets, at = torch.empty_like(elements), self._at
        at[:, 2] = [out.data_ptr() for out in found.values()]
        where = elements.data_ptr(), count, steps, self._address, len(at), tickets.data_ptr()
        return (found, tickets) if follower.read_flags(*where) else None


def _each(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshapes a tensor ``[n]`` so that it broadcasts with ``like``, ``[n, *shape]``."""
    return rows.reshape(-1, *(1,) * (like.dim() - 1))

"""Finds the byte ranges of a slots file that were ever written; all other bytes are zero.

The file system reports which ranges of a file have no data (lseek(2), SEEK_DATA). This module reads
only the ranges with data, because reading a hole through a shared map allocates a page on tmpfs. If
the file system does not report holes, the whole file counts as data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.array_types import Floats
from shmbuffer.memory.mapped.slots_file import SlotsFile, end_of_use
from shmbuffer.memory.system.filesystem import data_ranges
from shmbuffer.memory.system.path_checks import explain_errors


class Written:
    """The byte ranges of a slots file that contain data, as they were when it was created."""

    def __init__(self, files: Files, live: SlotsFile) -> None:
        self._live = live
        with (
            files.directory.open_file(layout.SLOTS, writable=False) as file,
            explain_errors(files.path / layout.SLOTS),
        ):
            self._data = list(data_ranges(file.fd, 0, os.fstat(file.fd).st_size))

    def slots(self) -> int:
        """Returns the number of slots up to the last one whose word is not zero."""
        words = self._live.words
        for low, high in reversed(list(self._data_in("words", len(words)))):
            if (end := end_of_use(words, low, high)) > low:
                return end
        return 0

    def count_masses(self, element: int) -> int:
        """Counts the nonzero nodes of the priority tree for ``element`` and later elements."""
        return sum(int(np.count_nonzero(part)) for part in self._masses_from(element))

    def clear_masses(self, element: int) -> None:
        """Clears all nodes that `count_masses` would count. No other client may be alive."""
        for part in self._masses_from(element):
            if part.any():
                part[:] = 0
                _core.reached("recover.beyond")
        _core.reached("recover.beyond")

    def _masses_from(self, element: int) -> Iterator[Floats]:
        """Yields the nodes of each tree level for ``element`` and later elements that have data."""
        live, first = self._live, element
        levels = [("mass", live.masses)]
        for level, (sums, least) in enumerate(live.levels, 1):
            levels += [(f"sum{level}", sums), (f"min{level}", least)]
        for name, nodes in levels:
            if name.startswith("sum"):
                first = -(-first // layout.FANOUT)
            for low, high in self._data_in(name, len(nodes)):
                if high > first:
                    yield nodes[max(low, first) : high]

    def _data_in(self, section: str, count: int) -> Iterator[tuple[int, int]]:
        """Yields the index ranges of a section that have data, each as first index and end.

        The section contains ``count`` numbers of 8 bytes.
        """
        at = self._live.at[section]
        for first, end in self._data:
            low, high = max(0, first - at) // 8, min(count, -(-(end - at) // 8))
            if low < high:
                yield low, high

"""Reads and writes rows of arrays for the NumPy client."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

from shmbuffer.items.form.leaves import Leaves
from shmbuffer.items.rows import RingRows, intake_form, priority_of
from shmbuffer.memory import Ring
from shmbuffer.memory.format.streams import GivenStreams

_NO_CLASS = type(None)  # class without containers, so that only dicts are accepted


class ArrayRows(RingRows):
    """Reads and writes the rows of a ring as arrays.

    If possible, the C core copies a dict of arrays and its priorities in one call.
    """

    def __init__(
        self,
        ring: Ring,
        leaves: Leaves,
        key: str | tuple[str, ...] | None,  # key of the priorities in the data
    ) -> None:
        super().__init__(ring, leaves)
        self._priority = priority_of([leaf.path for leaf in leaves.leaves], leaves.optional, key)
        arrays = [np.zeros((2, 3), dtype) for dtype in leaves.dtypes]
        numbers = [None if dtype is None else dtype.type() for dtype in leaves.arrays]
        examples = zip(arrays, numbers, repeat(None), strict=False)
        self._form = intake_form(ring, leaves, examples, tensors=False, box=_NO_CLASS, inside="")

    def write_as_it_is(self, data: Any, single: bool, streams: GivenStreams) -> Any:
        """Writes an item or a batch in one call into the C core, and returns its index.

        Returns None, and writes nothing, if the data must be converted or the call must wait.
        """
        ring, form = self.ring, self._form
        if form is None or ring.tree.initial is not None:
            return None
        seat, priority = ring.seat, self._priority
        core = seat.intakes.get(priority) or seat.intake(priority, **form)
        if core is None:
            return None
        found: Any
        if single:
            found = core.add(data, streams)
            if found is None or found >= 0:
                return found
        else:
            found = core.extend(data, streams)
            if type(found) is bytearray:
                return np.frombuffer(found, np.int64)
            if found is None:
                return None
        ring.raise_if_timed_out(found)
        return None

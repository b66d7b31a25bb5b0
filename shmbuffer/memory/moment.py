"""What a ring held at one moment, beside the bytes of its items."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Moment(NamedTuple):
    """A ring at one moment."""

    tickets: NDArray[np.int64]
    """int64[capacity]: of the item in each slot; -1: there is none."""
    sources: NDArray[np.int64]
    """int64[capacity]: the incarnation that wrote it; -1: there is none."""
    priorities: NDArray[np.float64]
    """float64[elements], raw; NaN where none is known."""
    head: int
    """The next ticket."""
    write_count: int
    """Elements written so far."""
    max_priority: float | None
    """The largest raw priority ever given; None before the first."""


class _Living:
    """Of which there is one."""

    def __repr__(self) -> str:
        return "LIVING"


LIVING: Final = _Living()
"""In the place of a moment: the ring itself is what is saved, and goes on."""

"""What cannot be, and in which row of a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class ImpossibleError(Exception):
    """A row of a batch that is no record, or cannot become one."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def refuse(bad: NDArray[np.bool_], reason: Callable[..., str]) -> None:
    """Raises if anything in ``bad`` is true; ``reason`` is told where the first is."""
    if bad.any():
        place = [int(at[0]) for at in np.nonzero(bad)]
        raise ImpossibleError(place[0], reason(*place))

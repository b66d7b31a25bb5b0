"""What moves the items of a ring: rows of arrays, or records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Floats, Ints
from shmbuffer.memory.format.streams import GivenStreams, of_each


@dataclass(slots=True)
class Drawn:
    """Items that were read."""

    data: Any
    index: Ints
    """Elements, int64 ``[n]``."""
    tickets: Ints
    """int64 ``[n]``."""
    weights: NDArray[np.float32] | None
    items: list[Any] | None = None
    """The data, where they are items one by one."""


class Mover(ABC):
    """Moves the items of one ring."""

    lanes: tuple[int, ...] = ()
    by_item = False

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def write_as_it_is(self, data: Any, single: bool, streams: GivenStreams) -> Any:
        """Write in one call of the core. The index; None: convert the data, refuse or wait."""
        return None

    @abstractmethod
    def write(
        self, data: Any, single: bool, priorities: Floats | None, streams: GivenStreams
    ) -> tuple[int, int]:
        """Write a batch, or an item, which is converted first; the first ticket, and the slots."""

    @abstractmethod
    def sample(self, count: int, key: int, beta: float | None) -> Drawn:
        """Draw, copy and validate; ``beta`` None draws uniformly."""

    @abstractmethod
    def read(self, index: Ints, tickets: Ints) -> Any:
        """The items at these elements; None if one of them is another by now, or gone."""


def write_found(
    ring: Ring,
    where: str,  # the buffer's name in messages
    # addresses of the leaves, what owns these bytes, and the slots: as the leaves have matched them
    found: tuple[list[int], list[Any], int],
    priorities: Floats | None,  # one for each element
    streams: GivenStreams,
) -> tuple[int, int]:
    """Write slots whose leaves lie as they have to; the first ticket, and the slots."""
    addresses, _, count = found  # the caller's bytes are owned by `found` until here is left
    if not count:
        return ring.head, 0
    if priorities is not None and priorities.size != count * ring.width:
        raise ValueError(
            f"{where}: {priorities.size} priorities were given for {count * ring.width} items; "
            "nothing was changed"
        )
    given = None if priorities is None else address(priorities)
    return ring.write(addresses, count, given, streams=of_each(streams, count)), count

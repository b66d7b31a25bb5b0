"""What moves the items of a ring: rows of arrays, or records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmbuffer.memory import Ring
from shmbuffer.memory.streams import GivenStreams, of_each
from shmbuffer.numpy.arrays import Floats, Ints, address_of

REALS = np.dtype(np.float32), np.dtype(np.float64)
_INTEGER = np.dtype(np.int64)


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

    def update(self, index: Any, priority: Any, generation: Any) -> tuple[int, int] | None:
        """`Ring.update` with arrays as the core reads them; None: they are others."""
        if not (
            type(index) is np.ndarray
            and type(priority) is np.ndarray
            and self.ring.width == 1
            and index.dtype == _INTEGER
            and index.ndim == 1
            and priority.dtype in REALS
            and priority.shape == index.shape
            and index.size
            and index.flags.c_contiguous
            and priority.flags.c_contiguous
        ):
            return None
        tickets = 0
        if generation is not None:
            if not (
                type(generation) is np.ndarray
                and generation.dtype == _INTEGER
                and generation.shape == index.shape
                and generation.flags.c_contiguous
            ):
                return None
            tickets = address_of(generation)
        try:
            return self.ring.update_at(
                address_of(index),
                address_of(priority),
                len(index),
                tickets,
                single=priority.dtype == REALS[0],
                shown=lambda: (priority.astype(np.float64), index),
            )
        except IndexError:
            return None


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
    given = None if priorities is None else address_of(priorities)
    return ring.write(addresses, count, given, streams=of_each(streams, count)), count

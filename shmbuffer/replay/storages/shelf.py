"""Where the items of a list are: objects of this process, or records that processes share.

ListStorage ── shelf ┬─ ObjectShelf   a Python list, and a ring without leaves beside it
                     └─ RecordShelf   a ring of bytes, in a directory
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from shmbuffer.replay.storages.indexing import Selection, select

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from shmbuffer.memory import Engine, Moment, Ring
    from shmbuffer.replay.storages.serving import Drawn


Edit = Callable[[int, Any], Any]
"""Called with a position among what was selected, and a copy of the item there; gives what it
becomes."""


class Contents(NamedTuple):
    """Everything on a shelf, of one moment."""

    items: list[Any]
    """As they are kept, in storage order."""
    slots: NDArray[np.int64]
    """int64[n]: where each of them is."""
    moment: Moment
    """The ring: order, priorities, position and counts."""


class Shelf(ABC):
    """The place of the items of a list, in slots of a ring.

    Attributes:
        name: of the storage's class, for messages.
        max_size: how many items there is room for.
    """

    shares: bool
    """Whether other processes may have the same items."""

    def __init__(self, name: str, max_size: int) -> None:
        self.name = name
        self.max_size = max_size

    @property
    @abstractmethod
    def engine(self) -> Engine | None:
        """The handle that others may use too; None: there is none, or it is not open yet."""

    @property
    @abstractmethod
    def ring(self) -> Ring | None:
        """The ring; None before there is one."""

    @abstractmethod
    def append(
        self, data: Any, single: bool, priorities: NDArray[np.float64] | None
    ) -> tuple[int, int]:
        """Write behind what was written last; see `ListStorage.append`."""

    def prepare(self, data: Any, single: bool) -> None:  # noqa: B027 - most need nothing
        """See `Serving.prepare`."""

    @abstractmethod
    def put(self, cursor: Any, data: Any, *, in_place: bool) -> NDArray[np.int64]:
        """Write at places, and return them without repetitions; see `ListStorage.set`."""

    @abstractmethod
    def change(self, index: Any, edit: Edit) -> None:
        """Put something in the place of items, which keep their priorities.

        Raises:
            IndexError: a place without an item. A slice leaves such places out.
        """

    @abstractmethod
    def fetch(self, index: Any) -> Any:
        """The item at an int; else what `apart` makes items of.

        Raises:
            IndexError: a place without an item. A slice leaves such places out.
            RuntimeError: more than one dimension.
        """

    @abstractmethod
    def fetch_held(self, index: torch.Tensor, tickets: torch.Tensor) -> Any:
        """See `Serving.fetch_held`."""

    @abstractmethod
    def draw(self, count: int, key: int, beta: float | None) -> Drawn:
        """See `Serving.draw`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """See `ListStorage.state_dict`."""

    @abstractmethod
    def copy_out(self) -> Contents:
        """Everything in here, of one moment."""

    @abstractmethod
    def copy_in(
        self,
        kept: list[Any],
        slots: NDArray[np.int64],
        *,
        cursor: int,
        write_count: int,
        priorities: NDArray[np.float64] | None = None,
        max_priority: float | None = None,
    ) -> None:
        """Replace everything in here; see `ListStorage.copy_in`."""

    def make_room(self, slots: int) -> None:  # noqa: B027 - most have all that they can have
        """Have so many slots, as far as the storage goes."""

    @abstractmethod
    def forget(self, *, keep_write_count: bool) -> None:
        """Forget every item."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""

    def select(self, index: Any, ring: Ring) -> Selection:
        """What an index means."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        selection = None if isinstance(index, tuple) else select(index, ring, ())
        if selection is None or len(selection.lead) > 1:
            raise RuntimeError(f"a {self.name} has one dimension, got {index!r}")
        return selection

"""Everything in a buffer in place of what was there: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmbuffer.memory import Ring


@contextmanager
def whole_or_empty(ring: Ring, where: str) -> Iterator[None]:
    """Empties the ring where what fills it raises, and has the error say so.

    Args:
        ring: what was in it is gone already.
        where: its name, for the note.
    """
    try:
        yield
    except BaseException as error:
        ring.empty()
        error.add_note(f"{where}: the load was broken off, and the buffer is empty; load again")
        raise

"""Progress of long work: reported some times a second.

    with hearing(on_progress):                        the door: check, recover, dumps, loads, attach
        ...
        with Progress("copy", total) as progress:     the work, some floors below
            for first, count in progress.cut(slots, slot_bytes): ...; progress.advance(...)

The callback is not handed down: between the door and the work lie parts of the user's own, whose
methods are TorchRL's and have no place for it. It is a context variable, so that only the work of
this thread is told of.

Always true
  1. It is called between two steps of the work: the mutex is not held, and no claim is open. What
     it raises ends the work there, as the handler of a signal might, and comes out of the door.
  2. It is called ten times a second at most, and then once more, with done == total, when nothing
     of that work is left.
  3. Where nobody asks, it is one look at a variable, and nothing is cut smaller than without it.
If the process dies in it: as between the two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self, TypeVar

EVERY_S = 0.1
"""Between two calls."""

PIECE_BYTES = 32 * 2**20
"""The amount of work between two looks at the clock, some ten milliseconds."""


@dataclass(frozen=True)
class ProgressReport:
    """How far a piece of long work is.

    Attributes:
        what: ``"prefault"``, ``"recover"``, ``"check"``, ``"copy"`` (out of the buffer: the first
            part of a save), ``"sync"`` (to the disk: the second) or ``"load"``. One call may do
            several of them, one after the other, or one for each buffer of an ensemble.
        done: how much of it.
        total: all of it; ``done`` gets there with the last report, and not before.
        unit: of both: ``"bytes"`` or ``"items"``.
    """

    what: str
    done: int
    total: int
    unit: str = "bytes"

    @property
    def fraction(self) -> float:
        """Between 0 and 1."""
        return self.done / self.total


Item = TypeVar("Item")
OnProgress = Callable[[ProgressReport], object]

_heard_by: ContextVar[OnProgress | None] = ContextVar("shmbuffer_on_progress", default=None)
_raised: ContextVar[BaseException | None] = ContextVar("shmbuffer_on_progress_raised", default=None)


@contextmanager
def hearing(on_progress: OnProgress | None) -> Iterator[None]:
    """Has the work inside report to ``on_progress``; None keeps the listener around it."""
    if on_progress is None:
        yield
        return
    require_callable(on_progress)
    before = _heard_by.set(on_progress)
    try:
        yield
    finally:
        _heard_by.reset(before)
        _raised.set(None)


def is_of_callback(error: BaseException) -> bool:
    """True if ``on_progress`` raised it: code that handles our errors leaves it alone."""
    return error is _raised.get()


def require_callable(on_progress: object) -> None:
    """TypeError where ``on_progress`` is something that cannot be called."""
    if on_progress is not None and not callable(on_progress):
        raise TypeError(f"on_progress is called with a ProgressReport; got {on_progress!r}")


class Progress:
    """Reports the progress and the end of some work, by default to the listener of `hearing`."""

    def __init__(
        self, what: str, total: int, unit: str = "bytes", on_progress: OnProgress | None = None
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._on_progress = _heard_by.get() if on_progress is None else on_progress
        self._done = 0
        self._next_s = time.monotonic() + EVERY_S
        self.heard = self._on_progress is not None and total > 0  # whether anybody is told

    def advance(self, by: int) -> None:
        """So much more is done. What goes beyond the total is not counted."""
        self._done = min(self._done + by, self._total)
        if by and self.heard and self._done < self._total and time.monotonic() >= self._next_s:
            self._tell()
            self._next_s = time.monotonic() + EVERY_S

    def counted(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the same items; each that is asked for is one more."""
        for item in items:
            self.advance(1)
            yield item

    def cut(self, count: int, nbytes: int, most: int | None = None) -> Iterator[tuple[int, int]]:
        """Pieces of the work, as the first of ``count`` and how many."""
        at_once = count if most is None else most
        if self.heard:
            at_once = min(at_once, max(1, PIECE_BYTES // max(1, nbytes)))
        for first in range(0, count, max(1, at_once)):
            yield first, min(at_once, count - first)

    def finish(self) -> None:
        """All of it is done."""
        self._done = self._total
        if self.heard:
            self._tell()

    def _tell(self) -> None:
        if self._on_progress is None:
            return
        before = _heard_by.set(None)  # what it does itself is not told to it
        try:
            self._on_progress(ProgressReport(self._what, self._done, self._total, self._unit))
        except BaseException as error:
            _raised.set(error)
            raise
        finally:
            _heard_by.reset(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

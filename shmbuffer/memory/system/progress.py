"""Reports the progress of long operations several times a second.

    with report_to(on_progress):                      the public call: check, recover, dumps, loads
        ...
        with Progress("copy", total) as progress:     the work, some layers below
            for first, count in progress.cut(slots, slot_bytes): ...; progress.advance(...)

The callback is a context variable instead of an argument. Between the public call and the work are
components that a user may have written, whose methods follow TorchRL and have no such argument. A
context variable also limits the reports to the work of this thread.

Always true
  1. The callback is called between two steps of the work, while the mutex is not held and no claim
     is open. An exception that it raises ends the work there, like one of a signal handler, and
     reaches the caller of the public method.
  2. The callback is called at most ten times a second, and once more with done == total when that
     work is complete.
  3. Without a callback, the cost is one lookup of a variable, and the work is not cut into smaller
     pieces.
If the process dies in the callback: the state is that between the two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self, TypeVar

EVERY_S = 0.1
"""Seconds between two calls."""

PIECE_BYTES = 32 * 2**20
"""Bytes of work between two readings of the clock, about ten milliseconds."""


@dataclass(frozen=True)
class ProgressReport:
    """The progress of a long operation.

    Attributes:
        what: The operation: ``"prefault"``, ``"recover"``, ``"check"``, ``"copy"`` (out of the
            buffer, the first part of a save), ``"sync"`` (to the disk, the second part) or
            ``"load"``. One call may perform several operations, one after the other or one for each
            buffer of an ensemble.
        done: The amount that is complete.
        total: The whole amount. ``done`` is equal to it in the last report only.
        unit: The unit of both: ``"bytes"`` or ``"items"``.
    """

    what: str
    done: int
    total: int
    unit: str = "bytes"

    @property
    def fraction(self) -> float:
        """The completed fraction of the work, between 0 and 1."""
        return self.done / self.total


Item = TypeVar("Item")
OnProgress = Callable[[ProgressReport], object]

_listener: ContextVar[OnProgress | None] = ContextVar("shmbuffer_on_progress", default=None)
_raised: ContextVar[BaseException | None] = ContextVar("shmbuffer_on_progress_raised", default=None)


@contextmanager
def report_to(on_progress: OnProgress | None) -> Iterator[None]:
    """Sends progress reports of the body to ``on_progress``; None keeps the outer callback."""
    if on_progress is None:
        yield
        return
    require_callable(on_progress)
    before = _listener.set(on_progress)
    try:
        yield
    finally:
        _listener.reset(before)
        _raised.set(None)


def is_from_callback(error: BaseException) -> bool:
    """True if ``on_progress`` raised this error, so that our error handling ignores it."""
    return error is _raised.get()


def require_callable(on_progress: object) -> None:
    """Raises TypeError if ``on_progress`` is neither None nor callable."""
    if on_progress is not None and not callable(on_progress):
        raise TypeError(
            f"on_progress must be a function of one ProgressReport, but is {on_progress!r};"
            " pass a function, or None"
        )


class Progress:
    """Reports the progress and the end of some work, by default to the callback of `report_to`."""

    def __init__(
        self, what: str, total: int, unit: str = "bytes", on_progress: OnProgress | None = None
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._on_progress = _listener.get() if on_progress is None else on_progress
        self._done = 0
        self._next_s = time.monotonic() + EVERY_S
        self.has_listener = (
            self._on_progress is not None and total > 0
        )  # whether there is a callback

    def advance(self, by: int) -> None:
        """Adds ``by`` to the completed amount, which never exceeds the total."""
        self._done = min(self._done + by, self._total)
        if (
            by
            and self.has_listener
            and self._done < self._total
            and time.monotonic() >= self._next_s
        ):
            self._report()
            self._next_s = time.monotonic() + EVERY_S

    def counted(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items unchanged, and counts each of them as one unit of work."""
        for item in items:
            self.advance(1)
            yield item

    def cut(self, count: int, nbytes: int, most: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields pieces of ``count`` items, as pairs of first item and number of items."""
        at_once = count if most is None else most
        if self.has_listener:
            at_once = min(at_once, max(1, PIECE_BYTES // max(1, nbytes)))
        for first in range(0, count, max(1, at_once)):
            yield first, min(at_once, count - first)

    def finish(self) -> None:
        """Reports that all of the work is complete."""
        self._done = self._total
        if self.has_listener:
            self._report()

    def _report(self) -> None:
        """Calls the callback, and remembers its exception."""
        if self._on_progress is None:
            return
        before = _listener.set(None)  # the callback's own work is not reported to it
        try:
            self._on_progress(ProgressReport(self._what, self._done, self._total, self._unit))
        except BaseException as error:
            _raised.set(error)
            raise
        finally:
            _listener.reset(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

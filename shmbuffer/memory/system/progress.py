"""Reports the progress of long operations to a callback, at most ten times a second.

    with report_to(on_progress):                      in the public call: check, recover, dumps, ...
        ...
        with Progress("copy", total) as progress:     in the function that does the work
            for first, count in progress.cut(slots, slot_bytes): ...; progress.advance(...)

The callback is stored in a context variable instead of being passed as an argument. Between the
public call and the work are components that the user may have written. Their methods follow TorchRL
and do not have this argument. A context variable also restricts the reports to work that is done in
the caller's thread.

Always true
  1. The callback is called between two steps of the work, while this process does not hold the
     mutex and has no open claim. An exception that the callback raises stops the work at this
     point, like an exception raised in a signal handler, and reaches the caller of the public
     method.
  2. The callback is called at most ten times a second while the work continues, and once more with
     done == total when the work is complete.
  3. Without a callback, the cost is one lookup of a context variable, and the work is not split
     into smaller chunks.
If the process dies in the callback: the buffer is in the state between two steps of the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self, TypeVar

EVERY_S = 0.1
"""Minimum number of seconds between two calls of the callback while the work continues."""

PIECE_BYTES = 32 * 2**20
"""Bytes that are processed between two readings of the clock: about ten milliseconds of work."""


@dataclass(frozen=True)
class ProgressReport:
    """The progress of a long operation.

    Attributes:
        what: The operation: ``"prefault"``, ``"recover"``, ``"check"``, ``"copy"``, ``"sync"`` or
            ``"load"``. A save is reported as two operations: "copy" copies the items out of the
            buffer, and "sync" syncs the copy to the disk. A call for an ensemble reports one
            operation for each of its buffers.
        done: The amount of work that is complete.
        total: The total amount of work. ``done`` equals ``total`` only in the last report.
        unit: The unit of ``done`` and ``total``: ``"bytes"`` or ``"items"``.
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
    """Reports the progress of all work in the ``with`` block to ``on_progress``.

    If ``on_progress`` is None, the callback of an enclosing `report_to` block stays in effect.
    """
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
    """True if the progress callback raised this error. Such errors reach the caller unchanged."""
    return error is _raised.get()


def require_callable(on_progress: object) -> None:
    """Raises TypeError if ``on_progress`` is neither None nor callable."""
    if on_progress is not None and not callable(on_progress):
        raise TypeError(
            f"on_progress must be a function or None, but is {on_progress!r}; the function is"
            " called with a ProgressReport"
        )


class Progress:
    """Tracks the progress of an operation and reports it to a callback.

    Args:
        what: Name of the operation, as in `ProgressReport`.
        total: Total amount of work.
        unit: Unit of ``total``: ``"bytes"`` or ``"items"``.
        on_progress: The callback. If None, uses the callback of the enclosing `report_to` block.
    """

    def __init__(
        self, what: str, total: int, unit: str = "bytes", on_progress: OnProgress | None = None
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._on_progress = _listener.get() if on_progress is None else on_progress
        self._done = 0
        self._next_s = time.monotonic() + EVERY_S
        # True if there is a callback and some work to report
        self.has_listener = self._on_progress is not None and total > 0

    def advance(self, by: int) -> None:
        """Adds ``by`` to the completed amount of work, which never exceeds the total."""
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
        """Splits ``count`` items into chunks, and yields the first index and size of each chunk.

        Without a callback there is only one chunk, unless ``most`` limits its size.

        Args:
            count: Number of items.
            nbytes: Bytes per item. A chunk has at most `PIECE_BYTES` bytes if there is a callback.
            most: Maximum number of items in a chunk, or None for no limit.
        """
        at_once = count if most is None else most
        if self.has_listener:
            at_once = min(at_once, max(1, PIECE_BYTES // max(1, nbytes)))
        for first in range(0, count, max(1, at_once)):
            yield first, min(at_once, count - first)

    def finish(self) -> None:
        """Reports that the work is complete."""
        self._done = self._total
        if self.has_listener:
            self._report()

    def _report(self) -> None:
        """Calls the callback, and stores an exception that it raises for `is_from_callback`."""
        if self._on_progress is None:
            return
        before = _listener.set(None)  # work that the callback itself does is not reported
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

"""Creates and maps pages before they are first used.

    first touch of a page   a fault: the kernel clears it (once, for all processes) and enters it
                            in the page table (once for each process); the first touch waits
    prefault                the same, piece by piece, from a thread that ends with the handle

Prefaulting belongs to one handle. It is not recorded, and handles received by pickle or through a
fork do not continue it. docs/memory.md gives the cost of a page, and the cases in which prefaulting
pays.

Always true
  1. No byte changes, so all processes may write meanwhile, and there is nothing to recover.
  2. Prefaulting begins when the files are complete and no lock is held.
  3. The thread refers to the maps, but not to the handle. It holds the interpreter lock only
     between two pieces.
If the process dies meanwhile: the buffer is complete, and some of its pages have been touched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmbuffer._native import _core
from shmbuffer.memory.system.filesystem import free_memory_bytes, space_error
from shmbuffer.memory.system.progress import OnProgress, Progress, require_callable

log = logging.getLogger("shmbuffer.memory")

MODES = ("off", "background", "full")

PIECE = 4 * 2**20
"""Bytes of one call: it takes some milliseconds, and covers whole huge pages."""


@dataclass(frozen=True)
class Prefault:
    """How a handle prefaults the pages of its buffer; ValueError or TypeError if invalid."""

    # ``"off"``, ``"background"`` (a thread creates and maps the pages), or ``"full"`` (the process
    # that creates or opens the buffer also waits for that thread)
    mode: str = "off"
    on_progress: OnProgress | None = None  # called in that thread

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"prefault must be 'off', 'background' or 'full', but is {self.mode!r}"
            )
        require_callable(self.on_progress)

    def __bool__(self) -> bool:
        return self.mode != "off"

    @property
    def waits(self) -> bool:
        """True if creating or opening the buffer waits until all pages are mapped."""
        return self.mode == "full"

    def require_memory(self, nbytes: int, where: str) -> None:
        """Raises SpaceError if pages that are not reserved do not fit into memory."""
        if nbytes > (free := free_memory_bytes()):
            what = f"{where}: prefault={self.mode!r} would bring all of it into memory"
            raise space_error(what, nbytes, free)

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefault, ()


OFF = Prefault()


class Populating:
    """A thread that creates and maps pages."""

    def __init__(
        self,
        # each with the number of bytes whose pages are created
        maps: Sequence[tuple[_core.Map, int]],
        *,
        # True if there is no disk below the maps, so that pages can be created by a write fault.
        # Pages of a disk are only read, because a write fault would make the kernel write all of
        # them back
        in_memory: bool,
        reserved: bool,  # the pages already have their memory
        prefault: Prefault,  # the settings, with the callback for progress
        where: str,  # for messages
    ) -> None:
        self._maps = maps
        self._in_memory = in_memory
        self._reserved = reserved
        self._prefault = prefault
        self._where = where
        self._wanted = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shmbuffer-prefault", daemon=True)

    def start(self) -> None:
        """Starts the thread. The constructor does not, because its caller could not stop it yet."""
        try:
            self._thread.start()
        except BaseException:  # such as an exception in a signal handler
            self.stop()
            raise

    def wait(self) -> None:
        """Waits until all pages are mapped or `stop` is called. A signal may end the wait."""
        try:
            if self._thread.is_alive():
                self._thread.join()
        except BaseException:
            self.stop()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """Stops the thread after its current piece, within milliseconds. Idempotent."""
        self._wanted = False
        # ``on_progress`` may close the handle, so this may run in the thread itself. A thread that
        # has not started finds nothing to do.
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Runs in the thread; logs an error, and keeps it for `wait`."""
        try:
            self._populate()
        except BaseException as error:
            if self._prefault.waits:
                self._failure = error
            # Log the text alone: a handler that stores log records would keep the maps alive
            # through the traceback.
            log.warning("%s: prefault has stopped: %s", self._where, str(error))
        finally:
            self._maps, self._prefault = (), OFF  # ``on_progress`` may refer to the handle

    def _populate(self) -> None:
        """Creates all pages, piece by piece."""
        total, done = sum(nbytes for _, nbytes in self._maps), 0
        if not self._reserved:
            self._prefault.require_memory(total, self._where)
        progress = Progress("prefault", total, on_progress=self._prefault.on_progress)
        for one, size in self._maps:
            for start in range(0, size, PIECE):
                if not self._wanted:
                    return
                nbytes = min(PIECE, size - start)
                try:
                    one.populate(start, nbytes, self._in_memory)
                except OSError as error:
                    what = f"{self._where}: prefault stopped after {done} bytes ({error})"
                    raise space_error(what, total, free_memory_bytes()) from error
                done += nbytes
                progress.advance(nbytes)
        progress.finish()

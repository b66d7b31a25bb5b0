"""Allocates and maps the pages of a buffer before they are first used.

    first touch of a page   page fault: the kernel clears the page (once for all processes) and
                            enters it in the page table (once per process); the caller waits
    prefault                the same work, chunk by chunk, in a thread that ends with the handle

Prefaulting is a setting of one handle. It is not stored in the buffer, and a handle that was
received by pickle or inherited through a fork does not prefault. docs/memory.md gives the cost of a
page and describes when prefaulting is worthwhile.

Always true
  1. No byte changes. All processes can write in the meantime, and there is nothing to recover.
  2. Prefaulting starts when the files are complete and the process holds no lock.
  3. The thread refers to the maps, but not to the handle. It holds the interpreter lock (GIL) only
     between two chunks.
If the process dies while it prefaults: the buffer is intact, and some of its pages are allocated.
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
"""Bytes that are populated per call: a few milliseconds of work, and a multiple of a huge page."""


@dataclass(frozen=True)
class Prefault:
    """The prefault setting of a handle.

    Raises:
        ValueError: ``mode`` is not one of `MODES`.
        TypeError: ``on_progress`` is neither None nor callable.
    """

    # "off", "background" (a thread allocates and maps the pages), or "full" (the call that creates
    # or opens the buffer also waits for this thread)
    mode: str = "off"
    on_progress: OnProgress | None = None  # called in the prefault thread

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
        """Raises SpaceError if ``nbytes`` bytes of pages do not fit into the free memory.

        Only needed for sparse files, whose pages have no memory yet.
        """
        if nbytes > (free := free_memory_bytes()):
            what = f"{where}: prefault={self.mode!r} would load the whole buffer into memory"
            raise space_error(what, nbytes, free)

    def __reduce__(self) -> tuple[Any, ...]:
        return Prefault, ()


OFF = Prefault()


class Populating:
    """A thread that allocates and maps the pages of a buffer."""

    def __init__(
        self,
        # pairs of a map and the number of its first bytes whose pages are populated
        maps: Sequence[tuple[_core.Map, int]],
        *,
        # True if the files are not on a disk. Their pages are then populated by write faults. Pages
        # of a file on a disk are only read, because the kernel would write back every page that had
        # a write fault.
        in_memory: bool,
        reserved: bool,  # True if memory for the pages is already reserved
        prefault: Prefault,  # the settings, with the progress callback
        where: str,  # path of the buffer, for messages
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
        """Starts the thread.

        The constructor does not start it, because the caller could not stop it if the constructor
        failed.
        """
        try:
            self._thread.start()
        except BaseException:  # such as an exception raised in a signal handler
            self.stop()
            raise

    def wait(self) -> None:
        """Waits until all pages are mapped or `stop` is called, and raises errors of the thread.

        If a signal handler raises an exception, the thread is stopped and the exception propagates.
        """
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
        """Stops the thread after its current chunk, within milliseconds. Idempotent."""
        self._wanted = False
        # `on_progress` may close the handle, so this method may run in the thread itself. If the
        # thread starts only after this call, it returns immediately.
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Populates the pages. Logs an error, and stores it for `wait` if the mode is "full"."""
        try:
            self._populate()
        except BaseException as error:
            if self._prefault.waits:
                self._failure = error
            # Only the text of the error is logged, because a log handler that stores its records
            # would keep the maps alive through the traceback.
            log.warning("%s: prefault has stopped: %s", self._where, str(error))
        finally:
            self._maps, self._prefault = (), OFF  # `on_progress` may refer to the handle

    def _populate(self) -> None:
        """Populates all pages in chunks of `PIECE` bytes, and reports the progress."""
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

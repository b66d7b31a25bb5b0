"""Pages that are there before they are needed.

    first touch of a page   a fault: the kernel clears it (once, for all processes) and enters it
                            in the page table (once for each process); the first touch waits
    prefault                the same, piece by piece, from a thread that ends with the handle

It is the affair of one handle: nothing of it is recorded, and who gets the handle by pickling or
through a fork does not go on with it. docs/memory.md has what a page costs, and where it pays.

Always true
  1. No byte changes, so everybody may write meanwhile, and there is nothing to recover.
  2. It begins when the files are complete and no lock is held.
  3. The thread refers to the maps and not to the handle, and it holds the interpreter lock between
     two pieces only.
If a process dies in it: a whole buffer, some pages of which have been touched.
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
"""Bytes a call: some milliseconds, and whole huge pages."""


@dataclass(frozen=True)
class Prefault:
    """How a handle prefaults the pages of its buffer; ValueError or TypeError if invalid."""

    # ``"off"``: nothing. ``"background"``: a thread makes and maps them. ``"full"``: the same, and
    # the process that creates or opens the buffer waits for it
    mode: str = "off"
    on_progress: OnProgress | None = None  # told of it, in that thread

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"prefault is 'off', 'background' or 'full', not {self.mode!r}")
        require_callable(self.on_progress)

    def __bool__(self) -> bool:
        return self.mode != "off"

    @property
    def waits(self) -> bool:
        """True if who creates or opens the buffer waits."""
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
    """A thread that makes and maps pages."""

    def __init__(
        self,
        maps: Sequence[tuple[_core.Map, int]],  # each with the bytes of it whose pages are made
        *,
        # no disk is below them, so pages are made to be written. Those of a disk are only read:
        # made to be written they would all have to be written back
        in_memory: bool,
        reserved: bool,  # they have their memory already
        prefault: Prefault,  # says who hears of it
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
        """Begins. Not in the constructor: who can stop it has to be known before."""
        try:
            self._thread.start()
        except BaseException:  # of a signal's handler, for one
            self.stop()
            raise

    def wait(self) -> None:
        """Returns when all of it is there, or it was stopped; a signal handler may end the wait."""
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
        """Ends it at the next piece, some milliseconds from now. Idempotent."""
        self._wanted = False
        # ``on_progress`` may close the handle, and a thread that has not begun finds nothing to do.
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._populate()
        except BaseException as error:
            if self._prefault.waits:
                self._failure = error
            # Its words alone: who keeps the record would keep the maps by way of the traceback.
            log.warning("%s: prefault has stopped: %s", self._where, str(error))
        finally:
            self._maps, self._prefault = (), OFF  # ``on_progress`` may refer to the handle

    def _populate(self) -> None:
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

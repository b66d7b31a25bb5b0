"""Scenarios: a prepared buffer, one action on it, and the invariants after the action.

There are two ends, because a process that got an error may continue or not:

    stays   the fault is gone; the same process repeats the action, which succeeds
    dies    the process ends at once; a new one opens the directory and finds it intact
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from shmbuffer.memory import Engine, Ring
from tests.crash.harness import (
    read_all,
    require_sound,
    require_usable,
    schema,
    settings,
    write,
)
from tests.faults.audit import files_below

#: Numbers of the items that `filled` leaves in a ring of eight slots.
ITEMS = frozenset(range(3, 11))
NOTHING: frozenset[int] = frozenset()
#: A wait for the lock of another process would be a wait for a persistent fault.
AT_ONCE = 0.0


class Scenario:
    """An action on a buffer.

    Attributes:
        folder: the directory for everything, which is empty before `prepare`.
        kind: rows or records.
        path: the path of the buffer.
        possible: sets of items that a new process may find.
        holds: part of the name of a file that an open handle has open now.
        unheard: part of the path of files whose faults are logged instead of raised.
        until_its_end: whether a new process also checks the buffer after one that stayed.
        kept: objects that `stop` closes.
    """

    possible: tuple[frozenset[int], ...] = (ITEMS,)
    holds: str | None = None
    unheard: str | None = None
    until_its_end = False

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.path = folder / "buffer"
        self.kept = ExitStack()
        (folder / "tmp").mkdir()
        tempfile.tempdir = str(folder / "tmp")

    def prepare(self) -> None:
        """Prepares the buffer before the fault."""

    def act(self) -> None:
        """Performs the action that meets the fault."""
        raise NotImplementedError

    def again(self) -> None:
        """Repeats the action without a fault. It succeeds, and all clients can go on."""
        self.act()

    def is_done(self) -> bool:
        """True if the action is complete. It is checked if the fault raised no error."""
        return False

    def stop(self) -> None:
        """Closes and removes everything in the process that stays."""
        self.kept.close()
        self.remove()

    def look_afterwards(self) -> None:
        """Checks the directory in a new process after the one that met the fault has ended."""
        with self.open() as engine:
            self.require_whole(engine)
        self.remove()

    # Parts of scenarios

    def open(self, **options: object) -> Engine:
        return Engine.open(self.path, settings(self.kind), timeout=AT_ONCE, **options)  # type: ignore[arg-type]

    def keep(self, engine: Engine) -> Engine:
        return self.kept.enter_context(engine)

    def ring(self, engine: Engine) -> Ring:
        return engine.define(schema(self.kind), timeout=AT_ONCE)

    def filled(self) -> Engine:
        """Creates a buffer with `ITEMS`."""
        engine = self.open()
        write(self.ring(engine), range(11))
        return engine

    def require_whole(self, engine: Engine) -> None:
        """Checks that all items are present and correct, and that the buffer can be used."""
        ring = self.ring(engine)
        assert frozenset(read_all(ring).values()) in self.possible
        require_sound(engine)
        require_usable(ring, 900)
        require_sound(engine)

    def remove(self) -> None:
        """Removes the buffer. No file of the library is left, whatever has happened before."""
        with self.open() as engine:
            engine.cleanup(timeout=AT_ONCE)
        left = [name for name in files_below(self.folder) if name not in ("buffer/", "tmp/")]
        assert not left, f"these were left: {left}"


def require_items(engine: Engine, items: frozenset[int]) -> None:
    assert engine.ring() is not None
    assert frozenset(read_all(engine.ring()).values()) == items

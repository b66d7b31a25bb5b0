"""What a scenario is: something is there, one thing is done to it, and what has to hold after that.

Two ends, because a process that heard an error may stay or go:

    stays   the fault is gone; the same thing is done again in the same process, and succeeds
    dies    the process ends where it stands; a fresh one opens the directory and finds it whole
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

#: What `filled` leaves in a ring of eight slots.
ITEMS = frozenset(range(3, 11))
NOTHING: frozenset[int] = frozenset()
#: A wait for somebody else's lock would be a wait for a fault that goes on.
AT_ONCE = 0.0


class Scenario:
    """One thing that is done to a buffer.

    Attributes:
        folder: everything lies in here; it is empty before `prepare`.
        kind: rows or records.
        path: of the buffer.
        possible: sets of items that a fresh process may find.
        holds: part of the name of a file that a handle which lives on has open by now.
        unheard: part of the path of files whose faults are logged, and not raised.
        until_its_end: a fresh process looks also after one that stayed.
        kept: what `stop` closes.
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
        """What is there before the fault."""

    def act(self) -> None:
        """What meets the fault."""
        raise NotImplementedError

    def again(self) -> None:
        """The same without one: it succeeds, and everybody can go on."""
        self.act()

    def is_done(self) -> bool:
        """Whether all is as if there had been no fault; asked where nobody heard of one."""
        return False

    def stop(self) -> None:
        """Leave and remove everything in the process that stays."""
        self.kept.close()
        self.remove()

    def look_afterwards(self) -> None:
        """What a fresh process finds when the one that met the fault has ended."""
        with self.open() as engine:
            self.require_whole(engine)
        self.remove()

    # What scenarios are made of.

    def open(self, **options: object) -> Engine:
        return Engine.open(self.path, settings(self.kind), timeout=AT_ONCE, **options)  # type: ignore[arg-type]

    def keep(self, engine: Engine) -> Engine:
        return self.kept.enter_context(engine)

    def ring(self, engine: Engine) -> Ring:
        return engine.define(schema(self.kind), timeout=AT_ONCE)

    def filled(self) -> Engine:
        """A buffer with `ITEMS`."""
        engine = self.open()
        write(self.ring(engine), range(11))
        return engine

    def require_whole(self, engine: Engine) -> None:
        """Nothing is missing, nothing is wrong, and it can be used."""
        ring = self.ring(engine)
        assert frozenset(read_all(ring).values()) in self.possible
        require_sound(engine)
        require_usable(ring, 900)
        require_sound(engine)

    def remove(self) -> None:
        """Remove the buffer: no file of ours is left, whatever has happened before."""
        with self.open() as engine:
            engine.cleanup(timeout=AT_ONCE)
        left = [name for name in files_below(self.folder) if name not in ("buffer/", "tmp/")]
        assert not left, f"these were left: {left}"


def require_items(engine: Engine, items: frozenset[int]) -> None:
    assert engine.ring() is not None
    assert frozenset(read_all(engine.ring()).values()) == items

"""Faults in the files of reservations, of consumers, and of pieces of an unfinished rollout."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from shmbuffer import ShmBufferError
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.clients.partials import PartialFile, read_partial
from shmbuffer.memory.directory import growth
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import schema, settings, write
from tests.faults.scenario import AT_ONCE, Scenario

NUMBER = 7  # number of a reservation


class Hold(Scenario):
    """The ledger grows for the first reservation and consumer, and other clients read it."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        ring = self.ring(self.engine)
        name = ring.reservations.reserve(1)
        try:
            ring.consumers.open("learner")
            found = inspect(self.path)
        finally:
            ring.reservations.give_back(name)
        assert [one["name"] for one in found["consumers"]] == ["learner"]
        assert len(found["reservations"]) == 1

    def again(self) -> None:
        self.ring(self.engine).consumers.remove("learner")
        self.act()
        self.ring(self.engine).consumers.remove("learner")
        self.require_whole(self.engine)

    def look_afterwards(self) -> None:
        with self.open() as engine:
            self.ring(engine).consumers.remove("learner")
        super().look_afterwards()


class Grow(Scenario):
    """A write allocates space for its slots in a buffer that grows in steps."""

    possible = (frozenset(range(2)), frozenset(range(5)))

    def prepare(self) -> None:
        for name, value in (("STEP_BYTES", 2 * sum(schema().bytes_of_slots(1))), ("TIMEOUT_S", 0)):
            self.kept.callback(setattr, growth, name, getattr(growth, name))
            setattr(growth, name, value)
        steps = replace(settings("rows"), reserve="steps")
        engine = Engine.open(self.path, steps, timeout=AT_ONCE)
        self.engine = self.keep(engine)
        write(engine.define(schema(), timeout=AT_ONCE), range(2))

    def act(self) -> None:
        write(self.ring(self.engine), range(2, 5))

    def again(self) -> None:
        self.act()
        self.require_whole(self.engine)

    def ring(self, engine: Engine) -> Ring:
        return engine.define(schema(), timeout=AT_ONCE)


class Pieces(Scenario):
    """Pieces of a rollout are kept in a file, and another process continues the rollout."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.added: list[bytes] = []

    def act(self) -> None:
        directory = self.engine.seat.backing.directory
        with PartialFile.make(directory, NUMBER, 3, 0, None) as partial:
            self.append(partial, b"first" * 200)
            self.append(partial, b"second" * 100)
        found = read_partial(directory, NUMBER)
        assert found is not None
        assert (found.pieces, found.items) == (2, 2)
        taken = PartialFile.take(directory, NUMBER)
        assert taken is not None
        with taken:
            assert taken.summarize() is not None
            taken.cut()
            self.append(taken, b"third")
            assert self.bodies(taken) == self.added
            taken.remove()

    def append(self, partial: PartialFile, body: bytes) -> None:
        """Appends a piece. A failed attempt changes nothing, and the next one succeeds."""
        try:
            partial.append(body, 1)
        except BaseException:
            with suppress(OSError, ShmBufferError):
                partial.append(b"another" * 20, 1)
                self.added.append(b"another" * 20)
            raise
        self.added.append(body)

    def bodies(self, partial: PartialFile) -> list[bytes]:
        return [body for _, body in partial.read()]

    def again(self) -> None:
        taken = PartialFile.take(self.engine.seat.backing.directory, NUMBER)
        if taken is not None:
            with taken:
                assert self.bodies(taken) == self.added
                taken.remove()
        self.added.clear()
        self.act()
        self.require_whole(self.engine)

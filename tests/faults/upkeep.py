"""Faults while a buffer is repaired, inspected, changed and removed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from shmbuffer import recover
from shmbuffer.memory import Engine
from shmbuffer.memory.directory import cleanup
from shmbuffer.memory.directory.cleanup import temporary_directory
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.directory.removal import sweep
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.check import check
from shmbuffer.memory.upkeep.history import Event, EventKind
from shmbuffer.memory.upkeep.history_writer import HistoryWriter
from shmbuffer.memory.upkeep.inspect import inspect
from tests.crash.harness import (
    dies,
    ended,
    fork,
    read_all,
    schema,
    settings,
    write,
)
from tests.faults.scenario import AT_ONCE, ITEMS, NOTHING, Scenario, require_items
from tests.memory.carried import newest, number_in, publish


class Recover(Scenario):
    """All processes died, one of them in the middle of a write."""

    possible = (ITEMS - {3, 4, 5},)
    unheard = "/.shmbuffer/history"

    def prepare(self) -> None:
        engine = self.filled()
        assert dies(
            self.path, "write.copy", lambda victim: write(victim.ring(), range(20, 23)) and None
        )  # type: ignore[arg-type, func-returns-value]
        ended(fork(lambda: os.kill(os.getpid(), signal.SIGKILL)))
        engine.close()

    def act(self) -> None:
        recover(self.path, timeout=AT_ONCE)

    def again(self) -> None:
        self.act()
        self.require_whole(self.keep(self.open()))


class RecoverCopy(Scenario):
    """The directory is a copy that was made while it was in use: every item needs its checksum."""

    def prepare(self) -> None:
        original = self.folder / "original"
        with Engine.open(original, settings(self.kind)) as engine:
            write(engine.define(schema(self.kind)), range(11))
            shutil.copytree(original, self.path)
            engine.cleanup()

    def act(self) -> None:
        recover(self.path, timeout=AT_ONCE)

    def again(self) -> None:
        self.act()
        self.require_whole(self.keep(self.open()))


class Flush(Scenario):
    """The buffer is flushed to disk."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        self.engine.flush(timeout=AT_ONCE)

    def again(self) -> None:
        self.engine.close()
        self.engine = self.keep(self.open())
        self.act()
        self.require_whole(self.engine)


class Dictionary(Scenario):
    """A dictionary for records is published, and other clients read it."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.other = self.keep(self.open())

    def act(self) -> None:
        assert (
            self.engine.seat.publish_dictionary(b"words" * 100, timeout=AT_ONCE) == b"words" * 100
        )
        assert self.other.seat.dictionary() == b"words" * 100

    def again(self) -> None:
        self.act()
        self.require_whole(self.other)

    def look_afterwards(self) -> None:
        with self.open() as engine:
            assert engine.seat.dictionary() in (None, b"words" * 100)
        super().look_afterwards()


class PublishFirst(Scenario):
    """The first weights are published, and another client reads them."""

    holds = "/.shmbuffer/weights"

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.other = self.keep(self.open())

    def act(self) -> None:
        publish(self.engine, 7, timeout=AT_ONCE)
        assert number_in(newest(self.other)) == 7

    def is_done(self) -> bool:
        return number_in(newest(self.other)) == 7

    def again(self) -> None:
        self.act()
        self.require_whole(self.other)

    def look_afterwards(self) -> None:
        with self.open() as engine:
            assert newest(engine) is None or number_in(newest(engine)) == 7
            publish(engine, 8, timeout=AT_ONCE)
            assert number_in(newest(engine)) == 8
        super().look_afterwards()


class Publish(PublishFirst):
    """Weights are published that replace others."""

    def prepare(self) -> None:
        super().prepare()
        publish(self.engine, 7)


class ChangeSettings(Scenario):
    """The recorded settings of a buffer change."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        self.engine.update_settings(timeout=AT_ONCE, extra={"name": "value"})

    def again(self) -> None:
        self.act()
        assert self.engine.settings.extra == {"name": "value"}
        self.require_whole(self.engine)


class Remove(Scenario):
    """A buffer is removed that another client has open."""

    possible = (ITEMS, NOTHING)

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.other = self.keep(self.open())

    def act(self) -> None:
        self.engine.cleanup(timeout=AT_ONCE)

    def again(self) -> None:
        require_items(self.other, ITEMS)  # its maps stay
        self.kept.close()
        self.require_whole(self.keep(self.open()))


class Overwrite(Scenario):
    """A new buffer replaces one that is not in use."""

    possible = (ITEMS, NOTHING)

    def prepare(self) -> None:
        self.filled().close()

    def act(self) -> None:
        self.engine = self.keep(self.open(existing="overwrite"))

    def again(self) -> None:
        self.act()
        assert not read_all(self.ring(self.engine))
        self.require_whole(self.engine)


class Temporary(Scenario):
    """A temporary directory is created, filled, and removed by its owner."""

    unheard = "/tmp"
    until_its_end = True

    def act(self) -> None:
        path = temporary_directory()
        with Engine.open(path, settings(self.kind), temporary=True, timeout=AT_ONCE) as engine:
            write(self.ring(engine), range(11))
            require_items(engine, ITEMS)
            assert engine.cleanup()

    def stop(self) -> None:
        """Removes the directory as its owner does at exit."""
        self.kept.close()
        cleanup._remove_all()

    def look_afterwards(self) -> None:
        """Starts a process, which removes what a dead owner left."""
        sweep(self.path)
        assert not list(Path(self.folder, "tmp").iterdir())


class Sweep(Temporary):
    """The next start removes what a killed owner left; an error is logged."""

    unheard = ""

    def prepare(self) -> None:
        def owner() -> None:
            path = temporary_directory()
            engine = Engine.open(path, settings(self.kind), temporary=True)
            write(self.ring(engine), range(11))
            os.kill(os.getpid(), signal.SIGKILL)

        assert ended(fork(owner)) == -signal.SIGKILL

    def act(self) -> None:
        sweep(self.path)


class TakeOver(Sweep):
    """A client takes over the temporary directory of an owner that was killed."""

    unheard = None
    holds = "/tmp/"

    def prepare(self) -> None:
        super().prepare()
        (self.path,) = Path(self.folder, "tmp").iterdir()

    def act(self) -> None:
        self.engine = self.keep(Engine.open(self.path, None, timeout=AT_ONCE))
        # This fails if the death of the owner cannot be proved.
        self.engine.take_ownership(timeout=AT_ONCE)

    def is_done(self) -> bool:
        """True if it is done. A recovery that cannot note the dead in the history logs this."""
        require_items(self.engine, ITEMS)
        return self.engine.superblock.owner_pid == os.getpid()

    def again(self) -> None:
        self.kept.close()
        self.act()
        self.require_whole(self.engine)


class Check(Scenario):
    """A living and then a dead buffer are checked; a damaged history is a note in the report."""

    unheard = "/.shmbuffer/history"

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        report = check(self.path, timeout=AT_ONCE)
        assert report.alive
        assert report.ok, report.problems

    def again(self) -> None:
        self.act()
        self.require_whole(self.engine)


class CheckDead(Check):
    """A buffer that is not in use is checked."""

    def prepare(self) -> None:
        self.filled().close()

    def act(self) -> None:
        report = check(self.path, timeout=AT_ONCE)
        assert not report.alive
        assert report.ok, report.problems

    def again(self) -> None:
        self.act()
        self.require_whole(self.keep(self.open()))


class Inspect(Check):
    """A buffer is inspected without a lock."""

    def act(self) -> None:
        found = inspect(self.path)
        assert found["needs_recovery"] is None
        assert found["schema"] is not None


def record(path: Path, engine: Engine) -> None:
    """Adds a record of the present state and an event to the history of a buffer."""
    with Directory.open(path) as directory:
        files = Files(directory)
        with files.lock(AT_ONCE):
            recorder = HistoryWriter.open(files, engine.superblock.uuid)
    try:
        recorder.record(engine.glance(), engine.seat.incarnation)
        recorder.note(Event(EventKind.JOINED), engine.seat.incarnation)
    finally:
        recorder.close()


class Record(Scenario):
    """The history of a buffer is continued."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.act()

    def act(self) -> None:
        record(self.path, self.engine)

    def again(self) -> None:
        self.act()
        with Directory.open(self.path) as directory:
            assert len(history.read(directory).fine) >= 1
        self.require_whole(self.engine)


class RecordFirst(Record):
    """The history of a buffer is started."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

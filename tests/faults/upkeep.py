"""Mending a buffer, looking at it, changing what is recorded of it, removing it."""

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
    """Everybody died, one of them in the middle of a write."""

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
    """A copy of a directory that was in use: every item needs its checksum."""

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
    """The durability barrier."""

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
    """What records are compressed with is published, and read by others."""

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
    """The first weights are published, and read by another client."""

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
    """Weights are published where there were others."""

    def prepare(self) -> None:
        super().prepare()
        publish(self.engine, 7)


class ChangeSettings(Scenario):
    """What is recorded of a buffer changes."""

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
    """A new buffer in the place of one that nobody uses."""

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
    """A directory of our own: made, filled, removed by its owner."""

    unheard = "/tmp"
    until_its_end = True

    def act(self) -> None:
        path = temporary_directory()
        with Engine.open(path, settings(self.kind), temporary=True, timeout=AT_ONCE) as engine:
            write(self.ring(engine), range(11))
            require_items(engine, ITEMS)
            assert engine.cleanup()

    def stop(self) -> None:
        """What its owner does at exit."""
        self.kept.close()
        cleanup._remove_all()

    def look_afterwards(self) -> None:
        """The next start of any process sweeps what a dead owner left."""
        sweep(self.path)
        assert not list(Path(self.folder, "tmp").iterdir())


class Sweep(Temporary):
    """What a killed owner left is removed by the next start; an error is logged."""

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
        self.engine.take_ownership(timeout=AT_ONCE)  # not from one whose death cannot be proved

    def is_done(self) -> bool:
        """What keeps a recovery from noting the dead in the history is logged, and it goes on."""
        require_items(self.engine, ITEMS)
        return self.engine.superblock.owner_pid == os.getpid()

    def again(self) -> None:
        self.kept.close()
        self.act()
        self.require_whole(self.engine)


class Check(Scenario):
    """A verdict on a living buffer, and then on a dead one; a bad history is a note in it."""

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
    """The same of a buffer that nobody uses."""

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
    """A look that locks nothing."""

    def act(self) -> None:
        found = inspect(self.path)
        assert found["needs_recovery"] is None
        assert found["schema"] is not None


def record(path: Path, engine: Engine) -> None:
    """A record of this moment and an event, in the history of a buffer."""
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
    """The history of a buffer is gone on with."""

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
    """The history of a buffer is begun."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

"""Faults in the files of a coordinator, of its processes, and of commands that inspect a buffer."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from shmbuffer.memory import Engine
from shmbuffer.memory.attaching import attach_engine
from shmbuffer.memory.clients import roster
from shmbuffer.memory.directory.anonymous import WHERE
from shmbuffer.memory.engine import _adopt_memory
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.prefault import OFF
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.service.buffer_config import BufferConfig
from shmbuffer.service.run_directory import RunDirectory
from shmbuffer.service.stopping import is_being_stopped, stop
from shmbuffer.watch.buffer_state import read_state
from tests.crash.harness import settings, write
from tests.faults.scenario import AT_ONCE, ITEMS, Scenario, require_items
from tests.faults.upkeep import Check, Recover, record

WORDS = roster.ExitRecord(3, "somewhere", "OSError: no")
DEAD = roster.Dead("worker-4", 3, "OSError: no")


class Lead(Scenario):
    """A coordinator starts and leaves. The buffer stays."""

    def prepare(self) -> None:
        self.filled().close()

    def act(self) -> None:
        with ExitStack() as undo:
            run_directory = RunDirectory(
                self.path,
                BufferConfig(),
                existing="recover",
                auto_cleanup=False,
                limiter=None,
                timeout=AT_ONCE,
                prefault=OFF,
            )
            undo.callback(run_directory.abandon)
            run_directory.begin()
            undo.pop_all()
        run_directory.leave()
        run_directory.engine.close()

    def again(self) -> None:
        self.act()
        self.require_whole(self.keep(self.open()))


class Spawn(Scenario):
    """A process is announced, identifies itself, is found, reports its end, and is forgotten."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        file = roster.create_file(self.path)
        try:
            assert roster.record_start(self.path, file, "worker", 4, 0.0)
            (found,) = roster.find_living(self.path)
            assert (found.name, found.index, found.identity.pid) == ("worker", 4, os.getpid())
            roster.record_exit(self.path, file, WORDS)
        finally:
            roster._alive.close()
        assert roster.read_exit(self.path, file) == WORDS
        file = roster.record_death(self.path, file, DEAD)
        with Directory.open(self.path) as directory:
            assert roster.read_roster(directory, ()).dead == (DEAD,)
        roster.find_living(self.path)
        roster.remove_file(self.path, file)

    def is_done(self) -> bool:
        assert roster.find_living(self.path) == []
        with Directory.open(self.path) as directory:
            return not directory.exists(layout.SPAWNED) or not directory.listdir(layout.SPAWNED)

    def again(self) -> None:
        assert self.is_done()
        self.act()
        self.require_whole(self.engine)

    def look_afterwards(self) -> None:
        assert roster.find_living(self.path) == []
        super().look_afterwards()


class Stop(Scenario):
    """All other clients of the buffer are stopped."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        assert stop(self.path, grace_s=0.0) == []
        assert not is_being_stopped(self.path)

    def again(self) -> None:
        self.act()
        self.require_whole(self.engine)


class Wait(Scenario):
    """A client waits for a buffer that exists."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())

    def act(self) -> None:
        self.keep(attach_engine(self.path, AT_ONCE, None, OFF))

    def again(self) -> None:
        self.act()
        self.require_whole(self.engine)


class Look(Check):
    """The state, the items and the history of a buffer are displayed."""

    def prepare(self) -> None:
        super().prepare()
        record(self.path, self.engine)

    def act(self) -> None:
        found = read_state(str(self.path), None)
        assert found.item_stats is not None
        assert len(found.item_stats.ages) == len(ITEMS)


class RecoverRecorded(Recover):
    """A buffer with a history is recovered, and the deaths are noted in the history."""

    def prepare(self) -> None:
        with self.filled() as engine:
            record(self.path, engine)
        super().prepare()

    def again(self) -> None:
        super().again()
        with Directory.open(self.path) as directory:
            assert len(history.read(directory).fine) == 1


class AnonymousShared(Scenario):
    """Another process created anonymous memory, defined the schema and reserved space."""

    def prepare(self) -> None:
        self.engine = self.keep(Engine.anonymous(replace(settings(self.kind))))
        write(self.ring(self.engine), range(11))

    def act(self) -> None:
        fd = self.engine.seat.backing.file.fd
        with explain_errors(Path(WHERE)):  # a spawned process has this block as well
            passed = os.dup(fd)
        with _adopt_memory(SimpleNamespace(detach=lambda: passed), "client") as other:
            require_items(other, ITEMS)
            ring = self.ring(other)
            ring.reservations.give_back(ring.reservations.reserve(1))

    def again(self) -> None:
        self.act()
        require_items(self.engine, ITEMS)

    def stop(self) -> None:
        self.kept.close()

    def look_afterwards(self) -> None:
        assert not self.path.exists()

"""Faults while a buffer is created, joined, used and left."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import (
    ended,
    fork,
    read_all,
    require_sound,
    require_usable,
    sample,
    schema,
    settings,
    write,
)
from tests.faults.scenario import AT_ONCE, ITEMS, NOTHING, Scenario, require_items


class Create(Scenario):
    """A buffer is created in a directory."""

    possible = (NOTHING,)

    def act(self) -> None:
        self.engine = self.keep(self.open())

    def again(self) -> None:
        self.act()
        self.require_whole(self.engine)


class Define(Scenario):
    """The first write defines the schema, so every file is created."""

    possible = (NOTHING,)

    def prepare(self) -> None:
        self.engine = self.keep(self.open())
        self.other = self.keep(self.open())

    def act(self) -> None:
        self.ring(self.engine)

    def again(self) -> None:
        self.act()
        self.require_whole(self.engine)
        require_sound(self.other)


class Undefine(Scenario):
    """An emptied buffer forgets its schema, which the next write defines again."""

    possible = (NOTHING,)

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.ring(self.engine).empty()

    def act(self) -> None:
        assert self.engine.undefine()
        assert self.engine.ring() is None

    def again(self) -> None:
        assert self.engine.undefine() or self.engine.ring() is None
        self.require_whole(self.engine)


class DefineAndDie(Define):
    """Defines a schema; the next attempt is killed when the first files exist."""

    def again(self) -> None:
        def victim() -> None:
            with self.open() as engine:
                _core.arm("define.listed")
                self.ring(engine)

        self.kept.close()
        with self.open() as engine:
            defined = engine.ring() is not None  # the fault came after the definition
        assert ended(fork(victim)) == (0 if defined else -signal.SIGKILL)
        self.require_whole(self.keep(self.open()))


class Adopt(Define):
    """Leaf files of an ordinary tensordict directory are adopted."""

    def prepare(self) -> None:
        self.filled().close()
        shutil.rmtree(self.path / ".shmbuffer")
        self.engine = self.keep(self.open(existing="adopt"))

    def again(self) -> None:
        self.require_leaves()
        self.act()
        self.require_whole(self.engine)

    def look_afterwards(self) -> None:
        self.require_leaves()
        with self.open(existing="adopt") as engine:
            self.require_whole(engine)
        self.remove()

    def require_leaves(self) -> None:
        """Checks the adopted leaves, which are user data and must not change."""
        leaves = [leaf.file for leaf in schema("rows").leaves]
        assert all((self.path / leaf).stat().st_size for leaf in leaves)

    def remove(self) -> None:
        shutil.rmtree(self.path)


class Attach(Scenario):
    """A second client joins a buffer in use."""

    def prepare(self) -> None:
        self.first = self.keep(self.filled())

    def act(self) -> None:
        self.second = self.keep(Engine.open(self.path, None, timeout=AT_ONCE))
        assert self.second.report is None, "a buffer in use was recovered"
        assert self.second.ring() is not None

    def again(self) -> None:
        require_items(self.first, ITEMS)
        require_usable(self.ring(self.first), 700)
        self.act()
        require_sound(self.second)
        require_usable(self.ring(self.second), 800)
        require_sound(self.first)


class Meet(Scenario):
    """A client that joined before there was a schema maps the files that another one created."""

    def prepare(self) -> None:
        self.early = self.keep(self.open())
        self.builder = self.keep(self.filled())

    def act(self) -> None:
        assert self.early.ring() is not None

    def again(self) -> None:
        self.act()
        require_items(self.early, ITEMS)
        self.require_whole(self.builder)


class Close(Scenario):
    """A client leaves while another one is at work."""

    def prepare(self) -> None:
        self.engine = self.keep(self.filled())
        self.other = self.keep(self.open())

    def act(self) -> None:
        self.other.close()

    def again(self) -> None:
        self.act()
        assert len(self.engine.clients()) == 1
        self.require_whole(self.engine)


class Use(Scenario):
    """A buffer is used without opening a file, while any allocation may fail."""

    possible = (ITEMS, ITEMS - {3, 4, 5} | {600, 601, 602})

    def prepare(self) -> None:
        self.engine = self.keep(self.open())
        self.ring(self.engine)
        self.other = self.keep(self.open())
        write(self.ring(self.other), range(11))

    def act(self) -> None:
        ring = self.ring(self.engine)
        write(ring, [600, 601, 602])
        sample(ring, 64)
        index = np.arange(8)
        ring.update(index, np.linspace(1.0, 2.0, 8))

    def again(self) -> None:
        require_sound(self.other)
        assert frozenset(read_all(self.ring(self.other)).values()) in self.possible
        self.act()
        require_sound(self.engine)
        require_usable(self.ring(self.other), 900)


class UseAfterFork(Scenario):
    """The child of a fork writes with the handle that it inherited."""

    possible = (ITEMS, ITEMS - {3} | {500})
    holds = "/procs/"

    def prepare(self) -> None:
        self.engine = self.filled()
        child = os.fork()
        if child:  # the child continues the scenario
            os._exit(abs(ended(child)))

    def act(self) -> None:
        write(self.ring(self.engine), [500])

    def again(self) -> None:
        self.act()
        require_sound(self.engine)
        require_usable(self.ring(self.engine), 900)

    def stop(self) -> None:
        self.engine.close()
        super().stop()


class Anonymous(Scenario):
    """A buffer is created in anonymous memory."""

    def act(self) -> None:
        with Engine.anonymous(replace(settings(self.kind))) as engine:
            write(self.ring(engine), range(11))
            require_items(engine, ITEMS)

    def look_afterwards(self) -> None:
        assert not self.path.exists()

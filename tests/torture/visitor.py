"""A process that is interrupted while it uses the core, in calls that wait, lock or write."""

from __future__ import annotations

from pathlib import Path

from shmbuffer import recover
from shmbuffer.memory import Engine
from tests.torture import items
from tests.torture.arena import Actor
from tests.torture.items import LIVES
from tests.torture.mixed import drawn
from tests.torture.plan import Plan
from tests.torture.roles import learn_once, look, read, write, write_once

VERBS = {
    "write": 30.0,
    "learn": 20.0,
    "flush": 6.0,
    "check": 3.0,
    "reap": 6.0,
    "recover": 4.0,
    "close": 15.0,
    "first write": 6.0,
}


class CoreVisitor:
    """A client that joins the buffer and leaves it again.

    Args:
        actor: the account of the process.
        path: the directory that all processes share. The client creates another one beside it.
        plan: the plan of the round.
    """

    def __init__(self, actor: Actor, path: Path, plan: Plan) -> None:
        self.actor = actor
        self.path = path
        self.plan = plan
        self._own = path.with_name(f"of-{actor.who // LIVES}")
        self._engine: Engine | None = None
        self._number = 0

    def engine(self) -> Engine | None:
        return self._engine

    def drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def step(self) -> None:
        if self._engine is None:
            self._engine = Engine.open(self.path, None)
        engine, ring = self._engine, self._engine.ring()
        assert ring is not None
        verb = drawn(self.actor.rng, VERBS)
        if verb in ("write", "learn"):
            once = write_once if verb == "write" else learn_once
            before = self._number
            self._number += self.plan.batch + 16  # after any interrupt, no number is used twice
            once(self.actor, ring, self.plan, before)
            look(self.actor, engine, ring)
        elif verb == "flush":
            engine.flush()
        elif verb == "check":
            assert engine.check().ok
        elif verb == "reap":
            engine.seat.reap_dead()
        elif verb == "recover":
            recover(self.path)
        elif verb == "close":
            self.drop()
        else:
            self._write_first()

    def _write_first(self) -> None:
        """Creates a buffer, or continues one that an earlier life has begun, and removes it."""
        with Engine.open(self._own, self.plan.settings) as engine:
            ring = engine.define(self.plan.schema)
            write(ring, items.keys_of(self.actor.who, 0, 1), self.plan)
            assert read(ring, self.plan)
            engine.cleanup()

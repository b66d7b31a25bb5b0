"""A process that is interrupted while it uses the whole library, including saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shmbuffer import attach
from shmbuffer.memory import Engine
from tests.torture.arena import Actor
from tests.torture.full_roles import collect_once, learn_once, look, made, read
from tests.torture.items import LIVES
from tests.torture.mixed import drawn

VERBS = {
    "extend": 30.0,
    "learn": 20.0,
    "flush": 6.0,
    "dumps": 12.0,
    "loads": 8.0,
    "close": 15.0,
}


class FullVisitor:
    """A client that joins the buffer and leaves it again.

    Args:
        actor: the account of the process.
        path: the directory that all processes share. The client saves it, and loads the save, in
            directories beside it.
        storage: the storage of the round.
    """

    def __init__(self, actor: Actor, path: Path, storage: str) -> None:
        torch.set_num_threads(1)
        self.actor = actor
        self.path = path
        self.storage = storage
        chair = actor.who // LIVES
        self._save, self._own = path.with_name(f"save-{chair}"), path.with_name(f"of-{chair}")
        self._buffer: Any = None
        self._number = 0

    def engine(self) -> Engine | None:
        return None if self._buffer is None else self._buffer.storage.engine()

    def drop(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def step(self) -> None:
        if self._buffer is None:
            self._buffer = attach(self.path)
        buffer, verb = self._buffer, drawn(self.actor.rng, VERBS)
        if verb in ("extend", "learn"):
            once = collect_once if verb == "extend" else learn_once
            before = self._number
            self._number += 64  # after any interrupt, no number is used twice
            once(self.actor, buffer, self.storage, before)
            look(self.actor, buffer)
        elif verb == "flush":
            buffer.storage.engine().flush()
        elif verb == "dumps":
            buffer.dumps(self._save)
        elif verb == "loads":
            self._load()
        else:
            self.drop()

    def _load(self) -> None:
        """Loads the save into another buffer, perhaps begun by an earlier life, and removes it."""
        if not self._save.exists():
            return
        with made(self._own, self.storage) as own:
            own.loads(self._save)
            read(own, self.storage)
            own.storage.engine().cleanup()

"""Roles of processes that fork beside a working thread, or that are interrupted in every call.

The callers pass the calls to make: on the core (roles.py) or on the whole library (full_roles.py).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shmbuffer.memory import Engine
from shmbuffer.memory.clients.locks import LivenessFile
from tests.torture import interrupts
from tests.torture.arena import Actor

#: Writes or samples with an account, beginning with a sequence number; returns the next number.
Work = Callable[[Actor, int], int]

#: Largest number of calls of a forked child.
CALLS = 8
#: Longest time until a parent kills its child.
LONGEST_S = 0.02


def fork_beside(actor: Actor, work: Work, leave: Callable[[], Any]) -> None:
    """Runs calls in a second thread while the first one forks children that use the same handle.

    The children end by themselves, are killed, or outlive their parent for some calls.
    """
    between, over = threading.Lock(), threading.Event()
    other = actor.beside()

    def works() -> None:
        number = 0
        try:
            while not over.is_set():
                with between:
                    number = work(other, number)
                time.sleep(1e-5)  # otherwise the first thread rarely gets the lock
        except BaseException:
            traceback.print_exc()
            os._exit(70)

    thread = threading.Thread(target=works)
    thread.start()
    try:
        while True:
            with between:  # so that the thread stands still too
                if not actor.goes_on():
                    return
            pid = actor.child(lambda child: _inherit(child, work, leave))
            if actor.rng.random() < 0.4:
                time.sleep(float(actor.rng.uniform(0, LONGEST_S)))
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, -signal.SIGKILL), f"a forked child ended with {status}"
    finally:
        over.set()
        thread.join()


def _inherit(child: Actor, work: Work, leave: Callable[[], Any]) -> None:
    number = 0
    child.log.forked()
    for _ in range(int(child.rng.integers(1, CALLS + 1))):
        if not child.goes_on():
            break
        number = work(child, number)
    if child.rng.random() < 0.5:
        leave()


class Visitor(Protocol):
    """A client that opens the buffer, makes some calls, and closes it."""

    def step(self) -> None:
        """Makes one call, which may be interrupted at any time."""

    def drop(self) -> None:
        """Closes the handle if it is open."""

    def engine(self) -> Engine | None:
        """Returns the engine of the handle."""


def visit(actor: Actor, visitor: Visitor) -> None:
    """Makes calls and continues after each interrupt, with the same handle or a new one."""
    while actor.goes_on():
        if interrupts.finishes(visitor.step):
            continue
        if actor.rng.random() < 0.5:
            visitor.drop()
        engine = visitor.engine()
        own = LivenessFile.name(engine.seat.entry) if engine is not None else None
        stray = [name for name in interrupts.held_locks() if own is None or not name.endswith(own)]
        actor.log.interrupted(len(stray))
        assert not stray, f"H14: an interrupt left {', '.join(stray)} locked"
    visitor.drop()


def drawn(rng: np.random.Generator, verbs: dict[str, float]) -> str:
    """Draws one of the names with a probability proportional to its weight."""
    weights = np.array(list(verbs.values()), float)
    return str(rng.choice(list(verbs), p=weights / weights.sum()))

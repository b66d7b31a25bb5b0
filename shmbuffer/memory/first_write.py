"""Waits for the first write to a buffer.

There is no ring before the first write, so the thread polls. No client can wake it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shmbuffer._native import _core
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.flow.sides import Sides
from shmbuffer.memory.flow.waiting import Waiting
from shmbuffer.memory.format.layout import Side, Why
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.ring.ring import Ring
from shmbuffer.memory.system import deadline


def first_ring(engine: Engine, min_size: int) -> Ring:
    """Returns the ring of a buffer, after waiting for the first write if there is no ring yet.

    Args:
        engine: A handle to the buffer.
        min_size: Number of items that the caller needs. It is shown to other processes.
    """
    ring = engine.ring()
    if ring is not None:
        return ring
    seat, limit = engine.seat, deadline.start(None)
    schema = Schema((), engine.settings.capacity)  # the leaves are not known yet
    waiting = Waiting(seat, schema, Sides(seat), "sample")
    with _show_wait(seat, min_size):
        while ring is None:
            seat.require_open()
            seat.require_linked()
            waiting.wait(Why.FEW, min_size, limit)
            ring = engine.ring()
    return ring


@contextmanager
def _show_wait(seat: Seat, min_size: int) -> Iterator[None]:
    """Shows in the registry that this client waits for ``min_size`` items to be written.

    With a ring, the C core does this.
    """
    own_entry = seat.control.entries[seat.entry : seat.entry + 1]
    fields = {
        "waits_since_ns": time.monotonic_ns(),
        "samples_wanted": min(min_size, 2**32 - 1),
        "waits_why": Why.FEW,
        "waits_for": Side.INSERTS,
    }
    try:
        for name, value in fields.items():
            own_entry[name] = value
            _core.reached("flow.shown")
        yield
    finally:
        if not seat.closed:
            own_entry["waits_for"] = 0
            _core.reached("flow.shown")

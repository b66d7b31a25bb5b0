"""Waiting for the first write: there is no ring yet, and nobody who could wake us."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shmbuffer._native import _core
from shmbuffer.errors import RateLimitError, RateLimitTimeout
from shmbuffer.memory import patience, sides, waiting
from shmbuffer.memory.engine import Engine
from shmbuffer.memory.layout import Alone, Side, Why
from shmbuffer.memory.ring import Ring
from shmbuffer.memory.seat import Seat
from shmbuffer.memory.standing import explain, others, standing

_log = logging.getLogger("shmbuffer.flow")


def first_ring(engine: Engine, min_size: int) -> Ring:
    """The ring; waited for while nobody has written anything, for a sample of ``min_size`` items.

    Raises:
        RateLimitTimeout: the deadline of `patience.within` has passed.
        RateLimitError: nobody is there to write, and ``when_alone`` is "error".
        BufferClosedError: the handle was closed meanwhile.
    """
    ring = engine.ring()
    if ring is not None:
        return ring
    seat, limit, said = engine.seat, patience.limit(None), -math.inf
    began = looked = accompanied = time.monotonic()
    with _shown(seat, min_size):
        while ring is None:
            now, found, entries = time.monotonic(), engine.limiter, seat.control.entries
            if now - looked >= waiting.LOOK_S:
                looked = now
                seat.require_linked()
                seat.reap_dead()
            there = others(entries, Side.INSERTS, besides=seat.entry)
            accompanied = now if there else accompanied
            left = now - accompanied >= sides.ALONE_S
            text = f"{seat.where}: sample waits: {_why_nothing(engine, min_size)}"
            if left and found is not None and found.alone == Alone.ERROR:
                raise RateLimitError(
                    f"{text}, and when_alone is 'error'; nothing was changed", pids=[]
                )
            if limit is not None and now >= limit.deadline:
                pids = sorted({int(entries["pid"][entry]) for entry in there})
                raise RateLimitTimeout(
                    f"{text}; after {limit.seconds:g} s nothing was changed", pids=pids
                )
            if now - said >= waiting.SAY_S and (left or now - began >= waiting.SAY_S):
                said = now
                _log.warning("%s", text)
            time.sleep(waiting.SLICE_NS / 1e9)
            ring = engine.ring()
    return ring


@contextmanager
def _shown(seat: Seat, min_size: int) -> Iterator[None]:
    """Has the registry say that we wait for somebody to write. There is no ring yet to say it."""
    mine = seat.control.entries[seat.entry : seat.entry + 1]
    fields = {
        "waits_since_ns": time.monotonic_ns(),
        "samples_wanted": min(min_size, 2**32 - 1),
        "waits_why": Why.FEW,
        "waits_for": Side.INSERTS,
    }
    try:
        for name, value in fields.items():
            mine[name] = value
            _core.reached("flow.shown")
        yield
    finally:
        if not seat.closed:
            mine["waits_for"] = 0
            _core.reached("flow.shown")


def _why_nothing(engine: Engine, min_size: int) -> str:
    control, capacity = engine.seat.control, engine.settings.capacity
    now = standing(control.runtime[0], width=1, capacity=capacity)
    at = time.monotonic_ns()
    return explain(now, control.entries, Side.INSERTS, min_size, Why.FEW, at, engine.seat.entry)

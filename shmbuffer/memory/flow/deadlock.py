"""Detects deadlocks, in which writers and samplers wait for each other forever.

    writes wait for samples (the error buffer, the slots or the bytes of a queue)
    samples wait for writes (the error buffer, too few items)
                                  ──▶ the allowed difference is too small for their batches

The registry contains the reason of each wait. For a queue, the core also checks the reasons under
the mutex. A client that could continue, but has not woken up yet, is not part of a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shmbuffer.memory.flow.rate_status import RateStatus, wanted
from shmbuffer.memory.format.layout import EntryState, Side, Why
from shmbuffer.memory.format.limiter import RateLimiter
from shmbuffer.memory.format.schema import Schema
from shmbuffer.memory.mapped.control import Control

InQueue = Callable[[int, Side], Why | None]


@dataclass(frozen=True)
class Deadlock:
    """The largest batches that wait for each other."""

    writes: int  # number of items of a write
    draws: int  # number of items of a sample
    in_queue: bool  # True if a queue is too small for both; False for the error buffer

    def text(self, control: Control, schema: Schema, found: RateLimiter, now: RateStatus) -> str:
        """Returns a description of the deadlock, and of the number that must be larger."""
        text = f"writes of {self.writes:,} items and samples of {self.draws:,} wait for each other:"
        if not self.in_queue:
            ratio = found.samples_per_insert or 0.0
            return (
                f"{text} with {ratio:g} samples per insert, the error buffer must be at least "
                f"{(self.writes * ratio + self.draws) / 2:g}, but is {found.tolerance:g}"
            )
        times = found.max_times_sampled or 1
        # the largest value that is too small
        short = max((self.draws + times - 2) // times, found.min_size - 1)
        if schema.record_bytes and (now.queued or 0) + self.writes <= schema.elements:
            return f"{text} {self._of_bytes(control, schema.record_bytes, now, short)}"
        return (
            f"{text} the queue needs space for at least {short + self.writes:,} items, but has "
            f"{schema.elements:,}"
        )

    def _of_bytes(self, control: Control, room: int, now: RateStatus, short: int) -> str:
        """Describes a queue of records; assumes that new records have the size of existing ones."""
        runtime, entries = control.runtime[0], control.entries
        waits = (entries["state"] == EntryState.LIVE) & (entries["waits_for"] & Side.SAMPLES > 0)
        size = int(entries["byte_first"][waits].max(initial=0))
        used = int(runtime["byte_head"]) - int(runtime["byte_tail"])
        each = max(size / self.writes, used / max(1, int(runtime["length"])))
        least = math.ceil(used + max(0, short - (now.queued or 0)) * each + size)
        return (
            f"the queue has {now.left:,} items to hand out in {used:,} of its "
            f"{room:,} bytes, and the next write needs {size:,}; give it "
            f"max_bytes of about {least:,}, or write or draw fewer at once"
        )


def find_deadlock(control: Control, now: RateStatus, why: Why, asked: InQueue) -> Deadlock | None:
    """Returns the deadlock of the clients, if all of them wait and none can continue."""
    entries = control.entries
    in_queue = now.queued is not None
    live = entries["state"] == EntryState.LIVE
    comes = now.pending or now.reserved
    if (why == Why.FEW and not in_queue) or comes or entries["reading"][live].any():
        return None  # more items will come, or current reads and writes will change the numbers
    busy = live & (
        (entries["last_insert_ns"] > 0)
        | (entries["last_sample_ns"] > 0)
        | (entries["waits_for"] > 0)
    )
    writes: list[int] = []
    draws: list[int] = []
    for entry in busy.nonzero()[0]:
        sides = [side for side in Side if int(entries["waits_for"][entry]) & side]
        for side in sides:
            count = wanted(entries[entry], side)
            limited = _limited(asked, now, int(entry), side, count)
            if limited is None or (limited == Why.FEW and not in_queue):
                return None  # it was woken, or stopped before it could continue
            (writes if side == Side.SAMPLES else draws).append(count)
        if not sides:
            return None
    return Deadlock(max(writes), max(draws), in_queue) if writes and draws else None


def _limited(asked: InQueue, now: RateStatus, entry: int, side: Side, count: int) -> Why | None:
    """Returns the limit that blocks a waiting client; None if the client can continue."""
    if now.queued is not None and (why := asked(entry, side)) is not None:
        return why
    numbers = now.why(side, count)
    return None if numbers in (Why.FULL, Why.SHORT) else numbers

"""Detects deadlocks, in which writers and learners wait for each other forever.

    writes wait for samples (because of the error buffer, or because a queue is full)
    samples wait for writes (because of the error buffer, or because there are too few items)
                                  ──▶ the error buffer or the queue is too small for their batches

The registry contains the reason for each wait. For a queue, the core also checks the reasons under
the mutex. A client that can continue, but has not woken up yet, is not part of a deadlock.
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

QueueReason = Callable[[int, Side], Why | None]
"""Function that returns why a queue blocks the client with a registry entry, or None."""


@dataclass(frozen=True)
class Deadlock:
    """A write and a sample that wait for each other, each the largest on its side."""

    writes: int  # number of items in the write
    draws: int  # number of items in the sample
    in_queue: bool  # True if a queue is too small for both; False if the error buffer is too small

    def text(self, control: Control, schema: Schema, found: RateLimiter, now: RateStatus) -> str:
        """Describes the deadlock for an error message, with the smallest sufficient setting."""
        text = f"writes of {self.writes:,} items and samples of {self.draws:,} wait for each other:"
        if not self.in_queue:
            ratio = found.samples_per_insert or 0.0
            return (
                f"{text} with {ratio:g} samples per insert, the error buffer must be at least "
                f"{(self.writes * ratio + self.draws) / 2:g}, but is {found.tolerance:g}"
            )
        times = found.max_times_sampled or 1
        # the largest number of queued items that is still too small for the sample
        short = max((self.draws + times - 2) // times, found.min_size - 1)
        if schema.record_bytes and (now.queued or 0) + self.writes <= schema.elements:
            return f"{text} {self._describe_byte_ring(control, schema.record_bytes, now, short)}"
        return (
            f"{text} the queue needs space for at least {short + self.writes:,} items, but has "
            f"{schema.elements:,}"
        )

    def _describe_byte_ring(
        self, control: Control, max_bytes: int, now: RateStatus, short: int
    ) -> str:
        """Describes a queue of records whose byte ring is too small.

        The estimate of the sufficient size assumes that new records are as large as existing ones.
        """
        runtime, entries = control.runtime[0], control.entries
        waits = (entries["state"] == EntryState.LIVE) & (entries["waits_for"] & Side.SAMPLES > 0)
        size = int(entries["byte_first"][waits].max(initial=0))
        used = int(runtime["byte_head"]) - int(runtime["byte_tail"])
        each = max(size / self.writes, used / max(1, int(runtime["length"])))
        least = math.ceil(used + max(0, short - (now.queued or 0)) * each + size)
        return (
            f"the queue still has {now.left:,} items to return in {used:,} of its "
            f"{max_bytes:,} bytes, and the next write needs {size:,}; set max_bytes to about "
            f"{least:,}, or write or sample fewer items at once"
        )


def find_deadlock(
    control: Control, now: RateStatus, why: Why, queue_reason: QueueReason
) -> Deadlock | None:
    """Returns a deadlock if all active clients wait and none of them can continue; otherwise None.

    Args:
        control: The control file.
        now: The current state of both sides.
        why: The reason why the caller waits.
        queue_reason: Function that asks the core why a queue blocks a client.
    """
    entries = control.entries
    in_queue = now.queued is not None
    live = entries["state"] == EntryState.LIVE
    are_coming = now.pending or now.reserved
    if (why == Why.FEW and not in_queue) or are_coming or entries["reading"][live].any():
        return None  # more items may be written, or reads and writes in progress will end a wait
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
            limited = _limited(queue_reason, now, int(entry), side, count)
            if limited is None or (limited == Why.FEW and not in_queue):
                return None  # the client was woken, or was stopped before it could continue
            (writes if side == Side.SAMPLES else draws).append(count)
        if not sides:
            return None
    return Deadlock(max(writes), max(draws), in_queue) if writes and draws else None


def _limited(
    queue_reason: QueueReason, now: RateStatus, entry: int, side: Side, count: int
) -> Why | None:
    """Returns the limit that blocks a waiting client, or None if the client can continue."""
    if now.queued is not None and (why := queue_reason(entry, side)) is not None:
        return why
    numbers = now.why(side, count)
    return None if numbers in (Why.FULL, Why.SHORT) else numbers

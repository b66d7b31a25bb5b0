"""Reads the state of a rate-limited buffer, and explains in words why a call waits.

The functions read the runtime page and the registry, mapped or copied, without a lock. Timeout
errors, log messages and ``shmbuffer top`` use them. In this module, any client that samples is
called a learner and any client that inserts is called a collector, regardless of its role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmbuffer.memory.flow.consumer_status import ConsumerStatus
from shmbuffer.memory.format import limiter
from shmbuffer.memory.format.layout import EntryState, Limit, Phase, Role, Side, Why
from shmbuffer.memory.system.identity import ProcessState, process_state

ROUNDING = 1e-6  # tolerance for rounding errors in samples, as in the core
_LONG_S = 1.0  # shorter durations are shown in milliseconds


@dataclass(frozen=True)
class RateStatus:
    """The state of a buffer's limits and of both sides at one point in time."""

    wanted: float | None  # configured samples per insert; None without a ratio
    # samples per insert since the ratio was set; None before the first insert
    seen: float | None
    ahead: float  # samples by which the inserts are ahead; negative if the samples are ahead
    error_buffer: float  # maximum of the absolute value of `ahead`
    min_size: int  # number of items that the buffer must have for a sample
    size: int  # number of items in the buffer
    filled: int  # number of items when all current writes and reservations are committed
    # number of items in a queue that must still be returned; None if the buffer is not a queue
    queued: int | None
    left: int  # number of items that the queue can still return, counted once per return
    room: int  # capacity of the ring in items
    pending: int  # number of items that are being written
    max_times_sampled: int  # number of times that a queue returns each item; 0 if it is not a queue
    quota: int | None = None  # number of items that can still be written to this shard
    reserved: int = 0  # number of reserved items
    allowed: int | None = None  # items that can be written before the next version; None: no limit
    version: int = 0  # version of the policy that the learners have published
    max_staleness: int | None = None  # maximum staleness of an item in versions; None: no limit
    refused: int = 0  # number of items that were rejected as too old

    def why(self, side: Side, count: int) -> Why | None:
        """Returns the limit for which a call would wait now, or None if it would not wait.

        Args:
            side: The side that the call would wait for. A write waits for SAMPLES.
            count: The number of items in the call.
        """
        if side == Side.SAMPLES:
            if self.queued is not None and self.queued + self.reserved + count > self.room:
                return Why.FULL
            if self.quota is not None and count > self.quota:
                return Why.QUOTA
            if self.allowed is not None and count > self.allowed:
                return Why.VERSION
            if self.wanted is not None and self.filled >= self.min_size:
                after = self.ahead + (self.pending + self.reserved + count) * self.wanted
                return Why.AHEAD if after > self.error_buffer + ROUNDING else None
            return None
        if self.size < self.min_size:
            return Why.FEW
        if self.wanted is not None and self.ahead - count < -self.error_buffer - ROUNDING:
            return Why.BEHIND
        if self.queued is not None:
            return Why.SHORT if self.left < count else None
        return None


def rate_status(runtime: Any, *, width: int, capacity: int) -> RateStatus:
    """Reads the state of a buffer's limits from its runtime page.

    Args:
        runtime: The runtime page.
        width: The number of items in a slot.
        capacity: The number of slots.
    """
    size, pending = int(runtime["length"]) * width, int(runtime["pending"])
    reserved = int(runtime["reserved"]) * width
    head = int(runtime["head"])
    setting = limiter.setting(runtime)
    if setting is None:
        room, open_ = capacity * width, pending + reserved
        return RateStatus(
            *(None, None, 0.0, 0.0, 0, size, size + open_, None, 0, room, pending, 0, None),
            reserved,
        )
    block, ages = setting["limiter"], setting["ages"]
    limits = Limit(int(block["limits"]))
    ratio = float(block["samples_per_insert"])
    inserted = limiter.signed(int(runtime["write_count"]) - int(block["inserts_base"]))
    drawn = limiter.signed(int(runtime["drawn"]) - int(block["samples_base"]))
    # Items that are being overwritten were counted before the write began, so they still count. A
    # claim in a ring that was not full overwrites no items.
    overwrites = inserted >= 0 and head * width >= capacity * width + pending
    times = int(block["max_times_sampled"]) if limits & Limit.QUEUE else 0
    queued, left = None, 0
    if times:
        end, oldest = head * width, max(0, head - 2 * capacity) * width
        following = min(max(int(block["queue_next"]), oldest * times), end * times)
        queued, left = end - following // times, end * times - following
    quota = limiter.quota_of(runtime)
    return RateStatus(
        wanted=ratio if limits & Limit.RATIO else None,
        seen=drawn / inserted if inserted > 0 and limits & Limit.RATIO else None,
        ahead=inserted * ratio - drawn if limits & Limit.RATIO else 0.0,
        error_buffer=float(block["error_buffer"]) if quota is None else 0.0,
        min_size=int(block["min_size"]),
        size=size + (pending if overwrites else 0),
        filled=size + pending + reserved,
        queued=queued,
        left=left,
        room=capacity * width,
        pending=pending,
        max_times_sampled=times,
        quota=None if quota is None else max(0, quota[0] - quota[1] - pending - reserved),
        reserved=reserved,
        allowed=_allowed(runtime, ages, pending + reserved) if limits & Limit.AGES else None,
        version=int(runtime["consumer_version"]),
        max_staleness=int(ages["max_staleness"]) if limits & Limit.AGES else None,
        refused=int(runtime["refused"]),
    )


def _allowed(runtime: Any, ages: Any, open_: int) -> int | None:
    """Returns the number of items that can be written before the next policy version.

    Returns None without a limit. ``open_`` is the number of items that are being written or
    reserved.
    """
    each = int(ages["items_per_version"])
    if each == 0:
        return None
    written = limiter.signed(int(runtime["write_count"]) - int(ages["inserts_base"]))
    versions = limiter.signed(int(runtime["consumer_version"]) - int(ages["version_base"]))
    if written + open_ == 0:
        versions = 0  # versions count from the first write on
    # If a version was published without new items, both terms are too large by one batch. Their
    # difference is right.
    return (max(0, versions) + int(ages["max_staleness"]) + 1) * each - written - open_


def clients_on(entries: Any, side: Side, *, excluding: int | None = None) -> list[int]:
    """Returns the registry entries of the clients on a side.

    A client is on a side if it has made a call of that side, or waits in such a call. A client that
    has made no call of the other side is also on the side of its role. The entry ``excluding`` is
    left out.
    """
    field, other, role, waiting = (
        ("last_sample_ns", "last_insert_ns", Role.LEARNER, Side.INSERTS)
        if side == Side.SAMPLES
        else ("last_insert_ns", "last_sample_ns", Role.COLLECTOR, Side.SAMPLES)
    )
    # Every spawned process has the role "collector", so calls are more reliable than roles.
    by_role = (entries["role"] == role) & (entries[other] == 0)
    on_side = (entries["state"] == EntryState.LIVE) & (
        (entries[field] > 0) | by_role | (entries["waits_for"] & waiting > 0)
    )
    return [int(i) for i in on_side.nonzero()[0] if i != excluding]


def may_write(entries: Any, *, excluding: int) -> bool:
    """True if a living client other than ``excluding`` has written or could write.

    A collector or other client could write unless it has only sampled.
    """
    live = (entries["state"] == EntryState.LIVE) & (np.arange(len(entries)) != excluding)
    writes = (entries["role"] == Role.COLLECTOR) | (entries["role"] == Role.CLIENT)
    draws = (entries["last_sample_ns"] > 0) | (entries["waits_for"] & Side.INSERTS > 0)
    return bool((live & ((entries["last_insert_ns"] > 0) | (writes & ~draws))).any())


def explain(
    now: RateStatus,
    entries: Any,
    side: Side,
    count: int,
    why: Why,
    now_ns: int,
    excluding: int,
    held: str = "",
    consumers: Sequence[ConsumerStatus] = (),
    absent: str = "",
) -> str:
    """Explains why a call waits, and which clients can end the wait.

    Args:
        now: The current state of the buffer's limits.
        entries: The entries of the registry.
        side: The side that the call waits for.
        count: The number of items that the call needs.
        why: The limit that stopped the call.
        now_ns: The current monotonic time in nanoseconds.
        excluding: The registry entry of the client that waits.
        held: Description of the reservations in the buffer, or "".
        consumers: The status of the consumers.
        absent: Description of collectors that have not attached yet, or "".
    """
    who = _who(entries, side, now_ns, excluding)
    if absent and not clients_on(entries, side, excluding=excluding):
        who = absent
    match why:
        case Why.AHEAD | Why.BEHIND:
            seen = "none" if now.seen is None else f"{now.seen:.3g}"
            what = f"{now.wanted:g} samples per insert are required, but so far there were {seen}"
        case Why.QUOTA:
            what = (
                f"{count:,} items are to be written, but the quota of this shard is {now.quota:,}"
            )
            who = "the quota grows when the learners of the sharded buffer sample"
        case Why.VERSION:
            what = (
                f"{count:,} items are to be written, but only {max(0, now.allowed or 0):,} more "
                f"are allowed while learners have version {now.version:,} "
                f"(max_staleness={now.max_staleness})"
            )
        case Why.HELD:
            what, who = _explain_hold(consumers)
        case Why.SCARCE:
            what = f"{count:,} undelivered items are needed, but this consumer has fewer"
            if (entries["waits_for"] & Side.SAMPLES > 0).any():
                what += _own_leases(consumers, excluding)
        case Why.FEW:
            what = f"the buffer has {now.size:,} items, but {count:,} are needed"
        case Why.FULL:
            what = f"the queue is full: {now.queued:,} of {now.room:,} items are not sampled yet"
            if now.reserved:
                what += f", and {now.reserved:,} are reserved"
            reader = _first(entries, "reading", entries["reading"] > 0)
            if (now.queued or 0) + now.reserved + count <= now.room and reader is not None:
                what = "items that were taken out of the queue are still being read"
                who = f"{_name(entries, reader)} reads them"
            elif (now.queued or 0) + now.reserved + count <= now.room and (
                size := int(entries["byte_first"][excluding])
            ):
                what = (
                    f"the queue is full: {now.queued:,} items are not sampled yet, and another "
                    f"{size:,} bytes do not fit"
                )
        case Why.SHORT:
            what = f"the queue has {now.left:,} items left, but {count:,} are needed"
            writer = _first(entries, "first", entries["phase"] == Phase.PAYLOAD)
            if now.left >= count and writer is not None:
                what = "the next items of the queue are still being written"
                who = f"{_name(entries, writer)} writes them"
            elif now.left >= count:
                what = f"the queue has fewer than {count:,} items: some slots are empty"
    if held and side == Side.SAMPLES:
        who = f"{held}; {who}"
    return f"{what}; {who}"


def _explain_hold(consumers: Sequence[ConsumerStatus]) -> tuple[str, str]:
    """Describes why a writer waits for a consumer, and which clients can end the wait."""
    blocking = [consumer for consumer in consumers if consumer.holds]
    if not blocking:
        reason = "the oldest item was not acknowledged by a consumer"
        return reason, "this consumer has just been removed"
    last = min(blocking, key=lambda consumer: consumer.floor)
    what = (
        f"the oldest of {last.behind:,} items that consumer {last.name!r} has not acknowledged "
        "would be overwritten"
    )
    advice = f"remove the consumer (`shmbuffer consumers DIRECTORY --remove {last.name}`)"
    running = [lease for lease in last.leases if lease.ends_in_s]
    if not running:
        return what, f"no learner holds any of these items; sample with the consumer, or {advice}"
    pids = sorted({lease.pid for lease in running})
    noun = "process" if len(pids) == 1 else "processes"
    held = f"{noun} {', '.join(map(str, pids))} {'holds' if len(pids) == 1 else 'hold'} "
    items = sum(lease.items for lease in running)
    return what, f"{held}{items:,} of these items until ack(); wait, or {advice}"


def _own_leases(consumers: Sequence[ConsumerStatus], entry: int) -> str:
    """Explains how a waiting learner whose own leases block the writers can continue.

    ``entry`` is the registry entry of the learner. The text is "" if it holds no items.
    """
    text = ""
    for consumer in consumers:
        leases = [lease for lease in consumer.leases if lease.entry == entry and lease.ends_in_s]
        items = sum(lease.items for lease in leases)
        if items and consumer.holds:
            held = f"{items:,} unacknowledged items of consumer {consumer.name!r}"
            text += f"; this handle holds {held}, and writers wait for them; ack them first"
    return text


def waits(
    runtime: Any,
    entries: Any,
    *,
    width: int,
    capacity: int,
    now_ns: int,
    held: str = "",
    consumers: Sequence[ConsumerStatus] = (),
) -> list[dict[str, Any]]:
    """Describes every client that waits for the other side.

    Returns:
        A dict per wait, with the registry ``entry`` and the ``pid`` of the client, the ``seconds``
        that it has waited, and the ``text`` of the reason.
    """
    now = rate_status(runtime, width=width, capacity=capacity)
    found = []
    live = entries["state"] == EntryState.LIVE
    for entry in (live & (entries["waits_for"] > 0)).nonzero()[0]:
        one = entries[entry]
        for side in Side:
            why = limited_by(now, one, side)
            if why is None:
                continue  # the client can continue, and will do so shortly
            call = now, entries, side, wanted(one, side), why, now_ns, int(entry)
            text = explain(*call, held, consumers)
            found.append(
                {
                    "entry": int(entry),
                    "pid": int(one["pid"]),
                    "seconds": _seconds(now_ns, int(one["waits_since_ns"])),
                    "text": f"{'extend' if side == Side.SAMPLES else 'sample'} waits: {text}",
                }
            )
    return found


def wanted(entry: Any, side: Side) -> int:
    """Returns the number of items that a waiting client wants to write or sample.

    ``side`` is the side that the client waits for.
    """
    return int(entry["inserts_wanted" if side == Side.SAMPLES else "samples_wanted"])


def limited_by(now: RateStatus, entry: Any, side: Side) -> Why | None:
    """Returns the limit for which a client waits; None if it does not wait or can continue.

    Args:
        now: The current state of the buffer's limits.
        entry: The registry entry of the client.
        side: The side that the client waits for.
    """
    if not int(entry["waits_for"]) & side:
        return None
    recorded = int(entry["waits_why"])
    if side == Side.SAMPLES and recorded == Why.FULL:
        return Why.FULL
    if recorded == Why.SHORT and side == Side.INSERTS:
        return Why.SHORT
    if recorded == (Why.HELD if side == Side.SAMPLES else Why.SCARCE):
        return Why(recorded)
    if side == Side.INSERTS and recorded == Why.FEW:
        return Why.FEW if now.size < wanted(entry, side) else None
    return now.why(side, wanted(entry, side))


def _who(entries: Any, side: Side, now_ns: int, excluding: int) -> str:
    """Describes the clients on a side, and when the most recently active client was active."""
    noun, did, field = (
        ("learner", "sampled", "last_sample_ns")
        if side == Side.SAMPLES
        else ("collector", "inserted", "last_insert_ns")
    )
    clients = clients_on(entries, side, excluding=excluding)
    if not clients:
        own_ns = int(entries[field][excluding])
        if own_ns == 0:
            return f"there is no {noun}"
        pid, when = int(entries["pid"][excluding]), _format_span(_seconds(now_ns, own_ns))
        return f"there is no {noun} other than pid {pid}, which last {did} {when} ago"
    last = max(clients, key=lambda entry: int(entries[field][entry]))
    at = int(entries[field][last])
    name = _name(entries, last)
    when = f"last {did} {_format_span(_seconds(now_ns, at))} ago" if at else f"has not {did} yet"
    if len(clients) == 1:
        return f"the only {noun}, {name}, {when}"
    return f"the most recent of {len(clients)} {noun}s, {name}, {when}"


def _name(entries: Any, entry: int) -> str:
    """Returns text like "pid 12 (stopped)". The state is left out if the process is running."""
    pid = int(entries["pid"][entry])
    state = process_state(pid)
    return f"pid {pid}" + (f" ({state})" if state != ProcessState.RUNNING else "")


def _first(entries: Any, field: str, which: Any) -> int | None:
    """Returns the living client with the smallest value of a field, as its registry entry.

    ``which`` is a mask of the entries that are considered. Returns None if none of them is alive.
    """
    living = (which & (entries["state"] == EntryState.LIVE)).nonzero()[0]
    return min(map(int, living), key=lambda entry: int(entries[field][entry]), default=None)


def not_attached(since: Sequence[float], now: float) -> str:
    """Describes collectors that were started but have not attached yet; "" if there are none.

    Args:
        since: The start time of each of these collectors, in epoch seconds.
        now: The current time, in epoch seconds.
    """
    if not since:
        return ""
    when = _format_span(max(0.0, now - max(since)))
    if len(since) == 1:
        return f"1 collector was started {when} ago and has not attached yet"
    return f"{len(since)} collectors were started {when} ago and have not attached yet"


def _seconds(now_ns: int, then_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9


def _format_span(seconds: float) -> str:
    """Formats a duration as milliseconds, seconds or minutes."""
    if seconds < _LONG_S:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"

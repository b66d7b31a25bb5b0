"""Reads the counters of a buffer as a flat dict, with or without the mutex."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.rate_status import rate_status
from shmbuffer.memory.format import layout
from shmbuffer.memory.ring.ring import Ring

# Counters of the runtime page that are shown unchanged.
RUNTIME_COUNTERS = (
    "waiters",
    "repairs",
    "rolled_back",
    "rolled_forward",
    "reaped",
    "evicted",
    "lock_waits",
    "loaded",
    "consumer_version",
    "refused",
)


def split_snapshot(snapshot: bytes) -> tuple[Any, Any]:
    """Splits a native snapshot into the runtime page and the registry."""
    data = np.frombuffer(snapshot, np.uint8)
    runtime = data[: layout.PAGE].view(layout.RUNTIME)[0]
    return runtime, data[layout.PAGE :].view(layout.ENTRY)


def totals(runtime: Any, entries: Any, *, width: int, elements: int) -> dict[str, int | float]:
    """Sums the counters of all current and former clients of a buffer.

    Returns:
        A dict with these keys:

        * ``length``, ``elements``, ``write_count`` (elements), ``head`` (ticket), ``prioritized``,
          ``alpha``, ``eps`` and ``max_priority``;
        * the sums of `layout.COUNTERS`, and the names of `RUNTIME_COUNTERS`;
        * ``samples_per_insert`` (0: no ratio), ``error_buffer``, ``samples_ahead`` (by which the
          inserts are ahead), ``min_size``, ``max_times_sampled`` and ``queued`` (0: no queue) of a
          limiter;
        * ``limited`` (clients that wait for the other side) and ``reserved`` (items).
    """
    flow = rate_status(runtime, width=width, capacity=max(1, elements // width))
    return {
        "length": int(runtime["length"]) * width,
        "elements": elements,
        "write_count": int(runtime["write_count"]),
        "head": int(runtime["head"]),
        "prioritized": int(runtime["prioritized"]),
        "alpha": float(runtime["alpha"]),
        "eps": float(runtime["eps"]),
        "max_priority": max(0.0, float(runtime["max_priority"])),
        **{name: int(entries[name].sum()) for name in layout.COUNTERS},
        **{name: int(runtime[name]) for name in RUNTIME_COUNTERS},
        "samples_per_insert": flow.wanted or 0.0,
        "error_buffer": flow.error_buffer,
        "samples_ahead": flow.ahead,
        "min_size": flow.min_size,
        "max_times_sampled": flow.max_times_sampled,
        "queued": flow.queued or 0,
        "limited": int(runtime["limited"]),
        "reserved": flow.reserved,
    }


def snapshot(seat: Seat, ring: Ring | None, capacity: int) -> dict[str, int | float]:
    """Returns the counters of a handle's buffer at one point in time; see `Engine.stats`."""
    if ring is None:
        runtime, entries = seat.control.runtime[0], seat.control.entries
    else:
        runtime, entries = split_snapshot(ring.snapshot())
    live = set((entries["state"] == layout.EntryState.LIVE).nonzero()[0].tolist())
    alive = live & {entry for entry, _ in seat.registry.alive()}
    return {
        **_read_handle(seat, ring, capacity, runtime, entries),
        "clients_alive": len(alive),
        "clients_dead": len(live) - len(alive),
        "bytes": _count_bytes(seat),
        "time_ns": time.monotonic_ns(),
    }


def _count_bytes(seat: Seat) -> int:
    mapped = seat.mapped.nbytes if seat.mapped else 0
    return layout.CONTROL_BYTES + mapped + sum(size for _, size in seat.backing.extra_files())


def glance(seat: Seat, ring: Ring | None, capacity: int) -> dict[str, int | float]:
    """Returns the counters of a handle's buffer without the mutex; see `Engine.glance`."""
    return _read_handle(seat, ring, capacity, seat.control.runtime[0], seat.control.entries)


def _read_sharing(ring: Ring | None) -> dict[str, int]:
    """Returns the counters of own rows; an empty dict if each leaf has its own column."""
    if ring is None or not ring.schema.sharing:
        return {}
    sharing = ring.schema.sharing
    return {"own_rows": sharing.own_rows, "own_rows_used": ring.live.count_own_rows()}


def _read_handle(
    seat: Seat, ring: Ring | None, capacity: int, runtime: Any, entries: Any
) -> dict[str, int | float]:
    """Combines the counters that need not be consistent with each other."""
    width, elements = (ring.width, ring.elements) if ring else (1, capacity)
    return {
        **totals(runtime, entries, width=width, elements=elements),
        "p_sum": ring.tree.p_sum if ring else 0.0,
        **_read_sharing(ring),
        "epoch": seat.control.superblock().epoch,
    }

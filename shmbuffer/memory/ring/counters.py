"""Reads the counters of a buffer as a flat dict, either consistently or without the mutex."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.flow.rate_status import rate_status
from shmbuffer.memory.format import layout
from shmbuffer.memory.ring.ring import Ring

# Counters in the runtime page that are reported under their own names.
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
    """Splits the bytes from `Ring.snapshot` into the runtime page and the registry."""
    data = np.frombuffer(snapshot, np.uint8)
    runtime = data[: layout.PAGE].view(layout.RUNTIME)[0]
    return runtime, data[layout.PAGE :].view(layout.ENTRY)


def totals(runtime: Any, entries: Any, *, width: int, elements: int) -> dict[str, int | float]:
    """Computes the counters of a buffer from its runtime page and registry.

    Args:
        runtime: The runtime page.
        entries: The registry, which includes the counters of former clients.
        width: Number of elements per slot.
        elements: Number of elements of the buffer.

    Returns:
        A dict with these keys:

        * ``length`` (elements with an item), ``elements``, ``write_count`` (elements), ``head``
          (next ticket), ``prioritized``, ``alpha``, ``eps`` and ``max_priority``;
        * the names in `layout.COUNTERS`, each summed over all clients, and the names in
          `RUNTIME_COUNTERS`;
        * the limits: ``samples_per_insert`` (0 without a ratio), ``error_buffer``,
          ``samples_ahead`` (number of samples by which the inserts are ahead), ``min_size``,
          ``max_times_sampled`` and ``queued`` (both 0 without a queue);
        * ``limited`` (number of clients that wait for the other side) and ``reserved`` (items).
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
    """Returns a consistent snapshot of a buffer's counters (`Engine.stats`).

    Args:
        seat: The seat of a handle.
        ring: The ring of the handle, or None before the schema is defined.
        capacity: Capacity in the settings of the buffer, which is reported without a ring.
    """
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
    """Returns the size of all files of a buffer in bytes."""
    mapped = seat.mapped.nbytes if seat.mapped else 0
    return layout.CONTROL_BYTES + mapped + sum(size for _, size in seat.backing.extra_files())


def glance(seat: Seat, ring: Ring | None, capacity: int) -> dict[str, int | float]:
    """Returns a buffer's counters without taking the mutex, so they may not be consistent.

    The arguments are those of `snapshot`. Used by `Engine.glance`.
    """
    return _read_handle(seat, ring, capacity, seat.control.runtime[0], seat.control.entries)


def _read_sharing(ring: Ring | None) -> dict[str, int]:
    """Returns the counters of own rows. The dict is empty without ``share_next``."""
    if ring is None or not ring.schema.sharing:
        return {}
    sharing = ring.schema.sharing
    return {"own_rows": sharing.own_rows, "own_rows_used": ring.live.count_own_rows()}


def _read_handle(
    seat: Seat, ring: Ring | None, capacity: int, runtime: Any, entries: Any
) -> dict[str, int | float]:
    """Returns the counters of `totals`, and those that are read separately from shared memory."""
    width, elements = (ring.width, ring.elements) if ring else (1, capacity)
    return {
        **totals(runtime, entries, width=width, elements=elements),
        "p_sum": ring.tree.p_sum if ring else 0.0,
        **_read_sharing(ring),
        "epoch": seat.control.superblock().epoch,
    }

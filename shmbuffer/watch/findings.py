"""Detects signs of an unhealthy replay buffer. Each check is one small function.

A finding is a hint and not an error. The threshold of each check is explained next to its constant.
If there is a history, the checks evaluate its selected part. Otherwise they evaluate the counters
since the buffer was created.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmbuffer.memory.system.identity import ProcessState
from shmbuffer.memory.upkeep.history import BY_RECOVERY, EventKind
from shmbuffer.watch import units
from shmbuffer.watch.buffer_state import BufferState


@dataclass(frozen=True)
class Finding:
    """A sign of an unhealthy buffer."""

    name: str  # name of the check that detected it
    says: str  # description of the problem


MANY_SAMPLES = 512
"""Largest normal number of samples per insert. DQN samples each item 8 times, and SAC with a batch
of 256 per step samples each item 256 times. Learners that sample twice as often overfit old
items."""

FEW_SAMPLES = 0.5
"""Number of samples per insert below which most items of a full buffer are never sampled."""

ENOUGH_ITEMS = 1000
"""Minimum number of written or sampled items for which a ratio is meaningful."""

LATE_UPDATES = 0.1
"""Largest normal share of priority updates that are lost because their item has already been
overwritten. A buffer that is a thousand times as large as a learner's batch loses none."""

ENOUGH_UPDATES = 100
"""Minimum number of priority updates for which their share is meaningful."""

QUIET_S = 30.0
"""Time in seconds without an insert or a sample that is reported if a process that has written or
sampled is still alive. Steps of environments and learners are shorter, but an evaluation or a reset
can take longer."""

SILENT_S = 60.0
"""Time in seconds without an insert after which a collector is reported as silent if others
write."""

SOME_DEATHS = 3
"""Number of deaths of one process that is reported. A single death may have been caused by a user
or by a lack of memory, but after three deaths the process will probably die again."""

TOP, TOP_MASS = 0.01, 0.5
"""Share of the items that have the highest priorities, and their largest normal share of the total
mass."""

RESAMPLED = 0.05
"""Largest normal share of sampled rows that were overwritten while they were copied. Above this
share, sampling a batch takes about as long as overwriting the whole buffer."""

WAITS_PER_S = 10.0
"""Largest normal number of writes per second that wait for a slot. Writes wait if the process that
claimed the slot is slow or stopped."""

EARLY_EVICTION = 0.5
"""Share of the capacity that should be in use when the byte ring is full."""

STANDSTILL_S = 10.0
"""Time in seconds without a record that is reported although the coordinator is alive. It writes
one record per second."""


def all_clients_dead(buffer: BufferState) -> str | None:
    """Reports that all clients have died."""
    dead = [client for client in buffer.found["clients"] if not client["alive"]]
    if buffer.living or not dead or not buffer.found["needs_recovery"]:
        return None
    who = ", ".join(_name(buffer, client) for client in dead[:3])
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    when = (
        ""
        if buffer.timeline is None
        else f"; the last record is from {units.clock(buffer.timeline.end_s)}"
    )
    return f"all clients are dead: {who}{more}{when}"


def coordinator_dead(buffer: BufferState) -> str | None:
    """Reports that the coordinator died while other clients keep running."""
    if buffer.timeline is None or not buffer.living or buffer.coordinator is not None:
        return None
    last = buffer.timeline.recorder
    if last is None or last.incarnation in buffer.timeline.ended:
        return None
    return (
        f"the coordinator (pid {last.pid}) is dead, and the last record is from "
        f"{units.clock(buffer.timeline.end_s)}: dead collectors are not restarted"
    )


def no_insert(buffer: BufferState) -> str | None:
    """Reports that nothing is written although a process that has written before is alive."""
    return _quiet(buffer, "inserts", "nothing was written")


def no_sample(buffer: BufferState) -> str | None:
    """Reports that nothing is sampled although a process that has sampled before is alive."""
    return _quiet(buffer, "batches_sampled", "nothing was sampled")


def silent_collector(buffer: BufferState) -> str | None:
    """Reports a collector that writes nothing while other collectors write."""
    writers = [client for client in buffer.living if client["role"] == "collector"]
    silent = []
    for client in writers:
        idle_s = client["idle_s"]
        idle_s = buffer.now_s - client["joined_s"] if idle_s is None else idle_s
        if idle_s >= SILENT_S:
            silent.append((idle_s, client))
    if not silent or len(silent) == len(writers):
        return None  # `no_insert` reports that no collector writes
    idle_s, longest = max(silent, key=lambda one: one[0])
    more = f", and {len(silent) - 1} more are silent" if len(silent) > 1 else ""
    state = "" if longest["state"] == ProcessState.RUNNING else f" ({longest['state']})"
    return (
        f"{_name(buffer, longest)}{state} has written nothing for {units.span(idle_s)}{more}, "
        "while others write"
    )


def dies_again(buffer: BufferState) -> str | None:
    """Reports a process that dies repeatedly."""
    if buffer.timeline is None:
        return None
    # Clients that were found dead by a recovery died together, so none of them is a likely cause.
    died = [
        one
        for one in buffer.timeline.events
        if one.kind == EventKind.DIED and one.recorder != BY_RECOVERY
    ]
    times = Counter(one.name or f"{one.role}s without a name" for one in died)
    often = [(name, n) for name, n in times.most_common() if n >= SOME_DEATHS]
    if not often:
        return None
    (name, n), *others = often
    more = f", and {units.counted(len(others), 'other process', 'other processes')} died repeatedly"
    more = more if others else ""
    return f"{name} died {n} times in {units.span(buffer.seconds or 0.0)}{more}"


def sampled_too_often(buffer: BufferState) -> str | None:
    """Reports that items are sampled very often although no rate limiter sets the ratio."""
    inserts, sampled = buffer.total("inserts"), buffer.total("items_sampled")
    if buffer.found["counters"].get("samples_per_insert"):
        return None
    if sampled < ENOUGH_ITEMS or not inserts or sampled / inserts <= MANY_SAMPLES:
        return None
    return f"{sampled / inserts:,.0f} samples per insert: the learner may overfit old items"


def overwritten_unsampled(buffer: BufferState) -> str | None:
    """Reports that most items are overwritten before they are sampled."""
    counters = buffer.found["counters"]
    inserts, sampled = buffer.total("inserts"), buffer.total("items_sampled")
    if counters["length"] < counters["elements"] or inserts < ENOUGH_ITEMS:
        return None
    if not counters["items_sampled"] or sampled >= FEW_SAMPLES * inserts:
        return None
    ratio = f"{sampled / inserts:.2g} samples per insert" if sampled else "nothing is sampled"
    return f"{ratio}: most items are overwritten before they are sampled"


def late_updates(buffer: BufferState) -> str | None:
    """Reports that too many priority updates arrive after their items were overwritten."""
    applied, stale = buffer.total("updates_applied"), buffer.total("updates_stale")
    if applied + stale < ENOUGH_UPDATES or stale <= LATE_UPDATES * (applied + stale):
        return None
    share = units.percent(stale / (applied + stale))
    return f"{share} of priority updates come too late: their items have been overwritten"


def never_updated(buffer: BufferState) -> str | None:
    """Reports that no learner updates the priorities."""
    if not buffer.found["counters"]["prioritized"] or buffer.total("items_sampled") < ENOUGH_ITEMS:
        return None
    if buffer.total("updates_applied") + buffer.total("updates_stale"):
        return None
    return "priorities are never updated, so prioritized sampling is uniform"


def few_have_the_mass(buffer: BufferState) -> str | None:
    """Reports that a few items account for most of the priority mass."""
    if buffer.item_stats is None:
        return None
    masses = np.sort(buffer.item_stats.masses)[::-1]
    if len(masses) < ENOUGH_ITEMS or not masses.sum() > 0:
        return None
    share = float(masses[: round(TOP * len(masses))].sum() / masses.sum())
    if share <= TOP_MASS:
        return None
    return f"{units.percent(TOP)} of the items have {units.percent(share)} of the priority mass"


def sampled_again(buffer: BufferState) -> str | None:
    """Reports that many rows are overwritten while a learner copies them."""
    redraws, sampled = buffer.total("redraws"), buffer.total("items_sampled")
    if sampled < ENOUGH_ITEMS or redraws <= RESAMPLED * sampled:
        return None
    share = units.percent(redraws / sampled)
    return f"{share} of rows are overwritten while they are sampled: the buffer is too small"


def writers_wait(buffer: BufferState) -> str | None:
    """Reports that many writes wait for a slot."""
    if not buffer.seconds or buffer.total("waits") <= WAITS_PER_S * buffer.seconds:
        return None
    rate = buffer.total("waits") / buffer.seconds
    return f"{rate:,.0f} writes per second wait for a slot that another process is filling"


def evicted_early(buffer: BufferState) -> str | None:
    """Reports that items are evicted long before the buffer reaches its capacity."""
    counters = buffer.found["counters"]
    fill = counters["length"] / counters["elements"]
    if buffer.found["records"] is None or not buffer.total("evicted") or fill >= EARLY_EVICTION:
        return None
    share = units.percent(fill)
    return f"the byte ring is full at {share} of the capacity: max_bytes is too small for it"


def history_stands_still(buffer: BufferState) -> str | None:
    """Reports that the coordinator is alive but records no history."""
    coordinator = buffer.coordinator
    if buffer.timeline is None or coordinator is None:
        return None
    still_s = buffer.now_s - buffer.timeline.end_s
    if still_s < STANDSTILL_S:
        return None
    state = coordinator["state"]
    return (
        f"the coordinator (pid {coordinator['pid']}, {state}) has recorded nothing for "
        f"{units.span(still_s)}"
    )


ALL: tuple[Callable[[BufferState], str | None], ...] = (
    all_clients_dead,
    coordinator_dead,
    no_insert,
    no_sample,
    silent_collector,
    dies_again,
    late_updates,
    sampled_too_often,
    overwritten_unsampled,
    never_updated,
    few_have_the_mass,
    sampled_again,
    writers_wait,
    evicted_early,
    history_stands_still,
)
"""All checks. The most urgent ones come first."""


def find_problems(buffer: BufferState) -> list[Finding]:
    """Runs all checks and returns their findings. The most urgent ones come first."""
    results = ((one.__name__, one(buffer)) for one in ALL)
    return [Finding(name, says) for name, says in results if says is not None]


def verdict(buffer: BufferState, findings: Sequence[Finding]) -> str:
    """Returns the headline of the report: the number of findings, or that there are none."""
    if not findings:
        written = buffer.found["counters"]["write_count"]
        return "looks healthy" if written else "nothing has been written yet"
    return units.counted(len(findings), "possible problem", "possible problems")


def _quiet(buffer: BufferState, counter: str, says: str) -> str | None:
    """Reports for how long a counter has not increased.

    Returns None if no client that has increased the counter is alive, or if the time is shorter
    than `QUIET_S`.
    """
    if buffer.timeline is None or not any(one["counters"][counter] for one in buffer.living):
        return None
    quiet_s = buffer.timeline.quiet_s(counter)
    limited = buffer.found["counters"].get("limited", 0)
    who = units.counted(limited, "client waits", "clients wait")
    held = f": {who} for the rate limiter" if limited else ""
    return f"{says} for {units.span(quiet_s)}{held}" if quiet_s >= QUIET_S else None


def _name(buffer: BufferState, client: Mapping[str, Any]) -> str:
    known = buffer.timeline.known if buffer.timeline is not None else {}
    seen = known.get(client["incarnation"])
    return seen.who if seen is not None else f"{client['role']} {client['pid']}"

"""Describes the results of `inspect` in words, for all commands of the command line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shmbuffer.memory.flow.holders import Holder, describe_holders
from shmbuffer.memory.system.identity import ProcessState
from shmbuffer.watch import units
from shmbuffer.watch.tables import Styled

Found = Mapping[str, Any]

DEAD, STOPPED, UNKNOWN = ProcessState.DEAD, ProcessState.STOPPED, ProcessState.UNKNOWN


def use(found: Found) -> Styled:
    """Describes how many clients use a buffer, or why it is not in use."""
    clients, state, reason = found["clients"], found["state"], found["needs_recovery"]
    counts = Counter(client["state"] for client in clients)
    dead, stopped, unknown = (counts[one] for one in (DEAD, STOPPED, UNKNOWN))
    if state == "CLOSING":
        return Styled("being removed", "yellow")
    if reason in _REASONS:
        text, colour = _REASONS[reason]
        return Styled(f"{text}; {_WILL_RECOVER}", colour)
    if state == "RECOVERING":
        text = "being recovered; the next process to open it continues an interrupted recovery"
        return Styled(text, "yellow")
    if reason is not None and dead:
        died = units.counted(dead, "client died", "clients died")
        return Styled(f"not in use ({died}; {_WILL_RECOVER})", "red")
    if reason is not None:
        return Styled("not in use (all clients closed it)", "yellow")
    waiting = sum(client["queue_position"] is not None for client in clients)
    counted = {
        "alive": len(clients) - dead - unknown,
        UNKNOWN: unknown,
        DEAD: dead,
        STOPPED: stopped,
        "waiting for a slot": waiting,
    }
    words = ", ".join(f"{number} {what}" for what, number in counted.items() if number)
    if state == "NO_SCHEMA":
        return Styled(f"nothing written yet, {words}", "yellow")
    return Styled(words, "red" if dead else "yellow" if stopped or waiting else "green")


_WILL_RECOVER = "the next client recovers it"

_REASONS = {
    "copy": ("a copy of another directory", "yellow"),
    "reboot": ("the machine was rebooted", "red"),
    "restored": ("changed by another program", "yellow"),
}


def state(client: Found) -> Styled:
    """Returns the `ProcessState` of a client, in yellow if it waits or blocks other clients."""
    if client["state"] == DEAD:
        return Styled(client["state"], "red")
    waits = client["state"] == STOPPED or client["queue_position"] is not None
    return Styled(client["state"], "yellow" if waits else "")


def cells(client: Found, held_s: float = 0.0) -> dict[str, object]:
    """Returns the cells of a client's row in a table, by the heading of the column."""
    idle, memory, counters = client["idle_s"], client["memory_bytes"], client["counters"]
    return {
        "client": client["role"],
        " pid": str(client["pid"]),
        "state": state(client),
        "attached": units.span(time.time() - client["joined_s"]),
        "idle for": None if idle is None else units.span(idle),
        " written": counters["inserts"],
        " sampled": counters["items_sampled"],
        " updates": counters["updates_applied"],
        " memory": None if memory is None else units.size(memory),
        "holds": holds(client, held_s) or "",
    }


def holds(client: Found, held_s: float = 0.0) -> str | None:
    """Describes the lock, queue position and slots that a client holds, or returns None.

    ``held_s`` is the time in seconds for which it has held them.
    """
    since = f" for {units.span(held_s)}" if held_s >= 1 else ""
    parts = []
    if client["mutex"]:
        parts.append(f"the lock{since}")
    if client["queue_position"] is not None:
        waited, position = units.span(client["queued_s"]), client["queue_position"]
        parts.append(f"queue position {position:,}, waiting {waited} for a slot")
    if client["claimed"] is not None:
        if client["phase"] == "EMPTYING":
            parts.append(f"emptying the buffer{since}")
        else:
            count, first = client["claimed"]["count"], client["claimed"]["first"]
            slots = units.counted(count, "slot", "slots")
            phase = "" if client["phase"] == "PAYLOAD" else f", {client['phase'].lower()}"
            parts.append(f"{slots}{since}, from ticket {first:,}{phase}")
    return "; ".join(parts) or None


def disk_usage(found: Found) -> str:
    """Describes the size of a buffer's files, and whether they are on disk or in memory."""
    used, nbytes = found["disk_bytes"], found["bytes"]
    sparse = f" of {units.size(nbytes)}" if used < 0.95 * nbytes else ""
    where = "in memory (tmpfs)" if found["filesystem"]["in_memory"] else "on disk"
    return f"{units.size(used)}{sparse} {where}"


def size(found: Found) -> str:
    """Describes the size of a buffer on disk and in memory, and the free space."""
    in_memory, free = found["filesystem"]["in_memory"], found["filesystem"]["free_bytes"]
    parts = [disk_usage(found)]
    if not in_memory and found["memory_bytes"] is not None:
        parts.append(f"{units.size(found['memory_bytes'])} of it in memory")
    if found["unwritten_bytes"]:
        parts.append(f"{units.size(found['unwritten_bytes'])} not written back")
    if free is not None:
        parts.append(f"{units.size(free)} free")
    return ", ".join(parts)


def sharing(found: Found) -> str | None:
    """Describes the leaves that consecutive items share, or returns None if there are none."""
    told = found.get("sharing")
    if told is None:
        return None
    names = ", ".join(told["leaves"])
    return f"{names} stored once; {told['used']:,} of {told['own_rows']:,} own rows used"


def records(found: Found) -> str | None:
    """Describes the use of the byte ring, or returns None if the items are rows."""
    ring = found["records"]
    if ring is None:
        return None
    used, most = ring["used_bytes"], ring["max_bytes"]
    parts = [f"{units.size(used)} of {units.size(most)} in use ({used / most:.1%})"]
    if ring["live_bytes"] is not None:
        parts.insert(0, f"{units.size(ring['live_bytes'])} in items")
    if ring["dictionary_bytes"]:
        parts.append(f"dictionary of {units.size(ring['dictionary_bytes'])}")
    return ", ".join(parts)


def status(found: Found) -> dict[str, str | None]:
    """Returns the lines that describe everything except the items of a buffer.

    The line of a feature that the buffer does not use is None.
    """
    return {
        "weights": weights(found),
        "policy": consumer(found),
        "rate limiter": flow(found),
        "reservations": reserved(found),
        "consumers": consumers(found),
        "waits": waiting(found),
        "recoveries": recoveries(found),
    }


def weights(found: Found) -> str | None:
    """Describes the version, age and size of the newest weights, or returns None without any."""
    newest = found["weights"]
    if newest is None:
        return None
    if "damage" in newest:
        return str(newest["damage"])
    age, size = units.span(time.time() - newest["at_s"]), units.size(newest["bytes"])
    tensors = units.counted(newest["tensors"], "tensor", "tensors")
    told = f"version {newest['version']:,}, step {newest['step']:,}, {age} ago"
    return f"{told}; {size} in {tensors}"


def consumer(found: Found) -> str | None:
    """Describes the policy version that learners have reported, or returns None without one."""
    version = found["counters"]["consumer_version"]
    return f"version {version:,}" if version else None


def reserved(found: Found) -> str | None:
    """Describes which processes hold reservations, and how many items were rejected as too old.

    Returns None if there are neither.
    """
    holders = [Holder(**holder) for holder in found.get("reservations", [])]
    refused = found["counters"]["refused"]
    parts = [describe_holders(holders)] if holders else []
    if found.get("partials"):
        what = units.counted(found["partials"], "rollout", "rollouts")
        parts.append(f"{what} of dead processes can be resumed")
    if refused:
        parts.append(f"{units.counted(refused, 'item', 'items')} rejected as too old")
    return "; ".join(parts) or None


def flow(found: Found) -> str | None:
    """Describes the limits on inserts and samples and their state, or returns None without any."""
    counters = found["counters"]
    parts = []
    if counters["samples_per_insert"]:
        ratio, ahead = counters["samples_per_insert"], counters["samples_ahead"]
        side, most = "inserts" if ahead >= 0 else "samples", counters["error_buffer"]
        parts.append(
            f"{ratio:g} samples per insert; {side} are ahead by {abs(ahead):,.0f} of {most:,.0f}"
        )
    if counters["max_times_sampled"]:
        parts.append(f"queue with {units.counted(counters['queued'], 'item', 'items')}")
    if counters["min_size"] > counters["length"]:
        parts.append(f"sampling starts at {counters['min_size']:,} items")
    return "; ".join(parts) or None


def waiting(found: Found) -> str | None:
    """Describes the process that has waited longest and its reason, or returns None."""
    waits = sorted(found["waits"], key=lambda one: -one["seconds"])
    if not waits:
        return None
    first = waits[0]
    more = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
    return f"pid {first['pid']} for {units.span(first['seconds'])}{more}: {first['text']}"


def consumers(found: Found) -> str | None:
    """Describes the backlog of each consumer and the pids that lease its items.

    Returns None if the buffer has no consumers.
    """
    told = []
    for one in found.get("consumers", ()):
        text = f"{one['name']} is {units.counted(one['behind'], 'item', 'items')} behind"
        pids = ", ".join(str(pid) for pid in sorted({lease["pid"] for lease in one["leases"]}))
        if one["leases"]:
            text += f", {one['held']:,} leased by pid {pids}"
        if one["redelivered"]:
            text += f", {one['redelivered']:,} redelivered"
        told.append(text)
    return "; ".join(told) or None


def recoveries(found: Found) -> str:
    """Describes the number of recoveries and the result of the last one."""
    last, count = found["recovery"], found["epoch"]
    if not count:
        return "none"
    if last is None:
        return f"{count:,}; the result of the last one was not recorded"
    times = "1," if count == 1 else f"{count:,}, the last"
    return f"{times} {units.span(time.time() - last['at_s'])} ago: {recovered(found)}"


def recovered(found: Found) -> str:
    """Describes the result of the last recovery."""
    last = found["recovery"]
    if last is None:
        return "its result was not recorded"
    kept = units.counted(last["items"], "item kept", "items kept")
    return ", ".join((last["reason"], kept, *repairs(last), f"in {last['duration_ms']:.1f} ms"))


def repairs(last: Found) -> list[str]:
    """Describes each type of repair that a recovery made."""
    return [units.counted(last[key], *says) for key, says in _FOUND.items() if last[key]]


_FOUND = {
    "rolled_back": ("rolled back",),
    "rolled_forward": ("rolled forward",),
    "checksum_failed": ("dropped: wrong checksum", "dropped: wrong checksum"),
    "words_refused": ("damaged slot word", "damaged slot words"),
    "priorities_repaired": ("priority repaired", "priorities repaired"),
    "unverified": ("not verified",),
    "clients_retired": ("client reaped", "clients reaped"),
}

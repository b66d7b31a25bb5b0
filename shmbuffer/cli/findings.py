"""What `inspect` found, in the words that `inspect` and `top` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmbuffer.cli import console


def room(found: Mapping[str, Any]) -> str:
    """Returns what a buffer takes, on the disk and in memory, and what is left there."""
    in_memory, free = found["filesystem"]["in_memory"], found["filesystem"]["free_bytes"]
    parts = [f"{console.size(found['bytes'])} of files"]
    if in_memory:
        parts.append(f"{console.size(found['disk_bytes'])} of it taken, in memory (tmpfs)")
    else:
        parts.append(f"{console.size(found['disk_bytes'])} of it on the disk")
        if found["memory_bytes"] is not None:
            parts.append(f"{console.size(found['memory_bytes'])} in memory")
        if found["unwritten_bytes"]:
            parts.append(f"{console.size(found['unwritten_bytes'])} of that not yet written back")
    if free is not None:
        parts.append(f"{console.size(free)} free")
    return ", ".join(parts)


def recoveries(found: Mapping[str, Any], now_s: float) -> str:
    """Returns how often a buffer was recovered, and what was found the last time."""
    last, count = found["recovery"], found["epoch"]
    if not count:
        return "none"
    times = "1" if count == 1 else f"{count:,}, the last one"
    if last is None:
        return f"{count:,}; what the last one found was not recorded"
    parts = [f"{last['items']:,} items kept"]
    parts += [f"{last[key]:,} {says}" for key, says in _FOUND.items() if last[key]]
    return (
        f"{times} {console.span(now_s - last['at_s'])} ago ({last['reason']}): {', '.join(parts)}, "
        f"in {last['duration_ms']:.1f} ms"
    )


_FOUND = {
    "rolled_back": "rolled back",
    "rolled_forward": "rolled forward",
    "checksum_failed": "refused by their checksum",
    "words_refused": "words refused",
    "priorities_repaired": "priorities repaired",
    "unverified": "not verified",
    "clients_retired": "clients retired",
}

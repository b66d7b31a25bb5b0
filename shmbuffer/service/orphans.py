"""Processes of an earlier, killed coordinator that are still running."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from shmbuffer.errors import BufferInUseError
from shmbuffer.memory.directory import roster
from shmbuffer.memory.system import identity
from shmbuffer.service.stopping import end, why_left

Orphans = Literal["stop", "adopt", "leave"]
"""The treatment of orphans whose name is spawned again; see ``Coordinator.spawn``."""

log = logging.getLogger("shmbuffer.service")


def take_over(
    scratch_dir: Path, found: Sequence[roster.LivingProcess], n: int, grace_s: float
) -> dict[int, tuple[roster.LivingProcess, int]]:
    """Adopt one for each index below ``n``, with a pidfd that the caller closes; end the others."""
    me = identity.current()  # which was spawned, if a collector has become the coordinator
    found = [one for one in found if one.identity != me]
    adopted: dict[int, tuple[roster.LivingProcess, int]] = {}
    for one in found:
        if one.index < n and one.index not in adopted:
            pidfd = identity.opened(one.identity)
            if pidfd is not None:
                adopted[one.index] = one, pidfd
    kept = [entry.identity for entry, _ in adopted.values()]
    how = end([one.identity for one in found if one.identity not in kept], grace_s)
    left = {who: why_left(who) for who, result in how.items() if result == "left"}
    for one in found:
        if one.identity in how.keys() - left:
            roster.forget(scratch_dir, one.file)
    if left:
        for _, pidfd in adopted.values():
            os.close(pidfd)
        pids = [who.pid for who in left]
        raise BufferInUseError(
            f"{scratch_dir}: an earlier coordinator spawned {found[0].name!r} (pids "
            f"{', '.join(map(str, pids))}), which runs and cannot be ended from here: "
            f"{next(iter(left.values()))}; end it, or pass orphans='leave'",
            path=scratch_dir,
            pids=pids,
        )
    for result, what in (("ended", "ended"), ("killed", "deaf to SIGTERM, so killed")):
        if ended := [str(who.pid) for who, as_found in how.items() if as_found == result]:
            log.warning(
                "%s: an earlier coordinator's %s were still running: %s (pids %s)",
                *(scratch_dir, found[0].name, what, ", ".join(ended)),
            )
    return adopted

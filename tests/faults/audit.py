"""Lists the descriptors, maps and threads that a process holds on watched files."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

#: The page with the mutex stays mapped until the process ends (_native/core/mutex.c).
_REMOVED = " (deleted)"
_KEPT = "/.shmbuffer/control"


def held(*prefixes: str) -> Counter[str]:
    """Counts descriptors and maps of files whose path has one of these prefixes, and threads."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            target = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(_REMOVED)
            if target.startswith(prefixes):
                found[f"descriptor of {target}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, _, _, inode, *path = line.split(maxsplit=5)
        target = path[0].removesuffix(_REMOVED) if path else ""
        if inode != "0" and target.startswith(prefixes) and _KEPT not in target:
            found[f"map of {target}"] += 1
    found["threads"] = threading.active_count()
    return found


def files_below(folder: Path) -> list[str]:
    """Returns all relative names below a directory; names of directories end with a slash."""
    if not folder.exists():
        return []
    return sorted(str(path.relative_to(folder)) + "/" * path.is_dir() for path in folder.rglob("*"))

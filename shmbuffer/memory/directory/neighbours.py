"""Buffers near a path without one: what the caller may have meant."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shmbuffer.memory.format import layout

_NEIGHBOURS = 1000  # of a crowded directory not every one is asked


def _folders(where: Path) -> list[Path]:
    with suppress(OSError), os.scandir(where) as entries:
        first = islice(entries, _NEIGHBOURS)
        return sorted(Path(one) for one in first if one.is_dir(follow_symlinks=False))
    return []


def did_you_mean(where: Path) -> str:
    """A question that names up to three of them; empty if there are none."""
    near = [where.parent, *_folders(where)]
    if not os.path.exists(where):  # one of its parts may be misspelt
        there = next((one for one in where.parents if os.path.exists(one)), where)
        rest = where.relative_to(there).parts[1:]
        near += [one.joinpath(*rest) for one in _folders(there)]
    found = [str(one) for one in dict.fromkeys(near) if os.path.isfile(one / layout.CONTROL)]
    others = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"did you mean {', '.join(found[:3])}{others}?" if found else ""

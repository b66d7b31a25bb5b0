"""Sources and destinations of compressed frames, and runs of frames expanded together.

    frames      ├── 0 ──┼─ 1 ─┼──── 2 ────┤      their expanded bytes, one after the other
    parts        a   b    c    c    d   e        each is some bytes of a frame, and an address

A part can be any run of bytes of its frame. Bytes that belong to no part are dropped, and bytes of
several parts are copied to each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.records.views import readable
from shmbuffer.memory.format.array_types import Ints

_LEAST_RUN_BYTES = 2**16
_RUN_BYTES = 2**18  # fits into the cache of a processor
_WOVEN_BYTES = 2**21  # woven frames of this size are expanded directly to their places
_EACH = 4  # runs per thread, so that no thread waits long for the last run


class Places(NamedTuple):
    """Sources and destinations of frames and their parts.

    The arrays are contiguous, and the caller keeps the memory alive.
    """

    at: Ints
    """Address of each frame, int64 ``[n]``."""
    stored: Ints
    """Stored bytes of each frame, int64 ``[n]``."""
    whole: Ints
    """Expanded bytes of each frame, int64 ``[n]``."""
    frame: Ints
    """Frame of each part, ascending, int64 ``[m]``."""
    before: Ints
    """Offset of each part in its frame, int64 ``[m]``."""
    nbytes: Ints
    """Bytes of each part, int64 ``[m]``."""
    to: Ints
    """Destination address of each part, int64 ``[m]``."""
    planes: Ints
    """Number of planes to join in each part, int64 ``[m]``; 1: the part is copied unchanged."""

    def source(self, frames: range) -> bytes | memoryview:
        """Returns the stored bytes of some frames, one after the other."""
        first, end, step = frames.start, frames.stop, frames.step
        if len(frames) == 1:
            return readable(int(self.at[first]), int(self.stored[first]))
        return _core.join_pieces(address(self.at), address(self.stored), first, end, step)

    def runs(self, threads: int = 1) -> Runs:
        """Groups the frames, in order, into runs that are large enough for a step of a thread."""
        frames, parts = len(self.whole), len(self.frame)
        share = max(int(self.whole.sum()) // (threads * _EACH), _LEAST_RUN_BYTES)
        at, table = np.empty(parts, np.int64), np.empty((frames, len(Run._fields)), np.int64)
        count = _core.group_frames(
            address(self.whole),
            frames,
            address(self.frame),
            address(self.before),
            address(self.nbytes),
            address(self.to),
            address(self.planes),
            parts,
            min(share, _RUN_BYTES),
            min(share, _WOVEN_BYTES),
            address(at),
            address(table),
        )
        return Runs(list(map(Run._make, table[:count].tolist())), at, self)


class Run(NamedTuple):
    """Frames that are expanded in one step."""

    first: int
    end: int
    size: int
    """Total size of the expanded frames in bytes."""
    into: int
    """Address of all frames, one after the other; 0: they are copied in parts."""
    other: int
    """Address of every second woven frame (see frames.h), with the others at ``into``; else 0."""
    part: int
    parts_end: int
    planar: int
    """True if some parts have planes to join."""


class Runs:
    """All runs of frames of `Places`.

    Args:
        runs: the runs in order.
        at: offset of each part in the bytes of its run, int64 ``[m]``.
        places: sources and destinations.
    """

    def __init__(self, runs: list[Run], at: Ints, places: Places) -> None:
        self.all = runs
        self.at = at
        self._places = places
        self._from, self._sizes = address(at), address(places.nbytes)
        self._planes, self._to = address(places.planes), address(places.to)

    def move(self, run: Run, base: int) -> None:
        """Copies the expanded bytes of a run from an address to their places."""
        skipped = 8 * run.part
        given, count = (self._from + skipped, self._sizes + skipped), run.parts_end - run.part
        to = self._to + skipped
        if run.planar:
            _core.join_planes(*given, self._planes + skipped, to, count, base)
        else:
            _core.move_pieces(*given, to, count, base)

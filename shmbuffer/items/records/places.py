"""Sources and destinations of compressed frames, and runs of frames that are expanded together.

    frames      ├── 0 ──┼─ 1 ─┼──── 2 ────┤      expanded bytes, one frame after the other
    parts        a   b    c    c    d   e        each has a range of bytes and a destination

A part is any range of bytes within one expanded frame. Bytes that belong to no part are discarded.
Bytes that belong to several parts are copied to the destination of each part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.records.views import readable
from shmbuffer.memory.format.array_types import Ints

_LEAST_RUN_BYTES = 2**16  # runs are not made smaller than this to occupy all threads
_RUN_BYTES = 2**18  # largest run, which fits into the cache of a processor
_WOVEN_BYTES = 2**21  # largest run of interleaved frames (see frames.h)
_EACH = 4  # runs per thread, so that no thread waits long for the last run


class Places(NamedTuple):
    """Sources of n frames, and destinations of their m parts.

    The arrays are contiguous. The caller must keep the memory at all addresses alive.
    """

    at: Ints
    """Address of each frame, int64 ``[n]``."""
    stored: Ints
    """Compressed size of each frame in bytes, int64 ``[n]``."""
    whole: Ints
    """Expanded size of each frame in bytes, int64 ``[n]``."""
    frame: Ints
    """Number of the frame that contains each part, in ascending order, int64 ``[m]``."""
    before: Ints
    """Offset of each part in its expanded frame in bytes, int64 ``[m]``."""
    nbytes: Ints
    """Size of each part in bytes, int64 ``[m]``."""
    to: Ints
    """Destination address of each part, int64 ``[m]``."""
    planes: Ints
    """Number of planes in each part, int64 ``[m]``. A part with 1 plane is copied unchanged."""

    def source(self, frames: range) -> bytes | memoryview:
        """Returns the compressed bytes of the given frames, one frame after the other."""
        first, end, step = frames.start, frames.stop, frames.step
        if len(frames) == 1:
            return readable(int(self.at[first]), int(self.stored[first]))
        return _core.join_pieces(address(self.at), address(self.stored), first, end, step)

    def runs(self, threads: int = 1) -> Runs:
        """Groups consecutive frames into runs, each of which a thread expands in one step."""
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
    """Address to which all frames are expanded, or 0 if their parts have separate destinations."""
    other: int
    """Address of every second frame if the frames are interleaved (see frames.h), otherwise 0."""
    part: int
    parts_end: int
    planar: int
    """True if some parts have planes to join."""


class Runs:
    """All runs of frames of `Places`.

    Args:
        runs: runs of consecutive frames, in order.
        at: offset of each part in the expanded bytes of its run, int64 ``[m]``.
        places: sources and destinations of the frames.
    """

    def __init__(self, runs: list[Run], at: Ints, places: Places) -> None:
        self.all = runs
        self.at = at
        self._places = places
        self._from, self._sizes = address(at), address(places.nbytes)
        self._planes, self._to = address(places.planes), address(places.to)

    def move(self, run: Run, base: int) -> None:
        """Copies the parts of a run to their destinations. Its expanded bytes are at ``base``."""
        skipped = 8 * run.part
        given, count = (self._from + skipped, self._sizes + skipped), run.parts_end - run.part
        to = self._to + skipped
        if run.planar:
            _core.join_planes(*given, self._planes + skipped, to, count, base)
        else:
            _core.move_pieces(*given, to, count, base)

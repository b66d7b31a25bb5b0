"""Where compressed frames lie, where their bytes go, and which are expanded in one step.

    frames      ├── 0 ──┼─ 1 ─┼──── 2 ────┤      what they expand to, one behind the other
    parts        a   b    c    c    d   e        each is some bytes of a frame, and an address

A part may be any run of bytes of its frame. Bytes of which there is no part go nowhere, and those
of which there are several go to each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shmbuffer._native import _core
from shmbuffer._native._core import address
from shmbuffer.items.records.views import readable
from shmbuffer.memory.format.array_types import Ints

_LEAST_RUN_BYTES = 2**16
_RUN_BYTES = 2**18  # stays in a processor's cache, and a thread does it while another does the next
_WOVEN_BYTES = 2**21  # these go straight to their places
_EACH = 4  # runs of a thread, or one would wait for the other at the end


class Places(NamedTuple):
    """The places of the parts that frames expand to.

    The arrays are contiguous; the caller keeps the memory alive.
    """

    at: Ints
    """int64[n]: the address of each frame."""
    stored: Ints
    """int64[n]: its bytes."""
    whole: Ints
    """int64[n]: bytes that each frame expands to."""
    frame: Ints
    """int64[m]: the frame of each part, ascending."""
    before: Ints
    """int64[m]: bytes of the frame in front of the part."""
    nbytes: Ints
    """int64[m]: of the part."""
    to: Ints
    """int64[m]: the address that it goes to."""
    planes: Ints
    """int64[m]: how many lie one behind the other in it, and are to be joined; 1: as it lies."""

    def source(self, frames: range) -> bytes | memoryview:
        """Some frames, one behind the other."""
        first, end, step = frames.start, frames.stop, frames.step
        if len(frames) == 1:
            return readable(int(self.at[first]), int(self.stored[first]))
        return _core.bytes_of(address(self.at), address(self.stored), first, end, step)

    def runs(self, threads: int = 1) -> Runs:
        """The frames in order, so many in a run as are worth a step to that many threads."""
        frames, parts = len(self.whole), len(self.frame)
        share = max(int(self.whole.sum()) // (threads * _EACH), _LEAST_RUN_BYTES)
        at, table = np.empty(parts, np.int64), np.empty((frames, len(Run._fields)), np.int64)
        count = _core.runs(
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
    """Bytes of all of them."""
    into: int
    """The address that all of them go to, one behind the other; 0: they go there in parts."""
    other: int
    """Of woven frames (see frames.h) every second one goes there, others to ``into``; else 0."""
    part: int
    parts_end: int
    planar: int
    """True if some parts are planes that have to be joined."""


class Runs:
    """All runs of some places.

    Args:
        runs: in order.
        at: int64[m]: where each part is in the bytes of its run.
        places: see there.
    """

    def __init__(self, runs: list[Run], at: Ints, places: Places) -> None:
        self.all = runs
        self.at = at
        self._places = places
        self._from, self._sizes = address(at), address(places.nbytes)
        self._planes, self._to = address(places.planes), address(places.to)

    def move(self, run: Run, base: int) -> None:
        """Copy the expanded bytes of a run, at that address, to their places."""
        skipped = 8 * run.part
        given, count = (self._from + skipped, self._sizes + skipped), run.parts_end - run.part
        to = self._to + skipped
        if run.planar:
            _core.join_planes(*given, self._planes + skipped, to, count, base)
        else:
            _core.move_pieces(*given, to, count, base)

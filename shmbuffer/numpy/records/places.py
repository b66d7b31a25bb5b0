"""Where the bytes of compressed frames go, and which frames are expanded in one step.

    frames      ├── 0 ──┼─ 1 ─┼──── 2 ────┤      what they expand to, one behind the other
    parts        a   b    c    c    d   e        each is some bytes of a frame, and an address

A part may be any run of bytes of its frame. Bytes of which there is no part go nowhere, and those
of which there are several go to each of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_RUN_BYTES = 2**18  # stays in a processor's cache, and a thread does it while another does the next


class Places(NamedTuple):
    """What frames expand to, in parts. Contiguous arrays; the caller keeps the memory alive."""

    whole: NDArray[np.int64]
    """int64[n]: bytes that each frame expands to."""
    frame: NDArray[np.int64]
    """int64[m]: the frame of each part, ascending."""
    before: NDArray[np.int64]
    """int64[m]: bytes of the frame in front of the part."""
    nbytes: NDArray[np.int64]
    """int64[m]: of the part."""
    to: NDArray[np.int64]
    """int64[m]: the address that it goes to."""
    planes: NDArray[np.int64]
    """int64[m]: how many lie one behind the other in it, and are to be joined; 1: as it lies."""

    def runs(self) -> list[Run]:
        """The frames in order, so many in a run as are worth a step. Cost: 40 µs for all."""
        ends = np.cumsum(self.whole)
        starts = ends - self.whole
        of = starts // _RUN_BYTES
        first = np.flatnonzero(np.append(True, of[1:] != of[:-1])) if len(of) else of
        last = np.append(first[1:], len(of))[: len(first)]
        at = starts[self.frame] + self.before
        parts = np.searchsorted(self.frame, np.append(first, len(of)))
        # Parts that lie behind each other in the frames as in memory, and leave nothing out.
        behind = (at[1:] - at[:-1] == self.nbytes[:-1]) & (
            self.to[1:] - self.to[:-1] == self.nbytes[:-1]
        )
        turned = np.append(0, np.cumsum(self.planes > 1))
        breaks = np.append(0, np.cumsum(~behind))
        runs = []
        for one, end, a, b in zip(
            first.tolist(), last.tolist(), parts[:-1].tolist(), parts[1:].tolist(), strict=True
        ):
            start, size = int(starts[one]), int(ends[end - 1] - starts[one])
            if size:
                as_is = (
                    a < b
                    and breaks[a] == breaks[b - 1]
                    and turned[a] == turned[b]
                    and at[a] == start
                    and at[b - 1] + self.nbytes[b - 1] == start + size
                )
                into = int(self.to[a]) if as_is else None
                part = slice(a, b)
                planes = self.planes[part] if turned[a] < turned[b] else None
                runs.append(
                    Run(
                        one,
                        end,
                        size,
                        into,
                        at[part] - start,
                        self.nbytes[part],
                        self.to[part],
                        planes,
                    )
                )
        return runs


class Run(NamedTuple):
    """Frames that are expanded in one step."""

    first: int
    end: int
    size: int
    """Bytes of all of them."""
    into: int | None
    """The address that all of them go to, one behind the other; None: they go there in parts."""
    at: NDArray[np.int64]
    """int64[m]: where each part is in these bytes."""
    nbytes: NDArray[np.int64]
    """int64[m]."""
    to: NDArray[np.int64]
    """int64[m]."""
    planes: NDArray[np.int64] | None
    """int64[m]; None: everything goes as it lies."""

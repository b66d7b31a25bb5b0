"""Which batches must, may or cannot be present after copies of the directory were put back.

    time    ──batches──▶ [copy begins .. ends] ──batches──▶ all dead, the copy is put back ──▶

If a batch was acknowledged before the copy began, and its slots were not needed again before the
copy ended, then its bytes did not change during the copy. It must be present afterwards. A batch
that began after the copy had ended cannot be present. Of a batch in between, each item may be
present or not, because it was copied while it changed. The directory may have been put back before
the copy was made, so the way to the present leads from copy to copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.torture.history import Kind

Which = NDArray[np.bool_]


@dataclass(frozen=True)
class Lineage:
    """The fate of each batch of a history.

    Attributes:
        since: when the last copy was put back, or 0 if none was.
        head, write_count: the state of the ring after the recovery that followed.
        ours: True if the batch began since then.
        kept: True if it did not change during any copy on the way, so it must be present.
        perhaps: True if each of its items may be present or not.
    """

    since: int
    head: int
    write_count: int
    ours: Which
    kept: Which
    perhaps: Which

    @property
    def undone(self) -> Which:
        """Batches that began after the end of the copy that was put back."""
        return ~(self.ours | self.kept | self.perhaps)


def lineage(batches: Any, marks: Any) -> Lineage:
    """Follows the copies that were put back, from the present to the past."""
    none = np.zeros(len(batches), np.bool_)
    restores = marks[marks["kind"] == Kind.RESTORED]
    if not len(restores):
        return Lineage(0, 0, 0, ~none, none, none)
    copies = {int(one["first"]): one for one in marks[marks["kind"] == Kind.COPIED]}
    last = restores[np.argmax(restores["began"])]
    kept, perhaps, oldest = none.copy(), none.copy(), 0
    restored = last
    while restored is not None:
        copy = copies[int(restored["first"])]
        oldest = max(oldest, int(copy["a"]))
        earlier = restores[restores["ended"] <= copy["began"]]
        restored = earlier[np.argmax(earlier["began"])] if len(earlier) else None
        first = 0 if restored is None else restored["began"]
        inside = (batches["began"] >= first) & (batches["began"] < copy["ended"])
        stood = (batches["ended"] <= copy["began"]) & (batches["ticket"] >= oldest)
        kept |= inside & stood
        perhaps |= inside & ~stood
    ours = batches["began"] >= last["began"]
    return Lineage(int(last["began"]), int(last["a"]), int(last["b"]), ours, kept, perhaps)

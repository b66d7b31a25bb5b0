"""What is left of the past after copies were put back: which batches are there, may be, or are not.

    time    ──batches──▶ [copy begins .. ends] ──batches──▶ all dead, the copy is put back ──▶

A batch that was acknowledged before the copy began, and whose slots nobody needed until it had
ended, stood still: its bytes in the copy are whole, so it has to be there afterwards. One that
began after the copy had ended cannot be there. Between the two each item may be there or not: it
was copied while it changed. A copy may itself come from a directory that had been put back, so the
way to the present goes from copy to copy.
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
    """Of each batch of a history.

    Attributes:
        since: when the last copy was put back; 0: none was.
        head, write_count: what the ring had after the recovery that followed.
        ours: the batch began since then.
        kept: it stood still in each copy on the way, so it is there.
        perhaps: each of its items is there or not.
    """

    since: int
    head: int
    write_count: int
    ours: Which
    kept: Which
    perhaps: Which

    @property
    def undone(self) -> Which:
        """It began after the copy that was put back had been made."""
        return ~(self.ours | self.kept | self.perhaps)


def lineage(batches: Any, marks: Any) -> Lineage:
    """Goes back from the present, from copy to copy."""
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

"""Grows a ring without leaves: moves its items to a larger ring in new anonymous memory.

    ring ──grow──▶ the same `Ring` object, so all threads that use it see the new slots

Each item keeps its slot, source and raw priority. The exponents, the largest priority, the write
count and the position of the ring do not change. Items get new tickets in the order of their slots,
so old tickets become invalid. A ring can therefore grow only if no other process has it open.

During the move, other threads can sample items and update priorities, and no update is lost. The
caller prevents writes during the move.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format.schema import Schema


def grow(engine: Engine, capacity: int) -> Engine:
    """Moves the ring of an engine to a larger ring.

    If the capacity is doubled each time, the amortized cost per item is O(1).

    Args:
        engine: A handle in anonymous memory, whose schema has no leaves. It is closed.
        capacity: Number of slots of the larger ring.

    Returns:
        The handle of the larger ring.
    """
    ring = engine.ring()
    assert ring is not None
    assert not engine.shared
    assert not ring.schema.leaves
    snapshot = ring.copy_out(())
    larger = Engine.anonymous(replace(engine.settings, capacity=capacity))
    new_ring = larger.define(Schema((), capacity, (), ring.schema.structure))
    if ring.tree.prioritized:
        new_ring.tree.bind(ring.tree.alpha, ring.tree.eps)
    present = np.nonzero(snapshot.tickets >= 0)[0]
    raw = np.ascontiguousarray(snapshot.priorities[present])
    if len(present):
        new_ring.claims.claim_slots(present, in_place=False)
        new_ring.claims.commit(None if np.isnan(raw).any() else raw)
        sources = new_ring.live.sources  # no other thread uses the new ring yet
        sources[present] = snapshot.sources[present]
    new_ring.restore(snapshot.head % ring.capacity, snapshot.write_count, snapshot.max_priority)
    new_ring.tree.initial = ring.tree.initial
    old = ring.live.raw
    vars(ring).update(vars(new_ring))  # one step under the GIL, so no thread sees a mixture
    larger._ring, engine._ring = ring, None
    engine.close()  # waits for running calls on the old memory
    current = old[present]
    changed = (current != raw) & ~np.isnan(current) & (ring.tree.priorities(present) == raw)
    ring.update(present[changed], np.ascontiguousarray(current[changed]))
    return larger

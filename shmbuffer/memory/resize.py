"""Grows a ring without leaves: moves its items to a larger piece of anonymous memory.

    ring ──grow──▶ the same `Ring` object, so all threads that use it see the new slots

An item keeps its slot and its source. Raw priorities, exponents, maximum, count and position are
kept, too. Tickets are new, in the order of the slots, so old tickets become invalid. A ring can
therefore grow only if no other process has it open.

During the move, other threads can sample and update priorities, and no update is lost. Writers
wait, because the caller prevents claims while the ring grows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format.schema import Schema


def grow(engine: Engine, capacity: int) -> Engine:
    """Moves a ring to more slots and returns its engine. Amortized O(1) per item if doubled."""
    ring = engine.ring()
    assert ring is not None
    assert not engine.shared
    assert not ring.schema.leaves
    moment = ring.copy_out(())
    larger = Engine.anonymous(replace(engine.settings, capacity=capacity))
    fresh = larger.define(Schema((), capacity, (), ring.schema.structure))
    if ring.tree.prioritized:
        fresh.tree.bind(ring.tree.alpha, ring.tree.eps)
    present = np.nonzero(moment.tickets >= 0)[0]
    raw = np.ascontiguousarray(moment.priorities[present])
    if len(present):
        fresh.claims.claim_slots(present, in_place=False)
        fresh.claims.commit(None if np.isnan(raw).any() else raw)
        sources = fresh.live.sources  # no other thread sees them yet
        sources[present] = moment.sources[present]
    fresh.restore(moment.head % ring.capacity, moment.write_count, moment.max_priority)
    fresh.tree.initial = ring.tree.initial
    old = ring.live.raw
    vars(ring).update(vars(fresh))  # one step, as other threads see it
    larger._ring, engine._ring = ring, None
    engine.close()  # waits for running calls on the old memory
    late = old[present]
    changed = (late != raw) & ~np.isnan(late) & (ring.tree.priorities(present) == raw)
    ring.update(present[changed], np.ascontiguousarray(late[changed]))
    return larger

"""More room for a ring without leaves: the same items, on a larger piece of anonymous memory.

    ring ──grow──▶ the same `Ring` object, and everybody who holds it sees the new slots

An item keeps its slot and its source; raw priorities, exponents, maximum, count and position come
along. Tickets are new, in the order of the slots: only a ring that nobody else has open can grow,
and what its owner has kept of old tickets is worth nothing afterwards.

Other threads may draw and change priorities meanwhile, and nothing of that is lost. Writers wait:
the caller lets nobody claim while the ring grows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shmbuffer.memory.engine import Engine
from shmbuffer.memory.format.schema import Schema


def grow(engine: Engine, capacity: int) -> Engine:
    """Moves a ring to more slots; returns its engine. O(capacity), constant an item by doubling."""
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
        sources = fresh.live.sources  # nobody else sees them yet
        sources[present] = moment.sources[present]
    fresh.restore(moment.head % ring.capacity, moment.write_count, moment.max_priority)
    fresh.tree.initial = ring.tree.initial
    old = ring.live.raw
    vars(ring).update(vars(fresh))  # one step, as other threads see it
    larger._ring, engine._ring = ring, None
    engine.close()  # returns when the calls that are in flight on the old memory have ended
    late = old[present]
    changed = (late != raw) & ~np.isnan(late) & (ring.tree.priorities(present) == raw)
    ring.update(present[changed], np.ascontiguousarray(late[changed]))
    return larger

"""Roles of the processes in the core campaign, which use the C core and numpy without torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmbuffer import EmptyBufferError, LockTimeout, RingOverrunError
from shmbuffer.memory import Engine, RecordBatch, Ring
from tests.torture import items
from tests.torture.arena import Actor, Role
from tests.torture.mixed import fork_beside
from tests.torture.plan import Plan

ROWS = 16


def roles(path: Path, plan: Plan) -> dict[str, Role]:
    """Returns the functions of all roles for this directory."""

    def joined(work: Callable[[Actor, Engine, Ring, Plan], None], role: str) -> Role:
        def body(actor: Actor) -> None:
            with Engine.open(path, None, role=role) as engine:
                assert engine.ring() is not None
                work(actor, engine, engine.ring(), plan)

        return body

    return {
        "writer": joined(write_on, "collector"),
        "learner": joined(learn_on, "learner"),
        "coordinator": joined(coordinate, "coordinator"),
        "forker": joined(fork_on, "client"),
    }


def write_on(actor: Actor, engine: Engine, ring: Ring, plan: Plan) -> None:
    first = 0
    while actor.goes_on():
        first = write_once(actor, ring, plan, first)
        look(actor, engine, ring)


def write_once(actor: Actor, ring: Ring, plan: Plan, first: int) -> int:
    """Writes one batch; returns the sequence number that follows it."""
    count = int(actor.rng.integers(1, plan.batch + 1))
    actor.log.invoked(first, count)
    try:
        ticket = write(ring, items.keys_of(actor.who, first, count), plan)
    except (RingOverrunError, LockTimeout):
        actor.log.refused(first, count)
    else:
        actor.log.written(first, count, ticket)
    return first + count


def learn_on(actor: Actor, engine: Engine, ring: Ring, plan: Plan) -> None:
    first = 0
    while actor.goes_on():
        first = learn_once(actor, ring, plan, first)
        look(actor, engine, ring)
        if actor.rng.random() < 0.05:
            read(ring, plan)


def learn_once(actor: Actor, ring: Ring, plan: Plan, first: int) -> int:
    """Samples once and updates the priorities; returns the number of the next update."""
    began = time.monotonic_ns()
    try:
        keys, index, tickets, _ = sample(ring, plan, actor.rng)
    except EmptyBufferError:
        return first
    actor.log.sampled(began, keys, tickets)
    _, where = np.unique(tickets, return_index=True)
    given = items.keys_of(actor.who, first, len(where))
    raw = items.priority(given)
    row = actor.log.updating(given, tickets[where], raw)
    applied, _ = ring.update(index[where], raw, tickets[where])
    actor.log.updated(row, len(where), applied)
    return first + len(where)


def coordinate(actor: Actor, engine: Engine, ring: Ring, plan: Plan) -> None:
    while actor.goes_on():
        engine.seat.reap_dead()
        look(actor, engine, ring)
        engine.stats()
        if actor.rng.random() < 0.1:
            engine.flush()
        if actor.rng.random() < 0.1:
            report = engine.check()
            assert report.ok, str(report)


def fork_on(actor: Actor, engine: Engine, ring: Ring, plan: Plan) -> None:
    def work(who: Actor, number: int) -> int:
        once = write_once if who.rng.random() < 0.5 else learn_once
        following = once(who, ring, plan, number)
        look(who, engine, ring)
        return following

    fork_beside(actor, work, engine.close)


def look(actor: Actor, engine: Engine, ring: Ring) -> None:
    """Notes the state of the ring, and from time to time the epoch, which takes longer to read."""
    began = time.monotonic_ns()
    epoch = engine.superblock.epoch if actor.rng.random() < 0.2 else -1
    actor.log.seen(began, ring.head, ring.write_count, epoch, engine.seat.incarnation)


def write(ring: Ring, keys: items.Keys, plan: Plan) -> int:
    """Writes the items with these keys and their first priorities."""
    raw = items.priority(keys)
    if ring.records is not None:
        batch = RecordBatch(*items.records_of(keys, plan.mean_words))
        return ring.records.write(batch, raw)
    rows = [items.row(keys, leaf, size) for leaf, size in enumerate(plan.leaf_bytes)]
    return ring.write([data.ctypes.data for data in rows], len(keys), raw)


def sample(
    ring: Ring, plan: Plan, rng: np.random.Generator, count: int = ROWS, beta: float = 0.5
) -> tuple[items.Keys, NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Samples items by priority, or uniformly if ``beta`` is 0; fails if an item is torn.

    Returns the keys, slots, tickets and weights of the items.
    """
    key, prioritized = int(rng.integers(2**63)), beta > 0
    if ring.records is not None:
        drawn = ring.records.sample(count, key, beta=beta if prioritized else None)
        weights = drawn.weights if drawn.weights is not None else np.ones(count, np.float32)
        return _record_keys(drawn.batch, plan), drawn.index, drawn.tickets, weights
    rows = _room(plan, count)
    index, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
    weights = np.ones(count, np.float32)
    places = (index.ctypes.data, tickets.ctypes.data, weights.ctypes.data)
    out = [data.ctypes.data for data in rows]
    ring.sample(count, key, out, *places, beta=beta, prioritized=prioritized)
    return _row_keys(rows), index, tickets, weights


def read(ring: Ring, plan: Plan) -> dict[int, int]:
    """Reads every item with the public API; returns the key of each slot, fails on a torn item."""
    index = np.arange(ring.capacity)
    if ring.records is not None:
        drawn = ring.records.read(index)
        there = (drawn.tickets >= 0).nonzero()[0]
        batch = RecordBatch(drawn.batch.data, drawn.batch.starts[there], drawn.batch.sizes[there])
        keys = _record_keys(batch, plan)
    else:
        rows, tickets = _room(plan, len(index)), np.empty(len(index), np.int64)
        out = [data.ctypes.data for data in rows]
        ring.read(index.ctypes.data, len(index), out, tickets.ctypes.data)
        there = (tickets >= 0).nonzero()[0]
        keys = _row_keys([data[there] for data in rows])
    return dict(zip(there.tolist(), keys.tolist(), strict=True))


def _room(plan: Plan, count: int) -> list[items.Bytes]:
    return [np.empty((count, size), np.uint8) for size in plan.leaf_bytes]


def _row_keys(rows: list[items.Bytes]) -> items.Keys:
    torn = items.torn(rows)
    assert not len(torn), f"H1: rows {torn} are torn"
    return items.key_in(rows[0])


def _record_keys(batch: RecordBatch, plan: Plan) -> items.Keys:
    keys = [items.record_key(bytes(batch.body(i)), plan.mean_words) for i in range(len(batch))]
    assert None not in keys, "H1: a record is torn"
    return np.array(keys, np.uint64)

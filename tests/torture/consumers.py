"""Kills learners at random and checks how often each item is done for each consumer.

    python -m tests.torture.consumers --seconds 60 --seed 1

A round is one directory with two consumers, one of which needs several acknowledgements of each
item. Learners join late, take items with short leases or without a time limit, and acknowledge them
at once, late, twice or never. They also return items, and they are killed. When all processes have
ended, the campaign takes and acknowledges the items that are left, and compares the accounts of all
learners (deliveries.py).
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np

from shmbuffer import EmptyBufferError, LockTimeout, RateLimitTimeout
from shmbuffer.memory import Engine, Ring
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.format.ledger import LeasedItems
from shmbuffer.memory.system import deadline
from tests.torture import items
from tests.torture.arena import Actor, Arena
from tests.torture.command import Figures, Say, added, main
from tests.torture.deliveries import Account, Deliveries
from tests.torture.history import History
from tests.torture.kills import audited, pause_of, rounds, settle
from tests.torture.plan import Plan
from tests.torture.roles import read, roles, write

KILLS = 120
CHAIRS = ["writer", "writer", "learner", "learner", "learner", "learner", "coordinator"]
NAMES = ("a", "b")
LEASES_S = (0.002, 0.03, math.inf)
#: How long a call waits for other processes, which may be standing still.
WAITS_S = 0.02
NOT_NOW = (EmptyBufferError, LockTimeout, RateLimitTimeout)


def round_of_kills(folder: Path, seed: int, *, kills: int = KILLS) -> Figures:
    """Plays a round in one directory with about ``kills`` kills; returns what was checked."""
    rng = np.random.default_rng(seed)
    record_bytes = 2**15 if rng.random() < 0.5 else 0
    plan = Plan(int(rng.integers(16, 200)), 40, 8, record_bytes, 2, 4, 0.5)
    times = (1, int(rng.integers(1, 4)))
    path = folder / "buffer"
    with Engine.open(path, plan.settings) as engine:
        engine.define(plan.schema)
        ring = engine.ring()
        assert ring is not None
        opened(ring, times)
    playing = {
        **roles(path, plan),
        "writer": lambda actor: write_on(actor, path, plan),
        "learner": lambda actor: learn_on(actor, path, plan, times),
    }
    figures: Figures = {"rounds": 1, "kills": 0, "recoveries": 0}

    def finish() -> Figures:
        """Takes what is left, after all processes have ended."""
        last = items.who_of(len(CHAIRS) + 1, 1)
        with Engine.open(path, None) as engine, Account(arena.logs, len(CHAIRS) + 1, last) as own:
            settle(engine)
            ring = engine.ring()
            assert ring is not None
            for number, consumer in enumerate(opened(ring, times)):
                drain(own, number, consumer)
            report = engine.check()
            assert report.ok, str(report)
            assert [one.behind for one in ring.consumers.status()] == [0, 0]
        found = Deliveries(Account.read(arena.logs), History.read(arena.logs).batches, times)
        broken = found.violations()
        assert not broken, "\n".join(["rules are broken", *broken[:20]])
        return found.figures()

    with Arena(folder / "logs", playing, CHAIRS, seed) as arena:
        arena.fill()
        while figures["kills"] < kills:
            time.sleep(pause_of(rng, 0.05))
            everybody = bool(rng.random() < 0.05)
            victims = arena.chairs if everybody else [arena.chairs[int(rng.integers(len(CHAIRS)))]]
            figures["kills"] += arena.kill(victims)
            figures["recoveries"] += everybody
            arena.fill()
        figures["kills"] += arena.kill(arena.chairs)
        arena.end_orphans()
        added(figures, audited(finish))
    return figures


def opened(ring: Ring, times: tuple[int, ...]) -> list[Consumer]:
    """Opens the consumers of a round."""
    return [ring.consumers.open(name, times=n) for name, n in zip(NAMES, times, strict=True)]


def write_on(actor: Actor, path: Path, plan: Plan) -> None:
    """Writes batches, and gives up a batch if consumers are behind."""
    first = 0
    with Engine.open(path, None, role="collector") as engine:
        ring = engine.ring()
        assert ring is not None
        while actor.goes_on():
            count = int(actor.rng.integers(1, plan.batch + 1))
            actor.log.invoked(first, count)
            try:
                with deadline.limit_waits(WAITS_S):
                    ticket = write(ring, items.keys_of(actor.who, first, count), plan)
            except NOT_NOW:
                actor.log.refused(first, count)
            else:
                actor.log.written(first, count, ticket)
            first += count


def learn_on(actor: Actor, path: Path, plan: Plan, times: tuple[int, ...]) -> None:
    """Takes items, and acknowledges, returns or keeps them at random."""
    time.sleep(pause_of(actor.rng, 0.1))  # some learners start late
    kept: list[tuple[int, Consumer, LeasedItems]] = []
    chair = actor.who // items.LIVES
    with (
        Engine.open(path, None, role="learner") as engine,
        Account(actor.log.folder, chair, actor.who) as own,
    ):
        ring = engine.ring()
        assert ring is not None
        consumers = opened(ring, times)
        while actor.goes_on():
            number = int(actor.rng.integers(len(consumers)))
            lease_s = float(actor.rng.choice(LEASES_S))
            taken = take(own, number, consumers[number], int(actor.rng.integers(1, 9)), lease_s)
            if taken is not None and lease_s == math.inf and actor.rng.random() < 0.3:
                there = read(ring, plan)  # no process overwrites a leased item
                own.keys(number, taken, [there[slot] for slot in taken.slots.tolist()])
            if taken is not None:
                kept.append((number, consumers[number], taken))
            actor.rng.shuffle(kept)  # type: ignore[arg-type]
            while kept and (len(kept) > 5 or actor.rng.random() < 0.6):
                dispose(actor, own, *kept.pop())


def take(
    own: Account, number: int, consumer: Consumer, count: int, lease_s: float
) -> LeasedItems | None:
    """Takes some items and notes them in the account; returns None if there are none at present."""
    began = time.monotonic_ns()
    try:
        with deadline.limit_waits(WAITS_S):
            taken = consumer.take(count, lease_s)
    except NOT_NOW:
        return None
    own.took(number, taken, began, lease_s)
    return taken


def dispose(
    actor: Actor, own: Account, number: int, consumer: Consumer, taken: LeasedItems
) -> None:
    """Acknowledges all or some of the items, perhaps too late, and returns or keeps the others."""
    chance = actor.rng.random()
    if chance < 0.2:
        time.sleep(pause_of(actor.rng, 0.05))
    if chance > 0.1:
        part = slice(0, int(actor.rng.integers(len(taken.slots) + 1)) if chance > 0.8 else None)
        acknowledge(
            own, number, consumer, LeasedItems(taken.slots[part], taken.tickets[part], taken.lease)
        )
    own.gave_back(number, taken)
    consumer.give_back(taken.lease)


def acknowledge(own: Account, number: int, consumer: Consumer, taken: LeasedItems) -> None:
    """Acknowledges all items in one call; if any is refused, again one by one to learn which.

    A second acknowledgement of an item counts as the first one. Items that were overwritten or
    delivered again between the two calls are the exception, because their outcome is unknown.
    """
    own.acknowledging(number, taken)
    done = consumer.ack(taken.lease, taken.slots, taken.tickets)
    if done.refused in (0, len(taken.slots)):
        own.acknowledged(number, taken, np.full(len(taken.slots), done.refused == 0))
        return
    pieces = (slice(i, i + 1) for i in range(len(taken.slots)))
    each = [consumer.ack(taken.lease, taken.slots[i], taken.tickets[i]) for i in pieces]
    applied = np.array([one.applied == 1 for one in each])
    now = consumer.item_states()
    ours = (now.tickets[taken.slots] == taken.tickets) & (now.leases[taken.slots] == taken.lease)
    assert not (ours & ~applied).any(), "a repeated ack says something else"
    assert applied.sum() <= done.applied, "a repeated ack applies what was refused"
    known = np.full(len(applied), True) if applied.sum() == done.applied else applied
    some = LeasedItems(taken.slots[known], taken.tickets[known], taken.lease)
    own.acknowledged(number, some, applied[known])


def drain(own: Account, number: int, consumer: Consumer) -> None:
    """Takes and acknowledges all remaining items, whose holders are dead."""
    while True:
        taken = take(own, number, consumer, 64, math.inf)
        if taken is None:
            return
        acknowledge(own, number, consumer, taken)


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Plays rounds for about ``seconds`` seconds, and at least one."""
    return rounds(__spec__.name, round_of_kills, seconds, seed, say)


if __name__ == "__main__":
    sys.exit(main(campaign))

"""Random kills around samplers that deliver complete units: groups, windows, and items by age.

    python -m tests.torture.units --seconds 60 --seed 1

A case is one round for each kind of unit. A unit has `SIZE` items, which are written at once or
piece by piece. Learners take units with leases that may or may not have a time limit, acknowledge
them, also late or never, and all are killed at random. When all processes have ended, the campaign
takes what is left and compares the accounts of all learners (deliveries.py).

A unit that was written at once is acknowledged once. A unit whose writer died between two pieces
may be given up. With a staleness limit, no delivered item is older than the limit allows.
"""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from shmbuffer import (
    ConsumingSampler,
    EmptyBufferError,
    LazyMemmapStorage,
    LockTimeout,
    PromptGroupSampler,
    RateLimiter,
    RateLimitTimeout,
    RingOverrunError,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from shmbuffer.memory import consumer_version
from shmbuffer.memory.format.ledger import LeasedItems
from tests.torture import items
from tests.torture.arena import Actor, Arena
from tests.torture.command import Figures, Say, added, main
from tests.torture.deliveries import Account, Deliveries
from tests.torture.history import History
from tests.torture.kills import audited, pause_of, rounds, settle

KILLS = 40
SIZE = 4
STALENESS = 1
CAPACITY = 96
NAME = "learners"
KINDS: dict[str, Any] = {
    "groups": lambda: PromptGroupSampler(group_key="unit", group_size=SIZE, consumer=NAME),
    "windows": lambda: StreamingSliceSampler(slice_len=SIZE, consumer=NAME),
    "gate": lambda: ConsumingSampler(consumer=NAME),
}
WRITERS = ["writer", "writer"]
CHAIRS = {
    "groups": [*WRITERS, "learner", "learner", "learner"],
    "windows": [*WRITERS, "learner", "learner", "learner"],
    "gate": [*WRITERS, "learner"],
}
LEASES_S = (0.03, math.inf)
WAITS_S = 0.05
NOT_NOW = (EmptyBufferError, LockTimeout, RateLimitTimeout, RingOverrunError)


def opened(path: Path, kind: str) -> TensorDictReplayBuffer:
    limiter = None
    if kind == "gate":
        each = {"max_staleness": STALENESS, "items_per_version": 2 * SIZE}
        limiter = RateLimiter(**each, when_no_peer="wait")  # for a whole batch of one version
    return TensorDictReplayBuffer(
        storage=LazyMemmapStorage(CAPACITY, scratch_dir=path, shared_init=True),
        sampler=KINDS[kind](),
        batch_size=2 * SIZE,
        rate_limiter=limiter,
    )


def pieces_of(who: int, first: int, at: int, count: int, version: int = 0) -> TensorDict:
    """Makes some items of a unit; ``first`` is the number of the unit's first item."""
    key = torch.from_numpy(items.keys_of(who, first + at, count).astype(np.int64))
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[-1] = at + count == SIZE
    unit = torch.full((count,), int(items.keys_of(who, first, 1)[0]))
    told = {"key": key, "unit": unit, "version": torch.full((count,), version)}
    return TensorDict({**told, ("next", "done"): done}, [count])


def write_on(actor: Actor, path: Path, kind: str) -> None:
    """Writes units one after the other, at once or piece by piece."""
    first = 0
    with opened(path, kind) as rb:
        while actor.goes_on():
            sizes = [SIZE] if kind == "gate" or actor.rng.random() < 0.5 else [1, 2, 1]
            at = 0
            for count in sizes:
                actor.log.invoked(first + at, count)
                ticket = None
                while ticket is None and actor.goes_on():
                    ticket = write(rb, kind, actor.who, first, at, count)
                if ticket is None:
                    return
                if ticket < 0:
                    actor.log.refused(first + at, count)
                else:
                    actor.log.written(first + at, count, ticket)
                at += count
            first += SIZE


def write(rb: Any, kind: str, who: int, first: int, at: int, count: int) -> int | None:
    """Writes some items of a unit.

    Returns the ticket of the first item, -1 if the items were refused, and None if there was no
    space.
    """
    ring = rb.storage.engine().ring()
    try:
        if kind == "gate" and ring is not None:
            version = consumer_version.read(ring.seat)
            with rb.reserve(count, timeout=WAITS_S, version=version) as room:
                index = room.commit(pieces_of(who, first, at, count, version), timeout=5.0)
        else:
            index = rb.extend(pieces_of(who, first, at, count), timeout=WAITS_S)
    except NOT_NOW:
        return None
    if not len(index):
        return -1
    return int(rb.storage.engine().ring().live.tickets()[int(index[0])])


def learn_on(actor: Actor, path: Path, kind: str) -> None:
    """Takes units, and acknowledges, returns or keeps them at random."""
    chair = actor.who // items.LIVES
    with opened(path, kind) as rb, Account(actor.log.folder, chair, actor.who) as own:
        while actor.goes_on():
            lease_s = math.inf if kind == "gate" else float(actor.rng.choice(LEASES_S))
            taken = take(rb, kind, own, lease_s)
            if taken is None:
                continue
            if actor.rng.random() < 0.2:
                time.sleep(pause_of(actor.rng, 0.05))
            if kind == "gate" or actor.rng.random() > 0.1:
                acknowledge(rb, own, taken)
            if kind == "gate":
                consumer_version.increment(rb.storage.engine().seat)


def take(rb: Any, kind: str, own: Account, lease_s: float) -> Any:
    """Takes and notes a batch of complete units; returns None if there is none at present."""
    began = time.monotonic_ns()
    version = consumer_version.read(rb.storage.engine().seat)
    try:
        batch = rb.sample(lease=lease_s, timeout=WAITS_S)
    except NOT_NOW:
        return None
    taken = taken_of(batch)
    own.took(0, taken, began, lease_s)
    if kind == "gate":
        behind = version - int(batch["version"].min())
        assert behind <= STALENESS, f"an item is {behind} versions behind"
    else:
        units, counts = batch["unit"].unique(return_counts=True)
        assert (counts == SIZE).all(), f"units are not whole: {units.tolist()} {counts.tolist()}"
    if lease_s == math.inf:
        own.keys(0, taken, batch["key"].numpy().astype(np.uint64))
    return batch


def taken_of(batch: Any) -> LeasedItems:
    """Returns the leases of a batch. The lease of the first part stands for all in an account."""
    slots, tickets = batch["index"].numpy().reshape(-1), batch["index_generation"].numpy()
    return LeasedItems(slots, tickets.reshape(-1), int(batch["index_lease"].reshape(-1)[0]))


def acknowledge(rb: Any, own: Account, batch: Any) -> None:
    """Acknowledges all units in one call; if any is refused, again one by one to learn which.

    A second acknowledgement of an item counts as the first one. Items that were overwritten or
    delivered again between the two calls are the exception, because their outcome is unknown.
    """
    taken = taken_of(batch)
    own.acknowledging(0, taken)
    done, count = rb.ack(batch), len(taken.slots)
    applied = np.full(count, done.refused == 0)
    if 0 < done.refused < count:
        applied = np.array([rb.ack(batch[i : i + 1]).applied == 1 for i in range(count)])
        assert applied.sum() <= done.applied, "a repeated ack applies what was refused"
    known = applied if applied.sum() < done.applied else np.full(count, True)
    some = LeasedItems(taken.slots[known], taken.tickets[known], taken.lease)
    own.acknowledged(0, some, applied[known])


def violations(found: Deliveries, at_once: set[int]) -> list[str]:
    """Returns violations, without those for items of units that were written piece by piece."""
    missed = re.compile(r"D1:.* (\d+)\)?$")
    return [
        text
        for text in found.violations()
        if (match := missed.match(text)) is None or int(match[1]) in at_once
    ]


def round_of_kills(folder: Path, seed: int, kind: str, *, kills: int = KILLS) -> Figures:
    """Plays a round in one directory with about ``kills`` kills; returns what was checked."""
    folder.mkdir()
    rng, path, chairs = np.random.default_rng(seed), folder / "buffer", CHAIRS[kind]
    with opened(path, kind) as rb:
        rb.can_sample()
    playing = {
        "writer": lambda actor: write_on(actor, path, kind),
        "learner": lambda actor: learn_on(actor, path, kind),
    }
    figures: Figures = {"rounds": 1, "kills": 0}

    def finish() -> Figures:
        """Takes what is left, after all processes have ended."""
        last = items.who_of(len(chairs) + 1, 1)
        with opened(path, kind) as rb, Account(arena.logs, len(chairs) + 1, last) as own:
            engine = rb.storage.engine()
            settle(engine)
            rb.rate_limiter = None  # the last batch takes what is left
            while (batch := take(rb, kind, own, math.inf)) is not None:
                acknowledge(rb, own, batch)
                if kind == "gate":
                    consumer_version.increment(engine.seat)
            report = engine.check()
            assert report.ok, str(report)
            version = consumer_version.read(engine.seat)
        batches = History.read(arena.logs).batches
        written = batches[batches["ticket"] >= 0]
        at_once = {
            int(one["ticket"]) + i for one in written if one["count"] == SIZE for i in range(SIZE)
        }
        found = Deliveries(Account.read(arena.logs), batches, (1,))
        broken = violations(found, at_once)
        assert not broken, "\n".join([f"{kind}: rules are broken", *broken[:20]])
        return {**found.figures(), "at_once": len(at_once), "versions": version}

    with Arena(folder / "logs", playing, chairs, seed) as arena:
        arena.fill()
        while figures["kills"] < kills:
            time.sleep(pause_of(rng, 0.2))
            everybody = bool(rng.random() < 0.05)
            victims = arena.chairs if everybody else [arena.chairs[int(rng.integers(len(chairs)))]]
            figures["kills"] += arena.kill(victims)
            arena.fill()
        figures["kills"] += arena.kill(arena.chairs)
        arena.end_orphans()
        added(figures, audited(finish))
    return figures


def case(folder: Path, seed: int) -> Figures:
    """Plays one round for each kind of unit."""
    figures: Figures = {}
    for kind in KINDS:
        added(figures, round_of_kills(folder / kind, seed, kind))
    return figures


def campaign(seconds: float, seed: int, say: Say) -> Figures:
    """Plays cases for about ``seconds`` seconds, and at least one."""
    torch.set_num_threads(1)
    return rounds(__spec__.name, case, seconds, seed, say)


if __name__ == "__main__":
    sys.exit(main(campaign))

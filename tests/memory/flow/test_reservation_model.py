"""Reservations of several handles, compared with a model that follows the rules alone.

With a staleness gate, an item's position determines the version that learns from it. The numbers
are checked under every order of calls. `tests/model/ages.py` checks that no process waits forever.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from shmbuffer import RateLimiter, RateLimitTimeout, ReservationLostError
from shmbuffer.memory import Engine, Ring, Settings, consumer_version
from shmbuffer.memory.flow.holders import holders, table_of
from shmbuffer.memory.flow.status import TooOld
from shmbuffer.memory.system import deadline
from tests.kit.rings import ring_of
from tests.memory.rows import schema, write
from tests.selection import seeds

CAPACITY = 24
LIMITERS = {
    "queue": RateLimiter(max_times_sampled=1),
    "ratio": RateLimiter(1.0, error_buffer=CAPACITY / 2, when_no_peer="wait"),
    "ages": RateLimiter(max_staleness=1, items_per_version=7),
    "strict ages": RateLimiter(max_staleness=0, items_per_version=4),
    "queue and ages": RateLimiter(max_times_sampled=1, max_staleness=2, items_per_version=5),
}


@dataclass
class Model:
    """The state of the buffer, in numbers.

    Attributes:
        written, taken: items committed; items drawn.
        version: the version of the learners.
        first, began: learners reached item ``first`` with version ``began``; versions count from
        there.
        drew: handles that have drawn and are alive.
        held: (handle, name) -> items of its reservations.
        head: the number of tickets that were used, including those of abandoned claims.
    """

    limiter: RateLimiter
    written: int = 0
    taken: int = 0
    version: int = 0
    first: int = 0
    began: int = 0
    drew: set[int] = field(default_factory=set)
    held: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        return sum(self.held.values())

    @property
    def allowed(self) -> int:
        """Returns the number of items that may be written while learners have this version."""
        staleness, each = self.limiter.max_staleness, self.limiter.items_per_version
        assert staleness is not None
        assert each is not None
        is_empty = (
            self.written + self.reserved == self.first
        )  # versions count from the next item on
        versions = 0 if is_empty else max(0, self.version - self.began)
        return self.first + (versions + staleness + 1) * each

    def admits(self, count: int) -> bool:
        """True if a write of ``count`` items, or a reservation for them, is admitted."""
        limiter, after = self.limiter, self.written + self.reserved + count
        if limiter.max_times_sampled and after > self.taken + CAPACITY:
            return False
        if limiter.items_per_version is not None:
            if after == count:
                self.began = self.version  # no item was written
            if after > self.allowed:
                return False
        if limiter.samples_per_insert is not None:
            ahead = after - 1 - self.taken  # the first item is not counted
            return ahead <= limiter.tolerance or (after - count < 1 and count <= 2 * CAPACITY)
        return True

    def turn(self, place: int) -> int:
        """Returns the version that learns from the item at this position."""
        if self.limiter.items_per_version is None:
            return self.version
        return self.began + max(0, place - self.first) // self.limiter.items_per_version

    def young(self, versions: list[int]) -> list[bool]:
        """Returns which of these consecutive items will not be too old when they are read."""
        most, place, found = self.limiter.max_staleness, self.written, []
        for version in versions:
            then = max(self.version, self.turn(place))
            found.append(most is None or then - version <= most)
            place += found[-1]
        return found

    def comes(self, who: int) -> None:
        """Lets a learner come for the next item."""
        turn, is_first = self.turn(self.taken), not self.drew
        if self.limiter.max_times_sampled and (turn < self.version or is_first):
            self.first, self.began = self.taken, self.version
        self.drew.add(who)


@contextmanager
def handles(path: Path, limiter: RateLimiter, *, early: bool) -> Iterator[list[Engine]]:
    """Makes several handles on a buffer, limited before or after it has a schema."""
    with Engine.open(path, Settings(capacity=CAPACITY)) as first:
        if early:
            first.set_limiter(limiter)
        first.define(schema(CAPACITY))
        if not early:
            first.set_limiter(limiter)
        made = [first, Engine.open(path, None), Engine.open(path, None)]
        yield made
        for one in made[1:]:
            one.close()


def goes(ring: Ring, count: int) -> bool:
    try:
        with deadline.limit_waits(0):
            write(ring, range(count))
    except RateLimitTimeout:
        return False
    return True


def commits(ring: Ring, name: int, versions: list[int]) -> list[bool]:
    """Commits all or none of the items; returns which of them were young enough."""
    young = np.ones(len(versions), np.bool_)
    with ring.reservations.hold(name, np.array(versions), young), suppress(TooOld):
        write(ring, range(len(versions)))
    return young.tolist()


def reserves(ring: Ring, count: int) -> int | None:
    try:
        with deadline.limit_waits(0):
            return ring.reservations.reserve(count)
    except RateLimitTimeout:
        return None


def draws(ring: Ring, count: int) -> None:
    if ring.admission.is_queue:
        index, tickets = np.empty(count, np.int64), np.empty(count, np.int64)
        ring.admission.take(index, tickets)
        ring.admission.release()
    else:
        ring.admission.admit(count)


@pytest.mark.parametrize("kind", LIMITERS)
@pytest.mark.parametrize("seed", seeds(3, 8))
def test_what_is_admitted_is_what_the_rules_admit(tmp_path: Path, kind: str, seed: int) -> None:
    choose = random.Random(f"{kind} {seed}")
    went = {"reserve": 0, "write": 0, "commit": 0, "refused": 0, "too old": 0}
    limiter = LIMITERS[kind]
    with handles(tmp_path / "buffer", limiter, early=choose.random() < 0.5) as engines:
        model = Model(limiter)
        for step in range(160):
            who = choose.randrange(len(engines))
            ring, count = ring_of(engines[who]), choose.choice((1, 1, 2, 3, 5, 8))
            ours = [key for key in model.held if key[0] == who]
            what = choose.choice(("reserve", "reserve", "write", "commit", "commit", "draw"))
            what = choose.choice(("back", "leave", "version")) if choose.random() < 0.15 else what
            where = f"{kind}, seed {seed}, step {step}: {what} {count} of {model}"
            if what == "reserve":
                name = reserves(ring, count)
                assert (name is not None) == model.admits(count), where
                went["reserve" if name is not None else "refused"] += 1
                if name is not None:
                    model.held[who, name] = count
            elif what == "write":
                expected = model.admits(count)
                assert goes(ring, count) == expected, where
                model.written += count if expected else 0
                went["write" if expected else "refused"] += 1
            elif what == "commit" and ours:
                key = choose.choice(ours)
                used = choose.randrange(1, model.held[key] + 1)
                versions = [max(0, model.version - choose.randrange(4)) for _ in range(used)]
                young = model.young(versions)
                assert commits(ring, key[1], versions) == young, f"{versions}: {where}"
                if not all(young):
                    went["too old"] += 1
                    versions = [one for one, kept in zip(versions, young, strict=True) if kept]
                    assert not versions or all(commits(ring, key[1], versions)), where
                    ring.reservations.give_back(key[1])
                del model.held[key]
                model.written += len(versions)
                went["commit"] += 1
                with pytest.raises(ReservationLostError), ring.reservations.hold(key[1]):
                    goes(ring, 1)
            elif what == "back" and ours:
                key = choose.choice(ours)
                assert ring.reservations.give_back(key[1])
                del model.held[key]
            elif what == "leave" and who:
                engines[who].close()
                engines[who] = Engine.open(tmp_path / "buffer", None)
                model.held = {key: n for key, n in model.held.items() if key[0] != who}
                model.drew.discard(who)
            elif what == "version":
                model.version += choose.choice((1, 1, 2))
                consumer_version.store(engines[who].seat, model.version)
            elif what == "draw":
                there = model.written - model.taken
                count = min(count, there) if model.limiter.max_times_sampled else count
                drawable = model.written > 0 and count > 0
                if model.limiter.samples_per_insert is not None:
                    ahead = model.written - 1 - model.taken - count
                    drawable = drawable and ahead >= -model.limiter.tolerance
                if drawable:
                    model.comes(who)
                    draws(ring, count)
                    model.taken += count
            require_the_same(engines[0], model, where)
    assert min(went["reserve"], went["commit"], went["refused"]) > 0
    assert went["too old"] or limiter.max_staleness is None


def require_the_same(engine: Engine, model: Model, where: str) -> None:
    runtime = engine.seat.control.runtime[0]
    assert (int(runtime["reserved"]), int(runtime["write_count"])) == (
        model.reserved,
        model.written,
    ), where
    found = holders(table_of(engine.seat), engine.seat.control.entries)
    by_handle: dict[int, int] = {}
    for (who, _), count in model.held.items():
        by_handle[who] = by_handle.get(who, 0) + count
    assert sorted(one.items for one in found) == sorted(by_handle.values()), where
    status = ring_of(engine).admission.rate_status()
    assert status.reserved == model.reserved
    if model.limiter.items_per_version is not None:
        assert status.allowed == model.allowed - model.written - model.reserved, where

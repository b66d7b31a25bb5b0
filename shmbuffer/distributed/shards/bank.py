"""How much all shards together may still be written, and drawn from: a function of what they say.

    keepers ──Report──▶ Bank ──Ledger, told to all of them first──▶ leases: rooms of rings, items
                                                                    that learners may draw

    inserts are leased while   (leased - free) * samples_per_insert - drawn    <=  error_buffer
    samples are leased while   (inserted - free) * samples_per_insert - leased >= -error_buffer

What others do is taken as it was last heard, a lower bound, because it only grows; what is leased
is taken as spent until its holder says otherwise. So the ratio is within the error buffer, whatever
is late, lost or dead. The first ``min_size`` inserts are free, as in one buffer.

A bank that starts again reads the shards, and from any of them the ledger: what was leased to those
that do not answer. Nothing is leased before all who answer have the ledger that says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shmbuffer.errors import RateLimitError
from shmbuffer.memory import RateLimiter
from shmbuffer.memory.layout import Alone

LAPSE_S = 2.0
"""How long a learner may draw by a lease, from when it asked for it."""

GONE_S = 3.0
"""After how long without a message a learner's lease has lapsed here."""

PEER_S = 60.0
"""How long a learner counts as there after its last message."""

ALONE_S = 1.0
"""That nobody is on a side, before it counts as left."""

_ROUNDING = 1e-6


class Report(NamedTuple):
    """What a keeper says of its shard. What is used and drawn only grows."""

    room: int
    """Items that may be written by the lease, from where the first one began."""
    used: int
    """Items that were written by it."""
    drawn: int
    """Items that were drawn, ever."""
    pending: int = 0
    """Items that are being written; they are not in ``used`` yet."""
    length: int = 0
    capacity: int = 0
    wanted: int = 0
    """Items of the largest write that waits."""
    has_writers: bool = False

    @property
    def left(self) -> int:
        """Items of the lease that nobody has begun to write."""
        return max(0, self.room - self.used - self.pending)

    @property
    def need(self) -> int:
        """The room that its largest waiting write needs; 0: none waits."""
        return self.used + self.pending + self.wanted if self.wanted > self.left else 0


class Ledger(NamedTuple):
    """What a bank tells all keepers before it leases: what the next bank has to know."""

    bank: int
    turn: int
    setting: int
    """Which one since there is a ratio; leases of learners belong to one."""
    limiter: RateLimiter | None
    free: int
    """Inserts that do not count."""
    passed: int
    """Samples that do not count."""
    samples: int
    """Items that may be drawn, from the beginning of the ratio on, by leases of learners."""
    began: Mapping[str, Report]
    """By shard: where the ratio began."""
    heard: Mapping[str, Report]
    """By shard: the last that was heard; its room is the largest that it may have."""


@dataclass
class Learner:
    """A lease of items to draw."""

    granted: int
    spent: int
    heard: float
    wanted: int = 0


@dataclass
class Bank:
    """The arithmetic. Times are given, and the caller sends the messages."""

    ledger: Ledger
    learners: dict[str, Learner] = field(default_factory=dict)
    lends_from: float = 0.0
    """No lease to a learner before: those of a bank before this one may still be drawn by."""
    _samples: int = 0  # leased to learners, or drawn, since the ratio began
    _told: int = 0  # samples of the ledger that all keepers have
    _waits: list[str] = field(default_factory=list)  # shards whose writers wait, in order
    _alone: dict[str, float] = field(default_factory=dict)  # sides that nobody is on, since when
    _snapshot: tuple[int, int] = 0, 0  # samples, and what living learners had left of them

    # -- settings ------------------------------------------------------------------------------

    @classmethod
    def new(cls, number: int, found: Ledger | None, now: float) -> Bank:
        """One that starts, with the last ledger that a keeper has."""
        if found is None:
            return cls(Ledger(number, 0, 0, None, 0, 0, 0, {}, {}))
        return cls(found._replace(bank=number), {}, now + GONE_S, found.samples)

    @property
    def limiter(self) -> RateLimiter | None:
        """What is set."""
        return self.ledger.limiter

    @property
    def ratio(self) -> float | None:
        """Samples per insert; None: nothing is leased."""
        return None if self.limiter is None else self.limiter.samples_per_insert

    @property
    def key(self) -> tuple[int, int]:
        """What leases of learners belong to."""
        return self.ledger.bank, self.ledger.setting

    def set(self, limiter: RateLimiter | None, reports: Mapping[str, Report], now: float) -> None:
        """The ratio counts from here on. Leases of learners are over, once they have lapsed."""
        there = sum(one.length for one in reports.values())
        free = 0 if limiter is None else max(0, limiter.min_size - there)
        old = self.ledger
        waits = bool(self.learners) or now < self.lends_from
        self.lends_from = max(self.lends_from, now + GONE_S) if waits else self.lends_from
        self.learners = {}
        self._samples = self._told = 0
        self.ledger = Ledger(
            *(old.bank, old.turn + 1, old.setting + 1, limiter, free, 0, 0),
            began=dict(reports),
            heard=dict(reports),
        )

    # -- what is heard ---------------------------------------------------------------------------

    def ask(self, now: float) -> None:
        """Reports are asked for now: what learners say from here on is later than those."""
        self.learners = {k: one for k, one in self.learners.items() if now - one.heard <= PEER_S}
        self._snapshot = (
            self._samples,
            sum(
                max(0, one.granted - one.spent)
                for one in self.learners.values()
                if now - one.heard <= GONE_S  # else it has lapsed, and what was drawn by it is read
            ),
        )

    def hear(self, reports: Mapping[str, Report], now: float) -> None:
        """Take in what the shards that answer say; their rooms are as they were last ordered."""
        if self.ratio is None:
            return
        known, began = dict(self.ledger.heard), dict(self.ledger.began)
        for shard, one in reports.items():
            before = known.get(shard)
            if before is None:
                began[shard] = one
            elif one.used < before.used or one.drawn < before.drawn:  # emptied, or loaded
                self.set(self.limiter, {**known, **reports}, now)
                return
            known[shard] = one
        self.ledger = self.ledger._replace(heard=known, began=began)
        if reports.keys() >= known.keys() and now >= self.lends_from:
            self._settle()
        self._note_sides(reports, now)
        waiting = {shard for shard, one in reports.items() if one.need}
        first = [shard for shard in self._waits if shard in waiting]
        self._waits = [*first, *sorted(waiting - set(first))]

    def _settle(self) -> None:
        """All shards have said what was drawn: what is leased is the rest."""
        before, leased = self._snapshot
        since = self._samples - before
        self._samples = max(self.drawn, min(self._samples, self.drawn + leased + since))

    def _note_sides(self, reports: Mapping[str, Report], now: float) -> None:
        sides = {
            "inserts": not reports or any(one.has_writers for one in reports.values()),
            "samples": bool(self.learners),
        }
        for side, is_there in sides.items():
            if is_there:
                self._alone.pop(side, None)
            else:
                self._alone.setdefault(side, now)

    def is_left(self, side: str, now: float) -> bool:
        """Whether nobody is on a side, and has not been for a while."""
        return now - self._alone.get(side, now) >= ALONE_S

    # -- the numbers -----------------------------------------------------------------------------

    @property
    def inserted(self) -> int:
        """Items that were written since the ratio began, at least."""
        return self._sum(self.ledger.heard, "used") - self._sum(self.ledger.began, "used")

    @property
    def leased(self) -> int:
        """Items that may have been written since, at most."""
        return self._sum(self.ledger.heard, "room") - self._sum(self.ledger.began, "used")

    @property
    def drawn(self) -> int:
        """Items that were drawn since, at least."""
        return self._sum(self.ledger.heard, "drawn") - self._sum(self.ledger.began, "drawn")

    @property
    def samples(self) -> int:
        """Items that may have been drawn since, at most."""
        return self._samples

    @staticmethod
    def _sum(reports: Mapping[str, Report], name: str) -> int:
        return sum(getattr(one, name) for one in reports.values())

    def _inserts_left(self) -> int:
        """Items that may be leased to writers."""
        assert self.limiter is not None
        assert self.ratio is not None
        drawn = self.drawn - self.ledger.passed + self.limiter.tolerance + _ROUNDING
        return self.ledger.free + math.floor(drawn / self.ratio) - self.leased

    def _samples_left(self) -> int:
        """Items that may be leased to learners."""
        assert self.limiter is not None
        assert self.ratio is not None
        done = (self.inserted - self.ledger.free) * self.ratio
        most = self.ledger.passed + math.floor(done + self.limiter.tolerance + _ROUNDING)
        return most - self._samples

    # -- leases of writers -----------------------------------------------------------------------

    def plan(self, living: Mapping[str, Report], now: float) -> dict[str, int]:
        """The rooms that shards shall have, where that is another than they have.

        They count as spent from here on, and are given once all keepers have the ledger. A lower
        one is asked back, and counts until the shard has said that it is lowered.
        """
        if self.ratio is None:
            return {}
        heard = self.ledger.heard
        rooms = {shard: heard[shard].room for shard in living}
        self._serve(rooms, living, now)
        short = sum(one.wanted for one in self.learners.values()) - self._samples_left()
        if short > 0 and self._passes("inserts", now):
            self.ledger = self.ledger._replace(passed=self.ledger.passed + short)
        heard = {
            shard: one._replace(room=max(one.room, rooms.get(shard, 0)))
            for shard, one in heard.items()
        }
        self.ledger = self.ledger._replace(turn=self.ledger.turn + 1, heard=heard)
        self.ledger = self.ledger._replace(samples=self._samples + self._reserve())
        return {shard: room for shard, room in rooms.items() if room != living[shard].room}

    def _serve(self, rooms: dict[str, int], living: Mapping[str, Report], now: float) -> None:
        """First who waits, the longest first; then those that have little left."""
        assert self.limiter is not None
        assert self.ratio is not None
        left, short = self._inserts_left(), self._short_of_items(living)
        for shard in self._waits:
            one = living[shard]
            more = one.need - rooms[shard]
            if more <= left:
                left -= more
            elif short > 0 and one.wanted * self.ratio <= 2 * self.limiter.tolerance:
                short -= more
            elif self._passes("samples", now):
                self.ledger = self.ledger._replace(free=self.ledger.free + more)
            else:  # it is the next one; what lies idle elsewhere is asked back
                idle = {k: r for k, r in living.items() if k not in self._waits and r.left}
                if sum(one.left for one in idle.values()) + left >= more:
                    rooms.update({k: r.used + r.pending for k, r in idle.items()})
                return
            rooms[shard] += more
        half = self.limiter.tolerance / 2 / self.ratio
        piece = max(1, int(half / max(1, len(self.ledger.began))))
        idle_now = self.leased - self.inserted
        for shard, one in living.items():
            has = rooms[shard] - one.used - one.pending
            more = min(piece - has, left, int(half) - idle_now)
            if shard not in self._waits and has <= piece // 2 and more > 0:
                rooms[shard] += more
                left, idle_now = left - more, idle_now + more

    def _short_of_items(self, living: Mapping[str, Report]) -> int:
        """Items that have to come before anybody may draw, whatever the ratio."""
        assert self.limiter is not None
        if sum(one.capacity for one in living.values()) < self.limiter.min_size:
            return 0  # they cannot: a shard is missing
        there = sum(
            min(one.capacity, one.length + one.left + one.pending) for one in living.values()
        )
        return self.limiter.min_size - there

    def _passes(self, side: str, now: float) -> bool:
        assert self.limiter is not None
        return self.limiter.alone == Alone.PASS and self.is_left(side, now)

    # -- leases of learners ----------------------------------------------------------------------

    @property
    def somebody_waits(self) -> bool:
        """Whether a writer or a learner waits for a lease."""
        return bool(self._waits) or any(one.wanted for one in self.learners.values())

    def confirm(self, ledger: Ledger) -> None:
        """All keepers that answer have this ledger."""
        if ledger.setting == self.ledger.setting:
            self._told = ledger.samples

    def _reserve(self) -> int:
        """Items that may be leased to learners until the next ledger."""
        assert self.limiter is not None
        wanted = sum(one.wanted for one in self.learners.values())
        return max(0, min(self._samples_left(), wanted + int(self.limiter.tolerance / 2)))

    def lend(self, name: str, granted: int, spent: int, wanted: int, now: float) -> int:
        """Lease items to a learner.

        Args:
            name: of the learner.
            granted: what it was granted, in all, by this `key`; 0 with another.
            spent: what it has drawn by that.
            wanted: items that it is about to draw.
            now: seconds.

        Returns:
            What it is granted, in all. It may draw where that is ``spent + wanted`` at least.

        Raises:
            RateLimitError: it never could draw so many; or nobody writes, and ``when_no_peer`` is
                "error".
        """
        limiter = self.limiter
        assert limiter is not None
        one = self.learners.setdefault(name, Learner(spent, spent, now))
        if now - one.heard > GONE_S:  # it has lapsed
            one.granted = spent
        over = max(0, spent - one.granted)  # drawn again, for a shard that has died
        one.granted = max(spent, min(one.granted, granted))  # an answer was lost, and is not used
        one.spent, one.heard = spent, now
        self._samples += over
        need = one.wanted = max(0, spent + wanted - one.granted)
        if wanted > 2 * limiter.tolerance:
            one.wanted = 0
            raise RateLimitError(
                f"to draw {wanted:,} items at once the error buffer, {limiter.tolerance:g}, has to "
                f"be at least {wanted / 2:g}",
                pids=[],
            )
        if need and limiter.alone == Alone.ERROR and self.is_left("inserts", now):
            raise RateLimitError(
                "sample waits for writes, there is no collector, and when_no_peer is 'error'",
                pids=[],
            )
        left = min(self._samples_left(), self._told - self._samples)
        if need > left or now < self.lends_from:
            return one.granted
        outstanding = sum(max(0, each.granted - each.spent) for each in self.learners.values())
        half = limiter.tolerance / 2
        extra = int(min(half / 2 / len(self.learners), half - outstanding, left - need))
        more = need + max(0, extra)
        one.granted, one.wanted = one.granted + more, 0
        self._samples += more
        return one.granted


def latest(ledgers: Iterable[Ledger | None]) -> Ledger | None:
    """The one that says the most."""
    found = [one for one in ledgers if one is not None]
    return max(found, key=lambda one: (one.bank, one.turn), default=None)

"""Computes how many items can be written to all shards and drawn from them.

    keepers ──Report──▶ Bank ──BankState, sent to all keepers first──▶ quotas of rings and learners

    inserts are granted while   (granted - free) * samples_per_insert - drawn    <=  error_buffer
    samples are granted while   (inserted - free) * samples_per_insert - granted >= -error_buffer

The counts of inserts and draws only grow, so the last report of a shard is a lower bound. A quota
counts as spent until its holder reports how much of it was used. Therefore the ratio stays within
the error buffer even if messages are late or lost, or if processes die. The first ``min_size``
inserts are free, as in a single buffer.

A quota of a ring is expressed as its *room*: the total number of items that all quotas so far allow
to be written.

A bank that restarts reads the reports of the shards, and the state of the previous bank from the
keepers. The state includes the quotas of shards that do not answer, because a bank grants a quota
only after all keepers that answer have received the state with this quota.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shmbuffer.errors import RateLimitError
from shmbuffer.memory import RateLimiter
from shmbuffer.memory.flow.rate_status import ROUNDING
from shmbuffer.memory.flow.sides import ALONE_S
from shmbuffer.memory.format.layout import Alone

LAPSE_S = 2.0
"""Seconds for which a learner can use a quota, counted from the time of its request."""

GONE_S = 3.0
"""Seconds without a message from a learner after which the bank treats its quota as expired."""

PEER_S = 60.0
"""Seconds for which a learner counts as a client after its last message."""


class Report(NamedTuple):
    """A keeper's report on its shard. ``used`` and ``drawn`` only grow."""

    room: int  # total number of items that all quotas so far allow to be written
    used: int  # number of these items that have been written
    drawn: int  # total number of items that have been drawn
    pending: int = 0  # number of items that are being written, and are not in ``used`` yet
    length: int = 0  # number of items in the shard
    capacity: int = 0  # maximum number of items in the shard
    wanted: int = 0  # number of items in the largest waiting write
    has_writers: bool = False  # True if any client writes to the shard

    @property
    def left(self) -> int:
        """Number of items that the quota allows and whose write has not started."""
        return max(0, self.room - self.used - self.pending)

    @property
    def need(self) -> int:
        """The room that the largest waiting write needs, or 0 if the quota suffices."""
        return self.used + self.pending + self.wanted if self.wanted > self.left else 0


class BankState(NamedTuple):
    """The state from which the next bank continues.

    A bank sends the state to all keepers before it grants a quota.
    """

    bank: int  # number of the bank; a later bank has a higher number
    turn: int  # number of the state; a later state has a higher number
    setting: int  # number of the current ratio, to which each learner's quota belongs
    limiter: RateLimiter | None
    free: int  # number of inserts that do not count for the ratio
    passed: int  # number of samples that do not count for the ratio
    samples: int  # number of items granted to learners since the ratio took effect
    began: Mapping[str, Report]  # report of each shard when the ratio took effect
    heard: Mapping[str, Report]  # last report of each shard, with the largest room it can have


@dataclass
class Learner:
    """A learner's quota of items to draw."""

    granted: int  # total number of items granted to the learner under the current ratio
    spent: int  # number of these items that the learner has drawn
    heard: float  # time of the learner's last message
    wanted: int = 0  # number of further items for which the learner waits


@dataclass
class Bank:
    """Computes the quotas. The caller passes the current time and sends the messages."""

    state: BankState
    learners: dict[str, Learner] = field(default_factory=dict)
    grants_from: float = 0.0  # before this time, learners may still use quotas of an earlier bank
    _samples: int = 0  # items granted to learners, or drawn, since the ratio took effect
    _told: int = 0  # ``samples`` in the last state that all keepers have received
    _waits: list[str] = field(default_factory=list)  # shards with waiting writers, oldest first
    _alone: dict[str, float] = field(default_factory=dict)  # since when each side has no clients
    _snapshot: tuple[int, int] = 0, 0  # ``samples``, and the part that live learners had not drawn

    # -- settings ------------------------------------------------------------------------------

    @classmethod
    def new(cls, number: int, found: BankState | None, now: float) -> Bank:
        """Creates a bank.

        Args:
            number: number of the bank.
            found: newest state that a keeper has received from an earlier bank, or None.
            now: current time in seconds.
        """
        if found is None:
            return cls(BankState(number, 0, 0, None, 0, 0, 0, {}, {}))
        return cls(found._replace(bank=number), {}, now + GONE_S, found.samples)

    @property
    def limiter(self) -> RateLimiter | None:
        """The current rate limiter, or None."""
        return self.state.limiter

    @property
    def ratio(self) -> float | None:
        """Required samples per insert, or None if quotas are not needed."""
        return None if self.limiter is None else self.limiter.samples_per_insert

    @property
    def key(self) -> tuple[int, int]:
        """Numbers of the bank and of the setting. A learner's quota is valid only for this key."""
        return self.state.bank, self.state.setting

    def set(self, limiter: RateLimiter | None, reports: Mapping[str, Report], now: float) -> None:
        """Sets a limiter, and starts to count for its ratio.

        Learners get no new quotas until their old quotas have expired.

        Args:
            limiter: the new limiter, or None.
            reports: current reports of the shards.
            now: current time in seconds.
        """
        there = sum(one.length for one in reports.values())
        free = 0 if limiter is None else max(0, limiter.min_size - there)
        old = self.state
        waits = bool(self.learners) or now < self.grants_from
        self.grants_from = max(self.grants_from, now + GONE_S) if waits else self.grants_from
        self.learners = {}
        self._samples = self._told = 0
        self.state = BankState(
            *(old.bank, old.turn + 1, old.setting + 1, limiter, free, 0, 0),
            began=dict(reports),
            heard=dict(reports),
        )

    # -- reports ---------------------------------------------------------------------------------

    def ask(self, now: float) -> None:
        """Records the grants at the time at which the caller requests reports from the shards.

        Later grants are not reflected in these reports.
        """
        self.learners = {k: one for k, one in self.learners.items() if now - one.heard <= PEER_S}
        self._snapshot = (
            self._samples,
            sum(
                max(0, one.granted - one.spent)
                for one in self.learners.values()
                if now - one.heard <= GONE_S  # an expired quota is not used any more
            ),
        )

    def hear(self, reports: Mapping[str, Report], now: float) -> None:
        """Records reports of the shards that have answered and have carried out the last orders.

        Args:
            reports: report of each shard.
            now: current time in seconds.
        """
        if self.ratio is None:
            return
        known, began = dict(self.state.heard), dict(self.state.began)
        for shard, one in reports.items():
            before = known.get(shard)
            if before is None:
                began[shard] = one
            elif one.used < before.used or one.drawn < before.drawn:  # emptied, or loaded a save
                self.set(self.limiter, {**known, **reports}, now)
                return
            known[shard] = one
        self.state = self.state._replace(heard=known, began=began)
        if reports.keys() >= known.keys() and now >= self.grants_from:
            self._settle()
        self._note_sides(reports, now)
        waiting = {shard for shard, one in reports.items() if one.need}
        first = [shard for shard in self._waits if shard in waiting]
        self._waits = [*first, *sorted(waiting - set(first))]

    def _settle(self) -> None:
        """Reduces the number of granted samples to what was drawn or can still be drawn.

        Called when all shards have reported their draws.
        """
        before, granted = self._snapshot
        since = self._samples - before
        self._samples = max(self.drawn, min(self._samples, self.drawn + granted + since))

    def _note_sides(self, reports: Mapping[str, Report], now: float) -> None:
        """Records the time at which the last writer, or the last learner, was found to be gone."""
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
        """True if there have been no writers, or no learners, for `ALONE_S` seconds.

        Args:
            side: "inserts" for the writers, or "samples" for the learners.
            now: current time in seconds.
        """
        return now - self._alone.get(side, now) >= ALONE_S

    # -- the numbers -----------------------------------------------------------------------------

    @property
    def inserted(self) -> int:
        """Lower bound on the number of items written since the ratio took effect."""
        return self._sum(self.state.heard, "used") - self._sum(self.state.began, "used")

    @property
    def granted(self) -> int:
        """Upper bound on the number of items written since the ratio took effect."""
        return self._sum(self.state.heard, "room") - self._sum(self.state.began, "used")

    @property
    def drawn(self) -> int:
        """Lower bound on the number of items drawn since the ratio took effect."""
        return self._sum(self.state.heard, "drawn") - self._sum(self.state.began, "drawn")

    @property
    def samples(self) -> int:
        """Upper bound on the number of items drawn since the ratio took effect."""
        return self._samples

    @staticmethod
    def _sum(reports: Mapping[str, Report], name: str) -> int:
        """Returns the sum of the field ``name`` over all reports."""
        return sum(getattr(one, name) for one in reports.values())

    def _inserts_left(self) -> int:
        """Returns the number of items that can be granted to writers now."""
        assert self.limiter is not None
        assert self.ratio is not None
        drawn = self.drawn - self.state.passed + self.limiter.tolerance + ROUNDING
        return self.state.free + math.floor(drawn / self.ratio) - self.granted

    def _samples_left(self) -> int:
        """Returns the number of items that can be granted to learners now."""
        assert self.limiter is not None
        assert self.ratio is not None
        done = (self.inserted - self.state.free) * self.ratio
        most = self.state.passed + math.floor(done + self.limiter.tolerance + ROUNDING)
        return most - self._samples

    # -- quotas of writers -----------------------------------------------------------------------

    def plan(self, living: Mapping[str, Report], now: float) -> dict[str, int]:
        """Computes the new quota of each ring.

        Args:
            living: last reports of the shards that answer.
            now: current time in seconds.

        Returns:
            The new room of each shard whose room changes. A decrease counts once the shard has
            reported it.
        """
        if self.ratio is None:
            return {}
        heard = self.state.heard
        rooms = {shard: heard[shard].room for shard in living}
        self._serve(rooms, living, now)
        short = sum(one.wanted for one in self.learners.values()) - self._samples_left()
        if short > 0 and self._passes("inserts", now):
            self.state = self.state._replace(passed=self.state.passed + short)
        heard = {
            shard: one._replace(room=max(one.room, rooms.get(shard, 0)))
            for shard, one in heard.items()
        }
        self.state = self.state._replace(turn=self.state.turn + 1, heard=heard)
        self.state = self.state._replace(samples=self._samples + self._reserve())
        return {shard: room for shard, room in rooms.items() if room != living[shard].room}

    def _serve(self, rooms: dict[str, int], living: Mapping[str, Report], now: float) -> None:
        """Grants items to shards with waiting writers, longest wait first, then to other shards.

        A shard without waiting writers gets items in advance if most of its quota is used.

        Args:
            rooms: room of each shard, which is updated in place.
            living: last reports of the shards that answer.
            now: current time in seconds.
        """
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
                self.state = self.state._replace(free=self.state.free + more)
            else:  # the next grant is for this shard, so other shards return their idle quotas
                idle = {k: r for k, r in living.items() if k not in self._waits and r.left}
                if sum(one.left for one in idle.values()) + left >= more:
                    rooms.update({k: r.used + r.pending for k, r in idle.items()})
                return
            rooms[shard] += more
        half = self.limiter.tolerance / 2 / self.ratio
        piece = max(1, int(half / max(1, len(self.state.began))))
        idle_now = self.granted - self.inserted
        for shard, one in living.items():
            has = rooms[shard] - one.used - one.pending
            more = min(piece - has, left, int(half) - idle_now)
            if shard not in self._waits and has <= piece // 2 and more > 0:
                rooms[shard] += more
                left, idle_now = left - more, idle_now + more

    def _short_of_items(self, living: Mapping[str, Report]) -> int:
        """Returns how many items are still missing to ``min_size``, which blocks all draws.

        The result is not positive if enough items are present or granted.
        """
        assert self.limiter is not None
        if sum(one.capacity for one in living.values()) < self.limiter.min_size:
            return 0  # shards are missing, and the others have too little space for the items
        there = sum(
            min(one.capacity, one.length + one.left + one.pending) for one in living.values()
        )
        return self.limiter.min_size - there

    def _passes(self, side: str, now: float) -> bool:
        """True if the ratio is suspended because there are no writers, or no learners."""
        assert self.limiter is not None
        return self.limiter.alone == Alone.PASS and self.is_left(side, now)

    # -- quotas of learners ----------------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        """True if a writer or a learner waits for a quota."""
        return bool(self._waits) or any(one.wanted for one in self.learners.values())

    def confirm(self, state: BankState) -> None:
        """Records that all keepers that answer have received ``state``."""
        if state.setting == self.state.setting:
            self._told = state.samples

    def _reserve(self) -> int:
        """Returns the number of items to reserve in the next state for requests of learners."""
        assert self.limiter is not None
        wanted = sum(one.wanted for one in self.learners.values())
        return max(0, min(self._samples_left(), wanted + int(self.limiter.tolerance / 2)))

    def grant(self, name: str, granted: int, spent: int, wanted: int, now: float) -> int:
        """Grants items to a learner.

        Args:
            name: name of the learner.
            granted: total number of items granted to the learner, as far as the learner knows.
            spent: number of these items that the learner has drawn.
            wanted: number of items that the learner wants to draw next. 0 only reports ``spent``.
            now: current time in seconds.

        Returns:
            The total number of items granted to the learner under the current `key`.

        Raises:
            RateLimitError: ``wanted`` is too large for one draw, or there is no writer and
                ``when_no_peer`` is "error".
        """
        limiter = self.limiter
        assert limiter is not None
        one = self.learners.setdefault(name, Learner(spent, spent, now))
        if now - one.heard > GONE_S:  # the quota has expired
            one.granted = spent
        over = max(0, spent - one.granted)  # items that were drawn again because a shard died
        one.granted = max(spent, min(one.granted, granted))  # an answer may have been lost
        one.spent, one.heard = spent, now
        self._samples += over
        need = one.wanted = max(0, spent + wanted - one.granted)
        if wanted > 2 * limiter.tolerance:
            one.wanted = 0
            raise RateLimitError(
                f"the error_buffer of the rate limiter must be at least {wanted / 2:g} to sample "
                f"{wanted:,} items in one call, got {limiter.tolerance:g}",
                pids=[],
            )
        if need and limiter.alone == Alone.ERROR and self.is_left("inserts", now):
            raise RateLimitError(
                "sample waits for writes, but there is no collector, and when_no_peer is 'error'",
                pids=[],
            )
        left = min(self._samples_left(), self._told - self._samples)
        if need > left or now < self.grants_from:
            return one.granted
        outstanding = sum(max(0, each.granted - each.spent) for each in self.learners.values())
        half = limiter.tolerance / 2
        extra = int(min(half / 2 / len(self.learners), half - outstanding, left - need))
        more = need + max(0, extra)
        one.granted, one.wanted = one.granted + more, 0
        self._samples += more
        return one.granted


def latest(states: Iterable[BankState | None]) -> BankState | None:
    """Returns the newest of several states, or None if all of them are None."""
    found = [one for one in states if one is not None]
    return max(found, key=lambda one: (one.bank, one.turn), default=None)

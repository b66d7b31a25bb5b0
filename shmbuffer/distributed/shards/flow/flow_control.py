"""Flow control in the map: a loop over the keepers.

    every 20 ms, or every 5 ms while a client waits
        ask      send the state and the last orders to the keepers, which report on their shards
        plan     `Bank` computes the quotas of the rings
        tell     send the state with these quotas to the keepers; the next round orders them

A keeper that does not answer in time is left out until it has answered. This module stores no state
that the next map needs: that map reads the state from the keepers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shmbuffer.distributed.keeper import open_answer, send_request
from shmbuffer.distributed.shards.flow.bank import Bank, Report, latest
from shmbuffer.distributed.shards.flow.quota import HOLD, KEEP, LOOK, OPEN, KeeperReply
from shmbuffer.errors import RateLimitError
from shmbuffer.memory import RateLimiter

ANSWER_S = 0.2
"""Maximum time in seconds that a round waits for the answers of the keepers."""

START_S = 30.0
"""Maximum time in seconds that a new map waits for the keepers to start."""

SETTLE_S = 5.0
"""Maximum time in seconds that a new setting or a pause waits for the keepers."""

HOLD_S = 10.0
"""Seconds after which a pause of all writers ends, unless it is renewed."""

_PACE_S, _HURRY_S, _IDLE_S = 0.02, 0.005, 0.2

_log = logging.getLogger(__name__)


class Lent(NamedTuple):
    """A quota, as sent to a learner."""

    key: tuple[int, int]  # the bank and the setting for which the quota is valid
    granted: int  # total number of items granted to the learner under this key
    limiter: RateLimiter | None
    text: str  # description of the current ratio, for messages


class FlowControl:
    """Runs flow control over all shards, in the map's process.

    Writers are paused by a *gate*: while it is closed, no quota allows a write.
    """

    def __init__(
        self,
        ray: Any,  # the module ``ray``
        keepers: Callable[[], dict[str, Any]],  # returns the keepers, keyed by node
        limiter: RateLimiter | None,  # limiter of a new buffer, whose keepers have no state yet
        where: str,  # description of the buffer, for messages
    ) -> None:
        self._ray, self._keepers, self._first, self._where = ray, keepers, limiter, where
        self._bank: Bank | None = None
        self._number = time.time_ns()
        self._talking = threading.Lock()  # one round with the keepers at a time
        self._state = threading.Lock()  # protects the bank
        self._late: dict[str, Any] = {}
        self._opened: set[tuple[str, Any]] = set()  # (node, keeper) of shards without a quota
        self._orders: dict[str, int] = {}
        self._shards: dict[str, str] = {}  # shard (`KeeperReply.shard`) of each node
        self._answering: set[str] = set()  # shards that answered in the last round
        self._hold: tuple[str, float] | None = None
        self._ended = threading.Event()
        self._ready = threading.Event()
        threading.Thread(target=self._watch, name="shmbuffer-flow", daemon=True).start()

    # -- requests --------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends the loop over the keepers."""
        self._ended.set()

    def rate(self) -> RateLimiter | None:
        """Returns the current rate limiter, or None."""
        self._ready.wait(START_S)
        return None if self._bank is None else self._bank.limiter

    def set_rate(self, limiter: RateLimiter | None) -> None:
        """Sets a limiter, and starts to count for its ratio.

        Raises ValueError if ``min_size`` is larger than the capacity of the shards that answer.
        """
        self._ready.wait(START_S)
        with self._talking:
            ratio = limiter is not None and limiter.samples_per_insert is not None
            found = self._ask(KEEP if ratio else LOOK, SETTLE_S)
            room = sum(one.report.capacity for one in found.values())
            if limiter is not None and limiter.min_size > room:
                raise ValueError(
                    f"{self._where}: min_size must be at most {room:,}, the capacity of all "
                    f"shards, got {limiter.min_size:,}; otherwise nothing could ever be sampled"
                )
            with self._state:
                assert self._bank is not None
                self._bank.set(limiter, _reports(found), time.monotonic())
            self._opened.clear()
            self._orders = {}
            self._round()

    def grant(
        self, name: str, key: tuple[int, int], granted: int, spent: int, wanted: int
    ) -> Lent | RateLimitError | None:
        """Grants items to a learner; see `Bank.grant`.

        Returns:
            The quota, an error that the learner has to raise, or None until the keepers answer.
        """
        with self._state:
            bank = self._bank
            if bank is None:
                return None
            if bank.ratio is None:
                return Lent(bank.key, 0, bank.limiter, "")
            if key != bank.key:
                granted = spent = 0
            try:
                more = bank.grant(name, granted, spent, wanted, time.monotonic())
            except RateLimitError as error:
                return RateLimitError(f"{self._where}: {error}", pids=[])
            return Lent(bank.key, more, bank.limiter, self._text(bank))

    def hold(self, token: str) -> str:
        """Closes the gate, and waits until no write is in progress.

        Args:
            token: identifies the pause in `renew` and `release`.

        Returns:
            "", or the reason why the gate could not be closed.
        """
        self._ready.wait(START_S)
        with self._state:
            if self._is_held() and self._hold is not None and self._hold[0] != token:
                return "another consistent save is in progress"
            self._hold = token, time.monotonic() + HOLD_S
        end = time.monotonic() + SETTLE_S
        while True:
            with self._talking:
                found = self._round()
            away = sorted(set(self._keepers()) - set(found))
            busy = sorted(node for node, one in found.items() if not one.holds)
            if not away and not busy:
                return ""
            if time.monotonic() > end:
                self.release(token)
                return (
                    f"no answer from the shards of {', '.join(away)}"
                    if away
                    else f"the shards of {', '.join(busy)} are still being written to"
                )
            time.sleep(_HURRY_S)

    def renew(self, token: str) -> bool:
        """Extends the pause by `HOLD_S` seconds. Returns False if the pause has ended."""
        with self._state:
            mine = self._is_held() and self._hold is not None and self._hold[0] == token
            if mine:
                self._hold = token, time.monotonic() + HOLD_S
            return mine

    def release(self, token: str) -> bool:
        """Opens the gate. Returns False if the pause had already ended."""
        mine = self.renew(token)
        if mine:
            with self._state:
                self._hold = None
        return mine

    # -- the loop --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Runs rounds until `end` is called."""
        began = time.monotonic()
        while not self._ended.is_set():
            pace = _IDLE_S
            try:
                with self._talking:
                    if self._bank is None:
                        self._start(patient=time.monotonic() - began < START_S)
                    else:
                        self._round()
                    pace = self._pace()
            except Exception:
                _log.exception("%s: a round of flow control failed", self._where)
            self._ended.wait(pace)

    def _pace(self) -> float:
        """Returns the number of seconds until the next round."""
        bank = self._bank
        if bank is None:
            return _PACE_S
        if bank.ratio is None:
            return _IDLE_S
        with self._state:
            return _HURRY_S if self._orders or bank.is_waited_for else _PACE_S

    def _start(self, *, patient: bool) -> None:
        """Creates the bank from the newest state that a keeper has.

        Args:
            patient: if True, does nothing unless all keepers answer.
        """
        found = self._ask(LOOK, ANSWER_S)
        if patient and (self._late or not found):
            return
        last = latest(one.state for one in found.values())
        now = time.monotonic()
        bank = Bank.new(self._number, last, now)
        if last is None and self._first is not None:
            if self._first.samples_per_insert is not None:
                found = self._ask(KEEP, SETTLE_S)
            bank.set(self._first, _reports(found), now)
        with self._state:
            self._bank = bank
        try:
            self._round()
        finally:
            self._ready.set()

    def _is_held(self) -> bool:
        """True if the gate is closed, so that writers are paused."""
        return self._hold is not None and time.monotonic() < self._hold[1]

    def _round(self) -> dict[str, KeeperReply]:
        """Runs one round: ask, plan, tell.

        Returns:
            The answers to the first message of the round, keyed by node.
        """
        bank = self._bank
        assert bank is not None
        with self._state:
            held, limited = self._is_held(), bank.ratio is not None
            state = bank.state
            bank.ask(time.monotonic())
        if held:
            found = self._ask(HOLD, ANSWER_S)
            self._opened.clear()
        elif limited:
            found = self._ask(KEEP, ANSWER_S)
        else:
            found = self._ask(OPEN, ANSWER_S, skip=self._opened)
            self._opened |= {(node, self._keepers()[node]) for node in found}
        newest = max((one.bank for one in found.values()), default=0)
        if newest > self._number:  # the clock of an earlier bank was ahead
            self._number = newest + 1
            with self._state:
                self._bank = Bank.new(
                    self._number,
                    latest([state, *(one.state for one in found.values())]),
                    time.monotonic(),
                )
            return {}
        self._orders = {}
        reports = _reports(found)
        self._answering = set(reports)
        with self._state:
            bank.confirm(state)
            bank.hear(reports, time.monotonic())
            orders = {} if held else bank.plan(reports, time.monotonic())
            planned = bank.state
        if orders:
            reached = self._ask(KEEP, ANSWER_S)
            with self._state:
                bank.confirm(planned)
            self._orders = orders if set(reached) >= set(found) else {}
        return found

    def _ask(
        self, order: str, timeout: float, skip: set[tuple[str, Any]] | None = None
    ) -> dict[str, KeeperReply]:
        """Sends each keeper the state of the bank with an order, and returns the answers by node.

        Args:
            order: the order. KEEP is replaced by the quota that was planned for the shard, if any.
            timeout: maximum time to wait for the answers, in seconds.
            skip: (node, keeper) of keepers that get no message.
        """
        ray, bank = self._ray, self._bank
        state = None if bank is None or not bank.state.setting else bank.state
        sent: dict[Any, str] = {}
        for node, keeper in self._keepers().items():
            if (late := self._late.get(node)) is not None:
                if not ray.wait([late], timeout=0)[0]:
                    continue
                del self._late[node]
            if skip and (node, keeper) in skip:
                continue
            shard = self._shards.get(node, "")
            room = self._orders.get(shard) if order == KEEP else None
            request = "flow", self._number, state, order if room is None else room
            sent[send_request(keeper, *request)] = node
        if not sent:
            return {}
        ready, late_ones = ray.wait(list(sent), num_returns=len(sent), timeout=timeout)
        self._late |= {sent[ref]: ref for ref in late_ones}
        found: dict[str, KeeperReply] = {}
        for ref in ready:
            try:
                found[sent[ref]] = open_answer(ray.get(ref))
            except ray.exceptions.RayError:
                continue  # the keeper is being restarted
            except Exception as error:
                _log.warning("%s: the shard of node %s: %s", self._where, sent[ref], error)
        self._shards |= {node: one.shard for node, one in found.items()}
        return found

    def _text(self, bank: Bank) -> str:
        """Returns a description of the ratio and of the quotas, for messages."""
        inserted, drawn = bank.inserted - bank.state.free, bank.drawn
        seen = f"{drawn / inserted:.3g}" if inserted > 0 else "none"
        away = sorted(
            shard.split("/")[0] for shard in bank.state.heard.keys() - set(self._answering)
        )
        missing = f"; no answer from the shards of {', '.join(away)}" if away else ""
        return (
            f"{bank.ratio:g} samples per insert are required, but so far there were {seen} "
            f"({bank.inserted:,} items "
            f"written, {drawn:,} sampled, {bank.granted - bank.inserted:,} granted to writers and "
            f"{max(0, bank.samples - drawn):,} to learners{missing})"
        )


def _reports(found: dict[str, KeeperReply]) -> dict[str, Report]:
    """Returns the report of each shard in the answers of the keepers."""
    return {one.shard: one.report for one in found.values()}

"""Flow control in a learner, which may only draw as many items as the shard map has granted.

The learner requests a quota of items from the shard map, draws them without further messages, and
requests more before the quota is used up. A quota expires `LAPSE_S` seconds after its request, so
that items granted to a learner that died can be granted to other learners. Without a limiter, the
learner asks the map every `PROBE_S` seconds whether a limiter has been set.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from shmbuffer.distributed.shards.flow.bank import LAPSE_S
from shmbuffer.distributed.shards.flow.flow_control import Lent
from shmbuffer.distributed.shards.member import PROBE_S
from shmbuffer.distributed.shards.members import Members
from shmbuffer.errors import RateLimitTimeout
from shmbuffer.memory import RateLimiter

POLL_S = 0.01
"""Seconds between two checks while `spend` waits."""


class Credits:
    """The quota of items that one handle can draw.

    Args:
        ray: the module ``ray``.
        members: the client's view of the shards.
        where: description of the buffer, for messages.
    """

    def __init__(self, ray: Any, members: Members, where: str) -> None:
        self._ray, self._members, self._where = ray, members, where
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._key = (-1, -1)
        self._granted = self._spent = 0
        self._limiter: RateLimiter | None = None
        self._text = "the shard map does not answer"
        self._ends = 0.0
        self._known = False  # True once the map has answered
        self._asked: Any = None
        self._asked_at = 0.0

    @property
    def limiter(self) -> RateLimiter | None:
        """The rate limiter that the map reported last."""
        return self._limiter

    def forget(self) -> None:
        """Discards the quota, because the limiter has changed. The next draw requests another."""
        self._known, self._asked, self._ends = False, None, 0.0

    def spend(self, count: int, min_size: int, timeout: float | None) -> None:
        """Waits until ``count`` items can be drawn, and records them as drawn.

        Args:
            count: number of items.
            min_size: number of items that the shards must contain.
            timeout: maximum time to wait in seconds, or None.

        Raises:
            RateLimitTimeout: the items cannot be drawn within ``timeout``.
            RateLimitError: the rate limiter can never allow the draw.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            text = self._refused(count, min_size, end)
            if not text:
                self._spent += count
                return
            if end is not None and time.monotonic() >= end:
                assert timeout is not None
                missing = self._members.missing()
                raise RateLimitTimeout(
                    f"{self._where}: sample waits: {text}"
                    + (f"; {missing}" if missing and missing not in text else "")
                    + f"; after {timeout:g} s nothing was changed"
                )
            time.sleep(POLL_S)

    def spend_now(self, count: int) -> bool:
        """Records ``count`` items as drawn, if this is possible without waiting.

        Returns False if the items cannot be drawn now.
        """
        self._hear()
        may = self._may(count)
        self._spent += count if may else 0
        return may

    def spend_more(self, count: int) -> None:
        """Records items that are drawn again because a shard died, even beyond the quota."""
        self._spent += count

    def _refused(self, count: int, min_size: int, end: float | None) -> str:
        """Returns the reason why ``count`` items cannot be drawn now, or "" if they can.

        Args:
            count: number of items.
            min_size: number of items that the shards must contain.
            end: time at which the caller gives up, or None.
        """
        self._hear()
        if not self._may(count) or not self._known:
            self._ask(count)
            left = self._members.timeout if end is None else max(0.0, end - time.monotonic())
            self._hear(min(left, self._members.timeout))
        if not self._known:
            return self._text
        limiter = self._limiter
        least = max(min_size, 0 if limiter is None else limiter.min_size)
        if least:
            self._members.refresh(all_of_them=bool(min_size))
            there = sum(one.totals.length for one in self._members.living())
            if there < least:
                return f"the shards have {there:,} items, but {least:,} are needed"
        return "" if self._may(count) else self._text

    def _may(self, count: int) -> bool:
        """True if the quota allows ``count`` items to be drawn now."""
        if self._limiter is None or self._limiter.samples_per_insert is None:
            return self._known
        return self._spent + count <= self._granted and time.monotonic() < self._ends

    def _ask(self, count: int) -> None:
        """Requests a quota for ``count`` more items from the map, unless a request is pending."""
        if self._asked is None:
            self._asked_at = time.monotonic()
            self._asked = self._members.send_map(
                "flow", "grant", self._name, self._key, self._granted, self._spent, count
            )

    def _hear(self, timeout: float = 0.0) -> None:
        """Reads the map's answer if it has arrived, and sends a request if none was sent recently.

        Args:
            timeout: maximum time in seconds to wait for the answer.
        """
        if self._asked is None and time.monotonic() - self._asked_at > PROBE_S:
            self._ask(0)
        ray, asked = self._ray, self._asked
        if asked is None:
            return
        if not ray.wait([asked], timeout=timeout)[0]:
            if time.monotonic() - self._asked_at > self._members.timeout:
                self._asked = None  # the next call sends a new request
            return
        self._asked = None
        try:
            lent = ray.get(asked)
        except ray.exceptions.RayError:
            self._members.lose_map()
            return
        if isinstance(lent, Exception):
            raise lent
        if lent is not None:
            self._take(lent)

    def _take(self, lent: Lent) -> None:
        """Records a quota that the map has granted."""
        if lent.key != self._key:
            self._key, self._spent = lent.key, 0
        self._granted, self._limiter = lent.granted, lent.limiter
        self._known, self._ends = True, self._asked_at + LAPSE_S
        self._text = lent.text or self._text

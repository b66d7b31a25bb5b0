"""What a handle may ask of the flow control of all shards: its setting, and a moment of rest."""

from __future__ import annotations

import secrets
from types import EllipsisType
from typing import Any, Self

from shmbuffer.distributed.shards.credits import Credits
from shmbuffer.distributed.shards.members import Members
from shmbuffer.memory import RateLimiter


class Limited:
    """The part of a handle that sets what limits both sides."""

    _members: Members
    _credits: Credits

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """What keeps the writers and learners of all shards in step; None: nothing. One message.

        It can be set while everything runs, see `set_rate`.

        Raises:
            TypeError, ValueError: as `set_rate`.
        """
        found: RateLimiter | None = self._members.ask_map("rate")
        return found

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        self.set_rate(limiter)

    def set_rate(
        self, limiter: RateLimiter | EllipsisType | None = ..., **changes: Any
    ) -> RateLimiter | None:
        """Change what keeps writers and learners in step, while everything runs.

            rb.set_rate(samples_per_insert=8)     # the rest stays as it is
            rb.set_rate(RateLimiter(samples_per_insert=8, min_size=1_000))

        With None nothing limits any more. The ratio counts from now on, over all shards. Learners
        that have drawn before wait up to 3 s for the first lease of the new one.

        Returns:
            What is set now.

        Raises:
            TypeError: a limiter and changes, or neither; no such argument of `RateLimiter`.
            ValueError: see `RateLimiter`; a queue; ``min_size`` is larger than all shards.
        """
        if bool(changes) == (limiter is not ...):
            raise TypeError("set_rate() takes a RateLimiter (or None), or changes to what is set")
        if isinstance(limiter, EllipsisType):
            limiter = (self.rate_limiter or RateLimiter()).changed(**changes)
        require_ratio(limiter)
        self._members.ask_map("set_rate", limiter)
        self._credits.forget()
        return limiter


def require_ratio(limiter: RateLimiter | None) -> None:
    """ValueError where it is a queue."""
    if limiter is not None and limiter.max_times_sampled is not None:
        raise ValueError(
            "a sharded buffer cannot be a queue (max_times_sampled): the oldest items of all "
            "shards are not known in one place; give samples_per_insert, min_size or both"
        )


class Gate:
    """While it is closed, no item is written into any shard; who wants to write waits.

    Raises:
        RuntimeError: a shard does not answer, another save has closed it, or the map has died
            while it was closed.
    """

    def __init__(self, members: Members) -> None:
        self._members, self._token = members, secrets.token_hex(8)

    def _ask(self, what: str) -> Any:
        return self._members.ask_map("gate", what, self._token)

    def __enter__(self) -> Self:
        if why := self._ask("hold"):
            raise RuntimeError(f"a save of one moment cannot be made: {why}; nothing was saved")
        return self

    def keep(self) -> None:
        """It stays closed: has to be said every few seconds, and once at the end."""
        if not self._ask("renew"):
            raise RuntimeError(
                "the shards could not be kept as they were until all were saved: the map of the "
                "shards was started again meanwhile; this save is not kept, one before it is"
            )

    def __exit__(self, *exception: object) -> None:
        try:
            self._ask("release")
        except RuntimeError:
            return  # it opens by itself

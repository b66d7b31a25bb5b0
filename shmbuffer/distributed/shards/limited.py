"""A handle's access to flow control over all shards: the rate limiter, and a pause of writes."""

from __future__ import annotations

import secrets
from types import EllipsisType
from typing import Any, Self

from shmbuffer.distributed.shards.credits import Credits
from shmbuffer.distributed.shards.members import Members
from shmbuffer.memory import RateLimiter


class Limited:
    """The part of a handle that sets the rate limiter."""

    _members: Members
    _credits: Credits

    @property
    def rate_limiter(self) -> RateLimiter | None:
        """The rate limiter of all shards, or None. Costs a message. To set it, see `set_rate`."""
        found: RateLimiter | None = self._members.ask_map("flow", "rate")
        return found

    @rate_limiter.setter
    def rate_limiter(self, limiter: RateLimiter | None) -> None:
        self.set_rate(limiter)

    def set_rate(
        self, limiter: RateLimiter | EllipsisType | None = ..., **changes: Any
    ) -> RateLimiter | None:
        """Change the rate limiter of all shards, while clients write and draw.

            rb.set_rate(samples_per_insert=8)     # the rest stays as it is
            rb.set_rate(RateLimiter(samples_per_insert=8, min_size=1_000))

        None removes it. The ratio counts from now on, over all shards. Learners that have drawn
        before wait up to 3 s for their first quota by the new ratio.

        Returns:
            The new rate limiter.

        Raises:
            TypeError: both a limiter and changes, or neither; no such argument of `RateLimiter`.
            ValueError: see `RateLimiter`; a queue; ``min_size`` is larger than all shards.
        """
        if bool(changes) == (limiter is not ...):
            raise TypeError("set_rate() takes a RateLimiter (or None), or changes to what is set")
        if isinstance(limiter, EllipsisType):
            limiter = (self.rate_limiter or RateLimiter()).changed(**changes)
        require_ratio(limiter)
        self._members.ask_map("flow", "set_rate", limiter)
        self._credits.forget()
        return limiter


def require_ratio(limiter: RateLimiter | None) -> None:
    """ValueError for a queue."""
    if limiter is not None and limiter.max_times_sampled is not None:
        raise ValueError(
            "a sharded buffer cannot be a queue (max_times_sampled): the oldest items of all "
            "shards are not known in one place; give samples_per_insert, min_size or both"
        )


class Gate:
    """Keeps all shards from being written to; writers wait. RuntimeError if it cannot."""

    def __init__(self, members: Members) -> None:
        self._members, self._token = members, secrets.token_hex(8)

    def _ask(self, what: str) -> Any:
        return self._members.ask_map("flow", what, self._token)

    def __enter__(self) -> Self:
        if why := self._ask("hold"):
            raise RuntimeError(f"a save of one moment cannot be made: {why}; nothing was saved")
        return self

    def keep(self) -> None:
        """Keeps it closed; to be called every few seconds, and once at the end."""
        if not self._ask("renew"):
            raise RuntimeError(
                "writers could not be paused until all shards were saved: the map of the shards "
                "was started again meanwhile; this save is not kept, an earlier one is"
            )

    def __exit__(self, *exception: object) -> None:
        try:
            self._ask("release")
        except RuntimeError:
            return  # it opens after `HOLD_S`

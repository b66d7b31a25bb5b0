"""Limits of both sides of a buffer: a ratio of samples to inserts, a queue, a size, an age.

    inserted = write_count - where the ratio began      (the first ``min_size`` inserts are free)
    drawn    = elements sampled since then
    ahead    = inserted * samples_per_insert - drawn    0 where both sides have done their share

A write waits where it would take ``ahead`` above ``error_buffer``, unless fewer than ``min_size``
items are there, for which samples wait; a sample waits where it would take it below minus
``error_buffer``: the semantics of Reverb's ``SampleToInsertRatio`` (Cassirer et al., Reverb: A
Framework For Experience Replay, 2021, section 3.4), for whole batches. The numbers are in the
control file (`layout.LIMITER`), so all processes share them and a crash leaves them;
``_native/core/flow.c`` decides by them.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from shmbuffer._native import _core
from shmbuffer.memory.format import layout
from shmbuffer.memory.format.layout import Alone, Limit

WhenNoPeer = Literal["pass", "wait", "error"]

#: Beside a limiter, one of the two in the runtime page's ``ages``.
AGES = layout.of_core("ages", 32)

#: A limiter and the ages beside it, as the C core copies them.
SETTING = np.dtype([("limiter", layout.LIMITER), ("ages", AGES)])

_TOLERANCE = 0.1  # of the samples that the first min_size inserts stand for


@dataclass(frozen=True)
class RateLimiter:
    """Keeps writers and samplers in step; or makes a queue of the buffer.

        RateLimiter(samples_per_insert=4, min_size=1_000)     # replay: each item 4 times on average
        RateLimiter(max_times_sampled=1)                      # an on-policy queue
        RateLimiter(max_staleness=2, items_per_version=512)   # asynchronous: two versions behind

    Args:
        samples_per_insert: how often an item is sampled, on average: items drawn for each one
            written. None: there is no ratio.
        min_size: samples wait until so many items are there, at least 1.
        error_buffer: how far the sides may be apart, in samples, at least
            ``max(1, samples_per_insert)``. Where one call writes w items and one draws s, it has to
            be at least ``(w * samples_per_insert + s) / 2``, or both could wait for each other.
            None is a tenth of ``samples_per_insert * min_size`` (Acme's tolerance), and not less
            than what is needed at least.
        max_times_sampled: how often an item is handed out at most: the buffer is a queue, first in,
            first out, and writes wait while it is full. None: no queue.
        when_no_peer: what a call does that has to wait for the other side while no living client is
            on it. "pass": go on and not count it, so that the ratio goes on where it was when
            somebody comes. "wait": wait, with a warning every 30 s. "error": raise RateLimitError.
            None is "pass"; for a queue, which would lose items, it is to wait. A sample that does
            not pass raises CollectorsDiedError, except with "wait", if all collectors that a
            coordinator has spawned have died, none is restarted, and no other client could write.
        max_staleness: how many versions of the policy an item may be behind learners when its turn
            comes (`ReplayBuffer.reserve`): an item that would be older is refused at the commit,
            and counted. None: nobody asks.
        items_per_version: how many items a learner makes a version from. A write, or a reservation,
            then waits until it may be trained on before it is too old: no more than
            ``(version + max_staleness + 1) * items_per_version`` items are written, in flight and
            reserved, where versions and items count from when this was set. None: nobody waits
            for a version.

    Raises:
        ValueError: a number out of range; ``when_no_peer="pass"`` for a queue;
            ``items_per_version`` without ``max_staleness``.

    Source: ``reverb.rate_limiters.SampleToInsertRatio``, and ``max_times_sampled`` of
        ``reverb.Table``.
    """

    samples_per_insert: float | None = None
    min_size: int = 1
    error_buffer: float | None = None
    max_times_sampled: int | None = None
    when_no_peer: WhenNoPeer | None = None
    max_staleness: int | None = None
    items_per_version: int | None = None

    def __post_init__(self) -> None:
        _require_whole("min_size", self.min_size)
        if self.max_times_sampled is not None:
            _require_whole("max_times_sampled", self.max_times_sampled)
        _require_ages(self.max_staleness, self.items_per_version)
        ratio, buffer = self.samples_per_insert, self.error_buffer
        if ratio is not None and not (_is_number(ratio) and 0 < ratio < math.inf):
            raise ValueError(f"samples_per_insert has to be a number above 0, got {ratio!r}")
        if buffer is not None:
            if ratio is None:
                raise ValueError("error_buffer is the tolerance of samples_per_insert: give both")
            if not (_is_number(buffer) and max(1.0, ratio) <= buffer < math.inf):
                raise ValueError(
                    f"error_buffer has to be at least max(1, samples_per_insert) = "
                    f"{max(1.0, ratio):g}, or neither side could continue; got {buffer!r}"
                )
        if self.when_no_peer is not None and self.when_no_peer not in get_args(WhenNoPeer):
            raise ValueError(
                f"when_no_peer is 'pass', 'wait' or 'error', got {self.when_no_peer!r}"
            )
        if self.max_times_sampled is not None and self.when_no_peer == "pass":
            raise ValueError(
                "when_no_peer='pass' would overwrite items that a queue has not handed out; use "
                "'wait' or 'error', or leave max_times_sampled out"
            )

    @property
    def tolerance(self) -> float:
        """The error buffer that counts, in samples."""
        if self.samples_per_insert is None:
            return 0.0
        if self.error_buffer is not None:
            return float(self.error_buffer)
        ratio = float(self.samples_per_insert)
        return max(1.0, ratio, _TOLERANCE * ratio * self.min_size)

    @property
    def alone(self) -> Alone:
        """The effective ``when_no_peer``."""
        if self.when_no_peer is None:
            return Alone.PASS if self.max_times_sampled is None else Alone.QUEUE
        return Alone[self.when_no_peer.upper()]

    @property
    def limits(self) -> Limit:
        """The limits that a call may have to wait for."""
        ratio = Limit.RATIO if self.samples_per_insert is not None else Limit(0)
        ages = Limit.AGES if self.max_staleness is not None else Limit(0)
        return ratio | ages | (Limit.QUEUE if self.max_times_sampled is not None else Limit(0))

    def changed(self, **changes: Any) -> RateLimiter:
        """A copy with other values; an error buffer too small for them is computed again."""
        ratio = changes.get("samples_per_insert", self.samples_per_insert)
        too_small = self.error_buffer is not None and (
            ratio is None or self.error_buffer < max(1.0, ratio)
        )
        if too_small:
            changes = {"error_buffer": None} | changes
        if self.when_no_peer == "pass" and changes.get("max_times_sampled") is not None:
            changes = {"when_no_peer": None} | changes
        return replace(self, **changes)

    def says_the_same(self, other: RateLimiter | None) -> bool:
        """True if another one limits in just the same way, whatever was left to defaults."""
        return other is not None and self.to_numbers() == other.to_numbers()

    def require_fits(self, elements: int, where: str, *, prioritized: bool) -> None:
        """ValueError if ``min_size`` is larger than the buffer, or a queue has priorities."""
        if self.max_times_sampled is not None and prioritized:
            raise ValueError(
                f"{where}: a queue hands items out first in, first out, and this buffer has "
                "priorities; make it without (alpha=None), or leave max_times_sampled out"
            )
        if self.min_size > elements:
            raise ValueError(
                f"{where}: min_size is {self.min_size:,}, but the buffer has room for only "
                f"{elements:,} items, so that no learner could ever sample; use a smaller min_size"
            )

    def to_numbers(self) -> Numbers:
        """Returns the arguments of ``_core.Ring.limit``, in the order of `NUMBERS`."""
        return (
            int(self.limits),
            float(self.samples_per_insert or 0.0),
            self.tolerance,
            int(self.min_size),
            int(self.max_times_sampled or 0),
            int(self.alone),
            int(self.max_staleness or 0),
            int(self.items_per_version or 0),
        )


Numbers = tuple[int, float, float, int, int, int, int, int]
NUMBERS = (
    *("limits", "samples_per_insert", "error_buffer", "min_size", "max_times_sampled"),
    *("when_no_peer", "max_staleness", "items_per_version"),
)
NO_LIMIT: Numbers = (0, 0.0, 0.0, 0, 0, 0, 0, 0)
"""The arguments of ``_core.Ring.limit`` that remove a limiter."""


class Quota(NamedTuple):
    """The part of one ring in what several may be written, as `Engine.set_limiter` takes it.

    ``room`` elements may be written from where the first quota began. A quota that follows another
    has to say the sum of both; 0 or one that is used up: writes wait. Emptying and loading the ring
    end it at 0.
    """

    room: int

    def require_fits(self, elements: int, where: str, *, prioritized: bool) -> None:
        """Any ring will do."""

    def to_numbers(self) -> Numbers:
        """Returns the limits as numbers, like `RateLimiter.to_numbers`."""
        return int(Limit.QUOTA), 0.0, float(self.room), 0, 0, int(Alone.WAIT), 0, 0


def quota_of(runtime: Any) -> tuple[int, int] | None:
    """Returns the room of the quota, and the elements written by it; None without a quota."""
    block = active(runtime)
    if block is None or not int(block["limits"]) & Limit.QUOTA:
        return None
    used = signed(int(runtime["write_count"]) - int(block["inserts_base"]))
    return int(block["error_buffer"]), used


def active(runtime: Any) -> Any:
    """A copy of the `layout.LIMITER` that counts, all of one setting; None: there is none."""
    found = setting(runtime)
    return None if found is None else found["limiter"]


def setting(runtime: Any) -> Any:
    """Returns the limiter and the ages beside it, as a `SETTING`."""
    found = _core.limiter(runtime)
    return None if found is None else np.frombuffer(found, SETTING)[0]


def is_far_apart(runtime: Any, elements: int) -> bool:
    """True if one side is so far ahead of the other as no limiter lets it come."""
    block = active(runtime)
    if block is None:
        return False
    inserted = signed(int(runtime["write_count"]) - int(block["inserts_base"]))
    drawn = signed(int(runtime["drawn"]) - int(block["samples_base"]))
    ratio, buffer = float(block["samples_per_insert"]), float(block["error_buffer"])
    furthest = 3 * buffer + ratio * (int(block["min_size"]) + 2 * elements)
    return (
        inserted < -int(block["min_size"]) or drawn < 0 or abs(inserted * ratio - drawn) > furthest
    )


def read(runtime: Any) -> RateLimiter | None:
    """Returns the rate limiter that is set, or None."""
    found = setting(runtime)
    if found is None:
        return None
    block, ages = found["limiter"], found["ages"]
    limits, alone = Limit(int(block["limits"])), Alone(int(block["when_no_peer"]))
    return RateLimiter(
        samples_per_insert=float(block["samples_per_insert"]) if limits & Limit.RATIO else None,
        min_size=max(1, int(block["min_size"])),
        error_buffer=float(block["error_buffer"]) if limits & Limit.RATIO else None,
        max_times_sampled=int(block["max_times_sampled"]) if limits & Limit.QUEUE else None,
        max_staleness=int(ages["max_staleness"]) if limits & Limit.AGES else None,
        items_per_version=int(ages["items_per_version"]) or None if limits & Limit.AGES else None,
        when_no_peer=None if alone == Alone.QUEUE else alone.name.lower(),  # type: ignore[arg-type]
    )


def signed(number: int) -> int:
    """Converts the difference of two unsigned counters to a signed number."""
    return int(np.int64(np.uint64(number % 2**64)))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _require_ages(most: object, items: object) -> None:
    if most is not None:
        _require_whole("max_staleness", most, 0)
    if items is not None:
        _require_whole("items_per_version", items)
        if most is None:
            raise ValueError("max_staleness and items_per_version need each other: give both")


def _require_whole(name: str, value: object, least: int = 1) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} has to be a whole number of at least {least}, got {value!r}")

"""The limits of writes and samples: a sample ratio, a queue, a quota and an age.

    inserted = write_count - where the ratio began      (the first ``min_size`` inserts are free)
    drawn    = elements sampled since then
    ahead    = inserted * samples_per_insert - drawn    0 if both sides have done their share

A write waits if it would raise ``ahead`` above ``error_buffer``, unless the buffer has fewer than
``min_size`` items, for which samples wait. A sample waits if it would lower ``ahead`` below minus
``error_buffer``. These are the semantics of Reverb's ``SampleToInsertRatio`` (Cassirer et al.,
Reverb: A Framework For Experience Replay, 2021, section 3.4), applied to whole batches.

The numbers are in the control file (`layout.LIMITER`). All processes share them, and they survive a
crash. ``_native/core/flow.c`` makes the decisions.
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

# The limits of age beside a limiter: one of the two in the runtime page's ``ages``.
AGES = layout.make_core_dtype("ages", 32)

# A limiter and its limits of age, as the C core copies them.
SETTING = np.dtype([("limiter", layout.LIMITER), ("ages", AGES)])

_TOLERANCE = 0.1  # a fraction of the samples that the first min_size inserts allow


@dataclass(frozen=True)
class RateLimiter:
    """Limits how far writers and samplers may be apart, or makes the buffer a queue.

        RateLimiter(samples_per_insert=4, min_size=1_000)     # replay: each item 4 times on average
        RateLimiter(max_times_sampled=1)                      # an on-policy queue
        RateLimiter(max_staleness=2, items_per_version=512)   # asynchronous: two versions behind

    Args:
        samples_per_insert: The average number of times that an item is sampled: items drawn for
            each item written. None: no ratio.
        min_size: Samples wait until the buffer has this many items. At least 1.
        error_buffer: How far the sides may be apart, in samples; at least ``max(1,
            samples_per_insert)``. If one call writes w items and one call draws s, it must be at
            least ``(w * samples_per_insert + s) / 2``. Otherwise, both sides could wait for each
            other. None uses a tenth of ``samples_per_insert * min_size`` (Acme's tolerance), or the
            minimum if that is larger.
        max_times_sampled: The largest number of times that an item is handed out. Setting it makes
            the buffer a first-in, first-out queue, whose writes wait while it is full. None: no
            queue.
        when_no_peer: The behaviour of a call that would have to wait while no living client is on
            the other side.

            * "pass": continue without counting, so that the ratio resumes when a client joins.
            * "wait": wait, with a warning every 30 s.
            * "error": raise RateLimitError.

            None is "pass" without a queue. With a queue, which would lose items, calls wait. Unless
            it passes, a sample raises CollectorsDiedError if all collectors that a coordinator
            spawned have died, none is restarted, and no other client could write. With "wait", it
            waits even then.
        max_staleness: The largest number of policy versions that an item may be behind the learners
            when it is committed (`ReplayBuffer.reserve`). Older items are refused and counted.
            None: no limit.
        items_per_version: The number of items from which a learner makes a version. A write or a
            reservation then waits until its items can be used before they are too old. At most
            ``(version + max_staleness + 1) * items_per_version`` items are written, in flight or
            reserved, counted like versions from the moment at which the limiter was set. None:
            writers do not wait for versions.

    Raises:
        ValueError: A number is out of range, ``when_no_peer="pass"`` is used with a queue, or
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
        _require_integer("min_size", self.min_size)
        if self.max_times_sampled is not None:
            _require_integer("max_times_sampled", self.max_times_sampled)
        _require_ages(self.max_staleness, self.items_per_version)
        ratio, buffer = self.samples_per_insert, self.error_buffer
        if ratio is not None and not (_is_number(ratio) and 0 < ratio < math.inf):
            raise ValueError(f"samples_per_insert must be a number above 0, but is {ratio!r}")
        if buffer is not None:
            if ratio is None:
                raise ValueError(
                    "error_buffer has no effect without samples_per_insert, whose tolerance it is;"
                    " pass both"
                )
            if not (_is_number(buffer) and max(1.0, ratio) <= buffer < math.inf):
                raise ValueError(
                    f"error_buffer must be at least max(1, samples_per_insert) = "
                    f"{max(1.0, ratio):g}, because no side could continue otherwise, but is"
                    f" {buffer!r}"
                )
        if self.when_no_peer is not None and self.when_no_peer not in get_args(WhenNoPeer):
            raise ValueError(
                f"when_no_peer must be 'pass', 'wait' or 'error', but is {self.when_no_peer!r}"
            )
        if self.max_times_sampled is not None and self.when_no_peer == "pass":
            raise ValueError(
                "when_no_peer='pass' would overwrite items that a queue has not handed out; use "
                "'wait' or 'error', or leave max_times_sampled out"
            )

    @property
    def tolerance(self) -> float:
        """The effective error buffer, in samples."""
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
        """The limits for which a call may have to wait."""
        ratio = Limit.RATIO if self.samples_per_insert is not None else Limit(0)
        ages = Limit.AGES if self.max_staleness is not None else Limit(0)
        return ratio | ages | (Limit.QUEUE if self.max_times_sampled is not None else Limit(0))

    def changed(self, **changes: Any) -> RateLimiter:
        """Returns a copy with other values; recomputes an error buffer that is too small."""
        ratio = changes.get("samples_per_insert", self.samples_per_insert)
        too_small = self.error_buffer is not None and (
            ratio is None or self.error_buffer < max(1.0, ratio)
        )
        if too_small:
            changes = {"error_buffer": None} | changes
        if self.when_no_peer == "pass" and changes.get("max_times_sampled") is not None:
            changes = {"when_no_peer": None} | changes
        return replace(self, **changes)

    def has_same_limits(self, other: RateLimiter | None) -> bool:
        """True if another limiter has the same effective limits, even if its arguments differ."""
        return other is not None and self.to_numbers() == other.to_numbers()

    def require_fits(self, elements: int, where: str, *, prioritized: bool) -> None:
        """Raises ValueError if ``min_size`` exceeds the buffer, or if a queue has priorities."""
        if self.max_times_sampled is not None and prioritized:
            raise ValueError(
                f"{where}: a queue hands items out first in, first out, but this buffer has "
                "priorities; create it without them (alpha=None), or leave max_times_sampled out"
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
    """The number of elements that may still be written to one ring; see `Engine.set_limiter`.

    ``room`` counts from the element at which the first quota began, so a quota that follows another
    must be the sum of both. Writes wait if the quota is 0 or used up. Emptying or loading the ring
    sets the quota to 0.
    """

    room: int

    def require_fits(self, elements: int, where: str, *, prioritized: bool) -> None:
        """Accepts any ring."""

    def to_numbers(self) -> Numbers:
        """Returns the limits as numbers, like `RateLimiter.to_numbers`."""
        return int(Limit.QUOTA), 0.0, float(self.room), 0, 0, int(Alone.WAIT), 0, 0


def quota_of(runtime: Any) -> tuple[int, int] | None:
    """Returns the room of the quota, and the elements written under it; None without a quota."""
    block = active(runtime)
    if block is None or not int(block["limits"]) & Limit.QUOTA:
        return None
    used = signed(int(runtime["write_count"]) - int(block["inserts_base"]))
    return int(block["error_buffer"]), used


def active(runtime: Any) -> Any:
    """Returns a consistent copy of the active `layout.LIMITER`; None without a limiter."""
    found = setting(runtime)
    return None if found is None else found["limiter"]


def setting(runtime: Any) -> Any:
    """Returns a consistent copy of the limiter and its limits of age, as a `SETTING`."""
    found = _core.limiter(runtime)
    return None if found is None else np.frombuffer(found, SETTING)[0]


def is_far_apart(runtime: Any, elements: int) -> bool:
    """True if one side is further ahead of the other than any limiter allows."""
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
    """Returns the active rate limiter, or None."""
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
    """Checks the limits of age."""
    if most is not None:
        _require_integer("max_staleness", most, 0)
    if items is not None:
        _require_integer("items_per_version", items)
        if most is None:
            raise ValueError("items_per_version has no effect without max_staleness; pass both")


def _require_integer(name: str, value: object, least: int = 1) -> None:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}")

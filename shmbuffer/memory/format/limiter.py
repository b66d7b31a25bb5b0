"""The limits for writes and samples: a sample ratio, a queue, a quota and a maximum age.

    inserted = write_count - inserts_base   elements written since the ratio took effect, where the
                                            first ``min_size`` elements do not count
    drawn    = elements sampled since the ratio took effect
    ahead    = inserted * samples_per_insert - drawn            0 if the actual ratio is exact

A write waits if it would raise ``ahead`` above ``error_buffer``. It does not wait while the buffer
has fewer than ``min_size`` items, because samples wait for these items. A sample waits if it would
lower ``ahead`` below minus ``error_buffer``. Reverb's ``SampleToInsertRatio`` has the same
semantics (Cassirer et al., Reverb: A Framework For Experience Replay, 2021, section 3.4). Here they
apply to whole batches.

The numbers are stored in the control file (`layout.LIMITER`). All processes use the same numbers,
and the numbers survive a crash. ``_native/core/flow.c`` decides whether a call has to wait.
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

# The age limits that belong to a limiter. The field `ages` of the runtime page has two of them.
AGES = layout.make_core_dtype("ages", 32)

# A limiter and its age limits, as the C core copies them from the runtime page.
SETTING = np.dtype([("limiter", layout.LIMITER), ("ages", AGES)])

_TOLERANCE = 0.1  # fraction of the number of samples that min_size inserts allow


@dataclass(frozen=True)
class RateLimiter:
    """Keeps the ratio of samples to inserts near a target, or turns the buffer into a queue.

        RateLimiter(samples_per_insert=4, min_size=1_000)     # replay: each item 4 times on average
        RateLimiter(max_times_sampled=1)                      # an on-policy queue
        RateLimiter(max_staleness=2, items_per_version=512)   # asynchronous: two versions behind

    Args:
        samples_per_insert: Target ratio: the average number of times that an item is sampled. None
            means that the ratio is not limited.
        min_size: Number of items that the buffer must have before samples can be drawn. At least 1.
        error_buffer: Tolerance of the ratio, in samples: how far the number of samples may be from
            the target. Must be at least ``max(1, samples_per_insert)``. If a call writes w items
            and a call draws s items, it must be at least ``(w * samples_per_insert + s) / 2``, or
            writers and samplers can block each other. If None, uses a tenth of
            ``samples_per_insert * min_size`` (Acme's tolerance), but at least the minimum.
        max_times_sampled: Maximum number of times that each item is sampled. If it is set, the
            buffer is a first-in, first-out queue, and writes wait while the queue is full. None
            means that the buffer is not a queue.
        when_no_peer: What a call does if it would have to wait although no living client is on the
            other side (a writer for samples, a sampler for writes).

            * "pass": The call continues and is not counted, so that the ratio resumes when a client
              joins.
            * "wait": The call waits and logs a warning every 30 s.
            * "error": The call raises RateLimitError.

            None means "pass" without a queue. In a queue, which would lose items, None means that
            calls wait. Except with "pass" and "wait", a sample raises CollectorsDiedError if all
            collectors that a coordinator spawned have died, none of them will be restarted, and no
            other client can write.
        max_staleness: Maximum number of policy versions by which an item may be older than the
            learners' version when it is committed (`ReplayBuffer.reserve`). Older items are
            rejected and counted. None means no limit.
        items_per_version: Number of items from which a learner makes one policy version. A write or
            reservation then waits until the learners can use its items before they are too old. At
            most ``(version + max_staleness + 1) * items_per_version`` items are written, in
            progress or reserved. Items and versions are counted from the time at which the limiter
            was set. None means that writers do not wait for versions.

    Raises:
        ValueError: A number is out of range, ``when_no_peer="pass"`` is used with a queue, or
            ``items_per_version`` is used without ``max_staleness``.

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
                    "error_buffer has no effect without samples_per_insert, because it is the"
                    " tolerance of that ratio; pass both"
                )
            if not (_is_number(buffer) and max(1.0, ratio) <= buffer < math.inf):
                raise ValueError(
                    "error_buffer must be at least max(1, samples_per_insert) ="
                    f" {max(1.0, ratio):g}, but is {buffer!r}; with a smaller one, writers and"
                    " samplers would block each other"
                )
        if self.when_no_peer is not None and self.when_no_peer not in get_args(WhenNoPeer):
            raise ValueError(
                f"when_no_peer must be 'pass', 'wait' or 'error', but is {self.when_no_peer!r}"
            )
        if self.max_times_sampled is not None and self.when_no_peer == "pass":
            raise ValueError(
                "when_no_peer='pass' would overwrite items of a queue that have not been sampled;"
                " use 'wait' or 'error', or leave out max_times_sampled"
            )

    @property
    def tolerance(self) -> float:
        """The effective ``error_buffer``, in samples, or 0 without a ratio."""
        if self.samples_per_insert is None:
            return 0.0
        if self.error_buffer is not None:
            return float(self.error_buffer)
        ratio = float(self.samples_per_insert)
        return max(1.0, ratio, _TOLERANCE * ratio * self.min_size)

    @property
    def alone(self) -> Alone:
        """The effective value of ``when_no_peer``."""
        if self.when_no_peer is None:
            return Alone.PASS if self.max_times_sampled is None else Alone.QUEUE
        return Alone[self.when_no_peer.upper()]

    @property
    def limits(self) -> Limit:
        """The set of limits that this limiter applies."""
        ratio = Limit.RATIO if self.samples_per_insert is not None else Limit(0)
        ages = Limit.AGES if self.max_staleness is not None else Limit(0)
        return ratio | ages | (Limit.QUEUE if self.max_times_sampled is not None else Limit(0))

    def changed(self, **changes: Any) -> RateLimiter:
        """Returns a copy of the limiter in which some arguments have other values.

        Two arguments are reset to None if the changes make them invalid: an ``error_buffer`` that
        is too small for the ratio, and ``when_no_peer="pass"`` if the buffer becomes a queue.
        """
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
        """True if another limiter has the same effect, even if its arguments differ."""
        return other is not None and self.to_numbers() == other.to_numbers()

    def require_fits(self, elements: int, where: str, *, prioritized: bool) -> None:
        """Raises ValueError if a buffer cannot have this limiter.

        ``min_size`` must not exceed the number of elements, and a queue must not have priorities.

        Args:
            elements: Number of elements of the buffer.
            where: Path of the buffer, for the message.
            prioritized: Whether the buffer has priorities.
        """
        if self.max_times_sampled is not None and prioritized:
            raise ValueError(
                f"{where}: a queue delivers its items in the order of their insertion, but this"
                " buffer has priorities; create it without priorities (alpha=None), or leave out"
                " max_times_sampled"
            )
        if self.min_size > elements:
            raise ValueError(
                f"{where}: min_size is {self.min_size:,}, but the buffer has room for only "
                f"{elements:,} items, so no learner could ever sample; use a smaller min_size"
            )

    def to_numbers(self) -> Numbers:
        """Returns the effective limits as arguments of ``_core.Ring.limit``, named by `NUMBERS`."""
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
"""Arguments of ``_core.Ring.limit``."""
NUMBERS = (
    *("limits", "samples_per_insert", "error_buffer", "min_size", "max_times_sampled"),
    *("when_no_peer", "max_staleness", "items_per_version"),
)
"""Names of the arguments of ``_core.Ring.limit``."""
NO_LIMIT: Numbers = (0, 0.0, 0.0, 0, 0, 0, 0, 0)
"""Arguments of ``_core.Ring.limit`` that remove a limiter."""


class Quota(NamedTuple):
    """A limit for the number of elements that are written to one ring (`Engine.set_limiter`).

    ``room`` is the total number of elements that can be written since the first quota was set. To
    allow more writes, pass the sum of the previous ``room`` and the additional elements. Writes
    wait while the quota is 0 or used up. Emptying the ring or loading a save sets the quota to 0.
    """

    room: int

    def require_fits(self, elements: int, where: str, *, prioritized: bool) -> None:
        """Does nothing, because every ring can have a quota."""

    def to_numbers(self) -> Numbers:
        """Returns the quota as arguments of ``_core.Ring.limit``, like `RateLimiter.to_numbers`."""
        return int(Limit.QUOTA), 0.0, float(self.room), 0, 0, int(Alone.WAIT), 0, 0


def quota_of(runtime: Any) -> tuple[int, int] | None:
    """Returns the total quota of a ring and the number of elements that were written under it.

    Returns None if the ring has no quota.

    Args:
        runtime: The runtime page, in shared memory.
    """
    block = active(runtime)
    if block is None or not int(block["limits"]) & Limit.QUOTA:
        return None
    used = signed(int(runtime["write_count"]) - int(block["inserts_base"]))
    return int(block["error_buffer"]), used


def active(runtime: Any) -> Any:
    """Returns a consistent copy of the active limiter as a `layout.LIMITER`, or None."""
    found = setting(runtime)
    return None if found is None else found["limiter"]


def setting(runtime: Any) -> Any:
    """Returns a consistent copy of the active limiter and its age limits as a `SETTING`, or None.

    Other processes may change the limiter while it is copied, so the C core makes the copy.
    """
    found = _core.limiter(runtime)
    return None if found is None else np.frombuffer(found, SETTING)[0]


def is_far_apart(runtime: Any, elements: int) -> bool:
    """True if the counters of a limiter are further apart than a limiter ever allows.

    Recovery uses this check to find counters that are damaged.

    Args:
        runtime: The runtime page.
        elements: Number of elements of the ring.
    """
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
    """Returns the active limiter of a runtime page as a `RateLimiter`, or None if there is none."""
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
    """Converts a difference of two unsigned 64-bit counters to a signed integer."""
    return int(np.int64(np.uint64(number % 2**64)))


def _is_number(value: object) -> bool:
    """True if a value is a real number other than True and False."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _require_ages(most: object, items: object) -> None:
    """Raises ValueError if ``max_staleness`` or ``items_per_version`` is invalid."""
    if most is not None:
        _require_integer("max_staleness", most, 0)
    if items is not None:
        _require_integer("items_per_version", items)
        if most is None:
            raise ValueError("items_per_version has no effect without max_staleness; pass both")


def _require_integer(name: str, value: object, least: int = 1) -> None:
    """Raises ValueError unless the argument ``name`` is an integer of at least ``least``."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}")

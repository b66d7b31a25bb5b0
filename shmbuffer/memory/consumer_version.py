"""The version of the policy that learners have: one number in the control file, for everybody.

    publish(weights) ──at least its version──▶
    sampler.consumer_version = n ────────────▶ consumer_version ──▶ samplers, limiter, top
    sampler.increment_consumer_version() ────▶

Items say by which version they were made, and are stale by the difference. Each change is one
atomic store, also while others change it, and wakes who waits for it.
If the process dies behind the store, the new version counts; waiters see it milliseconds later.
"""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

from shmbuffer._native import _core
from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.directory.seat import Seat
from shmbuffer.memory.format import layout

LIMIT = layout.VERSIONS


class _Change(IntEnum):
    """The changes of a version, numbered as in ``ring.h``."""

    SET = 0
    ADD = 1
    AT_LEAST = 2


def read(seat: Seat) -> int:
    """Returns the version as it is now; CorruptBufferError if something else has written there."""
    found = int(seat.control.runtime["consumer_version"][0])
    if found >= LIMIT:
        raise CorruptBufferError(
            f"{seat.where}: the consumer version is {found}, which is invalid: another program has "
            "written to the shared memory; set it again with sampler.consumer_version = n",
            path=seat.where,
            found=found,
        )
    return found


def store(seat: Seat, version: Any) -> None:
    """Sets it, whatever it was."""
    _change(seat, _Change.SET, require_version(version))


def increment(seat: Seat) -> int:
    """Adds 1, also while others do; returns what it is then."""
    return _change(seat, _Change.ADD, 1)


def raise_to(seat: Seat, version: int) -> int:
    """Sets it, where it is smaller; returns what it is then."""
    return _change(seat, _Change.AT_LEAST, version)


def require_version(version: Any, name: str = "consumer_version") -> int:
    """Returns a version as an int; TypeError or ValueError where it is none."""
    try:
        found = operator.index(version)
    except TypeError:
        raise TypeError(f"{name} is an integer, got {version!r}") from None
    if not 0 <= found < LIMIT:
        raise ValueError(f"{name} is a number from 0 to 2**62 - 1, got {found}")
    return found


def _change(seat: Seat, change: _Change, value: int) -> int:
    seat.require_open()
    found = _core.consumer_version(seat.control.map, change, value)
    seat.control.touch()
    return found

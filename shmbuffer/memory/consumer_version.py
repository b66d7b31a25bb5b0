"""The consumer version: the policy version of the learners, one number for all clients.

    publish(weights) ──at least its version──▶
    sampler.consumer_version = n ────────────▶ consumer_version ──▶ samplers, limiter, top
    sampler.increment_consumer_version() ────▶

The number is stored in the control file. Each item contains the version of the policy that
generated it. Its staleness is the difference between the two versions. Each change is atomic, even
if several processes change the version, and wakes waiting clients.

If the process dies after the change, the new version is valid. Waiting clients read it within
milliseconds.
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
    """The ways to change the version, numbered as in ``ring.h``."""

    SET = 0
    ADD = 1
    AT_LEAST = 2


def read(seat: Seat) -> int:
    """Returns the current version. Raises CorruptBufferError if the stored number is invalid."""
    found = int(seat.control.runtime["consumer_version"][0])
    if found >= LIMIT:
        raise CorruptBufferError(
            f"{seat.where}: the consumer version {found} is invalid, because another program wrote "
            "to the shared memory; set it again with sampler.consumer_version = n",
            path=seat.where,
            found=found,
        )
    return found


def store(seat: Seat, version: Any) -> None:
    """Sets the version, even if it becomes lower."""
    _change(seat, _Change.SET, require_version(version))


def increment(seat: Seat) -> int:
    """Increments the version atomically, and returns the new version."""
    return _change(seat, _Change.ADD, 1)


def raise_to(seat: Seat, version: int) -> int:
    """Raises the version to ``version`` unless it is higher already. Returns the new version."""
    return _change(seat, _Change.AT_LEAST, version)


def require_version(version: Any, name: str = "consumer_version") -> int:
    """Converts a version that the user passed as the argument ``name`` to an int.

    Raises:
        TypeError: The version is not an integer.
        ValueError: The version is out of range.
    """
    try:
        found = operator.index(version)
    except TypeError:
        raise TypeError(f"{name} must be an integer, but is {version!r}") from None
    if not 0 <= found < LIMIT:
        raise ValueError(f"{name} must be a number from 0 to 2**62 - 1, but is {found}")
    return found


def _change(seat: Seat, change: _Change, value: int) -> int:
    """Changes the version in the control file, and returns the new version."""
    seat.require_open()
    found = _core.consumer_version(seat.control.map, change, value)
    seat.control.touch()
    return found

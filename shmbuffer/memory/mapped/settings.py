"""The settings of a buffer, recorded when it is created."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shmbuffer.errors import CorruptBufferError
from shmbuffer.memory.format.layout import PAGE, SUPERBLOCK, Flag
from shmbuffer.memory.format.priorities import largest_mass
from shmbuffer.memory.format.schema import MAX_ELEMENTS, MAX_RECORD_BYTES

Reserve = Literal["all", "steps", False]
"""When a buffer takes the space of its files: with the first write, in steps, or page by page."""

ORDINARY_PRIORITY = 1e3
"""With every alpha a learner can give priorities up to here."""


@dataclass(frozen=True)
class Settings:
    """Recorded when a buffer is created, and read by every process that attaches."""

    capacity: int  # elements, as the user gave it
    ndim: int = 1  # dimensions that count as storage
    checksum: bool = True  # write a CRC32C over ticket and payload at each commit
    # "all": take all space when the schema is known; "steps": take it ahead of what is written;
    # False: page by page, where a full disk is a SIGBUS
    reserve: Reserve = "all"
    alpha: float | None = None  # priority exponent; None: no priorities until a sampler binds them
    eps: float = 1e-8  # added to raw priorities
    extra: dict[str, Any] = field(default_factory=dict)  # what the family records of itself; JSON
    # size of the byte ring of a buffer of records; rounded up to whole pages. 0: items are rows of
    # leaves
    record_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "record_bytes", -(-self.record_bytes // PAGE) * PAGE)
        if not 0 <= self.record_bytes <= MAX_RECORD_BYTES:
            raise ValueError(
                f"a byte ring cannot have {self.record_bytes} bytes; {MAX_RECORD_BYTES} is the "
                "limit"
            )
        require_reserve(self.reserve)
        if self.reserve == "steps" and self.record_bytes:
            raise ValueError(
                "reserve='steps' is for rows of leaves, and this buffer has a byte ring, whose "
                "size you choose; pass reserve='all', or False"
            )
        if self.capacity < 1:
            raise ValueError(f"the capacity is {self.capacity}; it has to be at least 1")
        if self.capacity > MAX_ELEMENTS:
            raise ValueError(f"the capacity is {self.capacity}; {MAX_ELEMENTS} is the limit")
        if self.ndim < 1:
            raise ValueError(f"ndim is {self.ndim}; it has to be at least 1")
        _require_exponent(self.alpha or 0.0, self.eps, self.capacity)

    @classmethod
    def recorded(cls, found: dict[str, Any], where: object) -> Settings:
        """Returns the values of a superblock."""
        try:
            if (name := wrong(found, KINDS)) is not None:
                raise TypeError(f"{name} is {found[name]!r}")
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise CorruptBufferError(
                f"{where}: no buffer can have the settings in the superblock ({error}); restore it "
                "from a copy",
                path=str(where),
                found=found,
            ) from error

    @property
    def flags(self) -> Flag:
        """The flags of the superblock."""
        checksum = Flag.CHECKSUM if self.checksum else Flag(0)
        return checksum | _FLAGS[self.reserve]


_FLAGS = {"all": Flag.RESERVE, "steps": Flag.STEPS, False: Flag(0)}


def require_reserve(value: object) -> None:
    """Raises ValueError unless the value is one of `Reserve`."""
    if value not in get_args(Reserve) or (isinstance(value, int) and value is not False):
        raise ValueError(f"reserve is 'all', 'steps' or False, not {value!r}")


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "capacity": _is(int),
    "ndim": _is(int),
    "checksum": _is(bool),
    "reserve": _is(str, bool),
    "alpha": _is(int, float, type(None)),
    "eps": _is(int, float),
    "extra": _is(dict),
    "record_bytes": _is(int),
}


def wrong(found: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]) -> str | None:
    """Returns the name of a value that fails its test; None: all pass."""
    return next((name for name in known if name in found and not known[name](found[name])), None)


def as_json(values: Mapping[str, Any]) -> bytes:
    """Returns the JSON of the superblock; ValueError if it has no room for it."""
    found, room = json.dumps(values, sort_keys=True).encode(), SUPERBLOCK["settings"].itemsize
    if len(found) > room:
        raise ValueError(
            f"the buffer's settings take {len(found)} bytes as JSON, but there is room for {room}; "
            "shorten priority_key or other settings that are recorded"
        )
    return found


def exponent_fits(alpha: float, eps: float, elements: int) -> bool:
    """True if both are numbers from 0 that leave the mass of an ordinary priority finite."""
    try:
        return (
            0 <= alpha < math.inf
            and 0 <= eps < math.inf
            and (ORDINARY_PRIORITY + eps) ** alpha <= largest_mass(elements)
        )
    except OverflowError:
        return False


def _require_exponent(alpha: float, eps: float, elements: int) -> None:
    if not exponent_fits(alpha, eps, elements):
        raise ValueError(
            f"alpha is {alpha}, eps is {eps}; they have to be numbers from 0, and "
            f"({ORDINARY_PRIORITY:g} + eps) ** alpha finite"
        )

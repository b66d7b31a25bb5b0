"""The settings of a buffer, which are recorded when it is created."""

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
"""When the space of files is allocated: at the first write, in steps, or page by page."""

ORDINARY_PRIORITY = 1e3
"""Every valid alpha supports priorities up to this value."""


@dataclass(frozen=True)
class Settings:
    """Settings that are recorded at creation, and read by every process that attaches."""

    capacity: int  # elements, as the user gave it
    ndim: int = 1  # dimensions that count as storage
    checksum: bool = True  # write a CRC32C over ticket and payload at each commit
    # "all": allocate all space when the schema is known; "steps": allocate it ahead of the writes;
    # False: page by page, so that a full disk causes SIGBUS
    reserve: Reserve = "all"
    alpha: float | None = None  # priority exponent; None: no priorities until a sampler sets them
    eps: float = 1e-8  # added to raw priorities
    extra: dict[str, Any] = field(default_factory=dict)  # settings of the buffer's class; JSON
    # size of the byte ring of a buffer of records, rounded up to whole pages; 0 if items are rows
    # of leaves
    record_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "record_bytes", -(-self.record_bytes // PAGE) * PAGE)
        if not 0 <= self.record_bytes <= MAX_RECORD_BYTES:
            raise ValueError(
                f"the byte ring cannot have {self.record_bytes} bytes; pass at most "
                f"{MAX_RECORD_BYTES}"
            )
        require_reserve(self.reserve)
        if self.reserve == "steps" and self.record_bytes:
            raise ValueError(
                "reserve='steps' works for rows of leaves only, but this buffer has a byte ring, "
                "whose size you choose; pass reserve='all', or False"
            )
        if self.capacity < 1:
            raise ValueError(f"the capacity must be at least 1, but is {self.capacity}")
        if self.capacity > MAX_ELEMENTS:
            raise ValueError(f"the capacity must be at most {MAX_ELEMENTS}, but is {self.capacity}")
        if self.ndim < 1:
            raise ValueError(f"ndim must be at least 1, but is {self.ndim}")
        _require_exponent(self.alpha or 0.0, self.eps, self.capacity)

    @classmethod
    def recorded(cls, found: dict[str, Any], where: object) -> Settings:
        """Parses the values of a superblock."""
        try:
            if (name := find_invalid(found, KINDS)) is not None:
                raise TypeError(f"{name} is {found[name]!r}")
            return cls(**found)
        except (TypeError, ValueError) as error:
            raise CorruptBufferError(
                f"{where}: the settings in the superblock are not valid ({error}); restore the "
                "directory from a copy",
                path=str(where),
                found=found,
            ) from error

    @property
    def flags(self) -> Flag:
        """The corresponding flags of the superblock."""
        checksum = Flag.CHECKSUM if self.checksum else Flag(0)
        return checksum | _FLAGS[self.reserve]


_FLAGS = {"all": Flag.RESERVE, "steps": Flag.STEPS, False: Flag(0)}


def require_reserve(value: object) -> None:
    """Raises ValueError unless the value is one of `Reserve`."""
    if value not in get_args(Reserve) or (isinstance(value, int) and value is not False):
        raise ValueError(f"reserve must be 'all', 'steps' or False, but is {value!r}")


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


def find_invalid(
    found: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]]
) -> str | None:
    """Returns the name of a value that fails its test; None if all pass."""
    return next((name for name in known if name in found and not known[name](found[name])), None)


def as_json(values: Mapping[str, Any]) -> bytes:
    """Encodes settings as JSON for the superblock; raises ValueError if they do not fit."""
    encoded, available = (
        json.dumps(values, sort_keys=True).encode(),
        SUPERBLOCK["settings"].itemsize,
    )
    if len(encoded) > available:
        raise ValueError(
            f"the settings of the buffer take {len(encoded)} bytes as JSON, but only {available} are "
            "available; shorten priority_key or other recorded settings",
        )
    return encoded


def exponent_fits(alpha: float, eps: float, elements: int) -> bool:
    """True if both numbers are at least 0 and the mass of an ordinary priority is finite."""
    try:
        return (
            0 <= alpha < math.inf
            and 0 <= eps < math.inf
            and (ORDINARY_PRIORITY + eps) ** alpha <= largest_mass(elements)
        )
    except OverflowError:
        return False


def _require_exponent(alpha: float, eps: float, elements: int) -> None:
    """Raises ValueError unless alpha and eps are valid."""
    if not exponent_fits(alpha, eps, elements):
        raise ValueError(
            f"alpha is {alpha} and eps is {eps}, but both must be numbers of at least 0 for which "
            f"({ORDINARY_PRIORITY:g} + eps) ** alpha is finite"
        )

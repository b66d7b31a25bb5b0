"""The settings of a buffer, which are stored in its superblock when it is created."""

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
"""When disk space is allocated: all of it at the first write, in steps, or page by page."""

ORDINARY_PRIORITY = 1e3
"""Priority that a buffer must support: an exponent alpha is rejected if its mass overflows."""


@dataclass(frozen=True)
class Settings:
    """Settings that are stored when a buffer is created. Every process that attaches reads them.

    Raises:
        ValueError: A setting is invalid.
    """

    capacity: int  # number of elements, as the user passed it
    ndim: int = 1  # number of storage dimensions
    checksum: bool = True  # whether a commit stores the CRC32C of the ticket and the payload
    # "all": all space is allocated when the schema is known.
    # "steps": space is allocated in steps before it is needed.
    # False: the kernel allocates page by page, and a full disk causes SIGBUS.
    reserve: Reserve = "all"
    # priority exponent; None: there are no priorities until a prioritized sampler sets it
    alpha: float | None = None
    eps: float = 1e-8  # constant that is added to raw priorities
    extra: dict[str, Any] = field(default_factory=dict)  # settings of the buffer's class, as JSON
    # size of the byte ring, which is rounded up to whole pages; 0 if items are stored as leaves
    record_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "record_bytes", -(-self.record_bytes // PAGE) * PAGE)
        if not 0 <= self.record_bytes <= MAX_RECORD_BYTES:
            raise ValueError(
                f"the size of the byte ring must be from 0 to {MAX_RECORD_BYTES} bytes, but is"
                f" {self.record_bytes}"
            )
        require_reserve(self.reserve)
        if self.reserve == "steps" and self.record_bytes:
            raise ValueError(
                "reserve='steps' is not supported for a buffer with a byte ring; pass"
                " reserve='all' or reserve=False"
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
        """Parses the settings in a superblock.

        Raises:
            CorruptBufferError: A setting is invalid.
        """
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
        """The flags of the superblock that correspond to these settings."""
        checksum = Flag.CHECKSUM if self.checksum else Flag(0)
        return checksum | _FLAGS[self.reserve]


_FLAGS = {"all": Flag.RESERVE, "steps": Flag.STEPS, False: Flag(0)}


def require_reserve(value: object) -> None:
    """Raises ValueError unless the value is one of `Reserve`."""
    if value not in get_args(Reserve) or (isinstance(value, int) and value is not False):
        raise ValueError(f"reserve must be 'all', 'steps' or False, but is {value!r}")


def _is(*types: type) -> Callable[[Any], bool]:
    """Returns a test for values of exactly one of these types."""
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
    """Returns the name of the first value that fails its test, or None if all pass.

    Args:
        found: The values by name. Missing values are not tested.
        known: The tests by name.
    """
    return next((name for name in known if name in found and not known[name](found[name])), None)


def as_json(values: Mapping[str, Any]) -> bytes:
    """Encodes settings as JSON for the superblock.

    Raises:
        ValueError: The settings do not fit into the superblock.
    """
    encoded = json.dumps(values, sort_keys=True).encode()
    available = SUPERBLOCK["settings"].itemsize
    if len(encoded) > available:
        raise ValueError(
            f"the settings of the buffer take {len(encoded)} bytes as JSON, but only {available}"
            " are available; shorten priority_key or other stored settings",
        )
    return encoded


def exponent_fits(alpha: float, eps: float, elements: int) -> bool:
    """True if alpha and eps are valid in a buffer with ``elements`` elements.

    Both must be finite and not negative, and a mass of `ORDINARY_PRIORITY` must be valid.
    """
    try:
        return (
            0 <= alpha < math.inf
            and 0 <= eps < math.inf
            and (ORDINARY_PRIORITY + eps) ** alpha <= largest_mass(elements)
        )
    except OverflowError:
        return False


def _require_exponent(alpha: float, eps: float, elements: int) -> None:
    """Raises ValueError unless `exponent_fits` accepts alpha and eps."""
    if not exponent_fits(alpha, eps, elements):
        raise ValueError(
            f"alpha is {alpha} and eps is {eps}, but both must be numbers of at least 0 for which "
            f"({ORDINARY_PRIORITY:g} + eps) ** alpha is finite"
        )

"""A tensor of an item: its key, dtype and shape, and the name of its file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shmbuffer.memory.format.dtypes import DTYPES

MAX_DEPTH = 64

Key = str | tuple[str, ...]
"""The key of a TensorDict; a nested key is a tuple."""
KeyPath = tuple[str, ...]


def path_of(key: Key) -> KeyPath:
    """Converts a key to a path, outermost key first."""
    return (key,) if isinstance(key, str) else tuple(key)


def key_of(path: KeyPath) -> Key:
    """Converts a path to a key."""
    return path[0] if len(path) == 1 else path


@dataclass(frozen=True)
class Leaf:
    """A tensor of an item."""

    path: KeyPath  # nested key, outermost first
    dtype: str  # torch's name, without the prefix ``torch.``
    shape: tuple[int, ...]  # of one element, without the storage's dimensions

    @property
    def itemsize(self) -> int:
        """The bytes of one number."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of one element."""
        return self.itemsize * math.prod(self.shape)

    @property
    def name(self) -> str:
        """The key in dotted notation, such as ``next.obs``."""
        return ".".join(self.path)

    @property
    def file(self) -> str:
        """The name of its file below the scratch directory, percent-encoded as tensordict does."""
        return "/".join(quote(part, safe="") for part in self.path) + ".memmap"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON."""
        return {"path": list(self.path), "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Any) -> Leaf:
        """Parses the output of `to_json`; ValueError, KeyError or TypeError if it is invalid."""
        path = tuple(map(_string, data["path"]))
        return cls(path, _string(data["dtype"]), sizes_of(data["shape"]))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def size_of(value: object) -> int:
    """Parses a size from JSON; raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is not a size")
    return value


def sizes_of(values: object) -> tuple[int, ...]:
    """Parses a shape from JSON; raises TypeError or ValueError for anything else."""
    if not isinstance(values, list) or len(values) > MAX_DEPTH:
        raise TypeError(f"{values!r} is not a shape")
    return tuple(map(size_of, values))

"""A leaf, which is one tensor of an item: its key, dtype, shape and file name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shmbuffer.memory.format.dtypes import DTYPES

MAX_DEPTH = 64
"""Maximum number of nested keys, and maximum number of dimensions."""

Key = str | tuple[str, ...]
"""Key of an entry in a TensorDict. A nested key is a tuple."""
KeyPath = tuple[str, ...]
"""A key as a tuple, even if it is not nested."""


def path_of(key: Key) -> KeyPath:
    """Converts a key to a path, which begins with the outermost key."""
    return (key,) if isinstance(key, str) else tuple(key)


def key_of(path: KeyPath) -> Key:
    """Converts a path to a key: a string if the path has one key, otherwise a tuple."""
    return path[0] if len(path) == 1 else path


@dataclass(frozen=True)
class Leaf:
    """The key, dtype and shape of one tensor of an item."""

    path: KeyPath  # nested key, which begins with the outermost key
    dtype: str  # torch's name, without the prefix ``torch.``
    shape: tuple[int, ...]  # shape of one element, without the storage's dimensions

    @property
    def itemsize(self) -> int:
        """Size of one value of the tensor in bytes."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Size of one element in bytes."""
        return self.itemsize * math.prod(self.shape)

    @property
    def name(self) -> str:
        """The key in dotted notation, such as ``next.obs``."""
        return ".".join(self.path)

    @property
    def file(self) -> str:
        """Name of the leaf's file in the scratch directory, percent-encoded like tensordict's."""
        return "/".join(quote(part, safe="") for part in self.path) + ".memmap"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def to_json(self) -> dict[str, Any]:
        """Converts the leaf to JSON for the schema file."""
        return {"path": list(self.path), "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Any) -> Leaf:
        """Parses the output of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: ``data`` is not valid.
        """
        path = tuple(map(_string, data["path"]))
        return cls(path, _string(data["dtype"]), sizes_of(data["shape"]))


def _string(value: object) -> str:
    """Returns the value if it is a string. Otherwise raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def size_of(value: object) -> int:
    """Checks an integer from JSON, which must be from 0 to 2**48 - 1. Otherwise raises ValueError.

    Returns:
        The integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is not a valid size")
    return value


def sizes_of(values: object) -> tuple[int, ...]:
    """Parses a shape from JSON: a list of at most `MAX_DEPTH` sizes.

    Raises:
        TypeError: ``values`` is not a list, or has too many entries.
        ValueError: An entry is not a valid size.
    """
    if not isinstance(values, list) or len(values) > MAX_DEPTH:
        raise TypeError(f"{values!r} is not a valid shape")
    return tuple(map(size_of, values))

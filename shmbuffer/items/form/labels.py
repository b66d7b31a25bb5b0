"""Converts the keys of dicts in a PyTree to names of leaves and to JSON.

Each key has a name that is unique among its siblings. A schema can store strings, numbers, None and
tuples of these as keys. A buffer with other keys cannot be shared between processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def names_of(keys: Iterable[Any]) -> list[str]:
    """Returns a unique name for each key, in order.

    If two keys have the same text, the type of a key is added to its name.
    """
    keys = list(keys)
    used = {str.__str__(key) for key in keys if isinstance(key, str)}
    names: dict[Any, str] = {}
    for key in sorted(keys, key=lambda key: (str(key), type(key).__name__)):
        name = str.__str__(key) if isinstance(key, str) else str(key)
        while name in used and not isinstance(key, str):
            name += f" ({type(key).__name__})"
        used.add(name)
        names[key] = name
    return [names[key] for key in keys]


def to_json(key: Any) -> Any:
    """Converts a key to a value that `from_json` accepts.

    The value can be written as JSON if `is_json` is True for the key.
    """
    if key is None or isinstance(key, bool):
        return key
    for kind in (str, int):
        if isinstance(key, kind):  # includes members of StrEnum and IntEnum
            return kind.__str__(key) if kind is str else int(key)
    if type(key) is float and math.isfinite(key):
        return key
    if type(key) is tuple:
        parts = list(map(to_json, key))
        if not any(isinstance(part, dict) for part in parts):
            return parts
    return {"key": key}


def is_json(key: Any) -> bool:
    """True if a key can be stored in a schema for other processes."""
    return not isinstance(to_json(key), dict)


def from_json(key: Any) -> Any:
    """Restores a key from a result of `to_json`."""
    if isinstance(key, list):
        return tuple(map(from_json, key))
    if isinstance(key, dict):
        return key["key"]
    return key

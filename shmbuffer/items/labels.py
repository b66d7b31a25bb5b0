"""The keys of a PyTree's dicts: as names of leaves, and as JSON.

Each key has a text of its own among its siblings. Text, numbers, None and tuples of them go into a
schema as they are; any other key stays in its process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def names_of(keys: Iterable[Any]) -> list[str]:
    """A text for each key, in order, no two alike: where 1 stands beside "1", its type is added."""
    keys = list(keys)
    taken = {str.__str__(key) for key in keys if isinstance(key, str)}
    names: dict[Any, str] = {}
    for key in sorted(keys, key=lambda key: (str(key), type(key).__name__)):
        name = str.__str__(key) if isinstance(key, str) else str(key)
        while name in taken and not isinstance(key, str):
            name += f" ({type(key).__name__})"
        taken.add(name)
        names[key] = name
    return [names[key] for key in keys]


def to_json(key: Any) -> Any:
    """A key as `from_json` takes it; JSON, where `is_json` says so."""
    if key is None or isinstance(key, bool):
        return key
    for kind in (str, int):
        if isinstance(key, kind):  # members of an Enum of text or integers are equal to these
            return kind.__str__(key) if kind is str else int(key)
    if type(key) is float and math.isfinite(key):
        return key
    if type(key) is tuple:
        parts = list(map(to_json, key))
        if not any(isinstance(part, dict) for part in parts):
            return parts
    return {"key": key}


def is_json(key: Any) -> bool:
    """True if a key can be written into a schema, for other processes to read."""
    return not isinstance(to_json(key), dict)


def from_json(key: Any) -> Any:
    """The key that `to_json` was given."""
    if isinstance(key, list):
        return tuple(map(from_json, key))
    if isinstance(key, dict):
        return key["key"]
    return key

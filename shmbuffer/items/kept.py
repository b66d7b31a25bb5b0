"""A cache of limited size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Kept(dict[Key, Value]):
    """A dict that creates a missing value with ``make(key)``.

    When the dict contains ``most`` values, it discards all of them before it adds another one.
    """

    def __init__(self, make: Callable[[Key], Value], most: int) -> None:
        super().__init__()
        self._make = make
        self._most = most

    def __missing__(self, key: Key) -> Value:
        if len(self) >= self._most:
            self.clear()
        value = self[key] = self._make(key)
        return value

"""Parts that are made when a buffer is first used: looking for one makes them all.

A part that is made hides what stands here. With ``__getattr__`` in the class of the buffer every
attribute would cost more.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

_makers: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # of buffers without parts


class LatePart:
    """In the class of a buffer, where an instance has no such part yet."""

    names: ClassVar[set[str]] = set()  # of all parts

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name
        self.names.add(name)

    def __get__(self, buffer: Any, owner: Any) -> Any:
        if buffer is None:
            return self
        made(buffer)
        if self._name in vars(buffer):
            return vars(buffer)[self._name]
        raise AttributeError(f"{type(buffer).__name__!r} object has no attribute {self._name!r}")


class LatePlan:
    """In a buffer, in place of its plan: every call reads that, and an attribute is faster."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        _makers[buffer] = buffer._makers

    def __getattr__(self, name: str) -> Any:
        made(self._buffer)
        if (plan := self._buffer._plan) is self:
            raise AttributeError("a buffer cannot be used by what makes its parts")
        return getattr(plan, name)


def made(buffer: Any) -> None:
    """Have the parts made, once: other threads wait."""
    with buffer._making:
        if buffer._makers is None:
            return
        try:
            buffer._make_parts()
        except BaseException:
            _unmade(buffer)
            raise
        del _makers[buffer]


def in_child(buffer: Any, abandoned: bool) -> None:
    """Forget the parts that another thread was making: that thread is not in this process."""
    if abandoned:
        _unmade(buffer)


def _unmade(buffer: Any) -> None:
    """Forget the parts, unless all were made."""
    if buffer not in _makers:
        return
    for name in LatePart.names & vars(buffer).keys():
        delattr(buffer, name)
    buffer._makers = _makers[buffer]
    buffer._plan = LatePlan(buffer)

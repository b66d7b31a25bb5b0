"""Parts that are made when a buffer is first used: looking for one makes them all.

A part that is made hides what stands here. With ``__getattr__`` in the class of the buffer every
attribute would cost more.
"""

from __future__ import annotations

from typing import Any


class LatePart:
    """In the class of a buffer, where an instance has no such part yet."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

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

    def __getattr__(self, name: str) -> Any:
        made(self._buffer)
        if (plan := self._buffer._plan) is self:
            raise AttributeError("a buffer cannot be used by what makes its parts")
        return getattr(plan, name)


def made(buffer: Any) -> None:
    """Have the parts made, once: other threads wait."""
    with buffer._making:
        if (makers := buffer._makers) is None:
            return
        try:
            buffer._make_parts()
        except BaseException:
            for name in PARTS & vars(buffer).keys():
                delattr(buffer, name)
            buffer._makers, buffer._plan = makers, LatePlan(buffer)
            raise


PARTS = frozenset(("_storage", "_sampler", "_writer", "_transform"))

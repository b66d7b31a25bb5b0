"""Locks of objects that are free again in the child of a fork."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary


class ForkLock:
    """Gives each instance of a class its own reentrant lock.

    If another thread holds the lock during a fork, the child gets a new lock, because that thread
    does not exist there. In the child, ``in_child`` is called with each instance and with whether
    its lock was held. If it was, the thread may have left the instance's state half changed.
    """

    def __init__(self, in_child: Callable[[Any, bool], None] | None = None) -> None:
        self._in_child = in_child
        self._locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        os.register_at_fork(after_in_child=self._renew)

    def __set_name__(self, owner: Any, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        lock = self._locks.setdefault(instance, RLock())
        # This attribute hides the descriptor. Writing to the instance's dict would slow all
        # attributes.
        object.__setattr__(instance, self._name, lock)
        return lock

    def _renew(self) -> None:
        """Replaces locks that other threads held during the fork."""
        for instance, lock in list(self._locks.items()):
            abandoned = not lock.acquire(blocking=False)
            if abandoned:
                self._locks.pop(instance)
                self.__get__(instance, None)
            else:
                lock.release()
            if self._in_child is not None:
                self._in_child(instance, abandoned)

"""Per-instance locks that the child of a fork can use even if a thread of the parent held them."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary


class ForkLock:
    """Gives each instance of a class its own reentrant lock.

    If another thread holds a lock during a fork, the lock is replaced in the child, because that
    thread does not exist there.

    Args:
        in_child: Function that is called in the child for each instance, with the instance and a
            boolean: True if another thread held its lock during the fork. The state of such an
            instance may be half updated.
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
        # From now on the instance attribute hides this descriptor. Writing to `instance.__dict__`
        # directly would slow down all attribute access of the instance.
        object.__setattr__(instance, self._name, lock)
        return lock

    def _renew(self) -> None:
        """Replaces the locks that other threads held during the fork. Runs in the child."""
        for instance, lock in list(self._locks.items()):
            abandoned = not lock.acquire(blocking=False)
            if abandoned:
                self._locks.pop(instance)
                self.__get__(instance, None)
            else:
                lock.release()
            if self._in_child is not None:
                self._in_child(instance, abandoned)

"""Locks of objects that the child of a fork finds free."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary


class ForkLock:
    """In a class: a reentrant lock for each instance.

    If another thread holds it during a fork, the child, which lacks that thread, has a new lock.
    There ``in_child`` is called with each instance, and whether its lock was held so: then its
    state is as that thread was changing it.
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
        # It hides this. By way of the dict of the instance, all attributes would take longer.
        object.__setattr__(instance, self._name, lock)
        return lock

    def _renew(self) -> None:
        for instance, lock in list(self._locks.items()):
            abandoned = not lock.acquire(blocking=False)
            if abandoned:
                self._locks.pop(instance)
                self.__get__(instance, None)
            else:
                lock.release()
            if self._in_child is not None:
                self._in_child(instance, abandoned)

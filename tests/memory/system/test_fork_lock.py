"""Locks of objects in a forked child."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from shmbuffer.memory.system.fork_lock import ForkLock
from tests.crash.harness import ended, fork


class Account:
    def __init__(self) -> None:
        self.state = "begun"

    def in_child(self, abandoned: bool) -> None:
        self.state = "begun again" if abandoned else "whole"

    lock = ForkLock(in_child)


@contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert over.wait(40)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(hold)
        try:
            assert held.wait(40)
            yield
        finally:
            over.set()
        done.result()


def is_free(account: Account) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(account.lock.acquire, blocking=False).result()


def in_a_child(check: Callable[[], None]) -> None:
    assert ended(fork(check)) == 0


def test_a_child_takes_a_lock_that_another_thread_held_and_begins_again() -> None:
    account, other = Account(), Account()

    def check() -> None:
        assert is_free(account)
        assert (account.state, other.state) == ("begun again", "begun")
        with held_by_another_thread(other.lock):
            in_a_child(lambda: None if is_free(other) else exit("held"))

    with held_by_another_thread(account.lock):
        in_a_child(check)
        assert not is_free(account)
    assert account.state == "begun"


def test_a_thread_that_forks_still_holds_its_own_lock_in_the_child() -> None:
    account = Account()

    def check() -> None:
        assert not is_free(account)
        assert account.state == "whole"
        account.lock.release()
        assert is_free(account)

    with account.lock:
        in_a_child(check)

"""Helpers for tests on a Ray cluster on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmbuffer.distributed.runtime import living_nodes
from shmbuffer.examples.loopback import Loopback
from tests.conftest import _descendants, _killed_in_the_end, _read


@contextlib.contextmanager
def cluster_of(names: str) -> Iterator[Loopback]:
    """Starts a cluster for a test module; this process is on the first of the nodes a, b, ...."""
    before = _descendants()
    with Loopback(names) as made:
        yield made
    left = _killed_in_the_end(lambda: _descendants() - before)
    assert not left, "these processes were left running, and have been killed now"


def on(name: str) -> dict[str, Any]:
    """Returns the options with which a task or an actor runs on a node."""
    strategy = NodeAffinitySchedulingStrategy(living_nodes()[name], soft=False)
    return {"scheduling_strategy": strategy, "num_cpus": 0}


def pid_of(rb: Any, node: str) -> int:
    """Returns the pid of a node's keeper."""
    keeper = rb._members.at(node).keeper
    return int(ray.get(keeper.__ray_call__.remote(lambda _: os.getpid())))


def kill(pid: int) -> None:
    """Kills a process and waits until it is dead."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: state_of(pid) in "ZX")


def stop(pid: int) -> None:
    """Stops a process and waits until it no longer responds."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")


def state_of(pid: int) -> str:
    """Returns the kernel's state of a process, or X if there is none."""
    return (_read(pid, "stat").rpartition(b")")[2].split() or [b"X"])[0].decode()


def until(reached: Callable[[], Any]) -> None:
    """Waits for a condition without a timeout, because the test has one."""
    while not reached():
        time.sleep(0.05)

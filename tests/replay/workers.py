"""Processes that work on one directory, each with a pipe to the test, until they are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Worker = tuple[Any, Any]
"""A process, and the test's end of its pipe."""


@contextmanager
def collectors(target: Any, path: Path, capacity: int, count: int) -> Iterator[list[Worker]]:
    """Starts processes that work on a directory; kills those that are in the list at the end."""
    running: list[Worker] = []
    try:
        for source in range(count):
            running.append(start(target, path, capacity, source))
        yield running
    finally:
        for process, connection in running:
            process.kill()
            process.join(50)
            connection.close()


def start(target: Any, path: Path, capacity: int, source: int) -> Worker:
    """Starts ``target(path, capacity, source, connection)`` in a process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tensordict"])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(path, capacity, source, theirs))
    process.start()
    theirs.close()
    return process, ours


def began(*workers: Worker) -> None:
    """Waits until each worker says that it has done its first work."""
    for _, connection in workers:
        assert connection.poll(50)
        assert connection.recv() == "began"


def tell(worker: Worker, count: int) -> None:
    """Tells a collector to write (or to claim, if negative), and waits until it has."""
    worker[1].send(count)
    assert worker[1].poll(50)
    worker[1].recv()


def kill(worker: Worker) -> None:
    """Kills a worker, which must not have ended by itself."""
    os.kill(worker[0].pid, signal.SIGKILL)
    worker[0].join(50)
    assert worker[0].exitcode == -signal.SIGKILL

"""A process that opens a buffer, and writes to it during requested periods.

The process ends when its pipe is closed, which also happens when its parent dies.

The peers import this module, so it must not import shmbuffer. Some of them do not have torch.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.items import Kind

_PATIENCE_S = 120.0  # to import torch on a busy machine
_LOOKS = 8  # batches between two looks at the clock


class Collector:
    """A collector process, from the view of its parent.

    Args:
        opener: function that returns the function that writes a batch; called in the process.
        kind: kind of the items.
        count: number of items in a batch.
        form: form of the batches; see `Kind.batches`.
        seed: seed of the contents.
        modules: modules that the process needs; they are imported once for all collectors.
    """

    def __init__(
        self,
        opener: Callable[[], Callable[[Any], object]],
        kind: Kind,
        count: int,
        form: str,
        seed: int,
        modules: list[str],
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *modules])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_collect, args=(opener, kind, count, form, seed, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Waits until the process has opened the buffer."""
        self._answer()

    def write(self, began: float, end: float) -> None:
        """Requests writes between two times of ``time.perf_counter``, at least one."""
        self._pipe.send((began, end))

    def rate(self) -> float:
        """Waits for the end of the period; returns the number of items written per second."""
        return float(self._answer())

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Waits until the process has ended."""
        self._pipe.close()
        self._process.join(_PATIENCE_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()

    def _answer(self) -> Any:
        if not self._pipe.poll(_PATIENCE_S):
            raise TimeoutError(f"a collector has not answered for {_PATIENCE_S:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a collector has ended; its error is above") from None


def _collect(
    opener: Callable[[], Callable[[Any], object]],
    kind: Kind,
    count: int,
    form: str,
    seed: int,
    pipe: Connection,
) -> None:
    write = opener()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    batches = kind.batches(count, form, seed)
    chosen = [[batches[(first + at) % len(batches)] for at in range(_LOOKS)] for first in range(8)]
    pipe.send(None)
    while True:
        try:
            began, end = pipe.recv()
        except (EOFError, ConnectionError):
            return
        written = turn = 0
        while time.perf_counter() < began:
            pass
        now = began
        while not written or now < end:
            for batch in chosen[turn % len(chosen)]:
                write(batch)
            turn += 1
            written += count * _LOOKS
            now = time.perf_counter()
        try:
            pipe.send(written / (now - began))
        except ConnectionError:
            return

"""Measures how long calls of shmbuffer hold the mutex, in a process that has loaded `holds.c`."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from benchmarks.library import Operation
from benchmarks.ours import ShmBuffer
from benchmarks.served import serve

_ROOM = 1 << 20


class Held(ShmBuffer):
    """shmbuffer, with the locked sections of its calls in nanoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self._holds = ctypes.CDLL(None)
        self._holds.holds_end.restype = ctypes.c_size_t
        self._notes = np.zeros(_ROOM, np.int64)

    def sections(self, operation: Operation, calls: int) -> dict[str, Any]:
        """Measures calls while no other process uses the buffer.

        Returns:
            ``held``: for each locked section of a call, its length in each call. ``outside``: for
            each call, the time in which it did not hold the mutex.
        """
        called = self.call(operation)
        assert called is not None
        call, inputs = called
        for at in range(calls // 10 + 1):
            call(*inputs[at % len(inputs)])
        took = []
        self._begin()
        for at in range(calls):
            began = time.perf_counter_ns()
            call(*inputs[at % len(inputs)])
            took.append(time.perf_counter_ns() - began)
        held = self._end()
        if len(held) % calls:
            raise RuntimeError(f"{len(held)} locked sections in {calls} calls of {operation}")
        held = held.reshape(calls, -1)
        outside = np.array(took) - held.sum(1)
        return {"held": held.T.tolist(), "outside": outside.tolist()}

    def beside(self, writers: int, batch: int, seconds: float) -> dict[str, Any]:
        """Measures the calls of a learner beside writers.

        Returns:
            The result of `Local.contend`, and ``held``: the length of each locked section in
            nanoseconds.
        """
        self._begin()
        found: dict[str, Any] = self.contend(writers, batch, seconds)
        return {**found, "held": self._end().tolist()}

    def _begin(self) -> None:
        into = self._notes.ctypes.data_as(ctypes.c_void_p)
        self._holds.holds_begin(into, ctypes.c_size_t(_ROOM))

    def _end(self) -> np.ndarray[Any, Any]:
        return self._notes[: min(_ROOM, self._holds.holds_end())].copy()


if __name__ == "__main__":
    serve(Held)

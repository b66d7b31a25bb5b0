"""Measures in rounds, each with a short measurement of every contender.

    round 1   A A A ... B B B ...        a letter is a block: some calls that are timed together,
    round 2   A A A ... B B B ...        about a millisecond, shorter than a slice of the scheduler
    ...

The result of a round is the median of its blocks, so that blocks during which another program ran
do not count. Median, minimum and maximum are those of the rounds. p95 is over all blocks and
therefore includes interruptions. Ratios are computed for each round.

The peers import this module, so it must not import shmbuffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Timed:
    """A call with its inputs.

    Args:
        call: the timed function.
        inputs: arguments, one tuple per call, used in turn.
        block_s: approximate length of a block in seconds.
        undo: called with the result of each call without being timed. A block is then one call.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: Sequence[tuple[Any, ...]],
        block_s: float,
        undo: Callable[[Any], object] | None = None,
    ) -> None:
        self._call = call
        self._inputs = inputs
        self._undo = undo
        self._block_s = block_s
        self._next = 0
        self._calls = 1
        if undo is None:
            for _ in range(3):  # what happens once happens here
                self.block()
            shortest = min(self.block() for _ in range(10))
            self._calls = max(1, min(1000, round(block_s / shortest)))
        self.block()

    def blocks(self, count: int) -> list[float]:
        """Returns the time per call of ``count`` blocks; of fewer if calls take long."""
        found: list[float] = []
        patience = time.perf_counter() + 4 * count * self._block_s
        while len(found) < count and (not found or time.perf_counter() < patience):
            found.append(self.block())
        return found

    def each(self, count: int) -> list[float]:
        """Returns the times of ``count`` single calls. Requires that there is no ``undo``."""
        assert self._undo is None
        inputs, call, clock = self._inputs, self._call, time.perf_counter_ns
        found: list[float] = []
        for at in range(self._next, self._next + count):
            arguments = inputs[at % len(inputs)]
            began = clock()
            call(*arguments)
            found.append((clock() - began) / 1e9)
        self._next = (self._next + count) % len(inputs)
        return found

    def block(self) -> float:
        """Returns the time per call in seconds."""
        inputs, first = self._inputs, self._next
        chosen = [inputs[at % len(inputs)] for at in range(first, first + self._calls)]
        self._next = (first + self._calls) % len(inputs)
        call = self._call
        if self._undo is not None:
            began = time.perf_counter_ns()
            result = call(*chosen[0])
            took = time.perf_counter_ns() - began
            self._undo(result)
            return took / 1e9
        began = time.perf_counter_ns()
        for arguments in chosen:
            call(*arguments)
        return (time.perf_counter_ns() - began) / 1e9 / self._calls


@dataclass
class Series:
    """Results of one contender.

    Attributes:
        operation: measured operation. Contenders of one operation are compared.
        library: name of the library.
        form: form of the data.
        unit: ``"s"`` (less is better), ``"1/s"`` or ``"x"`` (more is better).
        rounds: results of the blocks of each round.
    """

    operation: str
    library: str
    form: str
    unit: str
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def figures(self) -> list[float]:
        """Result of each round."""
        return [median(blocks) for blocks in self.rounds]

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return median(self.figures)

    @property
    def p95(self) -> float:
        """Value that 95 % of the blocks reached."""
        blocks = [value for blocks in self.rounds for value in blocks]
        return float(np.percentile(blocks, 95 if self.unit == "s" else 5))


@dataclass(frozen=True)
class Contender:
    """A measurement that is part of each round, with one or several series."""

    series: tuple[Series, ...]
    round: Callable[[], Sequence[list[float]]]
    """Function that returns the blocks of each series."""


@dataclass
class Load:
    """Number of CPUs that other programs used in each round."""

    rounds: list[float] = field(default_factory=list)

    @contextmanager
    def during_a_round(self) -> Iterator[None]:
        """Records the load during the context."""
        began, before, ours_before = time.monotonic(), _busy_s(), _ours_s()
        yield
        busy, ours = _busy_s() - before, _ours_s() - ours_before
        self.rounds.append(max(0.0, busy - ours) / (time.monotonic() - began))


def interleave(rounds: int, contenders: Sequence[Contender], load: Load) -> list[Series]:
    """Measures all contenders in each round."""
    for _ in range(rounds):
        with load.during_a_round():
            for contender in contenders:
                for series, blocks in zip(contender.series, contender.round(), strict=True):
                    series.rounds.append(blocks)
    return [series for contender in contenders for series in contender.series]


def _busy_s() -> float:
    """Returns the CPU seconds of all programs since boot, with those that the host has taken."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def _ours_s() -> float:
    """Returns the CPU seconds of this process and its descendants, including ended ones."""
    seconds, ahead = 0.0, [os.getpid()]
    while ahead:
        pid = ahead.pop()
        try:
            ticks = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(") ")[2].split()[11:15]
            for thread in Path(f"/proc/{pid}/task").iterdir():
                ahead += map(int, (thread / "children").read_text("ascii").split())
        except OSError:
            continue  # it has just ended
        seconds += sum(map(int, ticks)) * _TICK_S
    return seconds

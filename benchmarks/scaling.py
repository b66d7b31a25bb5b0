"""Models many processes that use one mutex, on more processors than this machine has.

    outside ──▶ waits for the mutex ──▶ first come, first served ──▶ holds it ──▶ outside ...
       └──────── each needs a processor, except while it waits ────────┘

The inputs are measured in one process on an idle machine: the length of each locked section of a
call, and of the rest of the call. The results are not measurements. The model leaves out effects
that make a real machine slower: transfers between caches, shared memory bandwidth, and wake-ups. It
also leaves out that a process that has just unlocked the mutex can lock it again before a waiter
wakes up.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Role:
    """The repeated calls of a process.

    Attributes:
        count: number of processes.
        steps: alternating times outside and inside locked sections, in seconds, for each call
            ``[calls, 2 * sections]``.
    """

    count: int
    steps: NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """Result of a model.

    Attributes:
        calls: number of calls per second by all processes of each role.
        busy: fraction of the time in which the mutex was held.
    """

    calls: list[float]
    busy: float


SLICE_S = 3e-3
"""Time slice of the scheduler in seconds."""


def simulate(roles: Sequence[Role], processors: int, seconds: float, seed: int = 0) -> Outcome:
    """Simulates the processes; deterministic for a seed."""
    rng = np.random.default_rng(seed)
    of = [role for role, one in enumerate(roles) for _ in range(one.count)]
    durations = [_program(roles[role], rng) for role in of]
    at = [0] * len(of)  # the step that is done, or comes next
    began = [0.0] * len(of)  # when the process was given its processor
    done = [0] * len(roles)
    free, held, busy, now, order = processors, False, 0.0, 0.0, 0
    ready: deque[int] = deque(int(who) for who in rng.permutation(len(of)))
    waiting: deque[int] = deque()
    ends: list[tuple[float, int, int]] = []

    def length(who: int) -> float:
        return durations[who][at[who] % len(durations[who])]

    while True:
        while free and ready:
            who = ready.popleft()
            free -= 1
            order += 1
            began[who] = now
            heapq.heappush(ends, (now + length(who), order, who))
        now, _, who = heapq.heappop(ends)
        if now >= seconds:
            return Outcome([count / seconds for count in done], busy / seconds)
        has_held = at[who] % 2 == 1
        if has_held:
            busy += length(who)
            held = False
        at[who] += 1
        if has_held and at[who] % roles[of[who]].steps.shape[1] == 0:
            done[of[who]] += 1
        if has_held and waiting:
            held = True
            ready.appendleft(waiting.popleft())  # the holder of the mutex goes first
        if not has_held and held:
            waiting.append(who)
            free += 1
        elif has_held and ready and (now - began[who] > SLICE_S or (held and not free)):
            ready.append(who)
            free += 1
        else:
            held = held or not has_held
            order += 1
            heapq.heappush(ends, (now + length(who), order, who))


def _program(role: Role, rng: np.random.Generator) -> list[float]:
    """Returns the steps of a process, whose calls are in a random order and are repeated."""
    calls = role.steps[rng.integers(len(role.steps), size=2000)]
    return [float(step) for step in calls.reshape(-1)]

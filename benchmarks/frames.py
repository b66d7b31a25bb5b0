"""What do stacks of four frames cost if the buffer stores each frame once?

A step has one frame of 84 x 84 pixels, and an episode 250 steps. `FrameStack` is compared with a
ring of frames in plain NumPy (`film.py`), and with cpprb's stack compression. Stable-Baselines3's
``optimize_memory_usage`` stores each stack, and takes the next stack from the following step.
"frames a step" is the memory of all files per step, in units of one frame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import shmbuffer
from benchmarks import film
from benchmarks.comparison import Setting
from benchmarks.library import AS_IT_COMES, OUT, TENSORDICT, Operation
from benchmarks.measure import Contender, Series, Timed, interleave

ITEMS = ("S",)
COUNTS = (32, 256)
NUMPY, PEERS = "numpy ring", ("sb3", "cpprb")


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    capacity = min(setting.capacity, film.STEPS)
    libraries = [one for one in setting.libraries if one.name in PEERS]
    peers = dataclasses.replace(setting, capacity=capacity, libraries=libraries)
    with ExitStack() as stack:
        scratch = stack.enter_context(setting.scratch())
        rb = open_buffer(scratch / "frames", capacity)
        stack.callback(rb.close)
        ring, at = film.FrameRing(capacity), 0
        for frames in film.episodes(capacity):
            ring.extend(frames, at)
            at += len(frames) - 1
        others = peers.open_all(stack, prioritized=False)
        contenders = []
        for count in COUNTS:
            out, name = rb.sample(count), f"{count} stacks of {film.STACK}"
            calls: list[tuple[str, str, Callable[..., Any]]] = [
                ("shmbuffer", TENSORDICT, partial(rb.sample, count)),
                ("shmbuffer", OUT, partial(rb.sample, count, out=out)),
                (NUMPY, AS_IT_COMES, partial(ring.sample, count)),
            ]
            for library, form, call in calls:
                timed = Timed(call, [()], setting.block_s)
                series = Series(name, library, form, "s")
                measure: Callable[[int], list[float]] = timed.blocks
                contenders.append(_contender(setting, series, measure))
            operation = Operation("frames", count, AS_IT_COMES)
            for other in others:
                if other.prepare(operation, setting.block_s):
                    series = Series(name, other.name, AS_IT_COMES, "s")
                    contenders.append(_contender(setting, series, partial(other.round, operation)))
        found = interleave(setting.rounds, contenders, setting.load)
        taken = rb.stats()["bytes"] / capacity / (film.SHAPE[0] * film.SHAPE[1])
        found.append(
            Series("frames a step", "shmbuffer", TENSORDICT, "x", [[taken]] * setting.rounds)
        )
        return found


def open_buffer(directory: Path, capacity: int) -> Any:
    """Returns a buffer of steps with one frame each, whose samples are stacks. It is full."""
    storage = shmbuffer.LazyMemmapStorage(
        capacity,
        scratch_dir=directory,
        shared_init=True,
        share_next=True,
        share_next_room=capacity // film.EPISODE + 64,
    )
    unit = shmbuffer.FrameStack(film.STACK, keys=("obs",))
    rb = shmbuffer.TensorDictReplayBuffer(storage=storage, sample_unit=unit)
    for frames in film.episodes(capacity):
        _extend(rb, torch.from_numpy(frames))
    return rb


def _contender(setting: Setting, series: Series, call: Callable[[int], list[float]]) -> Contender:
    return Contender((series,), lambda: [call(setting.blocks)])


def _extend(rb: Any, frames: torch.Tensor) -> None:
    """Writes an episode with one item per step."""
    count = len(frames) - 1
    done = torch.arange(count) == count - 1
    after = {"obs": frames[1:], "reward": torch.zeros(count), "done": done}
    items = {"obs": frames[:-1], "action": torch.zeros(count, dtype=torch.int64)}
    rb.extend(TensorDict({**items, "next": TensorDict(after, [count])}, [count]))

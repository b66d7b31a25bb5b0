"""What does it cost to sample windows of steps, and n-step transitions?

Windows have 4 burn-in steps, 8 steps for the update and 1 step for the value, in episodes of a
hundred steps. As many single items are measured for comparison. "quiet" samples repeatedly, and
"after add(1)" includes the write of an item before each sample. n-step transitions are computed
when they are sampled, which no peer does, and are compared with single steps of the same buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import shmbuffer
from benchmarks.comparison import Setting, compare
from benchmarks.library import AFTER_WRITE, QUIET, TENSORDICT, WINDOW, Operation
from benchmarks.measure import Contender, Series, Timed, interleave

ITEMS = ("S",)
WINDOWS, COUNT, STEPS = 32, 256, (3, 10)


def run(setting: Setting) -> list[Series]:
    """Runs the benchmark."""
    items = WINDOWS * sum(WINDOW)
    operations = {
        Operation("sample", items, TENSORDICT): f"{items} single items",
        **{
            Operation("windows", WINDOWS, form): f"{WINDOWS} windows of {sum(WINDOW)}"
            for form in (QUIET, AFTER_WRITE)
        },
    }
    found = compare(setting, operations, prioritized=False)
    with setting.scratch() as scratch:
        units = {"": None, **{f", {n} steps": shmbuffer.NStep(n, 0.99) for n in STEPS}}
        buffers = {name: _opened(scratch, setting, unit) for name, unit in units.items()}
        _fill(buffers[""], setting.capacity)
        contenders = [
            _contender(setting, f"sample({COUNT}){name}", rb) for name, rb in buffers.items()
        ]
        found += interleave(setting.rounds, contenders, setting.load)
        for rb in buffers.values():
            rb.close()
    return found


def _opened(scratch: Path, setting: Setting, unit: Any) -> shmbuffer.ReplayBuffer:
    storage = shmbuffer.LazyMemmapStorage(
        setting.capacity, scratch_dir=scratch / "buffer", shared_init=True
    )
    return shmbuffer.TensorDictReplayBuffer(storage=storage, sample_unit=unit)


def _fill(buffer: Any, capacity: int) -> None:
    number = torch.arange(capacity)
    seen = torch.rand(capacity, 4)
    after = {"obs": seen, "reward": torch.rand(capacity), "done": number % 100 == 99}
    items = {"obs": seen, "action": number, "next": TensorDict(after, [capacity])}
    buffer.extend(TensorDict(items, [capacity]))


def _contender(setting: Setting, title: str, buffer: Any) -> Contender:
    timed = Timed(buffer.sample, [(COUNT,)], setting.block_s)
    series = Series(title, "shmbuffer", TENSORDICT, "s")
    return Contender((series,), lambda: [timed.blocks(setting.blocks)])

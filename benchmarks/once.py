"""How much memory does it save to store observations once, and what does a sample then cost?

    python -m benchmarks.once [--toy] [--torchrl .venv-compat/bin/python]

Four collectors with eight environments each write episodes of 100 steps, whose last step has its
own final observation. They write in turn to a buffer with ``share_next`` and to one without it, so
that other programs disturb both. Memory is the size of all files. TorchRL's LazyMemmapStorage
stores the same items in its own interpreter.

Then frames are added step by step: single frames, from which a sample creates stacks of four
(`Sequence`), and stacks of four frames for comparison. Samples are by priority, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import (
    LazyMemmapStorage,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    set_threads,
)

COLLECTORS, STREAMS, EPISODE, STEPS, BATCH = 4, 8, 100, 4, 256
#: Observation and slots.
KINDS = {
    "float32 [376]": (torch.float32, (376,), 200_000),
    "uint8 [84, 84]": (torch.uint8, (84, 84), 20_000),
    "uint8 [4, 84, 84]": (torch.uint8, (4, 84, 84), 8_000),
}
_ROOT = Path(__file__).resolve().parents[1]
_TORCHRL = """
import json, sys, time
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

path, dtype, shape, slots = sys.argv[1:]
dtype, shape, slots = getattr(torch, dtype), json.loads(shape), int(slots)
storage = LazyMemmapStorage(slots, scratch_dir=path)
rb = TensorDictReplayBuffer(storage=storage, batch_size=256)
obs = torch.zeros(1024, *shape, dtype=dtype)
done = torch.zeros(1024, 1, dtype=torch.bool)
data = TensorDict({"obs": obs, "action": torch.zeros(1024, 4), "next": TensorDict(
    {"obs": obs, "reward": torch.zeros(1024, 1), "done": done}, [1024])}, [1024])
for _ in range(-(-slots // 1024)):
    rb.extend(data)
"""


class Collector:
    """A collector with several environments."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
        self._dtype, self._shape = dtype, shape
        self._random = torch.Generator().manual_seed(seed)
        self._step = 0
        self._now = self._observation(STREAMS)

    def steps(self) -> TensorDict:
        """Returns consecutive steps of each environment."""
        obs, after, done = [], [], []
        for _ in range(STEPS):
            self._step += 1
            obs.append(self._now)
            after.append(self._observation(STREAMS))
            ends = self._step % EPISODE == 0
            done.append(torch.full((STREAMS, 1), ends))
            self._now = self._observation(STREAMS) if ends else after[-1]
        count = STREAMS * STEPS
        following = {
            "obs": torch.cat(after),
            "reward": torch.zeros(count, 1),
            "done": torch.cat(done),
        }
        return TensorDict(
            {
                "obs": torch.cat(obs),
                "action": torch.zeros(count, 4),
                "next": TensorDict(following, [count]),
            },
            [count],
        )

    def _observation(self, count: int) -> torch.Tensor:
        if self._dtype is torch.uint8:
            return torch.randint(
                0, 256, (count, *self._shape), dtype=torch.uint8, generator=self._random
            )
        return torch.rand((count, *self._shape), generator=self._random)


def measure(kind: str, where: Path, python: Path | None, *, toy: bool) -> dict[str, Any]:
    """Measures one kind of observation."""
    dtype, shape, slots = KINDS[kind]
    slots, samples = (2000, 5) if toy else (slots, 300)
    buffers: dict[bool, list[TensorDictReplayBuffer]] = {}
    for shares in (False, True):
        place: dict[str, Any] = {"scratch_dir": where / str(shares), "shared_init": True}
        storages = [LazyMemmapStorage(slots, share_next=shares, **place) for _ in range(COLLECTORS)]
        buffers[shares] = [
            TensorDictReplayBuffer(storage=one, batch_size=BATCH) for one in storages
        ]
    collectors = [Collector(dtype, shape, seed) for seed in range(COLLECTORS)]
    streams = torch.arange(STREAMS).repeat(STEPS)
    writes: dict[bool, list[float]] = {False: [], True: []}
    reads: dict[bool, list[float]] = {False: [], True: []}
    written = 0
    while written < 1.2 * slots:
        for number, collector in enumerate(collectors):
            data = collector.steps()
            for shares in (written // 32 % 2 == 0, written // 32 % 2 == 1):
                began = time.perf_counter()
                buffers[shares][number].extend(data, streams=streams)
                writes[shares].append(time.perf_counter() - began)
            written += len(data)
    for turn in range(samples):
        for shares in (turn % 2 == 0, turn % 2 == 1):
            began = time.perf_counter()
            buffers[shares][0].sample()
            reads[shares].append(time.perf_counter() - began)
    stats = buffers[True][0].stats()
    found = {
        "memory": taken(where / "True") / taken(where / "False"),
        "sample": statistics.median(reads[True]) / statistics.median(reads[False]),
        "sample_us": 1e6 * statistics.median(reads[True]),
        "extend": statistics.median(writes[True]) / statistics.median(writes[False]),
        "own_rows": f"{stats['own_rows_used']} of {stats['own_rows']}",
    }
    if python is not None:
        name = str(dtype).removeprefix("torch.")
        asked = [str(where / "torchrl"), name, json.dumps(shape), str(slots)]
        subprocess.run([str(python), "-c", _TORCHRL, *asked], check=True, capture_output=True)
        found["memory_of_torchrl"] = taken(where / "True") / taken(where / "torchrl")
    for one in (*buffers[False], *buffers[True]):
        one.close()
    return found


def frames(where: Path, *, toy: bool) -> dict[str, Any]:
    """Measures single frames that are stacked when they are sampled, relative to stored stacks."""
    set_threads(1)
    slots, samples = (200, 2) if toy else (10_000, 60)
    film = torch.randint(0, 256, (slots + 4, 84, 84), dtype=torch.uint8)
    stored = {"single": film, "stacks": film.unfold(0, 4, 1).permute(0, 3, 1, 2)}
    buffers, times = {}, {}
    for kind in stored:
        single = kind == "single"
        buffers[kind] = TensorDictPrioritizedReplayBuffer(
            alpha=0.7,
            beta=0.9,
            storage=LazyMemmapStorage(
                slots, scratch_dir=where / kind, shared_init=True, share_next=single
            ),
            sample_unit=Sequence(length=1, burn_in=3) if single else None,
        )
    steps = {
        kind: [_step(obs[at], obs[at + 1], (at + 1) % EPISODE == 0) for at in range(slots)]
        for kind, obs in stored.items()
    }
    calls = {
        "add": lambda kind, turn: buffers[kind].add(steps[kind][turn % slots]),
        "sample(32)": lambda kind, _: _stacks(buffers[kind], kind, 32),
        "sample(256)": lambda kind, _: _stacks(buffers[kind], kind, 256),
    }
    for name, call in calls.items():
        for turn in range(slots if name == "add" else samples):
            for kind in stored if turn % 2 else reversed(stored):
                began = time.perf_counter()
                call(kind, turn)
                times.setdefault((name, kind), []).append(time.perf_counter() - began)
    found = {"memory": taken(where / "single") / taken(where / "stacks")}
    for name in calls:
        one, other = (statistics.median(times[name, kind]) for kind in stored)
        found |= {name: one / other, f"{name}_us": 1e6 * one}
    for buffer in buffers.values():
        buffer.close()
    return found


def _step(obs: torch.Tensor, after: torch.Tensor, done: bool) -> TensorDict:
    return TensorDict({"obs": obs, "next": {"obs": after, "done": torch.tensor(done)}})


def _stacks(rb: TensorDictReplayBuffer, kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the stacks of a batch before and after each step."""
    batch = rb.sample(count)
    if kind == "stacks":
        return batch["obs"], batch["next", "obs"]
    windows = batch.reshape(count, 4)
    obs = windows["obs"]
    return obs, torch.cat([obs[:, 1:], windows["next", "obs"][:, -1:]], 1)


def taken(folder: Path) -> int:
    """Returns the size of all files below a directory."""
    return sum(
        os.stat(os.path.join(above, name)).st_size
        for above, _, names in os.walk(folder)
        for name in names
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.once")
    parser.add_argument("--toy", action="store_true", help="only see that everything runs")
    parser.add_argument("--torchrl", type=Path, default=_ROOT / ".venv-compat/bin/python")
    asked = parser.parse_args(arguments)
    python = asked.torchrl if asked.torchrl.exists() else None
    for kind in (*KINDS, "single frames"):
        where = Path(tempfile.mkdtemp(dir="/dev/shm"))
        try:
            if kind in KINDS:
                found = measure(kind, where, python, toy=asked.toy)
            else:
                found = frames(where, toy=asked.toy)
        finally:
            shutil.rmtree(where)
        print(
            kind, json.dumps({name: _rounded(value) for name, value in found.items()}), flush=True
        )


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

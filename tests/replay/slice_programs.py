"""Collectors of the slice tests. Each is a process that runs until it is stopped or killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, TensorDictReplayBuffer
from tests.kit.rings import ring_of


def steps(source: int, first: int, count: int, end_every: int) -> TensorDict:
    """Makes consecutive steps of one collector."""
    number = torch.arange(first, first + count)
    done = (number % end_every == end_every - 1).unsqueeze(-1)
    return TensorDict(
        {
            "number": number,
            "source": torch.full((count,), source),
            "payload": number[:, None].expand(count, 64).clone(),
            ("next", "done"): done,
        },
        [count],
    )


def opened(path: Path, capacity: int) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)
    return TensorDictReplayBuffer(storage=storage)


def on_command(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes the requested steps and reports the total; a negative number only claims slots."""
    torch.set_num_threads(1)
    buffer, written = opened(path, capacity), 0
    while True:
        count = connection.recv()
        if count > 0:
            buffer.extend(steps(source, written, count, 10**9))
            written += count
        else:
            ring_of(buffer).claims.claim(-count)
        connection.send(written)


def without_end(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes small batches as fast as it can."""
    torch.set_num_threads(1)
    buffer, written, sizes = opened(path, capacity), 0, random.Random(source)
    while not connection.poll():
        count = sizes.randint(1, 4)
        buffer.extend(steps(source, written, count, 11 + source))
        if not written:
            connection.send("began")
        written += count
    buffer.close()


def in_streams(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes the requested steps of each environment; a negative number only claims slots.

    Collector 0 has two environments, collector 1 has three, and so on. One step of all of them is
    one batch, and the length of episodes differs between the environments.
    """
    torch.set_num_threads(1)
    buffer, step, envs = opened(path, capacity), 0, source + 2
    while True:
        count = connection.recv()
        for _ in range(count):
            buffer.extend(rows_of_streams(source, step, envs), streams=range(envs))
            step += 1
        if count < 0:
            ring_of(buffer).claims.claim(-count)
        connection.send(step)


def rows_of_streams(source: int, step: int, envs: int) -> TensorDict:
    """Makes one step of each environment of a collector."""
    env = torch.arange(envs)
    done = (step % (5 + env) == 4 + env).unsqueeze(-1)
    number = 10_000 * source + 1000 * env + step
    return TensorDict({"number": number, "next": TensorDict({"done": done}, [envs])}, [envs])


def up_to_three_thousand(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes 3000 steps in small batches as fast as possible, then waits."""
    torch.set_num_threads(1)
    buffer, written, sizes = opened(path, capacity), 0, random.Random(source)
    while written < 3000:
        count = sizes.randint(1, 4)
        buffer.extend(steps(source, written, count, 11 + source))
        if not written:
            connection.send("began")
        written += count
    connection.recv()

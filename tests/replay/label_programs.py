"""Collectors that write versions and groups. Each is a process that runs until it is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from shmbuffer import LazyMemmapStorage, LazyStackStorage, TensorDictReplayBuffer
from shmbuffer._native import _core

SIZE = 4
FAR = 10**6  # distance between the group numbers of two collectors


def opened(path: Path, capacity: int, sampler: Any = None) -> TensorDictReplayBuffer:
    """Opens a buffer; the name of its directory says whether its items are records."""
    storage: Any
    if "records" in path.name:
        storage = LazyStackStorage(
            capacity, scratch_dir=path, shared_init=True, max_bytes=capacity * 1024
        )
    else:
        storage = LazyMemmapStorage(capacity, scratch_dir=path, shared_init=True)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler)


def items(source: int, first: int, count: int, version: int = 0) -> TensorDict:
    """Makes the items of a collector from number ``first`` on; each group has SIZE items.

    Two groups are always open at the same time, and their items alternate.
    """
    number = torch.arange(first, first + count)
    lap, place = number // (2 * SIZE), number % (2 * SIZE)
    group = source * FAR + 2 * lap + place % 2
    return TensorDict(
        {
            "query": group,
            "member": place // 2,
            "policy_version": torch.full((count,), version),
            "payload": (group * 10 + place // 2)[:, None].expand(count, 32).clone(),
            "seal": torch.full((count, 16), version),
        },
        [count],
    )


def without_end(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes a few items at a time, with a different version lag for each collector."""
    torch.set_num_threads(1)
    buffer, written, chance = opened(path, capacity), 0, random.Random(source)
    while not connection.poll():
        count = chance.randint(1, 5)
        buffer.extend(items(source, written, count, written // 20 + 3 * source))
        if not written:
            connection.send("began")
        written += count
    buffer.close()


def dies_at(path: Path, capacity: int, source: int, connection: Any) -> None:
    """Writes some items, then dies at a sync point while it writes or edits more of them."""
    torch.set_num_threads(1)
    buffer = opened(path, capacity)
    point, after, edits = connection.recv()
    buffer.extend(items(source, 0, 5, 1))
    connection.send("wrote")
    connection.recv()
    _core.arm(point, "kill", after)
    if edits:
        buffer[edits] = buffer[edits].exclude("index")
    else:
        buffer.extend(items(source, 5, 5, 2))
    connection.send("alive")

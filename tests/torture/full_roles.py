"""Roles of the processes in the full campaign, which use the whole library with torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from shmbuffer import (
    CompressedListStorage,
    Coordinator,
    EmptyBufferError,
    LazyMemmapStorage,
    LazyStackStorage,
    LockTimeout,
    ReplayBuffer,
    RingOverrunError,
    TensorDictPrioritizedReplayBuffer,
    attach,
)
from tests.torture import items
from tests.torture.arena import Actor, Role
from tests.torture.mixed import fork_beside

CAPACITY = 512
BATCH = 16
ROWS = 16
#: The leaves of a row with their sizes in bytes, in the order in which they are stored.
LEAVES = {("a",): 16, ("b", "obs"): 100, ("c",): 5}
#: Mean number of words in a ragged item.
MEAN_WORDS = 12
MAX_BYTES = 65536
#: Upper limit for the size of a record of these items, with its header and metadata.
ITEM_BYTES = 512
STORAGES = ("LazyMemmapStorage", "CompressedListStorage", "LazyStackStorage")


def made(path: Path, storage: str) -> ReplayBuffer:
    """Creates a new buffer in this directory."""
    where: dict[str, Any] = {"scratch_dir": path, "shared_init": True}
    kept: Any
    if storage == "LazyMemmapStorage":
        kept = LazyMemmapStorage(CAPACITY, **where)
    elif storage == "CompressedListStorage":
        kept = CompressedListStorage(CAPACITY, max_bytes=MAX_BYTES, **where)
    else:
        kept = LazyStackStorage(CAPACITY, max_bytes=MAX_BYTES, **where)
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.5, eps=0.0, storage=kept, batch_size=ROWS
    )


def roles(path: Path, storage: str) -> dict[str, Role]:
    """Returns the functions of all roles for this directory."""

    def attached(work: Callable[[Actor, Any, str], None], role: Any) -> Role:
        def body(actor: Actor) -> None:
            torch.set_num_threads(1)
            with attach(path, role=role) as buffer:
                work(actor, buffer, storage)

        return body

    return {
        "writer": attached(collect, "collector"),
        "learner": attached(learn, "learner"),
        "coordinator": lambda actor: coordinate(actor, path),
        "forker": attached(fork_on, "client"),
    }


def batch_of(keys: items.Keys, storage: str) -> Any:
    """Makes the items with these keys in the form in which a user would write them."""
    raw = torch.from_numpy(items.priority(keys))
    if storage == "LazyStackStorage":
        return [
            TensorDict({"a": _ragged(key), "td_error": raw[i]}, [])
            for i, key in enumerate(keys.tolist())
        ]
    rows = {
        name: torch.from_numpy(items.row(keys, leaf, size))
        for leaf, (name, size) in enumerate(LEAVES.items())
    }
    return TensorDict({**rows, "td_error": raw}, [len(keys)])


def _ragged(key: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(items.record_body(key, MEAN_WORDS)), dtype=torch.uint8)


def keys_of(batch: Any, storage: str) -> items.Keys:
    """Returns the keys of the items in a batch; fails if an item is torn."""
    if storage == "LazyStackStorage":
        return np.array([_ragged_key(item) for item in batch.unbind(0)], np.uint64)
    rows = [np.ascontiguousarray(batch[name].numpy()) for name in LEAVES]
    torn = items.torn(rows)
    assert not len(torn), f"H1: rows {torn} are torn"
    return items.key_in(rows[0])


def _ragged_key(item: Any) -> int:
    body = item["a"].numpy().tobytes()
    key = int(items.key_in(np.frombuffer(body[:8], np.uint8)[None])[0])
    assert not key >> 50, "H1: an item is torn"
    assert body == items.record_body(key, MEAN_WORDS), "H1: an item is torn"
    return key


def collect(actor: Actor, buffer: Any, storage: str) -> None:
    first = 0
    while actor.goes_on():
        first = collect_once(actor, buffer, storage, first)
        look(actor, buffer)


def collect_once(actor: Actor, buffer: Any, storage: str, first: int) -> int:
    """Writes one batch; returns the sequence number that follows it."""
    count = int(actor.rng.integers(1, BATCH + 1))
    batch = batch_of(items.keys_of(actor.who, first, count), storage)
    ring = buffer.storage.ring()
    actor.log.invoked(first, count)
    before = ring.head
    try:
        index = buffer.extend(batch)
    except (RingOverrunError, LockTimeout):
        actor.log.refused(first, count)
    else:
        slot = int(index[0])
        ticket = before + (slot - before) % CAPACITY
        # After a whole lap the ticket is ambiguous, so no outcome is noted.
        if ring.head - before < CAPACITY:
            actor.log.written(first, count, ticket)
    return first + count


def learn(actor: Actor, buffer: Any, storage: str) -> None:
    first = 0
    while actor.goes_on():
        first = learn_once(actor, buffer, storage, first)
        look(actor, buffer)


def learn_once(actor: Actor, buffer: Any, storage: str, first: int) -> int:
    """Samples once and updates the priorities; returns the number of the next update."""
    began = time.monotonic_ns()
    try:
        batch = buffer.sample()
    except EmptyBufferError:
        return first
    keys = keys_of(batch, storage)
    index, tickets = batch["index"].numpy(), batch["index_generation"].numpy()
    actor.log.sampled(began, keys, tickets)
    _, where = np.unique(tickets, return_index=True)
    given = items.keys_of(actor.who, first, len(where))
    raw = items.priority(given)
    row = actor.log.updating(given, tickets[where], raw)
    if actor.rng.random() < 0.5:
        applied = _update_by_tensordict(buffer, index[where], tickets[where], raw)
    else:
        applied = buffer.update_priority(
            torch.from_numpy(index[where]),
            torch.from_numpy(raw),
            generation=torch.from_numpy(tickets[where]),
        ).applied
    actor.log.updated(row, len(where), applied)
    return first + len(where)


def fork_on(actor: Actor, buffer: Any, storage: str) -> None:
    def work(who: Actor, number: int) -> int:
        once = collect_once if who.rng.random() < 0.5 else learn_once
        following = once(who, buffer, storage, number)
        look(who, buffer)
        return following

    fork_beside(actor, work, buffer.close)


def _update_by_tensordict(
    buffer: Any,
    index: NDArray[np.int64],
    tickets: NDArray[np.int64],
    raw: NDArray[np.float64],
) -> int:
    back = {"index": index, "index_generation": tickets, "td_error": raw}
    batch = TensorDict({name: torch.from_numpy(data) for name, data in back.items()}, [len(raw)])
    return int(buffer.update_tensordict_priority(batch).applied)


def coordinate(actor: Actor, path: Path) -> None:
    with Coordinator(path, on_existing="recover") as coordinator:
        while actor.goes_on():
            coordinator.stats()
            if actor.rng.random() < 0.2:
                coordinator.flush()


def look(actor: Actor, buffer: Any) -> None:
    began = time.monotonic_ns()
    engine, ring = buffer.storage.engine(), buffer.storage.ring()
    actor.log.seen(
        began, ring.head, ring.write_count, engine.superblock.epoch, engine.seat.incarnation
    )


def read(buffer: Any, storage: str) -> dict[int, int]:
    """Reads every item by indexing the buffer; returns the key of each slot."""
    slots = buffer.storage.ring().live.committed()
    if not len(slots):
        return {}
    keys = keys_of(buffer[torch.from_numpy(slots)], storage)
    return dict(zip(slots.tolist(), keys.tolist(), strict=True))

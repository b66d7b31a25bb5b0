"""What consumers were given, in a save: which items each of them is done with.

    <path>/shmbuffer.consumers.jsonl, .data   there where buffer_metadata.json says so: `values`

What the saver holds under a lease counts as done: it trains on it, or has done so in what it saves
beside. What others hold is to be given again. Counts begin anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmbuffer.memory.consumers import DONE, HELD_HERE
from shmbuffer.replay.values import read_values, reading, write_values

if TYPE_CHECKING:
    from shmbuffer.memory import Ring
    from shmbuffer.replay.checkpoints import Loaded

_CONSUMERS = "shmbuffer.consumers"


def write_consumed(directory: Path, ring: Ring | None, moment: Any) -> bool:
    """Write how each consumer stands to the items of a moment; False: there is none."""
    if ring is None or not ring.consumers:
        return False
    values = []
    saved = getattr(moment, "tickets", None)
    for status in ring.consumers.status():
        consumer = ring.consumers.open(
            status.name, times=status.max_sample_count, holds=status.holds
        )
        found = consumer.standings()
        done = (found.states == DONE) | (found.states == HELD_HERE)
        if isinstance(saved, np.ndarray) and saved.shape == found.tickets.shape:
            done |= (saved >= 0) & (saved != found.tickets)  # written over since: it was done
        slots = torch.from_numpy(done.nonzero()[0].astype(np.int64))
        known = {"name": status.name, "times": status.max_sample_count, "holds": status.holds}
        values.append({**known, "done": slots})
    write_values(directory, _CONSUMERS, [values], allow_pickle=False, what="consumer")
    return True


def read_consumed(directory: Path) -> list[dict[str, Any]]:
    """What `write_consumed` wrote."""
    with reading(directory / f"{_CONSUMERS}.jsonl"):
        (found,) = read_values(directory, _CONSUMERS, allow_pickle=False)
        for one in found:
            if not isinstance(one["name"], str) or one["done"].dtype is not torch.int64:
                raise ValueError("a consumer has no name, or does not say what it is done with")
            one["times"], one["holds"] = int(one["times"]), bool(one["holds"])
    return list(found)


def restore_consumed(ring: Ring | None, saved: list[dict[str, Any]], loaded: Loaded) -> None:
    """Each consumer begins with the items that were loaded, less those that it is done with."""
    if ring is None or loaded.in_place:
        return
    there = {one.name: one for one in ring.consumers.status()}
    known = {one["name"]: one for one in saved}
    for name in {*there, *known}:
        ring.consumers.remove(name)
    tickets = ring.live.tickets()
    for name in sorted({*there, *known}):
        one = known.get(name)
        times = there[name].max_sample_count if one is None else one["times"]
        holds = there[name].holds if one is None else one["holds"]
        consumer = ring.consumers.open(name, times=times, holds=holds)
        if one is None:
            continue
        slots = loaded.places(one["done"].numpy())
        slots = slots[(slots >= 0) & (slots < ring.capacity)]
        slots = slots[tickets[slots] >= 0]
        for _ in range(times):
            _, lease = consumer.claim(slots, tickets[slots])
            consumer.ack(lease, slots, tickets[slots])

"""Saves and restores consumers: which items each consumer has acknowledged.

    <parts>/consumers.jsonl, .data   only if there are consumers; see `saved_parts`

Items that the saving process has leased count as acknowledged, because the process trains on them.
Items that other processes have leased are delivered again after a load. If items must be
acknowledged several times, each is delivered once for every acknowledgement that is still missing.
The counts of `ReplayBuffer.consumers` restart at 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmbuffer.errors import ConsumerError
from shmbuffer.memory import Ring
from shmbuffer.memory.format.ledger import COMPLETE, LEASED_HERE, NO_ITEM
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.saves.values import read_value, reading, write_value
from shmbuffer.storages.indexing import tickets_at
from shmbuffer.tensors.form import cpu

_CONSUMERS = "consumers"


def write_consumed(directory: Path, ring: Ring | None, moment: Any) -> None:
    """Writes which items each consumer has acknowledged. Without consumers, writes nothing.

    Args:
        directory: directory of the files.
        ring: ring of the buffer, or None.
        moment: the `ItemSnapshot` of the saved items, if the save has one.
    """
    if ring is None or not ring.consumers:
        return
    values = []
    saved = getattr(moment, "tickets", None)
    for status in ring.consumers.status():
        try:
            consumer = ring.consumers.known(status.name)
            found = None if consumer is None else consumer.item_states()
        except ConsumerError:
            found = None
        if found is None:
            continue  # the consumer was removed in the meantime
        times = status.max_sample_count
        acks = found.acks + (found.states == LEASED_HERE)
        acks[found.states == COMPLETE] = times
        acks[found.states == NO_ITEM] = 0
        if isinstance(saved, np.ndarray) and saved.shape == found.tickets.shape:
            gone = (saved != found.tickets) | (found.states == NO_ITEM)
            # Items that were overwritten after the snapshot count as acknowledged.
            acks[(saved >= 0) & gone] = times
        done, begun = acks >= times, (acks > 0) & (acks < times)
        slots = {"done": done.nonzero()[0], "begun": begun.nonzero()[0], "acks": acks[begun]}
        known = {"name": status.name, "times": times, "holds": status.holds}
        values.append(known | {name: torch.from_numpy(one) for name, one in slots.items()})
    write_value(directory, _CONSUMERS, values, "the progress of consumers")


def read_consumed(directory: Path) -> list[dict[str, Any]]:
    """Reads the files of `write_consumed`. Raises CorruptBufferError if they are damaged."""
    found = read_value(directory, _CONSUMERS)
    with reading(directory / f"{_CONSUMERS}.jsonl"):
        for one in found:
            if not isinstance(one["name"], str) or one["done"].dtype is not torch.int64:
                raise ValueError("a consumer has no valid name, or no list of acknowledged items")
            one["times"], one["holds"] = int(one["times"]), bool(one["holds"])
            none = cpu.zeros(0, dtype=torch.int64)  # older saves lack the next two entries
            begun, acks = one.setdefault("begun", none), one.setdefault("acks", none)
            if {begun.dtype, acks.dtype} != {torch.int64} or begun.shape != acks.shape:
                raise ValueError("a consumer has no valid numbers of acknowledgements")
    return list(found)


def restore_consumed(ring: Ring | None, saved: list[dict[str, Any]], loaded: Loaded) -> None:
    """Creates the saved consumers, and acknowledges the loaded items that each had acknowledged.

    Consumers that exist now but not in the save receive all loaded items.

    Args:
        ring: ring of the buffer, or None.
        saved: result of `read_consumed`.
        loaded: result of loading the storage.
    """
    if ring is None or loaded.in_place:
        return
    there = {one.name: one for one in ring.consumers.status()}
    known = {one["name"]: one for one in saved}
    for name in {*there, *known}:
        ring.consumers.remove(name)
    for name in sorted({*there, *known}):
        one = known.get(name)
        times = there[name].max_sample_count if one is None else one["times"]
        holds = there[name].holds if one is None else one["holds"]
        consumer = ring.consumers.open(name, times=times, holds=holds)
        if one is None:
            continue
        slots = loaded.places(torch.cat([one["done"], one["begun"]]).numpy())
        acks = np.append(np.full(len(one["done"]), times), one["acks"].numpy().clip(0, times))
        there_still = (slots >= 0) & (slots < ring.capacity)
        slots, acks = slots[there_still], acks[there_still]
        tickets = tickets_at(ring, slots)
        slots, acks, tickets = (each[tickets >= 0] for each in (slots, acks, tickets))
        while len(slots):
            _, lease = consumer.claim(slots, tickets)
            consumer.ack(lease, slots, tickets)
            slots, acks, tickets = (each[acks > 1] for each in (slots, acks - 1, tickets))
